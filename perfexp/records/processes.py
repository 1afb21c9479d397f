"""Processes: the results of those that measured one point, which of them are comparable, and their figures together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, geometric_mean, median, variance

import msgspec

from perfexp.records import races
from perfexp.records.point_times import first_median, loop_interval
from perfexp.records.record import Key, Metric, Point, Record, Series, Status, without_replicate
from perfexp.statistics import blockwise
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.prior import Prior

_PROVEN, _WORKSPACE, _LAUNCHES = "algorithm/proven_share", "algorithm/workspace_peak_bytes", "loop/host_seconds"
_CYCLES = "device/cycles_per_call"
#: Single figures by which the processes of a point are compared, with their metrics.
SINGLES = {
    "cycles": _CYCLES,
    "memory": "memory/peak_bytes",
    "energy": "energy/per_image_joules",
    "accuracy": "accuracy",
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


def single_figures(points: Sequence[Point], prior: Callable[[str], Prior | None]) -> dict[str, Repeats]:
    """The figures of `SINGLES` of the processes of a point; accuracies are exact, and so is one process's own value."""
    found = {}
    for name, of in SINGLES.items():
        known = [metric for point in points if point.status is Status.OK and (metric := point.metric(of))]
        if figures := [Interval(value=one.value, low=one.low, high=one.high) for one in known if one.value is not None]:
            one = Repeats.of(figures, None if name == "accuracy" else prior(name))
            within = one.within if name == "energy" else 0.0
            found[name] = replace(one, within=within, is_estimate=any(metric.estimated for metric in known))
    return found


def epoch_figures(points: Sequence[Point], prior: Callable[[str], Prior | None]) -> dict[str, Repeats]:
    """The times of whole epochs of the first process that has any.

    `epoch` is the mean pass over the training data, `runtime` all passes with evaluations and checkpoints. A single
    pass counts as exact, since it has many calls.
    """
    epochs = next((point.epochs for point in points if point.status is Status.OK and point.epochs), [])
    passes = [epoch.seconds for epoch in epochs]
    whole = [epoch.seconds + epoch.evaluation_seconds + epoch.checkpoint_seconds for epoch in epochs]
    found = {}
    for name, seconds, of in (("epoch", passes, fmean), ("runtime", whole, sum)):
        if seconds:
            relative = variance(seconds) / len(seconds) / fmean(seconds) ** 2 if len(seconds) > 1 else 0.0
            found[name] = Repeats(values=(of(seconds),), within=relative, prior=prior(name))
    return found


def pooled_metrics(
    points: Sequence[Point], times: Mapping[str, blockwise.Summary], kind: str | None
) -> tuple[Metric, ...]:
    """The metrics of the first process, but of all: rates of work, workspace, launches, cycles and speedups.

    The workspace is the largest one, launches are a median, and cycles a geometric mean, as device times are. Rates are
    by the times of all processes, beside which they stand. Speedups are pooled where every process has them.
    """
    factors = _rate_factors(points[0], times, kind)
    return tuple(_pooled(one, points, factors.get(one.name)) for one in points[0].metrics)


def pooled_speedup(points: Sequence[Point], name: str) -> Interval | None:
    """A speedup with its interval over processes; None unless each of several processes has found it itself."""
    finished = _finished(points)
    speedups = [one for point in finished if (one := _speedup(point, name)) and one.value > 0]
    return Repeats.of(speedups).interval if len(speedups) == len(finished) > 1 else None


def _pooled(metric: Metric, points: Sequence[Point], factor: float | None) -> Metric:
    if metric.name == _PROVEN and (proven := races.proven_share(points[0])) is not None:
        return msgspec.structs.replace(metric, value=proven)  # earlier versions counted torch's own choice
    if metric.name == _WORKSPACE:
        known = [own for point in _finished(points) if (own := point.metric(_WORKSPACE)) and own.value is not None]
        return max(known, key=lambda own: own.value or 0.0, default=metric)
    if metric.name == _LAUNCHES:
        values = [own.value for point in _finished(points) if (own := point.metric(_LAUNCHES)) and own.value]
        return msgspec.structs.replace(metric, value=median(values), reason=None) if values else metric
    if metric.name == _CYCLES:
        values = [
            own.value for point in _finished(points) if (own := point.metric(_CYCLES)) and own.value and own.value > 0
        ]
        return msgspec.structs.replace(metric, value=geometric_mean(values), reason=None) if values else metric
    if metric.value is None:
        return metric
    if races.is_speedup(metric.name) and (pooled := pooled_speedup(points, metric.name)):
        return msgspec.structs.replace(metric, value=pooled.value, low=pooled.low, high=pooled.high)
    return metric if factor is None else msgspec.structs.replace(metric, value=metric.value * factor)


def _finished(points: Sequence[Point]) -> list[Point]:
    """The first process and those that ended well, as it did."""
    first, *others = points
    return [first, *(point for point in others if point.status is first.status is Status.OK)]


def _speedup(point: Point, name: str) -> Interval | None:
    """A speedup of one process; the promised one is by its own races, as a cached race is another process's."""
    if name.startswith(races.PROMISED):
        timed = races.timed_passes(point)
        is_cached = any(one_pass.get("kept_since") for _, one_pass in timed)
        return None if is_cached else races.promised(timed).get(name.removeprefix(races.PROMISED))
    if (metric := point.metric(name)) is None or metric.value is None:
        return None
    return Interval(value=metric.value, low=metric.low, high=metric.high)


def _rate_factors(first: Point, times: Mapping[str, blockwise.Summary], kind: str | None) -> dict[str, float]:
    factors: dict[str, float] = {}
    if kind and (own := first_median(first, kind)) and times[kind].median.value > 0:
        factors["work/flops_per_second"] = own / times[kind].median.value
    pipelined = times.get("throughput") or times.get("latency")
    if pipelined and pipelined.mean.value > 0 and (loop := loop_interval(first)):
        factors |= dict.fromkeys(("mfu", "mfu_of_ceiling"), loop.value / pipelined.mean.value)
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
