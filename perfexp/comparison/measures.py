"""Measures that runs are compared by, with the figures of each process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from perfexp.records import estimates
from perfexp.records.cold_starts import first_predictions
from perfexp.records.point_times import DEVICE_TIMES, GRAPH, blocks_of, samples_per_call, summary_of
from perfexp.records.record import EarlierTime, Key, MachineSpread, Point, Record, Series, Status, without_replicate
from perfexp.records.summary import TIME_KINDS, Row, rows, series_of_processes
from perfexp.statistics import blockwise, estimators, variance
from perfexp.statistics.distributions import Z95
from perfexp.statistics.estimators import Interval, percentile_interval
from perfexp.statistics.ratios import Repeats
from perfexp.statistics.variance import Component

_P95 = 95.0
#: Measures of one process whose samples have an interval.
_SAMPLED = ("energy", "epoch", "runtime")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One kind of figure.

    Attributes:
        unit: SI unit.
        is_better_if_lower: direction.
        better: verdict for the better side, `worse` for the other.
        metric: name of the record's metric; None for a time.
        is_exact: whether the figure itself decides, with the margin as a difference of shares, not a ratio.
    """

    unit: str
    is_better_if_lower: bool = True
    better: str = "FASTER"
    worse: str = "SLOWER"
    metric: str | None = None
    is_exact: bool = False


#: Measures by name, in the order of reports.
MEASURES = {
    "device": Measure(unit="seconds"),
    GRAPH: Measure(unit="seconds"),
    "cycles": Measure(unit="cycles", better="FEWER", worse="MORE", metric="device/cycles_per_call"),
    "latency": Measure(unit="seconds"),
    "p95": Measure(unit="seconds"),
    "throughput": Measure(unit="samples/s", is_better_if_lower=False),
    "epoch": Measure(unit="seconds"),
    "runtime": Measure(unit="seconds"),
    "ttfp": Measure(unit="seconds"),
    "memory": Measure(unit="bytes", better="LESS", worse="MORE", metric="memory/peak_bytes"),
    "energy": Measure(unit="joules", better="LESS", worse="MORE", metric="energy/per_image_joules"),
    "accuracy": Measure(
        unit="1", is_better_if_lower=False, better="HIGHER", worse="LOWER", metric="accuracy", is_exact=True
    ),
}


def repeats(record: Record) -> dict[Key, dict[str, Repeats]]:
    """The figures of each timed point of a record by measure; those with a ratio are above 0, exact ones may be 0."""
    points: dict[Key, list[Point]] = {}
    for point in record.points:
        if point.key.is_timed and point.status is Status.OK:
            points.setdefault(without_replicate(point.key), []).append(point)
    found = {key: _metrics(of) for key, of in points.items() if any(point.key == key for point in of)}
    earlier = {(time.key, time.time): time for time in record.earlier}
    of_processes = list(series_of_processes(record))
    # rows take long, and only few samples of one process are marked in them
    shown = {row.key: row for row in rows(record)} if any(_is_few(series) for _, _, series in of_processes) else {}
    for key, name, series in of_processes:
        if key in found:
            history = earlier.get((key, name)) or EarlierTime(key=key, time=name, runs=[])
            times = _times(name, series, history.runs, samples_per_call(points[key][0]), row=shown.get(key))
            is_known = len(history.uids) == len(history.runs)
            uids = (*(history.uids if is_known else [""] * len(history.runs)), record.uid)
            found[key] |= {of: replace(one, uids=uids) for of, one in times.items()}
    for key, of in _of_runs(record, points).items():
        found.get(key, {}).update(of)
    usable = {
        key: {name: one for name, one in of.items() if min(one.values) > 0 or MEASURES[name].is_exact}
        for key, of in found.items()
    }
    return _with_components(usable, record.selfcheck)


def _is_few(series: list[Series]) -> bool:
    """Whether a series is of one process, with few effective samples."""
    if len(series) > 1:
        return False
    time = summary_of(series[0], ())
    return time.n / time.tau < estimators.FEW


def _metrics(points: list[Point]) -> dict[str, Repeats]:
    """The single figures of the processes of a point."""
    found = {}
    for name, measure in MEASURES.items():
        metrics = [metric for point in points if measure.metric and (metric := point.metric(measure.metric))]
        figures = [Interval(value=one.value, low=one.low, high=one.high) for one in metrics if one.value is not None]
        if figures:
            sampled, is_computed = _repeats(figures, []), any(one.estimated for one in metrics)
            found[name] = sampled if name in _SAMPLED else replace(sampled, within=0.0, is_estimate=is_computed)
    return found


def _of_runs(record: Record, points: Mapping[Key, list[Point]]) -> dict[Key, dict[str, Repeats]]:
    """The time to first prediction of a size, and the times of whole epochs of the first process that has any.

    `epoch` is the mean pass over the training data, `runtime` all passes with evaluations and checkpoints.
    """
    found: dict[Key, dict[str, Repeats]] = {}
    for first in first_predictions(record):
        key = without_replicate(msgspec.structs.replace(first.key, phase="inference"))
        found[key] = {"ttfp": Repeats(values=first.totals, within=None, is_estimate=len(first.totals) == 1)}
    for key, of in points.items():
        if epochs := next((point.epochs for point in of if point.epochs), []):
            passes = [epoch.seconds for epoch in epochs]
            whole = [epoch.seconds + epoch.evaluation_seconds + epoch.checkpoint_seconds for epoch in epochs]
            found.setdefault(key, {}).update(
                epoch=_of_epochs(passes, statistics.fmean(passes)), runtime=_of_epochs(whole, sum(whole))
            )
    return found


def _of_epochs(seconds: list[float], value: float) -> Repeats:
    """A figure in proportion to the mean of the epochs, with the variance that they show."""
    within = None
    if len(seconds) > 1:
        within = statistics.variance(seconds) / len(seconds) / statistics.fmean(seconds) ** 2
    return Repeats(values=(value,), within=within, is_estimate=within is None)


def _times(
    name: str, series: list[Series], runs: list[list[tuple[float, float]]], samples: int, *, row: Row | None
) -> dict[str, Repeats]:
    """The figures of one kind of time, with earlier runs, for a number of samples per call.

    Args:
        row: the point in tables, which mark the same figures as estimates.
    """
    found = {}
    if name != "throughput":
        medians = [blockwise.block_median(blocks_of(one)) for one in series]
        repeats = _repeats(medians, [[median for median, _ in run] for run in runs])
        is_estimate = row is not None and name in row.times and estimates.is_estimate(row, name)
        found[name] = replace(repeats, is_estimate=is_estimate or repeats.is_estimate)
    if name == "latency":
        found["p95"] = _percentiles(series, found[name])
    if name not in DEVICE_TIMES:  # `throughput` comes last and replaces `latency`, as in a row's samples_per_second
        processes = [blockwise.block_mean(blocks_of(one)) for one in series]
        means = _repeats(processes, [[mean for _, mean in run] for run in runs])
        rates = [tuple(samples / value for value in run) for run in (means.values, *means.earlier) if min(run) > 0]
        if min(means.values) > 0:
            is_estimate = row is not None and estimates.is_rate_estimate(row)
            means = replace(means, is_estimate=is_estimate or means.is_estimate)
            found["throughput"] = replace(means, values=rates[0], earlier=tuple(rates[1:]))
    return found


def _percentiles(series: list[Series], medians: Repeats) -> Repeats:
    """95th percentiles; a history has medians only, so that percentiles vary between runs as medians do."""
    found = _repeats([percentile_interval(one.measured, _P95) for one in series], [])
    scale = found.mean / medians.mean if medians.mean else 1.0
    earlier = tuple(tuple(scale * median for median in run) for run in medians.earlier)
    return replace(found, earlier=earlier, is_estimate=found.within is None)


def _repeats(processes: list[Interval], earlier: list[list[float]]) -> Repeats:
    widths = [width for one in processes if (width := one.log_half_width) is not None]
    within = sum((width / Z95) ** 2 for width in widths) / len(widths) ** 2 if len(widths) == len(processes) else None
    is_usable = all(value > 0 for run in earlier for value in run)
    values = tuple(one.value for one in processes)
    usable = tuple(map(tuple, earlier)) if is_usable else ()
    return Repeats(values=values, within=within, earlier=usable, is_estimate=within is None and len(values) == 1)


def _with_components(
    found: Mapping[Key, dict[str, Repeats]], selfcheck: Sequence[MachineSpread]
) -> dict[Key, dict[str, Repeats]]:
    """Give each figure the variance between processes that all figures of its phase and measure show (anchors).

    Without any, it is that of the machine's selfcheck. Energy, which one process measures, varies between processes as
    the times do.
    """
    groups: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for key, figures in found.items():
        for name, one in figures.items():
            groups.setdefault((key.phase, name), []).append(one.values)
    between = {(one.phase, one.time): Component(variance=one.variance, degrees=one.degrees) for one in selfcheck}
    for phase, name in groups:
        if name in ("p95", "throughput") and (latency := between.get((phase, "latency"))):
            between.setdefault((phase, name), latency)
    between |= {group: own for group, values in groups.items() if (own := variance.between_processes(values))}

    def component(phase: str, name: str) -> Component | None:
        own = between.get((phase, name))
        if own or name not in _SAMPLED:
            return own
        return next(filter(None, (between.get((phase, time)) for time in TIME_KINDS)), None)

    return {
        key: {name: replace(one, between=component(key.phase, name)) for name, one in figures.items()}
        for key, figures in found.items()
    }
