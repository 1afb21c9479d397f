"""Assign an algorithm to each layer, by layer name or pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from perfexp.errors import UserError, did_you_mean


def choose(layers: Sequence[Sequence[str]], name: str, patterns: Mapping[str, str]) -> list[str]:
    """The algorithm of each layer: an exact name beats a pattern, then the last match wins.

    Args:
        layers: names of each layer; a shared module has several.
        name: algorithm of layers without a match.
        patterns: algorithms by layer name or shell pattern (`features.*`).

    Raises:
        UserError: a pattern matches no layer.
    """
    for pattern in patterns:
        if not any(_fits(pattern, names) for names in layers):
            hint = did_you_mean(pattern, [names[0] for names in layers])
            raise UserError(f"algorithm.layers: no 2-D convolution of the model matches {pattern!r}. {hint}")
    return [_choice(names, name, patterns) for names in layers]


def _choice(names: Sequence[str], name: str, patterns: Mapping[str, str]) -> str:
    exact = [algorithm for pattern, algorithm in patterns.items() if pattern in names]
    fitting = exact or [algorithm for pattern, algorithm in patterns.items() if _fits(pattern, names)]
    return fitting[-1] if fitting else name


def _fits(pattern: str, names: Sequence[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)
