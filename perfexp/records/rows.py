"""Row: the figures of one point, from all processes that measured it.

Table rows, plot marks and compared pairs start from a `Row`. `summary.rows` makes them from a
record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from perfexp.records import quantities
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import Pooled
from perfexp.records.record import Key, Metric, Series, Status
from perfexp.statistics import blockwise, estimators
from perfexp.statistics.distributions import Z95
from perfexp.statistics.moderated import Repeats, around


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of a point.

    Attributes:
        key: identity of the point.
        status: final status.
        error: error message if there is no result.
        time_kind: name of the series behind `time`: `device`, `latency` or `throughput`; None
            without samples.
        series: raw samples of every measured time by name. The first process comes first, with its
            warm-up; the other processes follow without theirs. Each process is a block.
        times: statistics of these times over all processes, in seconds per call.
        processes: number of processes behind `time`.
        unfinished: number of further processes that were interrupted before they had measured the
            point.
        in_turn: whether the processes alternated with another run's processes (`perfexp ab`).
        figures: each process's figures with their prior, by measure. These are each time's median
            in seconds, the latency's `p95`, `samples_per_second`, the `SINGLES`, and `epoch` and
            `runtime` for whole epochs.
        bound_by: the loop's bottleneck: `gpu`, `launch` or `mixed`; None if unknown.
        phases: median seconds of each part of a call, by name, measured in a separate pass.
        samples_per_call: samples per call, over all ranks.
        own_choice: share of convolution FLOPs with torch's own, unobserved choice of algorithm.
        metrics: single figures; a metric computed from an estimated time or rate is marked as
            estimated.
        doubts: diagnostics about the point and its statistics.
    """

    key: Key
    status: Status
    error: str | None
    time_kind: str | None
    series: dict[str, Series]
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

    def metric(self, name: str) -> Metric | None:
        """Return the metric with this name, or None if the point has no such metric."""
        return next((metric for metric in self.metrics if metric.name == name), None)

    def value(self, name: str) -> float | None:
        """Return the value of the metric with this name; None without a value."""
        metric = self.metric(name)
        if metric:
            return metric.value
        return None

    def basis(self, metric: Metric) -> estimators.Interval | None:
        """Return the time or rate that a metric is computed from; None for independent metrics.

        For example, FLOP/s follow the median time in seconds per call, and tokens/s follow
        samples/s. A metric is not known better than its basis, so reports limit its digits by it.
        """
        pooled = quantities.of(metric).pooled
        if pooled is Pooled.BY_TIME:
            if self.time:
                return self.time.median
            return None
        if pooled is Pooled.BY_RATE:
            return self.samples_per_second
        return None

    def marked(self, metric: Metric) -> Metric:
        """Return the metric, marked as estimated (`≈` in reports) if its basis has no interval."""
        basis = self.basis(metric)
        is_estimate = metric.value is not None and basis is not None and basis.low is None
        if is_estimate:
            return msgspec.structs.replace(metric, estimated=True)
        return metric

    @property
    def service_kind(self) -> str | None:
        """Return the name of the time that a caller experiences: the latency if it was measured."""
        if "latency" in self.times:
            return "latency"
        return self.time_kind

    def percentile(self, number: float) -> estimators.Interval | None:
        """Return a percentile of the `service_kind` time, in seconds; None without samples.

        Args:
            number: 50, or a percentile that the plan requests.
        """
        if self.service_kind is None:
            return None
        time = self.times[self.service_kind]
        if number == 50:
            return time.median
        return time.percentiles[number]

    @property
    def time(self) -> blockwise.Summary | None:
        """Return the statistics of the representative time, in seconds per call; None if none."""
        if self.time_kind:
            return self.times[self.time_kind]
        return None

    @property
    def spread(self) -> float | None:
        """Return the relative standard deviation between process medians; None for one process."""
        component = self.figures[self.time_kind].own if self.time_kind in self.figures else None
        if component:
            return component.spread
        return None

    def own_interval(self, figure: str) -> estimators.Interval | None:
        """Return a figure for comparisons within the record; None if it was not measured.

        All points of a record were measured by processes forked from one server, so the interval
        leaves variance between servers out. If a single process measured them, they also share the
        process, and the interval only covers sample scatter.

        Args:
            figure: key of `figures`, for example `device` or `samples_per_second`.
        """
        repeats = self.figures.get(figure)
        if repeats is None:
            return None
        if self.processes > 1:
            return repeats.without_server().interval
        return around(
            repeats.mean, None if repeats.within is None else Z95 * math.sqrt(repeats.within)
        )

    @property
    def samples_per_second(self) -> estimators.Interval | None:
        """Return all ranks' samples per second, from the mean time in the pipelined loop.

        A CPU has no pipelined loop and uses the latency. None for a time of 0, or without one.
        """
        pipelined = self.times.get("throughput") or self.times.get("latency")
        if pipelined and pipelined.mean.value > 0:
            return rate_of(pipelined.mean, self.samples_per_call)
        return None


def rate_of(seconds: estimators.Interval, batch_size: int) -> estimators.Interval:
    """Return samples per second from seconds per call; the ends of the interval swap.

    An end at or below 0 seconds gives None.
    """
    low = batch_size / seconds.high if seconds.high else None
    high = batch_size / seconds.low if seconds.low and seconds.low > 0 else None
    return estimators.Interval(value=batch_size / seconds.value, low=low, high=high)
