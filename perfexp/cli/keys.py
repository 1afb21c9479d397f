"""Keys of the configuration: type, default, meaning and options of each one, for help and reference."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from perfexp.cli.conf_files import config_values, flat
from perfexp.plan import plan_fields, schema

#: Schemas whose keys do not follow the name of their group.
_PREFIXES = {"plan": "", "mode/train": "mode.train.", "mode/inference": "mode.inference."}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of the configuration as users type it.

    Attributes:
        default: default as users type it; empty for a section.
        options: options of the group that have the key; empty for all.
    """

    name: str
    kind: Any
    default: str
    meaning: str
    options: tuple[str, ...] = ()


def keys(conf: Path) -> dict[str, list[Key]]:
    """Return the keys of each schema (`plan`, `gpu`, `model/timm`); KeyError for one without a description."""
    schemas = {
        f"{group.removeprefix('schema/')}/{name}".removeprefix("schema/"): node
        for group, name, node in schema.settings()
    }
    described = descriptions()
    return {
        name: list(_keys(conf, name, node, described[name]))
        for name, node in {"plan": plan_fields.PlanSchema, **schemas}.items()
    }


def _keys(conf: Path, schema: str, node: type, meanings: dict[str, str]) -> Iterator[Key]:
    fields = {key: (kind, default) for key, kind, default in keys_of_schema(node)}
    if schema == "plan":
        for key, value in _values(conf).items():
            kind, _ = fields.get(key, (type(value), None))
            fields[key] = kind, value
    prefix = _PREFIXES.get(schema, f"{schema.partition('/')[0]}.")
    options = tuple(options_of(conf, schema)) if "/" in schema else ()
    for key, (kind, default) in fields.items():
        is_section = dataclasses.is_dataclass(kind) and default is None
        text = "" if is_section else default_text(default)
        name, meaning = prefix + key, meanings[key]
        yield Key(name=name, kind=kind, default=text, meaning=meaning, options=options)


def _values(conf: Path) -> dict[str, Any]:
    """Return the values of config.yaml, the default option of each group, and the default optimizer."""
    content = yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8"))
    groups = [entry for entry in content["defaults"] if isinstance(entry, dict)]
    chosen = {key: name for entry in groups for key, name in entry.items() if " " not in key}
    mode = yaml.safe_load((conf / "mode" / "train.yaml").read_text(encoding="utf-8"))
    optimizer = flat(mode["train"]["optimizer"], "mode.train.optimizer.")
    return {**config_values(conf), **chosen, **optimizer}


def lines(conf: Path) -> dict[str, list[str]]:
    """Return the lines of each key, with default, meaning and options; several if options differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for key in (key for of_schema in keys(conf).values() for key in of_schema):
        default = f": {key.default}" if key.default else ""
        text = f"  {key.name}{default}  # {key.meaning}".replace("`", "")
        found.setdefault(key.name, {}).setdefault(text, []).extend(key.options)
    return {
        key: [f"{text} ({', '.join(options)})" if options else text for text, options in of.items()]
        for key, of in found.items()
    }


def descriptions() -> dict[str, dict[str, str]]:
    """Return the meaning of each key, by schema."""
    text = (files("perfexp.plan") / "key_descriptions.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, str]] = yaml.safe_load(text)
    return content


def keys_of_schema(node: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, type and default of every field of a schema, nested schemas included."""
    hints = typing.get_type_hints(node)
    for field in dataclasses.fields(node):
        if field.name == "_target_":
            continue
        kind = hints[field.name]
        default = field.default if field.default is not dataclasses.MISSING else MISSING
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        nested = dataclasses.is_dataclass(kind)
        yield f"{prefix}{field.name}", kind, None if nested else default
        if nested:
            yield from keys_of_schema(kind, f"{prefix}{field.name}.")


def default_text(value: Any) -> str:
    """Return a default as the documentation shows it."""
    if value == MISSING:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, dict):
        return "{}" if not value else "set by the option"
    if isinstance(value, list):
        value = (
            "["
            + ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
            + "]"
        )
    if isinstance(value, float):
        value = f"{value:g}"
    return f"`{value}`"


def options_of(conf: Path, schema: str) -> list[str]:
    """Options of a group that have a schema's keys, those that build on another option included."""
    group, _, name = schema.partition("/")
    found: list[str] = []
    files = sorted((conf / group).glob("*.yaml"))
    for _ in range(2):
        for path in files:
            text = path.read_text(encoding="utf-8")
            bases = [f"/schema/{schema}@", *(f"/{group}/{base}@" for base in found)]
            if any(base in text for base in bases) and path.stem not in found:
                found.append(path.stem)
    return sorted(found) or [name]
