"""Meant: the overrides for words and flags that other tools accept, such as `resnet50 --batch-size 8`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from hydra._internal.utils import get_args_parser

from perfexp.cli.flags import (
    CONFIG_DIR,
    DRY_RUN,
    JSON,
    MAX_JOBS,
    OF_SWEEP,
    OVERWRITE,
    PARENT,
    REQUEUE,
    VERBOSE,
    flag_values,
)
from perfexp.cli.usage import COMMANDS, keys_of
from perfexp.errors import nearest
from perfexp.host import installation
from perfexp.models import torchvision_names
from perfexp.plan.hydra_errors import OF_TORCH

#: Flags of perfexp and Hydra without a value, and with one.
SWITCHES, _VALUED = {*VERBOSE, DRY_RUN, OVERWRITE, JSON, REQUEUE}, {MAX_JOBS, OF_SWEEP, PARENT}
for _action in get_args_parser()._actions:
    (SWITCHES if _action.nargs == 0 else _VALUED).update(_action.option_strings)
#: Keys of perfexp by the names that other tools use.
_KEYS = {"batch": "batch_size", "b": "batch_size", "bs": "batch_size", "size": "input_size", "image_size": "input_size"}
_KEYS |= {"img_size": "input_size", "resolution": "input_size", "device": "gpu", "dtype": "precision"}
_KEYS |= {"arch": "model", "net": "model", "output": "output_dir", "out": "output_dir", "o": "output_dir"}
#: Options by the names that torch gives them, if there is one for each.
_VALUES = {"cuda": "auto", "gpu": "auto", **{name: same for name, (same, *others) in OF_TORCH.items() if not others}}


def command(arguments: Sequence[str]) -> list[str] | None:
    """Return a command line with an override for each word and flag; None if one is unclear, or nothing changes."""
    folders = [installation.conf_dir(), *map(Path, flag_values(arguments, *CONFIG_DIR))]
    groups: dict[str, set[str]] = {}
    for file in chain.from_iterable(folder.glob("*/*.yaml") for folder in folders):
        groups.setdefault(file.parent.name, set()).add(file.stem)
    translated = list(_translated(arguments, groups, keys_of(folders[0] / "config.yaml") | set(groups)))
    texts = [text for text in translated if text is not None]
    return texts if len(texts) == len(translated) and texts != list(arguments) else None


def _translated(arguments: Sequence[str], groups: dict[str, set[str]], keys: Iterable[str]) -> Iterator[str | None]:
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in _VALUED and not equals:
            yield from (word, next(words, ""))
        elif not word.startswith("-") and not equals:
            yield _option(word, groups)
        elif not word.startswith("-") and name in _KEYS and name not in keys:
            yield f"{_KEYS[name]}={_VALUES.get(value.lower(), value)}"
        elif not word.startswith("-") or name in SWITCHES | _VALUED:
            yield word
        else:
            key = _key(name.lstrip("-").replace("-", "_"), keys)
            value = value or next(words, "")
            yield f"{key}={_VALUES.get(value.lower(), value)}" if key else None


def _key(name: str, keys: Iterable[str]) -> str | None:
    group, dot, rest = name.partition(".")
    exact = _KEYS.get(group, group)
    key = exact if exact in keys else next(iter(nearest(group, keys, 1)), None)
    return f"{key}{dot}{rest}" if key else None


def _option(word: str, groups: dict[str, set[str]]) -> str | None:
    """Return the override that chooses an option, or options with commas, or the model with the nearest name."""
    if word.startswith("~"):
        return word
    names = word.split(",")
    holders = [group for group, options in groups.items() if options.issuperset(names)]
    if len(holders) == 1:
        return f"{holders[0]}={word}"
    models = [*groups["model"], *torchvision_names.names()]
    if holders or nearest(word, COMMANDS) or not all(near := [nearest(name, models, 1) for name in names]):
        return None
    return f"model={','.join(name for [name] in near)}"
