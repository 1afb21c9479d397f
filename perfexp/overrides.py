"""Overrides: what stands on a command line, as Hydra reads it: values, axes of a sweep, and what is refused there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from perfexp.errors import UserError, did_you_mean
from perfexp.explain import FOREIGN_ERRORS, user_error
from perfexp.resume import MULTIRUN


def jobs_of(command: Sequence[str], params: Mapping[str, Any]) -> list[list[str]]:
    """The overrides of each run of a sweep, as Hydra hands them to its jobs; nothing is composed.

    Args:
        command: of the sweep.
        params: axes that a configuration file gives to the sweeper.

    Raises:
        UserError: they can't be told from the command.
    """
    given = [f"{key}={value}" for key, value in params.items()] + [text for text in command if text[:1] != "-"]
    values: dict[str, list[str]] = {}
    try:
        for override in OverridesParser.create().parse_overrides(given):
            key = override.get_key_element()
            if override.is_sweep_override() and not override.is_hydra_override():
                values[key] = [f"{key}={text}" for text in override.sweep_string_iterator()]
            elif not override.is_hydra_override():
                values[key] = [f"{key}={override.get_value_element_as_str()}"]
    except FOREIGN_ERRORS as error:
        raise user_error(error) from error
    return [list(job) for job in product(*values.values())]


def parsed(arguments: Sequence[str]) -> list[Override]:
    """The arguments that are overrides, parsed; Hydra's own flags are not.

    Args:
        arguments: of a command line.
    """
    return OverridesParser.create().parse_overrides([text for text in arguments if "=" in text and text[0] != "-"])


def axes_of(arguments: Sequence[str]) -> dict[str, int]:
    """The overrides that vary, each with how many values it has; 0 where that can't be known.

    Args:
        arguments: of a command line.
    """
    return {
        override.key_or_group: len(list(override.sweep_iterator())) if override.is_discrete_sweep() else 0
        for override in parsed(arguments)
        if override.is_sweep_override() and not override.is_hydra_override()
    }


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """The values of one job's overrides, as they are written.

    Args:
        overrides: of the job.
    """
    pairs = zip(overrides, parsed(overrides), strict=True)
    return {override.key_or_group: text.partition("=")[2] for text, override in pairs}


def flag_values(arguments: Sequence[str], *names: str) -> list[str]:
    """The values of one of Hydra's flags, written `--flag value` or `--flag=value`.

    Args:
        arguments: of a command line.
        names: of the flag.
    """
    found = [value for name, value in pairwise(arguments) if name in names]
    return found + [value for name, _, value in (text.partition("=") for text in arguments) if name in names and value]


def refuse_words(arguments: Sequence[str]) -> None:
    """A word that is neither an override nor a flag, nor the value of one, was meant as a command.

    Args:
        arguments: of a command line.

    Raises:
        UserError: there is such a word.
    """
    for before, word in pairwise(["", *arguments]):
        of_flag = before.startswith("-") and "=" not in before and before not in MULTIRUN
        if not of_flag and "=" not in word and word[:1] not in ("-", "~", ""):
            from perfexp.commands import NAMES

            if word in NAMES:
                raise UserError(f"'{word}' is a command, and comes first: perfexp {word} …")
            raise UserError(f"'{word}' is neither a command nor KEY=VALUE. {did_you_mean(word, NAMES)}")


def refuse_targets(arguments: Sequence[str]) -> None:
    """Code is chosen by files of conf/ and of --config-dir, never on the command line, and never unpickled.

    Args:
        arguments: of a command line.

    Raises:
        UserError: one of them chooses code.
    """
    for argument in arguments:
        if argument.startswith("--experimental-rerun"):
            raise UserError("--experimental-rerun reads a pickle; the command in record.json repeats a run.")
        if "_target_" in argument:
            raise UserError(f"'{argument}': a _target_ is honoured in configuration files only; see --config-dir.")
