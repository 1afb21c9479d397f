"""Configuration keys with type, default, meaning and options, for help and reference.

They come from the schemas in `plan`, defaults in conf/, and `key_descriptions.yaml`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING

from perfexp.cli.conf_files import config_values
from perfexp.plan import plan_fields, schema
from perfexp.plan.override_keys import flat


class ConfigKey(NamedTuple):
    """A configuration key as users type it.

    Attributes:
        name: dotted name, for example `probes.layers`.
        kind: type.
        default: default as users type it; empty for a section.
        meaning: description.
        options: group options that have the key; empty for all.
    """

    name: str
    kind: Any
    default: str
    meaning: str
    options: tuple[str, ...]


def keys(conf: Path) -> dict[str, list[ConfigKey]]:
    """Return the keys in each schema, such as `plan` or `model/timm`.

    The reference page and `perfexp help` show them.

    Args:
        conf: folder with the configuration groups.

    Raises:
        KeyError: a key has no description.
    """
    meanings = descriptions()
    keys_by_group: dict[str, list[ConfigKey]] = {}
    for name, (prefix, node) in schemas().items():
        fields = {key: (kind, default) for key, kind, default in keys_of_schema(node, prefix)}
        if name == "plan":
            for key, value in _values(conf).items():
                fields[key] = fields.get(key, (type(value),))[0], default_text(value)
            fields["resume"] = str | None, "null"
            fields["decode.context"] = list, "`512`"
        options = tuple(options_of(conf, name)) if "/" in name else ()
        keys_by_group[name] = [
            ConfigKey(key, kind, default, meanings[key], options)
            for key, (kind, default) in fields.items()
        ]
    return keys_by_group


def schemas() -> dict[str, tuple[str, type]]:
    """Return the key prefix and the class of each schema, for example `gpu` or `model/timm`."""
    classes: dict[str, tuple[str, type]] = {"plan": ("", plan_fields.PlanSchema)}
    for name, node in schema.settings().items():
        # mode/train has the prefix mode.train, but model/timm has model
        classes[name] = f"{name.replace('mode/', 'mode.').partition('/')[0]}.", node
    return classes


def _values(conf: Path) -> dict[str, Any]:
    """Return the values in config.yaml by key, with default options and optimizer.

    Each group's default option is the value of the group's name.
    """
    content = yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8"))
    chosen: dict[str, str] = {}
    for entry in content["defaults"]:
        if isinstance(entry, dict):
            chosen |= {key: name for key, name in entry.items() if " " not in key}
    mode = yaml.safe_load((conf / "mode" / "train.yaml").read_text(encoding="utf-8"))
    optimizer = flat(mode["train"]["optimizer"], "mode.train.optimizer.")
    return {**config_values(conf), **chosen, **optimizer}


def lines(conf: Path) -> dict[str, list[str]]:
    """Return help lines by key, with default, meaning and options.

    A key has several lines if options differ in its default or meaning. `perfexp help KEY` and
    `perfexp help keys` print them.
    """
    options_by_text: dict[tuple[str, str], list[str]] = {}
    for key in chain.from_iterable(keys(conf).values()):
        default = f": {key.default}" if key.default else ""
        text = f"  {key.name}{default}  # {key.meaning}".replace("`", "")
        options_by_text.setdefault((key.name, text), []).extend(key.options)
    lines_by_group: dict[str, list[str]] = {}
    for (name, text), options in options_by_text.items():
        line = f"{text} ({', '.join(options)})" if options else text
        lines_by_group.setdefault(name, []).append(line)
    return lines_by_group


def descriptions() -> dict[str, str]:
    """Return the meaning of each key, from `key_descriptions.yaml`."""
    text = (files("perfexp.plan") / "key_descriptions.yaml").read_text(encoding="utf-8")
    content: dict[str, str] = yaml.safe_load(text)
    return content


def keys_of_schema(node: type, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield key, type and default text for each schema field, including nested schemas.

    Args:
        node: dataclass.
        prefix: beginning of its keys, with a period at the end.
    """
    hints = typing.get_type_hints(node)
    for field in dataclasses.fields(node):
        key, kind = f"{prefix}{field.name}", hints[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield key, kind, ""
            yield from keys_of_schema(kind, f"{key}.")
        elif field.default_factory is not dataclasses.MISSING:
            yield key, kind, default_text(field.default_factory())
        elif field.name != "_target_":
            is_required = field.default is dataclasses.MISSING
            yield key, kind, default_text(MISSING if is_required else field.default)


def default_text(value: Any) -> str:
    """Return a default as the documentation shows it, for example `null`, `required` or `true`."""
    match value:
        case None:
            return "null"
        case dict() if not value:
            return "{}"
        case "???":
            return "required"
        case list():
            text = f"[{','.join(default_text(item).strip('`') for item in value)}]"
        case bool():
            text = str(value).lower()
        case float():
            text = f"{value:g}"
        case _:
            text = str(value)
    return f"`{text}`"


def options_of(conf: Path, schema: str) -> list[str]:
    """Return the group options that have a schema's keys, directly or through another option.

    `keys` calls it for schemas in a group, such as `model/timm`.

    Args:
        schema: name such as `model/timm`.
    """
    group, _, name = schema.partition("/")
    options: list[str] = []
    files = sorted((conf / group).glob("*.yaml"))
    for _ in range(2):  # an option may be based on one that comes later
        for path in files:
            text = path.read_text(encoding="utf-8")
            bases = [f"/schema/{schema}@", *(f"/{group}/{base}@" for base in options)]
            if any(base in text for base in bases) and path.stem not in options:
                options.append(path.stem)
    return sorted(options) or [name]
