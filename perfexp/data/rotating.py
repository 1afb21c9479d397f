"""The same batch at many addresses of the device's memory, exceeding its caches (cache=rotate)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from perfexp.data import Batches
from perfexp.models import Batch, Session

#: Size of all copies together, relative to the caches.
_TIMES_CACHE = 2


class Cycled:
    """Batches on the device, in rotation; constant if they share their inputs."""

    def __init__(self, batches: Sequence[Batch], per_epoch: int | None, *, constant: bool) -> None:
        self._cycle, self.per_epoch, self.constant = cycle(batches), per_epoch, constant

    def next(self) -> Batch:
        return next(self._cycle)

    def epoch(self) -> Iterator[Batch]:
        return islice(self._cycle, self.per_epoch or 0)


class Rotating(Cycled):
    """Copies of equal batches in rotation, exceeding `cache_bytes`, so that a call finds its inputs in memory."""

    def __init__(self, batches: Batches, session: Session, cache_bytes: int) -> None:
        first = batches.next()
        size = int(getattr(first.inputs, "nbytes", 0)) or cache_bytes or 1
        self.copies = max(math.ceil(_TIMES_CACHE * cache_bytes / size) + 1, 2)
        others = [session.copy(batches.next()) for _ in range(self.copies - 1)]
        super().__init__([first, *others], batches.per_epoch, constant=False)


def on_device(batches: Batches) -> bool:
    """Whether all batches are on the device already."""
    return batches.constant or isinstance(batches, Cycled)
