"""Override keys: the keys of overrides as typed, and which of them concern the measurement."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.plan.plan_file import NOT_MEASURED


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
