"""Sweeps within one run: which sizes and batch sizes the points of a plan have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from perfexp.errors import UserError

Size = tuple[int, int]
_T = TypeVar("_T")


class Sweep(Protocol):
    """What a `sweep` node of the configuration builds."""

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """Sizes and batch sizes in the order in which they are measured.

        Args:
            sizes: those that `input_size` gives; empty if it gives none.
            batch_sizes: those that `batch_size` gives; empty if it gives none.

        Raises:
            UserError: they contradict the sweep.
        """


class Point:
    """Every input size with every batch size, as they are given."""

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """See `Sweep`."""
        return [(size, batch) for size in sizes for batch in batch_sizes]


class Sizes:
    """Square sizes, evenly spaced.

    Args:
        num_sizes: how many.
        min_size: the smallest, pixels a side.
        max_size: the largest.
    """

    def __init__(self, *, num_sizes: int, min_size: int, max_size: int) -> None:
        if num_sizes < 1 or min_size < 1 or max_size < min_size:
            raise UserError(
                f"sweep=sizes needs num_sizes ≥ 1 and 1 ≤ min_size ≤ max_size; "
                f"given: num_sizes={num_sizes}, min_size={min_size}, max_size={max_size}."
            )
        if num_sizes > max_size - min_size + 1:
            raise UserError(
                f"sweep=sizes: there are only {max_size - min_size + 1} sizes from {min_size} to {max_size}, "
                f"not {num_sizes}. Lower sweep.num_sizes or widen the range."
            )
        self.num_sizes, self.min_size, self.max_size = num_sizes, min_size, max_size

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """See `Sweep`."""
        if sizes:
            raise UserError("sweep=sizes chooses the input sizes itself: leave out input_size, or take sweep=point.")
        span, steps = self.max_size - self.min_size, max(self.num_sizes - 1, 1)
        sides = [self.min_size + round(span * step / steps) for step in range(self.num_sizes)]
        return [((side, side), batch) for side in sides for batch in batch_sizes]


class BatchSizes:
    """A list of batch sizes.

    Args:
        batch_sizes: samples per call.
    """

    def __init__(self, *, batch_sizes: Sequence[int]) -> None:
        self.batch_sizes = parse_batch_sizes(list(batch_sizes))

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """See `Sweep`."""
        if batch_sizes:
            raise UserError("sweep=batch chooses the batch sizes itself: set sweep.batch_sizes instead of batch_size.")
        return [(size, batch) for size in sizes for batch in self.batch_sizes]


def parse_sizes(given: Any) -> list[Size]:
    """Input sizes as they are written: `224`, `512x1024` (height × width), or a list of such.

    Args:
        given: an integer, a text, a list of them, or None for none.

    Raises:
        UserError: that is no size.
    """
    if given is None:
        return []
    return _unique([_parse_size(item) for item in (given if isinstance(given, list) else [given])], "input_size")


def parse_batch_sizes(given: Any) -> list[int]:
    """Batch sizes as they are written: an integer or a list of them.

    Args:
        given: an integer, a list, or None for none.

    Raises:
        UserError: one is no positive integer.
    """
    if given is None:
        return []
    items = given if isinstance(given, list) else [given]
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or item < 1:
            raise UserError(f"batch_size={item!r} is no batch size: a whole number from 1 up, or a list [1,2,4].")
    return _unique(items, "batch_size")


def _parse_size(item: Any) -> Size:
    found = re.fullmatch(r"\s*(\d+)\s*(?:[x×]\s*(\d+)\s*)?", str(item)) if not isinstance(item, bool) else None
    if found is None or not isinstance(item, (int, str)):
        raise UserError(f"input_size={item!r} is no size: write 224, 512x1024 (height × width) or a list [224,256].")
    size = int(found[1]), int(found[2] or found[1])
    if min(size) < 1:
        raise UserError(f"input_size={item} has no pixels: both sides have to be at least 1.")
    return size


def _unique(items: list[_T], name: str) -> list[_T]:
    if not items:
        raise UserError(f"{name}=[] names nothing to measure.")
    doubled = [item for item in items if items.count(item) > 1]
    if doubled:
        raise UserError(f"{name} names {doubled[0]} twice; replicate=2 measures everything twice.")
    return items
