"""Overrides for words and flags from other tools, such as `resnet50 --batch-size 8`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

from perfexp.cli.conf_files import config_values, options_below
from perfexp.cli.usage import COMMANDS
from perfexp.errors import nearest
from perfexp.host import installation
from perfexp.models import torchvision_names
from perfexp.plan.flags import (
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
from perfexp.plan.hydra_errors import OF_TORCH

#: Flags of perfexp and Hydra without a value, and with one.
SWITCHES, _VALUED = {*VERBOSE, DRY_RUN, OVERWRITE, JSON, REQUEUE}, {MAX_JOBS, OF_SWEEP, PARENT}
for _action in get_args_parser()._actions:
    (SWITCHES if _action.nargs == 0 else _VALUED).update(_action.option_strings)
#: Keys, each with its names in other tools.
_ALIASES = {
    "batch_size": "batch b bs",
    "input_size": "size image_size img_size resolution",
    "gpu": "device",
    "precision": "dtype",
    "model": "arch net",
    "output_dir": "output out o",
}
_KEYS = {alias: key for key, aliases in _ALIASES.items() for alias in aliases.split()}
#: Options by the names that torch gives them, if there is one for each.
_VALUES = {"cuda": "auto", "gpu": "auto"}
_VALUES |= {name: same for name, (same, *others) in OF_TORCH.items() if not others}


def command(arguments: Sequence[str]) -> list[str] | None:
    """Return a command line with an override for each word and flag.

    None if a word is unclear, or if nothing changes.
    """
    conf = installation.conf_dir()
    options = options_below([conf, *map(Path, flag_values(arguments, *CONFIG_DIR))])
    keys = {*options, *config_values(conf)}
    words = iter(arguments)
    translated: list[str] = []
    is_clear = True
    for word in words:
        if word in _VALUED:
            translated += [word, next(words, "")]
            continue
        if word.startswith("-") and "=" not in word and word not in SWITCHES:
            word = f"{word}={next(words, '')}"
        override = _override(word, options, keys)
        is_clear &= override is not None
        translated.append(override or "")
    if is_clear and translated != list(arguments):
        return translated
    return None


def _override(
    word: str, options: Mapping[str, Collection[str]], keys: Collection[str]
) -> str | None:
    """Return a word as perfexp accepts it; None if its meaning is unclear."""
    name, equals, value = word.partition("=")
    if name in SWITCHES | _VALUED or word.startswith("~"):
        return word
    if not equals:
        return _option(word, options)
    group, dot, rest = name.lstrip("-").replace("-", "_").partition(".")
    if not word.startswith("-") and (group in keys or group not in _KEYS):
        return word
    exact = _KEYS.get(group, group)
    key = exact if exact in keys else next(iter(nearest(group, keys, 1)), None)
    if not key:
        return None
    return f"{key}{dot}{rest}={_VALUES.get(value.lower(), value)}"


def _option(word: str, options: Mapping[str, Collection[str]]) -> str | None:
    """Return the override for an option, options with commas, or the nearest model name."""
    names = word.split(",")
    groups = [group for group, known in options.items() if set(names) <= set(known)]
    if len(groups) == 1:
        return f"{groups[0]}={word}"
    models = [*options["model"], *torchvision_names.names()]
    similar = [nearest(name, models, 1) for name in names]
    if groups or nearest(word, COMMANDS) or not all(similar):
        return None
    return f"model={','.join(name for [name] in similar)}"
