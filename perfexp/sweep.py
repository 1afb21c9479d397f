"""Sweeps within one run: which sizes and batch sizes the points of a plan have."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import ge
from typing import Any, Protocol, TypeVar

from perfexp.errors import UserError
from perfexp.records.record import Key, Status
from perfexp.records.record import Point as Measured

Size = tuple[int, int]
_T = TypeVar("_T")
#: Limit on the points of a plan, and on the sizes and batch sizes that it lists.
MOST_POINTS = 100_000
#: Limits far beyond any device's memory, within which pixels and bytes still are 64-bit numbers.
_MOST_PIXELS, _MOST_SAMPLES = 100_000, 10_000_000


class Sweep(Protocol):
    """What a `sweep` node of the configuration builds.

    Attributes:
        skip_larger: whether points that are larger than one which ran out of memory are left out.
    """

    skip_larger: bool

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """Sizes and batch sizes in the order in which they are measured.

        Args:
            sizes: those that `input_size` gives; empty if it gives none.
            batch_sizes: those that `batch_size` gives; empty if it gives none.

        Raises:
            UserError: they contradict the sweep.
        """


class Point:
    """Every input size with every batch size, as they are given.

    Args:
        skip_larger: see `Sweep`.
    """

    def __init__(self, *, skip_larger: bool = False) -> None:
        self.skip_larger = skip_larger

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """See `Sweep`."""
        return _combined(sizes, batch_sizes)


class Sizes:
    """Square sizes, evenly spaced.

    Args:
        num_sizes: how many.
        min_size: the smallest, pixels a side.
        max_size: the largest.
        skip_larger: see `Sweep`.
    """

    def __init__(self, *, num_sizes: int, min_size: int, max_size: int, skip_larger: bool = False) -> None:
        if num_sizes < 1 or min_size < 1 or max_size < min_size:
            raise UserError(
                f"sweep=sizes needs num_sizes ≥ 1 and 1 ≤ min_size ≤ max_size; "
                f"given: num_sizes={num_sizes}, min_size={min_size}, max_size={max_size}."
            )
        if max_size > _MOST_PIXELS:
            raise UserError(f"sweep.max_size={max_size}: at most {_MOST_PIXELS:,} pixels a side.")
        if num_sizes > max_size - min_size + 1:
            raise UserError(
                f"sweep=sizes: there are only {max_size - min_size + 1} sizes from {min_size} to {max_size}, "
                f"not {num_sizes}. Lower sweep.num_sizes or widen the range."
            )
        self.skip_larger = skip_larger
        self.num_sizes, self.min_size, self.max_size = num_sizes, min_size, max_size

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """See `Sweep`."""
        if sizes:
            raise UserError("sweep=sizes chooses the input sizes itself: leave out input_size, or take sweep=point.")
        span, steps = self.max_size - self.min_size, max(self.num_sizes - 1, 1)
        sides = (self.min_size + round(span * step / steps) for step in range(self.num_sizes))
        return _combined([(side, side) for side in sides], batch_sizes)


class BatchSizes:
    """A list of batch sizes.

    Args:
        batch_sizes: samples per call.
        skip_larger: see `Sweep`.
    """

    def __init__(self, *, batch_sizes: Sequence[int], skip_larger: bool = False) -> None:
        self.skip_larger = skip_larger
        self.batch_sizes = parse_batch_sizes(list(batch_sizes))

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """See `Sweep`."""
        if batch_sizes:
            raise UserError("sweep=batch chooses the batch sizes itself: set sweep.batch_sizes instead of batch_size.")
        return _combined(sizes, self.batch_sizes)


def timed_keys(
    sweep: Sweep, input_size: Any, batch_size: Any, *, phases: Sequence[str], precision: str, replicate: int
) -> list[Key]:
    """The points of a plan that are timed, in order: replicate by replicate. They are counted before there are any.

    Args:
        sweep: which sizes and batch sizes belong together.
        input_size: as `parse_sizes` takes it.
        batch_size: as `parse_batch_sizes` takes it.
        phases: of each point.
        precision: name of the precision.
        replicate: number of processes that measure everything.

    Raises:
        UserError: the settings contradict one another, or make too many points.
    """
    pairs = sweep.points(parse_sizes(input_size), parse_batch_sizes(batch_size))
    _refuse_many(replicate, len(pairs), len(phases))
    return [
        Key(phase=phase, input_size=size, batch_size=batch, precision=precision, replicate=number)
        for number in range(replicate)
        for size, batch in pairs
        for phase in phases
    ]


def predicted_out_of_memory(key: Key, known: Iterable[Measured]) -> Measured | None:
    """The result of a point, if a smaller one of the same phase and precision ran out of memory; None otherwise.

    Args:
        key: which point; not measured yet.
        known: results so far.
    """
    for point in known:
        small = point.key
        same = (small.phase, small.precision) == (key.phase, key.precision)
        larger = key.batch_size >= small.batch_size and all(map(ge, key.input_size, small.input_size))
        if point.status is Status.OOM and same and larger:
            text = f"not tried: {small} ran out of memory (sweep.skip_larger)"
            return Measured(key=key, status=Status.OOM_PREDICTED, error=text)
    return None


def order(keys: Sequence[Key], replicate: int, seed: int) -> list[Key]:
    """The order in which a process measures its points, so that replicates do not all meet the same neighbours.

    Args:
        keys: of one process.
        replicate: its number.
        seed: of the plan.

    Returns:
        The keys as they are for the first process, shuffled for the others.
    """
    shuffled = list(keys)
    if replicate:
        random.Random(f"{seed} {replicate}").shuffle(shuffled)
    return shuffled


def parse_sizes(given: Any) -> list[Size]:
    """Input sizes as they are written: `224`, `512x1024` (height × width), or a list of such.

    Args:
        given: an integer, a text, a list of them, or None for none.

    Raises:
        UserError: that is no size.
    """
    if given is None:
        return []
    items = given if isinstance(given, list) else [given]
    _refuse_many(len(items))
    return _unique([_parse_size(item) for item in items], "input_size")


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
    _refuse_many(len(items))
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or item < 1:
            raise UserError(f"batch_size={_short(item)} is no batch size: a whole number from 1 up, or a list [1,2,4].")
        if item > _MOST_SAMPLES:
            raise UserError(f"batch_size={_short(item)}: at most {_MOST_SAMPLES:,} samples a call.")
    return _unique(items, "batch_size")


def _parse_size(item: Any) -> Size:
    is_size = isinstance(item, (int, str)) and not isinstance(item, bool)
    found = re.fullmatch(r"\s*(\d+)\s*(?:[x×]\s*(\d+)\s*)?", _short(item)) if is_size else None
    if found is None:
        raise UserError(
            f"input_size={_short(item)} is no size: write 224, 512x1024 (height × width) or a list [224,256]."
        )
    size = int(found[1]), int(found[2] or found[1])
    if min(size) < 1:
        raise UserError(f"input_size={item} has no pixels: both sides have to be at least 1.")
    if max(size) > _MOST_PIXELS:
        raise UserError(f"input_size={item}: at most {_MOST_PIXELS:,} pixels a side.")
    return size


def _short(item: Any) -> str:
    """A value as text, cut off: a number of thousands of digits is not converted, nor shown."""
    if isinstance(item, int) and item.bit_length() > 200:
        return "a number of more than 60 digits"
    text = str(item)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _combined(sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
    """Each size with each batch size.

    Raises:
        UserError: there are none, or too many.
    """
    for name, values in (("input_size", sizes), ("batch_size", batch_sizes)):
        if not values:
            raise UserError(f"{name}=null names nothing to measure: set {name}=VALUE.")
    _refuse_many(len(sizes), len(batch_sizes))
    return [(size, batch) for size in sizes for batch in batch_sizes]


def _refuse_many(*counts: int) -> None:
    """Refuse a plan by the number of its points, which is the product of these counts."""
    if math.prod(counts) > MOST_POINTS:
        raise UserError(
            f"The plan has more than {MOST_POINTS:,} points (replicate × sizes × batch sizes × phases). "
            "Lower replicate, or name fewer sizes or batch sizes."
        )


def _unique(items: list[_T], name: str) -> list[_T]:
    if not items:
        raise UserError(f"{name}=[] names nothing to measure.")
    doubled = [item for item, count in Counter(items).items() if count > 1]
    if doubled:
        raise UserError(f"{name} names {doubled[0]} twice; replicate=2 measures everything twice.")
    return items
