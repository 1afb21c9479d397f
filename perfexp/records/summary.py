"""Figures of a record for reports, tables, plots and tracking: pure functions of the raw samples."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from perfexp.records import disturbances, estimates, growth, idleness, races, sampling
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import (
    DEVICE_TIMES,
    first_median,
    samples_per_call,
    series_of,
    summary_of,
)
from perfexp.records.processes import by_point, comparable, interrupted, joined, pooled_metrics
from perfexp.records.record import (
    EarlierTime,
    Key,
    MachineSpread,
    Metric,
    Point,
    Record,
    Series,
    Status,
    without_replicate,
)
from perfexp.statistics import blockwise, estimators, variance

#: Times that can represent a point, best first.
TIME_KINDS = (*DEVICE_TIMES, "latency", "throughput")
#: State and rows of records that are in use.
_known: dict[int, tuple[tuple[object, ...], list[Row]]] = {}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one point.

    Attributes:
        key: identity of the point.
        status: final status.
        error: error message of a point without a result.
        time_kind: name of the series behind `time`: `device`, `latency` or `throughput`; None without samples.
        series: raw samples behind `time`: those of the first process, warm-up first, then those of the other processes
            without theirs; a block is a process.
        times: statistics of every measured time over all processes, by name, in seconds per call.
        processes: number of processes behind `time`.
        unfinished: number of further processes that were interrupted before they had measured the point.
        in_turn: whether the processes took turns with those of another run (`perfexp ab`).
        spread: relative standard deviation between the processes' medians; None for one process.
        is_pooled: whether the intervals of one process were widened by what other points show about processes.
        runs: number of earlier runs of the same command that the intervals of `time` include.
        selfcheck: date of the selfcheck by which the intervals of `time` of one process were widened; None without.
        phases: median seconds of each part of a call, by name, measured in a separate pass.
        samples_per_call: samples per call, over all ranks.
        own_choice: share of the convolutions' FLOPs by torch's own choice, of an algorithm that was not observed.
        metrics: single figures of the point; those that are computed from an estimated time or rate are estimated.
        doubts: diagnostics of the point and of its statistics.
    """

    key: Key
    status: Status
    error: str | None
    time_kind: str | None
    series: Series | None
    times: dict[str, blockwise.Summary]
    processes: int
    spread: float | None
    unfinished: int = 0
    in_turn: bool = False
    is_pooled: bool = False
    runs: int = 0
    selfcheck: str | None = None
    phases: dict[str, float]
    samples_per_call: int
    own_choice: float = 0.0
    metrics: tuple[Metric, ...]
    doubts: tuple[Diagnostic, ...]

    @property
    def time(self) -> blockwise.Summary | None:
        """Statistics of the representative time, in seconds per call."""
        return self.times[self.time_kind] if self.time_kind else None

    @property
    def is_of_machine(self) -> bool:
        """Whether its intervals include how processes of this machine differ, as those of a mean over them do."""
        return bool(self.processes > 1 or self.is_pooled or self.runs or self.selfcheck)

    @property
    def samples_per_second(self) -> estimators.Interval | None:
        """Samples of all ranks per call, divided by the mean time of a pipelined call; None if that is 0."""
        pipelined = self.times.get("throughput") or self.times.get("latency")
        return _rate(pipelined.mean, self.samples_per_call) if pipelined and pipelined.mean.value > 0 else None


def rows(record: Record) -> list[Row]:
    """One row per timed point, in the order of the record; the processes that measured it are combined.

    Every table, plot and text of a record begins with them, so they are computed once as long as the record stays what
    it is. Lists that are replaced or change their length are noticed, and a point's other status or error; an element
    that is edited in place is not.
    """
    state = _state(record)
    known = _known.get(id(record))
    if known is None:
        weakref.finalize(record, _known.pop, id(record), None).atexit = False
    if known is None or known[0] != state:
        _known[id(record)] = known = (state, _rows(record))
    return list(known[1])


def _state(record: Record) -> tuple[object, ...]:
    """What shows that a record has other results, diagnostics or earlier runs than before."""
    parts = (part for point in record.points for part in (point.series, point.metrics, point.doubts, point.facts))
    lists = [(id(part), len(part)) for part in (record.points, record.earlier, record.selfcheck, *parts)]
    return requested_percentiles(record), [(point.status, point.error) for point in record.points], lists


def _rows(record: Record) -> list[Row]:
    percentiles = requested_percentiles(record)
    groups, unfinished = by_point(record), interrupted(record)
    earlier: dict[Key, dict[str, EarlierTime]] = {}
    for time in record.earlier:
        earlier.setdefault(time.key, {})[time.time] = time
    known = [row(points, percentiles, earlier.get(key)) for key, points in groups.items()]
    own = _components(list(groups.values()))
    known = [_widened(each, own) for each in known]
    if others := {place: one for place, one in _of_selfcheck(record.selfcheck).items() if place not in own}:
        known = [_widened(each, others, record.selfcheck[0].ended.partition("T")[0]) for each in known]
    in_turn = record.sweep is not None and record.sweep.level is not None
    known = [replace(each, unfinished=unfinished[each.key], in_turn=in_turn) for each in known]
    raised = growth.judge(known, growth.kernels_of(record))
    known = [replace(each, doubts=(*each.doubts, *raised.get(each.key, ()))) for each in known]
    return [replace(each, metrics=estimates.marked(each)) for each in known]


def series_of_processes(record: Record) -> Iterator[tuple[Key, str, list[Series]]]:
    """Yield each point and kind of time with the comparable series of the processes that took it."""
    for key, points in by_point(record).items():
        for name in TIME_KINDS:
            if measured := comparable(points, name):
                yield key, name, [series_of(point, name) for point in measured]


def _components(groups: Sequence[Sequence[Point]]) -> dict[tuple[str, str], variance.Component]:
    """The variance between processes by phase and kind of time, from the points that several processes measured."""
    medians: dict[tuple[str, str], list[list[float]]] = {}
    for points in groups:
        for name in TIME_KINDS:
            found = [first_median(point, name) for point in comparable(points, name)]
            medians.setdefault((points[0].key.phase, name), []).append([value for value in found if value])
    pooled = {place: variance.between_processes(of_points) for place, of_points in medians.items()}
    return {place: component for place, component in pooled.items() if component}


def _of_selfcheck(spreads: Sequence[MachineSpread]) -> dict[tuple[str, str], variance.Component]:
    return {(one.phase, one.time): variance.Component(variance=one.variance, degrees=one.degrees) for one in spreads}


def _widened(row: Row, components: Mapping[tuple[str, str], variance.Component], selfcheck: str | None = None) -> Row:
    """Widen the intervals of a row of one process by what other points show about processes.

    Args:
        selfcheck: date of the selfcheck that measured the components, which earlier runs of the command replace; None
            if they are those of other points.
    """
    if row.processes > 1 or not row.times or (selfcheck and row.runs):
        return row
    times = dict(row.times)
    for name, time in row.times.items():
        if component := components.get((row.key.phase, name)):
            widen = partial(variance.widened, component=component)
            times[name] = time.widened(widen, widen)
    if times == row.times:
        return row
    is_of_time = row.time_kind is not None and times[row.time_kind] != row.time
    pooled = row.is_pooled or is_of_time
    return replace(row, times=times, is_pooled=pooled, selfcheck=selfcheck if is_of_time else row.selfcheck)


def centers(processes: Sequence[blockwise.Summary]) -> list[tuple[float, float]]:
    """Median and mean of each process."""
    return [(one.median.value, one.mean.value) for one in processes]


def _of_runs(time: blockwise.Summary, runs: Sequence[Sequence[tuple[float, float]]]) -> blockwise.Summary | None:
    """Widen the intervals of the last run to those of other runs of the same command; None if these are too few."""
    if any(value <= 0 for run in runs for center in run for value in center):
        return None
    median, mean = (variance.of_run([[center[place] for center in run] for run in runs]) for place in (0, 1))
    if median is None or mean is None:
        return None
    return time.widened(partial(variance.at_least, component=median), partial(variance.at_least, component=mean))


def _with_runs(
    time: blockwise.Summary, earlier: Sequence[Sequence[tuple[float, float]]], own: Sequence[tuple[float, float]]
) -> tuple[blockwise.Summary, int]:
    """Widen the intervals of a time by earlier runs; returns it, and the number of runs that the intervals include."""
    widened = _of_runs(time, [*earlier, own])
    if widened is None:
        return time, 0
    # few runs are in the interval if they lie near, and in one of several processes if they widen it
    is_wide = len(own) == 1 or widened != time
    is_included = len(earlier) + 1 >= variance.LEAST_RUNS or (is_wide and _are_near(earlier, widened.median))
    return widened, len(earlier) if is_included else 0


def _are_near(runs: Sequence[Sequence[tuple[float, float]]], median: estimators.Interval) -> bool:
    """Whether the medians of runs are as near as those of 95 of 100 other runs, by the interval of one run."""
    width = median.log_half_width
    means = [np.mean(np.log([center for center, _ in run])) for run in runs]
    return width is not None and all(abs(mean - np.log(median.value)) <= np.sqrt(2) * width for mean in means)


def requested_percentiles(record: Record) -> tuple[float, ...]:
    """The percentiles that the plan requests."""
    asked = record.plan.get("percentiles")
    numbers = [p for p in asked if isinstance(p, int | float)] if isinstance(asked, list) else []
    return tuple(float(p) for p in numbers if 0 < p < 100 > 100 - p) or (50.0, 95.0, 99.0)


def row(
    points: Sequence[Point],
    percentiles: Sequence[float] = (50.0, 95.0, 99.0),
    earlier: Mapping[str, EarlierTime] | None = None,
) -> Row:
    """The figures of one point with the requested percentiles, in percent.

    Args:
        points: results of the processes that measured it, whose figures `pooled_metrics` combines.
        earlier: times of the point in earlier runs of the same command, by name.
    """
    first = points[0]
    times, spreads, processes, runs = {}, {}, {}, {}
    for name in TIME_KINDS:
        if measured := comparable(points, name):
            series = [series_of(point, name) for point in measured]
            summaries = [summary_of(one, percentiles) for one in series]
            times[name] = variance.combined(summaries, [np.asarray(one.measured) for one in series])
            component = variance.between_processes([[one.median.value for one in summaries]])
            spreads[name], processes[name] = component.spread if component else None, len(series)
            if earlier and name in earlier:
                times[name], runs[name] = _with_runs(times[name], earlier[name].runs, centers(summaries))
    kind = next(iter(times), None)
    doubts = [*disturbances.confirmed(first), *sampling.judge(first, kind)]
    for other in points[1:]:
        known = {item.code for item in doubts}
        doubts += [
            item for item in (*disturbances.confirmed(other), *sampling.judge(other, kind)) if item.code not in known
        ]
    doubts += sampling.judge_processes(comparable(points, kind), kind) if kind else []
    doubts = idleness.judge(first, doubts)
    doubts += disturbances.judge_pace(first)
    if kind in DEVICE_TIMES and not any(item.code == "clock_moved" for item in doubts):
        doubts += disturbances.judge_clocks([point.facts for point in comparable(points, kind)])
    return Row(
        key=without_replicate(first.key),
        status=first.status,
        error=first.error,
        time_kind=kind,
        series=joined([series_of(point, kind) for point in comparable(points, kind)]) if kind else None,
        times=times,
        processes=processes[kind] if kind else 0,
        spread=spreads[kind] if kind else None,
        runs=runs.get(kind or "", 0),
        phases={
            part.name.removeprefix("phase/"): summary_of(part, (50.0,)).median.value
            for part in first.series
            if part.name.startswith("phase/") and part.measured
        },
        samples_per_call=samples_per_call(first),
        own_choice=races.own_choice_share(first),
        metrics=pooled_metrics(points, times, kind),
        doubts=tuple(doubts),
    )


def _rate(seconds: estimators.Interval, batch_size: int) -> estimators.Interval:
    """Samples per second from seconds per call; the ends of the interval swap."""
    low = batch_size / seconds.high if seconds.high else None
    high = batch_size / seconds.low if seconds.low and seconds.low > 0 else None
    return estimators.Interval(value=batch_size / seconds.value, low=low, high=high)
