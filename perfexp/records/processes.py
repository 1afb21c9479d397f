"""Processes: the results of those that measured one point, which of them are comparable, and their figures together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import geometric_mean, median

import msgspec

from perfexp.records import quantities, races
from perfexp.records.point_times import first_median, loop_interval
from perfexp.records.quantities import Pooled
from perfexp.records.record import Key, Metric, Point, Record, Series, Status, without_replicate
from perfexp.statistics import blockwise
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import Repeats

#: What becomes of the values of several processes.
_POOLED: dict[Pooled, Callable[[Iterable[float]], float]] = {
    Pooled.LARGEST: max,
    Pooled.MEDIAN: median,
    Pooled.GEOMETRIC_MEAN: geometric_mean,
}


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


def pooled_metrics(
    points: Sequence[Point], times: Mapping[str, blockwise.Summary], kind: str | None
) -> tuple[Metric, ...]:
    """The metrics of the first process, but for those that the registry pools.

    Rates are by the times of all processes, beside which they stand. Speedups are pooled where every process has them.
    """
    factors = _rate_factors(points[0], times, kind)
    return tuple(_pooled(one, points, factors) for one in points[0].metrics)


def pooled_speedup(points: Sequence[Point], name: str) -> Interval | None:
    """A speedup with its interval over processes; None unless each of several processes has found it itself."""
    finished = _finished(points)
    speedups = [one for point in finished if (one := _speedup(point, name)) and one.value > 0]
    return Repeats.of(speedups).interval if len(speedups) == len(finished) > 1 else None


def _pooled(metric: Metric, points: Sequence[Point], factors: Mapping[Pooled, float]) -> Metric:
    pooled = quantities.of(metric).pooled
    if metric.name == quantities.PROVEN and (proven := races.proven_share(points[0])) is not None:
        return msgspec.structs.replace(metric, value=proven)  # earlier versions counted torch's own choice
    if combine := _POOLED.get(pooled):
        found = [one.metric(metric.name) for one in _finished(points)]
        values = [own.value for own in found if own and own.value and own.value > 0]
        return msgspec.structs.replace(metric, value=combine(values), reason=None) if values else metric
    if metric.value is None:
        return metric
    if pooled is Pooled.SPEEDUP and (speedup := pooled_speedup(points, metric.name)):
        return msgspec.structs.replace(metric, value=speedup.value, low=speedup.low, high=speedup.high)
    factor = factors.get(pooled)
    return metric if factor is None else msgspec.structs.replace(metric, value=metric.value * factor)


def _finished(points: Sequence[Point]) -> list[Point]:
    """The first process and those that ended well, as it did."""
    first, *others = points
    return [first, *(point for point in others if point.status is first.status is Status.OK)]


def _speedup(point: Point, name: str) -> Interval | None:
    """A speedup of one process; the promised one is by its own races, as a cached race is another process's."""
    if name.startswith(promised := quantities.member(quantities.PROMISED_SPEEDUP, "")):
        timed = races.timed_passes(point)
        is_cached = any(one_pass.get("kept_since") for _, one_pass in timed)
        return None if is_cached else races.promised(timed).get(name.removeprefix(promised))
    if (metric := point.metric(name)) is None or metric.value is None:
        return None
    return Interval(value=metric.value, low=metric.low, high=metric.high)


def _rate_factors(first: Point, times: Mapping[str, blockwise.Summary], kind: str | None) -> dict[Pooled, float]:
    factors: dict[Pooled, float] = {}
    if kind and (own := first_median(first, kind)) and times[kind].median.value > 0:
        factors[Pooled.BY_TIME] = own / times[kind].median.value
    pipelined = times.get("throughput") or times.get("latency")
    if pipelined and pipelined.mean.value > 0 and (loop := loop_interval(first)):
        factors[Pooled.BY_RATE] = loop.value / pipelined.mean.value
    return factors


def joined(processes: Sequence[Series]) -> Series:
    """The samples of the first process, then those of the others without their warm-up; a block is a process."""
    first, *others = processes
    lengths = [len(first.samples), *(len(other.measured) for other in others)]
    samples = [*first.samples, *(sample for other in others for sample in other.measured)]
    return msgspec.structs.replace(first, samples=samples, blocks=[0, *accumulate(lengths[:-1])])


def comparable(points: Sequence[Point], name: str) -> list[Point]:
    """The processes that took this time with success, as the first one did."""
    measured = [point for point in _finished(points) if (series := point.find_series(name)) and series.measured]
    return measured if points[0] in measured else []
