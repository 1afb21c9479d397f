"""Sweeps within one run: the input sizes and batch sizes of a plan's points.

A `sweep` node selects one of the classes here (`point`, `sizes`, `batch`) or `sparse`. Functions
turn its pairs of size and batch into keys, and decide about points that are too large for the
memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from operator import ge
from typing import Protocol

import msgspec
import numpy as np

from perfexp.errors import UserError
from perfexp.records.quantities import FITTING_BATCH
from perfexp.records.record import Key, Status
from perfexp.records.record import Point as Measured
from perfexp.records.sizes import MOST_PIXELS, Size, parse_batch_sizes, refuse_many

#: Points of a sweep that show how much processes differ, and get the extra passes.
ANCHORS = 3


class Oom(StrEnum):
    """Action after an out-of-memory point: only record it, or add a point with a fitting batch."""

    record = "record"
    shrink = "shrink"


class Sweep(Protocol):
    """Combinations of input size and batch size, chosen by a `sweep` node.

    A sweep may have two more attributes. `skip_oom`: whether to skip points if their traced peak
    exceeds the memory. `oom`: the action after an out-of-memory point.

    Attributes:
        skip_larger: whether to skip points larger than an out-of-memory point.
    """

    skip_larger: bool

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """List pairs of input size and batch size, in measuring order.

        The plan calls it for each phase.

        Args:
            sizes: the plan's input sizes (height, width); empty if the sweep chooses them.
            batch_sizes: the plan's batch sizes; empty if the sweep chooses them.

        Raises:
            UserError: the plan's values contradict the sweep.
        """


@dataclass(kw_only=True, eq=False)
class Skipping:
    """Settings for points that need too much memory; see `Sweep`."""

    skip_larger: bool = False
    skip_oom: bool = False
    oom: Oom = Oom.record

    def __post_init__(self) -> None:
        self.oom = Oom(self.oom)  # a plan contains its name


@dataclass(kw_only=True, eq=False)
class Point(Skipping):
    """Every input size with every batch size."""

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """List each size with each batch size."""
        return _combined(sizes, batch_sizes)


@dataclass(kw_only=True, eq=False)
class Sizes(Skipping):
    """Evenly spaced square sizes between two sides in pixels, inclusive."""

    num_sizes: int
    min_size: int
    max_size: int

    def __post_init__(self) -> None:
        """Raise `UserError` unless the numbers describe possible sizes."""
        super().__post_init__()
        if self.num_sizes < 1 or self.min_size < 1 or self.max_size < self.min_size:
            raise UserError(
                "sweep needs num_sizes ≥ 1 and 1 ≤ min_size ≤ max_size; given: "
                f"num_sizes={self.num_sizes}, min_size={self.min_size}, max_size={self.max_size}."
            )
        if self.max_size > MOST_PIXELS:
            raise UserError(
                f"sweep.max_size={self.max_size}: at most {MOST_PIXELS:,} pixels a side."
            )
        if self.num_sizes > (possible := self.max_size - self.min_size + 1):
            raise UserError(
                f"sweep.num_sizes: there are only {possible} sizes from {self.min_size} to "
                f"{self.max_size}, not {self.num_sizes}. Lower it or widen the range."
            )

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """List the evenly spaced sizes with each batch size.

        The plan itself must then leave the input size open.
        """
        if sizes:
            raise UserError(
                "sweep=sizes chooses the input sizes itself: leave out input_size, or set "
                "sweep=point."
            )
        span, steps = self.max_size - self.min_size, max(self.num_sizes - 1, 1)
        sides = (self.min_size + round(span * step / steps) for step in range(self.num_sizes))
        return _combined([(side, side) for side in sides], batch_sizes)


@dataclass(kw_only=True, eq=False)
class BatchSizes(Skipping):
    """A list of batch sizes, in samples per call."""

    batch_sizes: Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_sizes = parse_batch_sizes(list(self.batch_sizes))

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
        """List each size with the sweep's own batch sizes.

        The plan itself must then leave the batch size open.
        """
        if batch_sizes:
            raise UserError(
                "sweep=batch chooses the batch sizes itself: set sweep.batch_sizes instead of "
                "batch_size."
            )
        return _combined(sizes, self.batch_sizes)


def timed_keys(
    pairs: Mapping[str, Sequence[tuple[Size, int]]],
    *,
    precision: str,
    replicate: int,
    chosen: Mapping[str, Sequence[tuple[Size, int]]] | None = None,
) -> list[Key]:
    """List a plan's timed points, process by process.

    Phases with the same sizes and batch sizes take turns. Other phases run one after another.

    Args:
        pairs: sizes and batch sizes by phase.
        replicate: number of processes.
        chosen: points for the first process, selected from earlier results; they replace its
            `pairs`.

    Raises:
        UserError: there are too many points.
    """
    refuse_many(replicate, sum(map(len, pairs.values())))
    # phases that take turns, their pairs, and their pairs in the first process
    groups: list[tuple[list[str], Sequence[tuple[Size, int]], Sequence[tuple[Size, int]]]] = []
    for phase, usual in pairs.items():
        first = (chosen or {}).get(phase) or usual
        if groups and groups[-1][1:] == (usual, first):
            groups[-1][0].append(phase)
        else:
            groups.append(([phase], usual, first))
    keys = []
    for number in range(replicate):
        for phases, usual, first in groups:
            points = usual if number else first
            for (size, batch), phase in product(points, phases):
                key = Key(
                    phase=phase,
                    input_size=size,
                    batch_size=batch,
                    precision=precision,
                    replicate=number,
                )
                keys.append(key)
    return keys


def spread(pairs: Iterable[tuple[Size, int]], number: int) -> list[tuple[Size, int]]:
    """Return up to `number` points from the least to the most work, both included.

    These get the extra passes, such as energy with the device kept busy.
    """
    ranked = sorted(pairs, key=lambda pair: (pair[0][0] * pair[0][1] * pair[1], pair))
    places = np.linspace(0, len(ranked) - 1, min(number, len(ranked))).round().astype(int)
    return [ranked[index] for index in places]


def predicted_out_of_memory(key: Key, results: Iterable[Measured]) -> Measured | None:
    """Return an out-of-memory result for a point if a smaller one ran out of memory.

    Otherwise return None. Only points in the same phase and precision count (`sweep.skip_larger`).
    """
    for point in results:
        small = point.key
        same = (small.phase, small.precision) == (key.phase, key.precision)
        larger = key.batch_size >= small.batch_size and all(
            map(ge, key.input_size, small.input_size)
        )
        if point.status is Status.OOM and same and larger:
            text = f"not tried: {small} ran out of memory (sweep.skip_larger)"
            return Measured(key=key, status=Status.OOM_PREDICTED, error=text)
    return None


def shrunk(results: Iterable[Measured]) -> dict[Key, int]:
    """Return points to add with the batch that fits, each with the batch that ran out of memory.

    The worker has traced the fitting batch (`sweep.oom=shrink`).
    """
    batch_of: dict[Key, int] = {}
    for point in results:
        fits = point.metric(FITTING_BATCH)
        if point.status is Status.OOM and fits is not None and fits.value:
            key = msgspec.structs.replace(point.key, batch_size=int(fits.value))
            batch_of.setdefault(key, point.key.batch_size)
    return batch_of


def order(keys: Sequence[Key], replicate: int, seed: int) -> list[Key]:
    """Return a process's points in random order, so that a slow-down does not resemble scaling.

    The worker measures in this order.

    Args:
        replicate: number of the process, which has its own order.
    """
    shuffled = list(keys)
    random.Random(f"{seed} {replicate}").shuffle(shuffled)
    return shuffled


def _combined(sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[tuple[Size, int]]:
    """Combine each size with each batch size; raise `UserError` for no or too many points."""
    for name, values in (("input_size", sizes), ("batch_size", batch_sizes)):
        if not values:
            raise UserError(f"{name}=null leaves nothing to measure: set {name}=VALUE.")
    refuse_many(len(sizes), len(batch_sizes))
    return list(product(sizes, batch_sizes))
