"""Processes: the results of those that measured one point, which of them are comparable, and their figures together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from perfexp.records.point_times import first_median, loop_interval
from perfexp.records.record import Key, Metric, Point, Record, Series, Status, without_replicate
from perfexp.statistics import blockwise


def by_point(record: Record) -> dict[Key, list[Point]]:
    """The results of the processes by their point, the first process first."""
    groups: dict[Key, list[Point]] = {}
    for point in record.points:
        if point.key.is_timed:
            groups.setdefault(without_replicate(point.key), []).append(point)
    # an interrupted run has figures of the processes that finished a point, whichever these are
    return {key: [one for one in of if one.status is not Status.INTERRUPTED] or of for key, of in groups.items()}


def interrupted(record: Record) -> Counter[Key]:
    """How many processes of each timed point were interrupted before they had measured it."""
    unfinished = (point.key for point in record.points if point.status is Status.INTERRUPTED and point.key.is_timed)
    return Counter(map(without_replicate, unfinished))


def pooled_rates(first: Point, times: Mapping[str, blockwise.Summary], kind: str | None) -> tuple[Metric, ...]:
    """The metrics of the first process, but rates of work by the times of all processes, beside which they stand."""
    factors: dict[str, float] = {}
    if kind and (own := first_median(first, kind)) and times[kind].median.value > 0:
        factors["work/flops_per_second"] = own / times[kind].median.value
    pipelined = times.get("throughput") or times.get("latency")
    if pipelined and pipelined.mean.value > 0 and (loop := loop_interval(first)):
        factors |= dict.fromkeys(("mfu", "mfu_of_ceiling"), loop.value / pipelined.mean.value)
    return tuple(
        one
        if one.value is None or one.name not in factors
        else msgspec.structs.replace(one, value=one.value * factors[one.name])
        for one in first.metrics
    )


def joined(processes: Sequence[Series]) -> Series:
    """The samples of the first process, then those of the others without their warm-up; a block is a process."""
    first, *others = processes
    lengths = [len(first.samples), *(len(other.measured) for other in others)]
    samples = [*first.samples, *(sample for other in others for sample in other.measured)]
    return msgspec.structs.replace(first, samples=samples, blocks=[0, *accumulate(lengths[:-1])])


def comparable(points: Sequence[Point], name: str) -> list[Point]:
    """The processes that took this time with success, as the first one did."""
    first, *others = points
    alike = [point for point in others if point.status is first.status is Status.OK]
    measured = [point for point in (first, *alike) if (series := point.find_series(name)) and series.measured]
    return measured if first in measured else []
