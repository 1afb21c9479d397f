"""Rotating: the same batch in many places of the device's memory, more than its caches hold (cache=rotate)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle, islice

from perfexp.data import Batches
from perfexp.models import Batch, Session

#: All copies together are so many times as large as the caches.
_TIMES_CACHE = 2


class Rotating:
    """Copies of batches that take turns, so that a call finds its inputs in memory and not in a cache.

    Args:
        batches: whose inputs are all the same.
        session: that makes the copies.
        cache_bytes: size of the largest cache.
    """

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
        """See `Batches`."""
        return next(self._cycle)

    def epoch(self) -> Iterator[Batch]:
        """See `Batches`."""
        return islice(self._cycle, self.per_epoch or 0)


def on_device(batches: Batches) -> bool:
    """Whether all batches lie on the device already.

    Args:
        batches: of a point.
    """
    return batches.constant or isinstance(batches, Rotating)
