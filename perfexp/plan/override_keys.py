"""Keys of overrides as typed, and which of them change the measurement.

An override is a word `KEY=VALUE`. Commands that repeat, continue or compare runs ask whether two
command lines measure the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfexp.host import foreign
from perfexp.plan.flags import MULTIRUN

#: Keys that concern output, appearance or profiling, and not the measurement.
NOT_MEASURED = (
    *("profiler", "output_dir", "speed_dir", "export", "compare", "stage", "tracking", "quiet"),
    *(
        "choices",
        "command",
        "uid",
        "format",
        "timeout_seconds",
        "device_lock",
        "host_sharing",
        "cluster",
    ),
)


def measures_the_same(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two commands measure the same; output place and appearance may differ."""
    return _measured(first) == _measured(second)


def _measured(command: Sequence[str]) -> list[str]:
    """Return a command's words that concern the measurement, sorted."""
    words = ("-m" if text == "--multirun" else text for text in command)
    return sorted(filter(is_measured, words))


def differing_keys(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the keys of overrides that differ, or that only one command has.

    The message about a folder with another sweep names them.
    """
    differing = set(filter(is_measured, first)) ^ set(filter(is_measured, second))
    return sorted({key_of(text) for text in differing if "=" in text})


def is_measured(argument: str) -> bool:
    """Return whether an override changes the measurement.

    Launcher keys, for example, and keys for output place and appearance do not. `perfexp reproduce`
    repeats only such overrides.
    """
    if key_of(argument).startswith(("hydra/launcher", "hydra.launcher.")):
        return False
    return key_of(argument).split(".")[0] not in NOT_MEASURED


def key_of(argument: str) -> str:
    """Return the key of an override, without `+` and `~`."""
    return argument.lstrip("+~").partition("=")[0]


def line_to_type(
    stored: Sequence[str], program: Sequence[str] = ("perfexp",), *, in_turn: bool = False
) -> str | None:
    """Return the command line that repeats a stored command; None if it can't be shown.

    Anybody may have stored it: words are shown only if they are overrides or flags of them, and not
    the name of another command.

    Args:
        stored: words after the program.
        in_turn: whether it is a command line of `perfexp ab`, which has other words, too.
    """
    is_plain = all("=" in word or word.startswith("~") or word in MULTIRUN for word in stored)
    if is_plain or in_turn:
        return foreign.command_line(stored, program)
    return None


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in nested mappings by dotted key; an empty mapping is a value.

    Plans are compared, and tables have a column for each key.
    """
    values: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
