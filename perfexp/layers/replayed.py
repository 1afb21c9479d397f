"""Replayed: the rows of a captured call's kernels, which are those of the same call made kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from perfexp.layers import Key, Pass
from perfexp.layers.attribution import Attributed

#: The phase in which a captured call is launched, as `perfexp.modes.graphed` names it.
_GRAPH = "graph"


def without_data(kernels: Iterable[Attributed]) -> list[Attributed]:
    """Of a call that is made kernel by kernel, what a graph of it has in it.

    Args:
        kernels: of the call.
    """
    return [each for each in kernels if each.key is None or each.key.which is not Pass.data]


def with_rows(replays: Iterable[Attributed], pattern: Sequence[Attributed]) -> list[Attributed]:
    """The same kernels; those that a graph launched belong to the rows of the pattern's.

    One after the other they have the same names. A kernel that the pattern lacks, or has elsewhere, belongs to no row.

    Args:
        replays: kernels of a profile, in the order in which the device began them.
        pattern: kernels of the call that was captured, in the same order.
    """
    rowed: list[Attributed] = []
    for (_, in_graph), group in groupby(replays, key=lambda each: (each.call, _launched_as_one(each.key))):
        kernels = list(group)
        rowed += _rowed(kernels, pattern) if in_graph else kernels
    return rowed


def _launched_as_one(key: Key | None) -> bool:
    return key is not None and key.path is None and key.kind == _GRAPH


def _rowed(replay: Sequence[Attributed], pattern: Sequence[Attributed]) -> Iterator[Attributed]:
    """The kernels of one replay."""
    rows: dict[int, Key | None] = {}
    names, expected = ([each.kernel.name for each in of] for of in (replay, pattern))
    if names == expected:
        rows = {place: each.key for place, each in enumerate(pattern)}
    else:
        for block in SequenceMatcher(None, names, expected, autojunk=False).get_matching_blocks():
            rows |= {block.a + place: pattern[block.b + place].key for place in range(block.size)}
    for place, each in enumerate(replay):
        yield each._replace(key=rows.get(place))
