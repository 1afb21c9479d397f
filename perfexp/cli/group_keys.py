"""Group keys: the settings of the options of all groups, each with its default and its meaning."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from perfexp.plan import plan_fields, schema


def group_keys(conf: Path) -> dict[str, list[str]]:
    """Return the lines of each key below a group, with default, meaning and options; several if options differ."""
    found: dict[str, dict[str, list[str]]] = {}
    nodes = {
        f"{group.removeprefix('schema/')}/{name}": node for group, name, node in schema.settings()
    }
    nodes |= {name: nodes.pop(f"schema/{name}") for name in ("gpu", "cluster")} | {
        "plan": plan_fields.PlanSchema
    }
    top = (conf / "config.yaml").read_text(encoding="utf-8")
    for name, meanings in descriptions().items():
        group = name.partition("/")[0]
        prefix = {"plan": "", "mode/train": "mode.train."}.get(name, f"{group}.")
        defaults = {key: default_text(value) for key, _, value in keys_of_schema(nodes[name])}
        options = [] if name in ("plan", "gpu", "cluster") else options_of(conf, name)
        for key, meaning in meanings.items():
            if name == "plan" and ("." not in key or f"\n{key.partition('.')[0]}:" in top):
                continue  # `perfexp help` reads these from config.yaml
            text = f"  {prefix}{key}" + (
                f": {defaults[key]}".replace("`", "") if defaults.get(key) else ""
            )
            found.setdefault(prefix + key, {}).setdefault(
                f"{text}  # {meaning.replace('`', '')}", []
            ).extend(options)
    return {
        key: [
            f"{line} ({', '.join(options)})" if options else line for line, options in lines.items()
        ]
        for key, lines in found.items()
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
