"""Rows of a captured call's kernels, taken from the same call made kernel by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher

from perfexp.layers import Pass
from perfexp.layers.attribution import Attributed

#: The phase in which a captured call is launched, as `perfexp.modes.graphed` names it.
_GRAPH = "graph"


class Pattern:
    """The kernels of a call that is made kernel by kernel, in the order in which the device began them.

    A graph of the call has the same kernel names in the same order, except for those of the call's data.

    Attributes:
        replays: number of replays that were compared with it.
        least_found: least share of its time that was matched in a replay.
    """

    def __init__(self, kernels: Iterable[Attributed]) -> None:
        self._kernels = [kernel for kernel in kernels if kernel.key is None or kernel.key.which is not Pass.data]
        self._names = [kernel.kernel.name for kernel in self._kernels]
        self.replays, self.least_found = 0, 1.0

    def rowed(self, kernels: Sequence[Attributed]) -> list[Attributed]:
        """A profile's kernels in order of their start, where those that a graph launched have the rows of the pattern.

        A kernel that the pattern lacks, or has elsewhere, has no row.
        """
        places: dict[int, list[int]] = defaultdict(list)
        for place, kernel in enumerate(kernels):
            if kernel.call is not None and kernel.key and kernel.key.path is None and kernel.key.kind == _GRAPH:
                places[kernel.call].append(place)
        rowed = list(kernels)
        for of_call in places.values():
            matches = self._matched([kernels[place].kernel.name for place in of_call])
            for number, place in enumerate(of_call):
                key = self._kernels[matches[number]].key if number in matches else None
                rowed[place] = kernels[place]._replace(key=key)
            self.replays += 1
            whole = sum(kernel.kernel.duration_ns for kernel in self._kernels)
            matched = sum(self._kernels[place].kernel.duration_ns for place in matches.values())
            self.least_found = min(self.least_found, matched / whole if whole else 0.0)
        return rowed

    def _matched(self, names: list[str]) -> Mapping[int, int]:
        """Position in the pattern by position in a replay."""
        if names == self._names:
            return {place: place for place in range(len(names))}
        blocks = SequenceMatcher(None, names, self._names, autojunk=False).get_matching_blocks()
        return {block.a + place: block.b + place for block in blocks for place in range(block.size)}
