"""Stored commands: the command in a folder is data, and chooses among what conf/ and the command line offer.

A stored command may set options and plain values of existing keys. Everything else (paths of code, data, weights,
tools and caches, downloads, nested settings, keys that no file contains) must be typed again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from perfexp.cli.keys import keys_of_schema, schemas
from perfexp.cli.overrides import alternatives, parsed, refuse_length
from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.models import mmseg_names, torchvision_names
from perfexp.plan import config
from perfexp.plan.hydra_errors import FOREIGN_ERRORS

#: A value that refers to nothing outside: a number, a size, an option of a library.
_WORD = re.compile(r"[A-Za-z0-9_][\w .+:%()-]*")
#: A configuration of mmsegmentation is code: one of its own may be repeated, a path must be typed.
_CONFIG = "model.config"
#: Keys with code, or with files that are read, written or downloaded outside the run's folder, which must be typed.
_TYPED = {
    *(
        "profiler.reports",
        "profiler.options",
        "profiler.tool",
        "algorithm.cache_dir",
        "data.root",
        "data.download",
    ),
    *("model.weights", "model.weights_dir", "mode.train.resume_from"),
}
#: Mappings of plain names to plain values: layers to algorithms, and the script of a fake device.
_MAPPINGS = ("algorithm.layers.", "gpu.script.", "tracking.tags.")
_PLAIN = (bool, int, float, str, NoneType)
_GLOBAL = re.compile(rb"^#\s*@package\s+_global_\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Offer:
    """Options, keys and code in conf/ and in the folders of `--config-dir` that the user typed."""

    folders: tuple[Path, ...]

    @cached_property
    def options(self) -> dict[str, set[str]]:
        """Names of the options of each group."""
        names: dict[str, set[str]] = {}
        for group, file, _, _ in self._files:
            names.setdefault(group, set()).add(file.stem)
        return names

    @cached_property
    def keys(self) -> set[str]:
        """Keys of the schema and of the options' files whose values are plain."""
        of_schema = {
            key
            for prefix, node in schemas().values()
            for key, kind, _ in keys_of_schema(node, prefix)
            if _is_plain_type(kind) or key in ("input_size", "batch_size")
        }
        return of_schema | {
            key for _, _, prefix, node in self._files for key in _plain_keys(node, prefix)
        }

    @cached_property
    def targets(self) -> set[str]:
        """Every `_target_` that a file spells out."""
        return {target for _, _, _, node in self._files for _, target in config.targets(node)}

    @cached_property
    def _files(self) -> list[tuple[str, Path, str, Any]]:
        """Group, file, prefix of the keys, and content of each option."""
        files = []
        for folder in self.folders:
            for file in sorted([*folder.glob("*/*.yaml"), *folder.glob("*/*/*.yaml")]):
                try:
                    text = untrusted.read_bytes(file)
                    node = untrusted.yaml_data(text)
                except (OSError, ValueError):  # Hydra reports it if it is chosen
                    continue
                group = file.parent.relative_to(folder).as_posix()
                files.append(
                    (
                        group,
                        file,
                        "" if _GLOBAL.search(text) else f"{group.replace('/', '.')}.",
                        node,
                    )
                )
        return files


def check(command: Sequence[str], offer: Offer, words: Sequence[str]) -> None:
    """Raise UserError for an override that a stored command may not set; `words` are those that name its folder."""
    refuse_length(command)
    refused = [text for text in command if not _may_be_stored(text, offer)]
    if refused:
        listed = ", ".join(map(repr, refused))
        raise refusal(f"its command sets {listed}, which a file may not choose", refused, words)


def refusal(why: str, texts: Sequence[str], words: Sequence[str]) -> UserError:
    """The error for arguments of a stored command that the user has to type."""
    again = shlex.join(["perfexp", *words, *texts])
    return UserError(f"{' '.join(words)}: {why}. If you trust it, type it again: {again}")


def check_targets(plain: Mapping[str, Any], offer: Offer, typed: Mapping[str, Any]) -> None:
    """Raise UserError for a plan of a stored command with code that no file offers.

    Args:
        typed: model options that the user typed as `module:Name`.
    """
    offered = offer.targets | {target for _, target in config.targets(typed)}
    if unknown := {target for _, target in config.targets(plain)} - offered:
        raise UserError(
            f"The stored command chooses code that no configuration file offers: {sorted(unknown)}."
        )


def _may_be_stored(text: str, offer: Offer) -> bool:
    try:
        [override] = parsed([text])
    except (*FOREIGN_ERRORS, ValueError):
        return False
    return _is_offered(override, text, offer)


def _is_offered(override: Any, text: str, offer: Offer) -> bool:
    key = override.key_or_group
    if (
        override.package is not None
        or "_target_" in text
        or (text.startswith("~") and key not in offer.options)
    ):
        return False
    values = alternatives(override)
    if any("${" in str(value) or "_target_" in str(value) for value in values):
        return False
    if key in offer.options:
        own = key == "model" and torchvision_names.is_name
        return all(
            value is None or str(value) in offer.options[key] or (own and own(str(value)))
            for value in values
        )
    if key == _CONFIG:
        return all(mmseg_names.is_own(str(value)) for value in values)
    if key in _TYPED:
        return all(value in (None, False) for value in values)
    is_free = key in offer.keys or f"{key}.".startswith(_MAPPINGS)
    return is_free and all(map(_is_plain, values))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None and ".." not in value
    return value is None or isinstance(value, bool | int | float)


def _is_plain_type(hint: Any) -> bool:
    if get_origin(hint) is not None and get_origin(hint) is not dict:
        return all(map(_is_plain_type, get_args(hint)))
    return isinstance(hint, type) and issubclass(hint, (*_PLAIN, Enum))


def _plain_keys(node: Any, prefix: str) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if key in ("defaults", "hydra", "_target_"):
            continue
        if isinstance(value, Mapping):
            yield from _plain_keys(value, f"{prefix}{key}.")
        elif all(
            isinstance(item, _PLAIN) for item in (value if isinstance(value, list) else [value])
        ):
            yield f"{prefix}{key}"
