"""Summary: what every sink shows of a record, computed from it by pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfexp import doubts, stats
from perfexp.record import Doubt, Key, Metric, Point, Record, Series, Status

#: Which time stands for a point, best first: the device's own where there is one.
TIME_KINDS = ("device", "latency", "throughput")
#: Overheads of one process, in their order; the first prediction is there after `first_call`.
TTFP_PARTS = ("imports", "context", "weights", "first_call")


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
        samples_per_second: batch size over the mean time of a pipelined call, with its interval.
        metrics: the point's other figures.
        doubts: the point's own, and those that its statistics raise.
    """

    key: Key
    status: Status
    error: str | None
    time_kind: str | None
    time: stats.Summary | None
    series: Series | None
    times: dict[str, stats.Summary]
    phases: dict[str, float]
    samples_per_second: stats.Interval | None
    metrics: tuple[Metric, ...]
    doubts: tuple[Doubt, ...]


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


def rows(record: Record) -> list[Row]:
    """One row for each point that is timed, in the record's order.

    Args:
        record: of any run.
    """
    percentiles = requested_percentiles(record)
    return [row(point, percentiles) for point in record.points if point.key.phase != "ttfp"]


def requested_percentiles(record: Record) -> tuple[float, ...]:
    """The percentiles that the plan asks for.

    Args:
        record: of any run.
    """
    return tuple(float(p) for p in record.plan.get("percentiles") or (50.0, 95.0, 99.0))


def row(point: Point, percentiles: Sequence[float] = (50.0, 95.0, 99.0)) -> Row:
    """The summary of one point.

    Args:
        point: of any status.
        percentiles: which ones to compute.
    """
    timed = [name for name in TIME_KINDS if (series := point.find_series(name)) is not None and series.measured]
    times = {name: stats.summarise(_series(point, name).measured, percentiles) for name in timed}
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
            part.name.removeprefix("phase/"): stats.summarise(part.measured, (50.0,)).median.value
            for part in point.series
            if part.name.startswith("phase/") and part.measured
        },
        samples_per_second=_rate(pipelined.mean, point.key.batch_size) if pipelined else None,
        metrics=tuple(point.metrics),
        doubts=(*point.doubts, *_statistical_doubts(main, series)),
    )


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
            name.removeprefix("ttfp/"): stats.summarise(
                [sample for point in points for sample in _series(point, name).samples], (50.0,)
            ).median.value
            for name in names
        }
        total = sum(parts.get(part, 0.0) for part in TTFP_PARTS)
        found.append(
            FirstPrediction(key=points[0].key, parts=parts, total_seconds=total, processes=len(points)),
        )
    return found


def _series(point: Point, name: str) -> Series:
    series = point.find_series(name)
    if series is None:
        raise KeyError(f"{point.key} has no series {name}")
    return series


def _rate(seconds: stats.Interval, batch_size: int) -> stats.Interval:
    """Samples per second from seconds per call; the ends of the interval change places."""
    low = batch_size / seconds.high if seconds.high else None
    high = batch_size / seconds.low if seconds.low and seconds.low > 0 else None
    return stats.Interval(value=batch_size / seconds.value, low=low, high=high)


def _statistical_doubts(time: stats.Summary | None, series: Series | None) -> list[Doubt]:
    """What the samples themselves say against the figure."""
    if time is None or series is None:
        return []
    found = []
    if time.drift is not None:
        found.append(doubts.drift(time.drift.relative))
    target, achieved = series.stop.target if series.stop else None, time.median.relative_half_width
    if achieved is None or (target is not None and achieved > target):
        found.append(doubts.too_few_samples(time.n, time.n / time.tau, achieved, target))
    return found
