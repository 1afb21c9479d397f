"""Replayed: the rows of a captured call's kernels, which are those of the same call made kernel by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher

from perfexp.layers import Key, Pass
from perfexp.layers.attribution import Attributed

#: The phase in which a captured call is launched, as `perfexp.modes.graphed` names it.
_GRAPH = "graph"


class Pattern:
    """The kernels of a call that is made kernel by kernel.

    A graph of the call has them, too, with the same names in the same order, but for those of the call's data.

    Args:
        kernels: of the call, in the order in which the device began them.

    Attributes:
        replays: that have been compared with it.
        least_found: share of its time that was found in each of them, or less.
    """

    def __init__(self, kernels: Iterable[Attributed]) -> None:
        self._kernels = [each for each in kernels if each.key is None or each.key.which is not Pass.data]
        self._names = [each.kernel.name for each in self._kernels]
        self.replays, self.least_found = 0, 1.0

    def rowed(self, kernels: Sequence[Attributed]) -> list[Attributed]:
        """The same kernels; those that a graph launched belong to the rows of the pattern's.

        A kernel that the pattern lacks, or has elsewhere, belongs to no row.

        Args:
            kernels: of a profile of replays, in the order in which the device began them.
        """
        places: dict[int, list[int]] = defaultdict(list)
        for place, each in enumerate(kernels):
            if each.call is not None and _launched_as_one(each.key):
                places[each.call].append(place)
        rowed = list(kernels)
        for of_call in places.values():
            found = self._found([kernels[place].kernel.name for place in of_call])
            for number, place in enumerate(of_call):
                rowed[place] = kernels[place]._replace(
                    key=self._kernels[found[number]].key if number in found else None
                )
            self._count(found)
        return rowed

    def _found(self, names: list[str]) -> Mapping[int, int]:
        """Place in the pattern by place in a replay."""
        if names == self._names:
            return {place: place for place in range(len(names))}
        blocks = SequenceMatcher(None, names, self._names, autojunk=False).get_matching_blocks()
        return {block.a + place: block.b + place for block in blocks for place in range(block.size)}

    def _count(self, found: Mapping[int, int]) -> None:
        self.replays += 1
        whole = sum(each.kernel.duration_ns for each in self._kernels)
        seen = sum(self._kernels[place].kernel.duration_ns for place in found.values())
        self.least_found = min(self.least_found, seen / whole if whole else 0.0)


def _launched_as_one(key: Key | None) -> bool:
    return key is not None and key.path is None and key.kind == _GRAPH
