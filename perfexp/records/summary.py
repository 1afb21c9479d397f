"""Summary: a record's figures for reports, tables, plots and tracking, from its raw samples.

A timed point is measured by one or several processes (replicates). `rows` combines them into one
`Row`, with intervals that cover the variation between processes. `Repeats` (`statistics.moderated`)
is a figure from several processes with its prior, the variance known before measuring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, geometric_mean, median, variance

import msgspec
import numpy as np

from perfexp.records import (
    diagnostics,
    growth,
    point_diagnostics,
    priors,
    quantities,
    races,
    seeds,
)
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import (
    DEVICE_TIMES,
    first_median,
    first_series,
    interval_of,
    is_of_gpu,
    loop_interval,
    samples_per_call,
    series_of,
    summary_of,
)
from perfexp.records.quantities import (
    ACCURACY,
    CYCLES,
    IMAGE_ENERGY,
    PEAK_MEMORY,
    TARGET_ACCURACY,
    TIME_TO_ACCURACY,
    Pooled,
)
from perfexp.records.record import (
    Epoch,
    Key,
    Metric,
    Point,
    Record,
    Series,
    Status,
    without_replicate,
)
from perfexp.records.rows import Row
from perfexp.statistics import blockwise, estimators
from perfexp.statistics.moderated import Repeats, combined
from perfexp.statistics.prior import Prior

#: Times that can represent a point, best first.
TIME_KINDS = (*DEVICE_TIMES, "latency", "throughput")
#: Single figures that are compared between processes, with their metrics.
SINGLES = {
    "cycles": CYCLES,
    "memory": PEAK_MEMORY,
    "energy": IMAGE_ENERGY,
    "accuracy": ACCURACY,
    "time_to_accuracy": TIME_TO_ACCURACY,
}
#: Single figures that vary with a training's seed, which no prior covers.
_OF_SEEDS = ("accuracy", "time_to_accuracy")
#: How values from several processes are combined, if not by time, rate or speedup.
_POOLED: dict[Pooled, Callable[[Iterable[float]], float]] = {
    Pooled.LARGEST: max,
    Pooled.MEDIAN: median,
    Pooled.GEOMETRIC_MEAN: geometric_mean,
}


def rows(record: Record) -> list[Row]:
    """Return one row per timed point, in record order, with its processes combined.

    `Analysis.of` calls it once per record.
    """
    percentiles = requested_percentiles(record)
    known_priors, free = priors.of_record(record), priors.free_cores(record)
    groups = by_point(record).values()
    separate = [row(points, percentiles, known_priors, free) for points in groups]
    # these need all rows: odd sizes and falling rates
    raised = growth.judge(separate, growth.kernels_of(record))
    unfinished = interrupted(record)
    in_turn = record.sweep is not None and record.sweep.level is not None
    complete = []
    for separate_row in separate:
        complete.append(
            replace(
                separate_row,
                unfinished=unfinished[separate_row.key],
                in_turn=in_turn,
                metrics=tuple(map(separate_row.marked, separate_row.metrics)),
                doubts=(*separate_row.doubts, *raised.get(separate_row.key, ())),
            )
        )
    return complete


def requested_percentiles(record: Record) -> tuple[float, ...]:
    """Return the percentiles that the record's plan requests, in percent; 50, 95, 99 without any.

    A record is data, so anything that is not a percentile is left out.
    """
    requested, numbers = record.plan.get("percentiles"), []
    for number in requested if isinstance(requested, list) else ():
        if isinstance(number, int | float) and 0 < number < 100 > 100 - number:
            numbers.append(float(number))
    return tuple(numbers) or (50.0, 95.0, 99.0)


def row(
    points: Sequence[Point],
    percentiles: Sequence[float] = (50.0, 95.0, 99.0),
    known_priors: Mapping[str, Prior] | None = None,
    free: int = 0,
) -> Row:
    """Return one point's figures, combined over the processes that measured it.

    Args:
        points: results from each process, the first process first.
        percentiles: requested percentiles, in percent.
        known_priors: priors by class; by default the package's priors.
        free: CPU cores that the run's threads leave free for other work.
    """
    first = points[0]
    samples, bound_by = samples_per_call(first), first.facts.get("bound_by")
    if known_priors is None:
        known_priors = priors.of_any("cuda" if is_of_gpu(first) else "cpu")
    prior = partial(priors.find, known_priors, points, free=free)
    times, figures = dict[str, blockwise.Summary](), dict[str, Repeats]()
    measured = _series_by_time(points)
    for name, processes in measured.items():
        together = combined(
            [summary_of(series, percentiles) for series in processes],
            [np.asarray(series.measured) for series in processes],
            time=prior(name),
            rate=prior("samples_per_second"),
        )
        times[name], figures[name] = together.summary, together.medians
        if name == "latency":
            figures["p95"] = _p95(processes, prior(name))
        # `throughput` comes last and replaces `latency`
        if name not in DEVICE_TIMES and together.means.mean:
            rates = tuple(samples / value for value in together.means.values)
            figures["samples_per_second"] = replace(together.means, values=rates)
    phases = dict[str, float]()
    for part in first.series:
        if part.name.startswith("phase/") and part.measured:
            phases[part.name.removeprefix("phase/")] = summary_of(part, (50.0,)).median.value
    kind = next(iter(times), None)
    return Row(
        key=without_replicate(first.key),
        status=first.status,
        error=first.error,
        time_kind=kind,
        series={name: _joined(processes) for name, processes in measured.items()},
        times=times,
        processes=len(figures[kind].values) if kind else 0,
        figures=figures | single_figures(points, prior) | epoch_figures(points, prior),
        bound_by=bound_by,
        phases=phases,
        samples_per_call=samples,
        own_choice=races.own_choice_share(first),
        metrics=pooled_metrics(points, times, kind),
        doubts=tuple(_doubts(points, kind, times)),
    )


def _series_by_time(points: Sequence[Point]) -> dict[str, list[Series]]:
    """Return the series of each time that was measured, one per process, best time first."""
    series = {}
    for name in TIME_KINDS:
        if measured := comparable(points, name):
            series[name] = [series_of(point, name) for point in measured]
    return series


def _doubts(
    points: Sequence[Point], kind: str | None, times: Mapping[str, blockwise.Summary]
) -> list[Diagnostic]:
    """Return diagnostics about a point's processes and their statistics, each code once.

    Args:
        points: results from each process.
        kind: name of the representative time; None without samples.
        times: statistics over all processes, by time.
    """
    doubts: list[Diagnostic] = []
    for point in points:
        known_codes = {doubt.code for doubt in doubts}
        point_doubts = (
            *point_diagnostics.confirmed(point),
            *point_diagnostics.judge_samples(point, kind),
        )
        doubts += [doubt for doubt in point_doubts if doubt.code not in known_codes]
    if kind and len(measured := comparable(points, kind)) > 1:
        doubts += point_diagnostics.judge_processes(measured, kind)
        if times[kind].median.low is not None:  # only the interval of their mean matters
            doubts = diagnostics.without(doubts, "too_few_samples")
    doubts = point_diagnostics.with_device_idle(points[0], doubts)
    doubts += point_diagnostics.judge_pace(points[0])
    if kind in DEVICE_TIMES and not diagnostics.has(doubts, "clock_moved"):
        doubts += point_diagnostics.judge_clocks(
            [point.facts for point in comparable(points, kind)]
        )
    return doubts


def _p95(processes: Sequence[Series], prior: Prior | None) -> Repeats:
    """Return each process's 95th percentile in seconds, with intervals, for comparisons."""
    return Repeats.of(
        [estimators.percentile_interval(process.measured, 95.0) for process in processes], prior
    )


def by_point(record: Record) -> dict[Key, list[Point]]:
    """Return the results of a record's timed points by key, the first process first.

    Keys have replicate 0. `rows` makes a row of each group.
    """
    groups: dict[Key, list[Point]] = {}
    for point in record.points:
        if point.key.is_timed:
            groups.setdefault(without_replicate(point.key), []).append(point)
    # an interrupted run uses the processes that finished the point, whichever these are
    for key, points in groups.items():
        ended = [point for point in points if point.status is not Status.INTERRUPTED]
        groups[key] = ended or points
    return groups


def interrupted(record: Record) -> Counter[Key]:
    """Return, by timed point, how many processes were interrupted before they had measured it.

    Reports then say how to continue the run.
    """
    unfinished = Counter[Key]()
    for point in record.points:
        if point.status is Status.INTERRUPTED and point.key.is_timed:
            unfinished[without_replicate(point.key)] += 1
    return unfinished


def single_figures(
    points: Sequence[Point], prior: Callable[[str], Prior | None]
) -> dict[str, Repeats]:
    """Return the `SINGLES` of a point's processes by name: cycles, bytes, joules, accuracy.

    A single process's value counts as exact, except for energy and for trainings to a target
    accuracy. If one of these has not reached the target, there is no time to it.

    Args:
        prior: returns a figure's prior by name.
    """
    singles = {}
    for name, metric_name in SINGLES.items():
        measured = [point.metric(metric_name) for point in points if point.status is Status.OK]
        figures = list(filter(None, map(interval_of, measured)))
        is_endless = name == "time_to_accuracy" and len(figures) < len(measured)
        if figures and not is_endless:
            repeats = Repeats.of(figures, None if name in _OF_SEEDS else prior(name))
            is_estimate = any(metric.estimated for metric in measured if metric)
            within = repeats.within if name == "energy" else 0.0
            if name in _OF_SEEDS and points[0].metric(TARGET_ACCURACY):
                within = None
            singles[name] = replace(repeats, within=within, is_estimate=is_estimate)
    return singles


def epoch_figures(
    points: Sequence[Point], prior: Callable[[str], Prior | None]
) -> dict[str, Repeats]:
    """Return whole-epoch times in seconds from the first process that has any; otherwise empty.

    `epoch` is the mean pass over the training data. `runtime` is all passes with evaluations and
    checkpoints. A single pass counts as exact, because it has many calls.

    Args:
        prior: returns a figure's prior by name.
    """
    epochs = list[Epoch]()
    for point in points:
        if point.status is Status.OK and not epochs:
            epochs = point.epochs
    passes = [epoch.seconds for epoch in epochs]
    epoch_totals = [epoch.total_seconds for epoch in epochs]
    whole_epochs = {}
    for name, seconds, combine in (("epoch", passes, fmean), ("runtime", epoch_totals, sum)):
        if seconds:
            # relative variance of the mean over the epochs
            within = 0.0
            if len(seconds) > 1:
                within = variance(seconds) / len(seconds) / fmean(seconds) ** 2
            whole_epochs[name] = Repeats(
                values=(combine(seconds),), within=within, prior=prior(name)
            )
    return whole_epochs


def pooled_metrics(
    points: Sequence[Point], times: Mapping[str, blockwise.Summary], kind: str | None
) -> tuple[Metric, ...]:
    """Return the first process's metrics, pooled over processes if the registry says so.

    Rates use the times of all processes. Speedups are pooled if every process has them. Trainings
    to a target accuracy add their statistics.

    Args:
        times: statistics over all processes, by time.
        kind: name of the representative time; None without samples.
    """
    factors, of_seeds = _rate_factors(points[0], times, kind), seeds.metrics(_finished(points))
    pooled = [_pooled(metric, points, factors) for metric in points[0].metrics]
    return (*(metric for metric in pooled if metric.name not in of_seeds), *of_seeds.values())


def pooled_speedup(points: Sequence[Point], name: str) -> estimators.Interval | None:
    """Return a speedup with its interval over processes.

    Returns:
        None unless there are several processes and each measured the speedup itself.
    """
    finished = _finished(points)
    speedups = [
        speedup for point in finished if (speedup := _speedup(point, name)) and speedup.value > 0
    ]
    if len(speedups) == len(finished) > 1:
        return Repeats.of(speedups).interval
    return None


def _pooled(metric: Metric, points: Sequence[Point], factors: Mapping[Pooled, float]) -> Metric:
    """Return the first process's metric, combined with the other processes' as `Pooled` says.

    Args:
        factors: factors from `_rate_factors` for metrics that are computed from a time or rate.
    """
    pooled = quantities.of(metric).pooled
    if metric.name == quantities.PROVEN and (proven := races.proven_share(points[0])) is not None:
        # earlier versions counted torch's own choice
        return msgspec.structs.replace(metric, value=proven)
    if combine := _POOLED.get(pooled):
        measured = [point.metric(metric.name) for point in _finished(points)]
        values = [
            interval.value
            for interval in measured
            if interval and interval.value and interval.value > 0
        ]
        if not values:
            return metric
        # the mean of equal bytes is theirs to the last digit
        value = combine(values) if len(set(values)) > 1 else values[0]
        return msgspec.structs.replace(metric, value=value, reason=None)
    if metric.value is None:
        return metric
    if pooled is Pooled.SPEEDUP and (speedup := pooled_speedup(points, metric.name)):
        return msgspec.structs.replace(
            metric, value=speedup.value, low=speedup.low, high=speedup.high
        )
    if pooled not in factors:
        return metric
    return msgspec.structs.replace(metric, value=metric.value * factors[pooled])


def _finished(points: Sequence[Point]) -> list[Point]:
    """Return the first process, and the others that succeeded if the first did."""
    first, *others = points
    return [first, *(point for point in others if point.status is first.status is Status.OK)]


def _speedup(point: Point, name: str) -> estimators.Interval | None:
    """Return a speedup from one process; None if the process did not measure it.

    A promised speedup comes from the process's own races; a cached race belongs to another process.
    """
    if name.startswith(promised := quantities.member(quantities.PROMISED_SPEEDUP, "")):
        timed = races.timed_passes(point)
        is_cached = any(one_pass.get("kept_since") for _, one_pass in timed)
        if is_cached:
            return None
        return races.promised(timed).get(name.removeprefix(promised))
    return interval_of(point.metric(name))


def _rate_factors(
    first: Point, times: Mapping[str, blockwise.Summary], kind: str | None
) -> dict[Pooled, float]:
    """Return factors that take a rate from the first process's time to that of all processes.

    Empty without times.
    """
    factors: dict[Pooled, float] = {}
    if kind and (first_time := first_median(first, kind)) and times[kind].median.value > 0:
        factors[Pooled.BY_TIME] = first_time / times[kind].median.value
    pipelined = times.get("throughput") or times.get("latency")
    if pipelined and pipelined.mean.value > 0 and (loop := loop_interval(first)):
        factors[Pooled.BY_RATE] = loop.value / pipelined.mean.value
    return factors


def _joined(processes: Sequence[Series]) -> Series:
    """Join samples: the first process, then the others without their warm-up. Each is a block."""
    first, *others = processes
    samples, blocks = list(first.samples), [0]
    for other in others:
        blocks.append(len(samples))
        samples += other.measured
    return msgspec.structs.replace(first, samples=samples, blocks=blocks)


def comparable(points: Sequence[Point], name: str) -> list[Point]:
    """Return the processes whose samples of a time can be combined: those that measured it.

    None if the first process did not, because the row shows the first process's metrics.
    """
    measured = [point for point in _finished(points) if first_series(point, name)]
    if points[0] in measured:
        return measured
    return []
