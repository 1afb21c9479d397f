"""Figures of a record for reports, tables, plots and tracking: pure functions of the raw samples."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from perfexp.records import disturbances, estimates, growth, idleness, priors, races, sampling
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import (
    DEVICE_TIMES,
    is_of_gpu,
    samples_per_call,
    series_of,
    summary_of,
)
from perfexp.records.processes import (
    by_point,
    comparable,
    epoch_figures,
    interrupted,
    joined,
    pooled_metrics,
    single_figures,
)
from perfexp.records.record import (
    Key,
    Metric,
    Point,
    Record,
    Series,
    Status,
    without_replicate,
)
from perfexp.statistics import blockwise, estimators, variance
from perfexp.statistics.distributions import Z95
from perfexp.statistics.moderated import Repeats, around
from perfexp.statistics.prior import Prior

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
        figures: figures of each process with their prior, by measure: each time's median in seconds, `p95` of latency,
            `samples_per_second`, those of `processes.SINGLES`, and `epoch` and `runtime` of whole epochs.
        bound_by: what limits the loop: `gpu`, `launch` or `mixed`; None where that is unknown.
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
    figures: dict[str, Repeats]
    bound_by: str | None = None
    processes: int
    unfinished: int = 0
    in_turn: bool = False
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
    def spread(self) -> float | None:
        """Relative standard deviation between the processes' medians of `time`; None for one process."""
        own = self.figures[self.time_kind].own if self.time_kind in self.figures else None
        return own.spread if own else None

    def own_interval(self, figure: str) -> estimators.Interval | None:
        """A figure with an interval for comparisons with other points of its record; None if it was not measured.

        Points that one process measured have that process in common, and all points their server.
        """
        one = self.figures.get(figure)
        if one is None:
            return None
        if self.processes > 1:
            return one.without_server().interval
        return around(one.mean, None if one.within is None else Z95 * math.sqrt(one.within))

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
    """What shows that a record has other results, diagnostics or priors than before."""
    parts = (part for point in record.points for part in (point.series, point.metrics, point.doubts, point.facts))
    lists = [(id(part), len(part)) for part in (record.points, record.priors, *parts)]
    return requested_percentiles(record), [(point.status, point.error) for point in record.points], lists


def _rows(record: Record) -> list[Row]:
    percentiles = requested_percentiles(record)
    unfinished, known_priors, free = interrupted(record), priors.of_record(record), priors.free_cores(record)
    known = [row(points, percentiles, known_priors, free) for points in by_point(record).values()]
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


def requested_percentiles(record: Record) -> tuple[float, ...]:
    """The percentiles that the plan requests."""
    asked = record.plan.get("percentiles")
    numbers = [p for p in asked if isinstance(p, int | float)] if isinstance(asked, list) else []
    return tuple(float(p) for p in numbers if 0 < p < 100 > 100 - p) or (50.0, 95.0, 99.0)


def row(
    points: Sequence[Point],
    percentiles: Sequence[float] = (50.0, 95.0, 99.0),
    known: Mapping[str, Prior] | None = None,
    free: int = 0,
) -> Row:
    """The figures of one point with the requested percentiles, in percent.

    Args:
        points: results of the processes that measured it, whose figures `pooled_metrics` combines.
        known: priors by class; None for those of the package.
        free: cores that the threads of the run leave to other work on a CPU.
    """
    first = points[0]
    samples, bound_by = samples_per_call(first), first.facts.get("bound_by")
    if known is None:
        known = priors.of_any("cuda" if is_of_gpu(first) else "cpu")
    prior = partial(priors.find, known, points, free=free)
    times, figures, processes = {}, dict[str, Repeats](), {}
    for name in TIME_KINDS:
        if measured := comparable(points, name):
            series = [series_of(point, name) for point in measured]
            together = variance.combined(
                [summary_of(one, percentiles) for one in series],
                [np.asarray(one.measured) for one in series],
                time=prior(name),
                rate=prior("samples_per_second"),
            )
            times[name], figures[name], processes[name] = together.summary, together.medians, len(series)
            if name == "latency":
                figures["p95"] = _p95(series, prior(name))
            if name not in DEVICE_TIMES and together.means.mean:  # `throughput` comes last and replaces `latency`
                rates = tuple(samples / value for value in together.means.values)
                figures["samples_per_second"] = replace(together.means, values=rates)
    kind = next(iter(times), None)
    return Row(
        key=without_replicate(first.key),
        status=first.status,
        error=first.error,
        time_kind=kind,
        series=joined([series_of(point, kind) for point in comparable(points, kind)]) if kind else None,
        times=times,
        processes=processes[kind] if kind else 0,
        figures=figures | single_figures(points, prior) | epoch_figures(points, prior),
        bound_by=bound_by,
        phases={
            part.name.removeprefix("phase/"): summary_of(part, (50.0,)).median.value
            for part in first.series
            if part.name.startswith("phase/") and part.measured
        },
        samples_per_call=samples,
        own_choice=races.own_choice_share(first),
        metrics=pooled_metrics(points, times, kind),
        doubts=tuple(_doubts(points, kind, times)),
    )


def _doubts(points: Sequence[Point], kind: str | None, times: Mapping[str, blockwise.Summary]) -> list[Diagnostic]:
    """Diagnostics of the processes of a point and of their statistics, each code once."""
    first = points[0]
    doubts = [*disturbances.confirmed(first), *sampling.judge(first, kind)]
    for other in points[1:]:
        before = {item.code for item in doubts}
        doubts += [
            item for item in (*disturbances.confirmed(other), *sampling.judge(other, kind)) if item.code not in before
        ]
    if kind and len(measured := comparable(points, kind)) > 1:
        doubts += sampling.judge_processes(measured, kind)
        if times[kind].median.low is not None:  # the interval of their mean is what counts
            doubts = [item for item in doubts if item.code != "too_few_samples"]
    doubts = idleness.judge(first, doubts)
    doubts += disturbances.judge_pace(first)
    if kind in DEVICE_TIMES and not any(item.code == "clock_moved" for item in doubts):
        doubts += disturbances.judge_clocks([point.facts for point in comparable(points, kind)])
    return doubts


def _p95(processes: Sequence[Series], prior: Prior | None) -> Repeats:
    """The 95th percentile of each process."""
    return Repeats.of([estimators.percentile_interval(one.measured, 95.0) for one in processes], prior)


def _rate(seconds: estimators.Interval, batch_size: int) -> estimators.Interval:
    """Samples per second from seconds per call; the ends of the interval swap."""
    low = batch_size / seconds.high if seconds.high else None
    high = batch_size / seconds.low if seconds.low and seconds.low > 0 else None
    return estimators.Interval(value=batch_size / seconds.value, low=low, high=high)
