"""The same batch at many addresses of the device's memory, exceeding its caches (cache=rotate)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle, islice

from perfexp.data import Batches
from perfexp.models import Batch, Session

#: Size of all copies together, relative to the caches.
_TIMES_CACHE = 2


class Rotating:
    """Copies of equal batches in rotation, exceeding `cache_bytes`, so that a call finds its inputs in memory."""

    constant = False

    def __init__(self, batches: Batches, session: Session, cache_bytes: int) -> None:
        first = batches.next()
        size = int(getattr(first.inputs, "nbytes", 0)) or cache_bytes or 1
        count = math.ceil(_TIMES_CACHE * cache_bytes / size) + 1
        copies = [first, *(session.copy(batches.next()) for _ in range(max(count, 2) - 1))]
        self._cycle = cycle(copies)
        self.copies = len(copies)
        self.per_epoch = batches.per_epoch

    def next(self) -> Batch:
        return next(self._cycle)

    def epoch(self) -> Iterator[Batch]:
        return islice(self._cycle, self.per_epoch or 0)


def on_device(batches: Batches) -> bool:
    """Whether all batches are on the device already."""
    return batches.constant or isinstance(batches, Rotating)
