"""Override keys: the keys of overrides as typed, and which of them concern the measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    """Whether two commands differ only in the place and appearance of output."""
    one, other = (
        sorted("-m" if text == "--multirun" else text for text in command)
        for command in (first, second)
    )
    return list(filter(is_measured, one)) == list(filter(is_measured, other))


def differing_keys(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Keys of the overrides and options that only one of two commands has, or each with another value."""
    one, other = (
        {text for text in command if "=" in text and is_measured(text)}
        for command in (first, second)
    )
    return sorted(set(map(key_of, one ^ other)))


def is_measured(argument: str) -> bool:
    """Whether an override changes the measurement, and not only its launcher, and place and appearance of output."""
    if key_of(argument).startswith(("hydra/launcher", "hydra.launcher.")):
        return False
    return key_of(argument).split(".")[0] not in NOT_MEASURED


def key_of(argument: str) -> str:
    """Return the key of an override, without `+` and `~`."""
    return argument.lstrip("+~").partition("=")[0]


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key; an empty mapping is a value."""
    values: dict[str, Any] = {}
    for key, value in plain.items():
        is_section = isinstance(value, Mapping) and value
        values |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return values
