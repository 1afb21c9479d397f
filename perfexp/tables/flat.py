"""The numbers of a record that are shown in charts: its point, its group, and a name that ends in its unit.

Extremes, numbers of outliers and cycles are in the tables only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfexp.records.cold_starts import FirstPrediction, first_predictions
from perfexp.records.estimates import is_estimate, is_rate_estimate
from perfexp.records.growth import scalings
from perfexp.records.quantities import of as quantity_of
from perfexp.records.record import Key, Point, Record, Status
from perfexp.records.summary import Row, requested_percentiles
from perfexp.records.units import prettify
from perfexp.statistics import blockwise
from perfexp.summaries.wording import percentile, service_time

#: Values of a metric in a chart of MLflow; more cost time and are not shown.
CHART_POINTS = 320


class Quantity(NamedTuple):
    """One number.

    Attributes:
        group: `latency`, `throughput`, `memory`, …
        name: name within the group, ending in its unit.
        step: the point's input width if points differ in a square size only, or else its index; the index of the sample
            in the group `samples`, and the number of the epoch in the group `epoch`.
        reason: why there is no value.
        estimated: whether it is derived from another measured value, or has no interval.
    """

    group: str
    name: str
    value: float | None
    key: Key
    step: int
    reason: str | None = None
    estimated: bool = False


@dataclass(frozen=True, kw_only=True)
class PointRun:
    """The points of one phase and one batch size, whose metrics have the same names; a training has no cold starts."""

    phase: str
    batch_size: int
    rows: tuple[Row, ...]
    first_predictions: tuple[FirstPrediction, ...]


def point_runs(record: Record, table: Sequence[Row]) -> list[PointRun]:
    """Split the rows of a record by phase and batch size, in its order."""
    firsts = first_predictions(record)
    pairs = [(row.key.phase, row.key.batch_size) for row in table]
    pairs += [("inference", first.key.batch_size) for first in firsts]
    return [
        PointRun(
            phase=phase,
            batch_size=batch,
            rows=tuple(row for row in table if (row.key.phase, row.key.batch_size) == (phase, batch)),
            first_predictions=tuple(first for first in firsts if ("inference", first.key.batch_size) == (phase, batch)),
        )
        for phase, batch in dict.fromkeys(pairs)
    ]


def by_size(run: PointRun) -> list[PointRun]:
    """Return each size of a run of several sizes as a run of its own; none for a single size."""
    if len(run.rows) < 2:
        return []
    firsts = {one.key.input_size: one for one in run.first_predictions}
    return [
        replace(run, rows=(row,), first_predictions=tuple(filter(None, [firsts.get(row.key.input_size)])))
        for row in run.rows
    ]


def quantities(record: Record, run: PointRun) -> Iterator[Quantity]:
    """Yield the numbers of one phase and batch size, point by point."""
    percentiles = requested_percentiles(record)
    steps = _steps(run.rows)
    for row, step in zip(run.rows, steps.values(), strict=True):
        for group, name, value, is_estimated in _of_row(row):
            yield Quantity(group, name, value, row.key, step, estimated=is_estimated)
        yield from _percentiles(row, percentiles, step)
        yield from _metrics(row, step)
    yield from _scalings(run.rows, steps)
    yield from _first_predictions(run, steps)
    if len(run.rows) == 1 and (series := run.rows[0].series):  # a chart of warm-up, drift and outliers
        for index, value in decimate(series.samples):
            yield Quantity("samples", f"{series.name}_ms", value * 1e3, run.rows[0].key, index)
    if len(run.rows) == 1:
        for point in record.points:
            if point.key == run.rows[0].key:
                yield from of_epochs(point)


def of_epochs(point: Point) -> Iterator[Quantity]:
    """The figures of each epoch of a training, at its number."""
    for epoch in point.epochs:
        for name, value in epoch.figures.items():
            if value is not None:
                yield Quantity("epoch", name, value, point.key, epoch.number)


def decimate(samples: Sequence[float], limit: int = CHART_POINTS) -> list[tuple[int, float]]:
    """Return at most `limit` samples (even) with their indices; the extremes of each section stay."""
    if len(samples) <= limit:
        return list(enumerate(samples))
    values = np.asarray(samples)
    indices: set[int] = set()
    for section in np.array_split(np.arange(values.size), limit // 2):
        indices |= {int(section[values[section].argmin()]), int(section[values[section].argmax()])}
    return [(index, samples[index]) for index in sorted(indices)]


def _steps(rows: Sequence[Row]) -> dict[Key, int]:
    """The step of each point: the width in a sweep over square sizes, so that a chart has it as its axis."""
    widths = {row.key.input_size[1] for row in rows if row.key.input_size[0] == row.key.input_size[1]}
    is_sweep = len(widths) == len(rows) > 1
    return {row.key: row.key.input_size[1] if is_sweep else index for index, row in enumerate(rows)}


def _of_row(row: Row) -> Iterator[tuple[str, str, float, bool]]:
    """Group, name and value of the row's own figures, and whether `≈` precedes it in reports, in MLflow's order."""
    for kind, time in row.times.items():
        for name, value in _of_time(time):
            yield kind, name, value, name == "p50_ms" and is_estimate(row, kind)
    if row.samples_per_second:
        rate = row.samples_per_second
        for ending, number in (("", rate.value), ("_low", rate.low), ("_high", rate.high)):
            if number is not None:
                yield "throughput", f"samples_per_second{ending}", number, is_rate_estimate(row)
    for group, name, value in _facts(row):
        yield group, name, value, False


def _facts(row: Row) -> Iterator[tuple[str, str, float]]:
    for name, seconds in row.phases.items():
        yield f"{row.key.phase}_phase", f"{name}_ms", seconds * 1e3
    yield "point", "input_height", row.key.input_size[0]
    yield "point", "input_width", row.key.input_size[1]
    yield "point", "batch_size", row.key.batch_size
    yield "point", "processes_count", row.processes
    if row.spread is not None:
        yield "point", "spread_percent", 100 * row.spread
    yield "point", "ok", float(row.status is Status.OK)


def _of_time(time: blockwise.Summary) -> Iterator[tuple[str, float]]:
    yield "p50_ms", time.median.value * 1e3
    for name, end in (("ci_low_ms", time.median.low), ("ci_high_ms", time.median.high)):
        if end is not None:
            yield name, end * 1e3
    if (width := time.median.relative_half_width) is not None:
        yield "ci_half_width_percent", width * 100
    yield "mean_ms", time.mean.value * 1e3
    if time.std is not None:
        yield "std_ms", time.std * 1e3
    yield "measured_count", time.n


def _percentiles(row: Row, percentiles: Sequence[float], step: int) -> Iterator[Quantity]:
    """Percentiles of the service time above the median; one without an interval is an estimate."""
    if service := service_time(row):
        kind, summary = service
        for number in (number for number in percentiles if number != 50):
            interval = percentile(summary, number)
            is_estimated = interval.low is None
            yield Quantity(kind, f"p{number:g}_ms", interval.value * 1e3, row.key, step, estimated=is_estimated)


def _metrics(row: Row, step: int) -> Iterator[Quantity]:
    """The point's metrics with a chart; one without a group is put into that of its phase."""
    for metric in row.metrics:
        if not quantity_of(metric).is_charted:
            continue
        group, slash, rest = metric.name.partition("/")
        group, stem = (group, rest) if slash else (row.key.phase, group)
        for ending, number in (("", metric.value), ("_low", metric.low), ("_high", metric.high)):
            name, pretty = prettify(stem, number or 0.0, metric.unit)
            value = None if number is None else pretty
            if value is not None or not ending:
                yield Quantity(group, f"{name}{ending}", value, row.key, step, metric.reason, metric.estimated)


def _scalings(rows: Sequence[Row], steps: Mapping[Key, int]) -> Iterator[Quantity]:
    """Growth of a time with the size, at the step of the largest size; a missing figure has a reason."""
    for scaling in scalings(rows):
        fit, exponent = scaling.fit, None if scaling.doubt else scaling.fit.exponent
        values = {
            "exponent": exponent.value if exponent else None,
            "exponent_low": exponent.low if exponent else None,
            "exponent_high": exponent.high if exponent else None,
            "constant_ms": None if scaling.doubt else fit.a * 1e3,
            "growing_ms": None if scaling.doubt else fit.b * 1e3,
            "scatter_percent": fit.scatter * 100,
        }
        for name, value in values.items():
            reason = (scaling.doubt or "the time does not grow with the size") if value is None else None
            yield Quantity("scaling", name, value, scaling.key, steps[scaling.key], reason)


def _first_predictions(run: PointRun, steps: Mapping[Key, int]) -> Iterator[Quantity]:
    at = {key.input_size: step for key, step in reversed(list(steps.items()))}
    for index, first in enumerate(run.first_predictions):
        step = at.get(first.key.input_size, index)
        for name, seconds in (*first.parts.items(), ("total", first.total.value)):
            yield Quantity("ttfp", f"{name}_ms", seconds * 1e3, first.key, step)
