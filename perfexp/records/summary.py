"""Summary: what every sink shows of a record, computed from it by pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Key, Metric, Point, Record, Series, Status
from perfexp.statistics import estimators, scaling

#: Which time stands for a point, best first: the device's own where there is one.
TIME_KINDS = ("device", "latency", "throughput")
#: Overheads of one process, in their order; the first prediction is there after `first_call`.
TTFP_PARTS = ("imports", "context", "weights", "first_call")
#: Pixels in the unit of size in which a fit over sizes is given.
MEGAPIXEL = 1e6
#: What a median without an interval counts for in a fit over sizes: as one of this relative half-width.
_ERROR_UNKNOWN = 0.05
#: A larger input may take so much less time than a smaller one: tiles fill better at some sizes than at others.
_FALL_TOLERANCE = 0.1
#: Advice on getting more samples, by the reason for which a block ended.
_MORE_SAMPLES = {
    "fixed": "use more calls (stopping.measure=N; ITERATIONS of perfexp benchmark) or stopping=normal",
    "max_seconds": "use more time (stopping.max_seconds=N)",
    "max_calls": "use more calls (stopping.max_calls=N)",
    "epochs": "use more epochs, or more data",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point as people want to see it.

    Attributes:
        key: which point.
        status: how it ended.
        error: why, where it did not end well.
        time_kind: which time `time` is: `device`, `latency` or `throughput`; None where nothing was timed.
        time: its statistics, seconds per call.
        series: the raw samples behind `time`.
        times: statistics of every time that was measured, by kind.
        phases: median seconds of each part of a call, by name, from their separate pass.
        samples_per_second: samples of a call, of all ranks, over the mean time of a pipelined one, with its interval.
        metrics: the point's other figures.
        doubts: the point's own, and those that its statistics raise.
    """

    key: Key
    status: Status
    error: str | None
    time_kind: str | None
    time: estimators.Summary | None
    series: Series | None
    times: dict[str, estimators.Summary]
    phases: dict[str, float]
    samples_per_second: estimators.Interval | None
    metrics: tuple[Metric, ...]
    doubts: tuple[Diagnostic, ...]


@dataclass(frozen=True, kw_only=True)
class FirstPrediction:
    """Time to first prediction of fresh processes.

    Attributes:
        key: with which inputs.
        parts: seconds of `imports`, `context`, `weights`, `first_call`, `second_call`; medians over the processes.
        total_seconds: their sum up to the first prediction; without the second call.
        processes: how many processes were measured.
    """

    key: Key
    parts: dict[str, float]
    total_seconds: float
    processes: int


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the time of one phase, batch size, precision and process depends on the input size.

    Attributes:
        key: of the largest size.
        keys: of all sizes, the smallest first.
        time_kind: which time.
        fit: in seconds per call over megapixels.
    """

    key: Key
    keys: tuple[Key, ...]
    time_kind: str
    fit: scaling.ScalingFit


@dataclass(frozen=True, kw_only=True)
class Across:
    """One point as several processes measured it.

    Attributes:
        key: of the first process.
        keys: of all of them.
        time_kind: which time.
        time: geometric mean of the processes' medians, seconds per call, with its interval.
        spread: standard deviation between the processes' medians, as a fraction.
    """

    key: Key
    keys: tuple[Key, ...]
    time_kind: str
    time: estimators.Interval
    spread: float


def rows(record: Record) -> list[Row]:
    """One row for each point that is timed, in the record's order.

    Args:
        record: of any run.
    """
    percentiles = requested_percentiles(record)
    known = [row(point, percentiles) for point in record.points if point.key.is_timed]
    raised = _scaling_doubts(known)
    return [replace(each, doubts=(*each.doubts, *raised.get(each.key, ()))) for each in known]


def scalings(known: Sequence[Row]) -> list[Scaling]:
    """How times depend on the input size, wherever four different sizes or more were measured.

    Args:
        known: the rows of a record.
    """
    found = []
    for group in _over_sizes(known):
        if len({each.key.pixels for each in group}) >= scaling.LEAST_SIZES:
            medians = [_median(each) for each in group]
            widths = [median.relative_half_width for median in medians]
            fit = scaling.fit_scaling(
                [each.key.pixels / MEGAPIXEL for each in group],
                [median.value for median in medians],
                [_ERROR_UNKNOWN if width is None else width for width in widths],
            )
            keys = tuple(each.key for each in group)
            found.append(Scaling(key=keys[-1], keys=keys, time_kind=group[0].time_kind or "", fit=fit))
    return found


def across(known: Sequence[Row]) -> list[Across]:
    """What the processes say together of each point that two or more of them measured.

    Args:
        known: the rows of a record.
    """
    groups = _grouped(known, lambda row: (row.time_kind, *_without_replicate(row.key)))
    found = []
    for group in groups:
        if len(group) > 1:
            time, spread = estimators.across_interval([_median(each).value for each in group])
            keys = tuple(each.key for each in group)
            found.append(Across(key=keys[0], keys=keys, time_kind=group[0].time_kind or "", time=time, spread=spread))
    return found


def requested_percentiles(record: Record) -> tuple[float, ...]:
    """The percentiles that the plan asks for.

    Args:
        record: of any run.
    """
    asked = record.plan.get("percentiles")
    numbers = [p for p in asked if isinstance(p, int | float)] if isinstance(asked, list) else []
    return tuple(float(p) for p in numbers if 0 < p < 100) or (50.0, 95.0, 99.0)


def row(point: Point, percentiles: Sequence[float] = (50.0, 95.0, 99.0)) -> Row:
    """The summary of one point.

    Args:
        point: of any status.
        percentiles: which ones to compute.
    """
    timed = [name for name in TIME_KINDS if (series := point.find_series(name)) is not None and series.measured]
    times = {name: estimators.summarise(_series(point, name).measured, percentiles) for name in timed}
    kind = timed[0] if timed else None
    pipelined = times.get("throughput") or times.get("latency")
    main = times[kind] if kind else None
    series = _series(point, kind) if kind else None
    return Row(
        key=point.key,
        status=point.status,
        error=point.error,
        time_kind=kind,
        time=main,
        series=series,
        times=times,
        phases={
            part.name.removeprefix("phase/"): estimators.summarise(part.measured, (50.0,)).median.value
            for part in point.series
            if part.name.startswith("phase/") and part.measured
        },
        samples_per_second=_rate(pipelined.mean, samples_per_call(point)) if pipelined else None,
        metrics=tuple(point.metrics),
        doubts=(*point.doubts, *_statistical_doubts(main, series)),
    )


def samples_per_call(point: Point) -> int:
    """The batch of a call; where several ranks make it together, those of all of them.

    Args:
        point: of a record.
    """
    return point.key.batch_size * int(point.facts.get("world_size", 1))


def first_interval(point: Point, *names: str) -> estimators.Interval | None:
    """Seconds per call by the first of these series that was measured, with their interval; None where none was.

    Args:
        point: of any status.
        names: of series, the best first.
    """
    for name in names:
        series = point.find_series(name)
        if series is not None and series.measured:
            return estimators.median_interval(series.measured)
    return None


def first_median(point: Point, *names: str) -> float | None:
    """`first_interval` without its interval.

    Args:
        point: of any status.
        names: of series, the best first.
    """
    found = first_interval(point, *names)
    return found.value if found else None


def loop_interval(point: Point) -> estimators.Interval | None:
    """Mean seconds of a call among calls that follow one another, which rates are made of; None where none was timed.

    A loader's processes may bring their batches at once, and then none for a while: the median knows nothing of that.

    Args:
        point: of any status.
    """
    for name in ("throughput", "latency"):
        series = point.find_series(name)
        if series is not None and series.measured:
            return estimators.mean_interval(series.measured)
    return None


def first_predictions(record: Record) -> list[FirstPrediction]:
    """Time to first prediction, for each size and batch that it was measured at.

    Args:
        record: of any run.
    """
    groups: dict[tuple[tuple[int, int], int], list[Point]] = {}
    for point in record.points:
        if point.key.phase == "ttfp" and point.status is Status.OK:
            groups.setdefault((point.key.input_size, point.key.batch_size), []).append(point)
    found = []
    for points in groups.values():
        names = [series.name for series in points[0].series]
        parts = {
            name.removeprefix("ttfp/"): estimators.summarise(
                [sample for point in points for sample in _series(point, name).samples], (50.0,)
            ).median.value
            for name in names
        }
        total = sum(parts.get(part, 0.0) for part in TTFP_PARTS)
        found.append(
            FirstPrediction(key=points[0].key, parts=parts, total_seconds=total, processes=len(points)),
        )
    return found


def _median(row: Row) -> estimators.Interval:
    assert row.time is not None
    return row.time.median


def _grouped(known: Iterable[Row], by: Callable[[Row], Hashable]) -> list[list[Row]]:
    """The rows that went well and have a time, by what they have in common; a time of zero stands for none."""
    groups: dict[Hashable, list[Row]] = {}
    for each in known:
        if each.status is Status.OK and each.time and each.time.median.value > 0:
            groups.setdefault(by(each), []).append(each)
    return list(groups.values())


def _without_replicate(key: Key) -> tuple[Hashable, ...]:
    return key.phase, key.input_size, key.batch_size, key.precision


def _over_sizes(known: Iterable[Row]) -> list[list[Row]]:
    """The rows that differ in their size only, the smallest size first."""
    groups = _grouped(
        known, lambda row: (row.time_kind, row.key.phase, row.key.batch_size, row.key.precision, row.key.replicate)
    )
    return [sorted(group, key=lambda row: row.key.pixels) for group in groups]


def _scaling_doubts(known: Sequence[Row]) -> dict[Key, tuple[Diagnostic, ...]]:
    """For each point at most one: its time is less than that of a smaller size, or far from the fit over all sizes."""
    found: dict[Key, tuple[Diagnostic, ...]] = {}
    for grown in scalings(known):
        for index in grown.fit.far:
            ratio = 1 + grown.fit.deviations[index]
            reference = f"the fit over {len(grown.keys)} sizes (tolerated: ±{grown.fit.tolerance:.0%})"
            found[grown.keys[index]] = (diagnostics.make("scaling_unexpected", ratio=ratio, reference=reference),)
    # a time far above the fit is suspect itself: compared with it, no other time counts as a fall
    far = set(found)
    for group in _over_sizes(known):
        for smaller, larger in combinations([row for row in group if row.key not in far], 2):
            if larger.key not in found and _falls(smaller, larger):
                ratio = _median(larger).value / _median(smaller).value
                reference = f"the smaller size {smaller.key.size_label}, beyond both intervals"
                found[larger.key] = (diagnostics.make("scaling_unexpected", ratio=ratio, reference=reference),)
    return found


def is_clearly_below(rate: estimators.Interval, other: estimators.Interval) -> bool:
    """Whether a rate is below another: beyond both intervals or, where one has none, by more than the intervals' usual.

    Args:
        rate: per second.
        other: per second.
    """
    if rate.high is not None and other.low is not None:
        return rate.high < other.low
    return rate.value < (1 - _FALL_TOLERANCE) * other.value


def _falls(smaller: Row, larger: Row) -> bool:
    """Whether a larger size takes clearly less time: beyond both intervals and beyond what tiles explain."""
    before, after = _median(smaller), _median(larger)
    if before.low is None or after.high is None or smaller.key.pixels == larger.key.pixels:
        return False
    return after.high < before.low and after.value < (1 - _FALL_TOLERANCE) * before.value


def _series(point: Point, name: str) -> Series:
    series = point.find_series(name)
    if series is None:
        raise KeyError(f"{point.key} has no series {name}")
    return series


def _rate(seconds: estimators.Interval, batch_size: int) -> estimators.Interval:
    """Samples per second from seconds per call; the ends of the interval change places."""
    low = batch_size / seconds.high if seconds.high else None
    high = batch_size / seconds.low if seconds.low and seconds.low > 0 else None
    return estimators.Interval(value=batch_size / seconds.value, low=low, high=high)


def _statistical_doubts(time: estimators.Summary | None, series: Series | None) -> list[Diagnostic]:
    """Diagnostics of the samples themselves: drift, and a wide interval."""
    if time is None or series is None:
        return []
    found = []
    if time.drift is not None:
        found.append(diagnostics.make("drift", relative=time.drift.relative))
    target, achieved = series.stop.target if series.stop else None, time.median.relative_half_width
    effective, reason = time.n / time.tau, series.stop.reason if series.stop else None
    narrow = estimators.FEW_TOO_NARROW if effective < estimators.FEW and reason != "precision" else 1.0
    if achieved is None or (target is not None and narrow * achieved > target):
        reached = _reached(achieved, target)
        advice = _MORE_SAMPLES.get(reason or "", "use more time or calls (stopping.max_seconds, stopping.measure)")
        found.append(diagnostics.make("too_few_samples", n=time.n, effective=effective, reached=reached, advice=advice))
    return found


def _reached(achieved: float | None, target: float | None) -> str:
    if achieved is None:
        return "no confidence interval exists"
    if target is None:
        return f"±{achieved:.1%}"
    if achieved <= target:
        return f"±{achieved:.1%}, which with few effective samples may be several times too narrow"
    return f"±{achieved:.1%} instead of ±{target:.1%}"
