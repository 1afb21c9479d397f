"""The plot of a record as data; `drawing` draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy

from perfexp.forecast.predictions import INTERPOLATED, Forecast, key_of
from perfexp.plots.chart import Caption, Chart, Curve, Line, Panel, Strips, Taken, footer_of
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.growth import Odd, odd_sizes, scalings
from perfexp.records.point_times import DEVICE_TIMES, interval_of
from perfexp.records.quantities import ENERGY, PEAK_MEMORY, TIMES, time_title
from perfexp.records.record import Key, Record
from perfexp.records.summary import Row
from perfexp.statistics.estimators import Interval
from perfexp.summaries import wording
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.subject import label, shape, varying
from perfexp.summaries.wording import (
    interval_text,
    median_text,
    percent,
    scaling_text,
)

#: Fields that make an axis if they vary.
NUMERIC = ("input_size", "batch_size")
#: Panels below the times, if measured: title, metric, unit, quantity of a forecast.
_PANELS = (
    ("peak memory", PEAK_MEMORY, "bytes", ""),
    ("energy per call", ENERGY, "joules", "energy"),
)
#: Names of lines, points and their predictions by phase and quantity; and with their positions, by quantity.
_Predicted = Mapping[tuple[str, str], Sequence[tuple[str, Key, Interval]]]
_Bands = Mapping[str, Sequence[tuple[str, float, Interval]]]
#: Line segments of a fitted curve.
_CURVE_SEGMENTS = 60
#: Limit on lines that have the latency behind them, and share of the best rate at the knee, with its least batches.
_MOST_WITH_LATENCY, _KNEE, _LEAST_BATCHES = 2, 0.9, 3


class Placed(NamedTuple):
    """A row at its place on the horizontal axis, with the name of its line; None with the status of a failed run."""

    name: str
    x: float
    row: Row | None
    status: str


def plot(analysis: Analysis, forecasts: Sequence[Forecast] = ()) -> Chart | Strips | None:
    """Return the plot of a record.

    It shows times, samples per second and memory against input size, or against batch size if only that varies. If
    neither varies, it shows all samples of all times. None if nothing was timed.

    Args:
        forecasts: predictions of a sparse sweep, shown as bands in place of the scaling model.
    """
    table, about = analysis.rows, analysis.about
    timed = [row for row in table if row.time]
    if not timed:
        return None
    title = " · ".join(filter(None, (str(about), shape(row.key for row in table))))
    caption = Caption(
        title=title, subtitle=subtitle(timed, about.device), footer=footer(table, [analysis.record])
    )
    fields, axis = axes_of(table)
    if not axis:
        of = f"; 95 % intervals of {scope}" if (scope := wording.scope(timed)) else ""
        where = f"all samples of all times after the warm-up{of}, on {about.device or 'an unknown device'}"
        points = tuple(_strips(timed, fields))
        return Strips(caption=replace(caption, subtitle=where), points=points)
    named = [(line_name(row.key, fields, axis), row) for row in table]
    return chart_of(
        caption,
        named,
        axis,
        fitted=not forecasts,
        predicted=_predicted(forecasts, named, fields, axis),
    )


def axes_of(table: Sequence[Row]) -> tuple[tuple[str, ...], str | None]:
    """The fields that vary, and the one of the horizontal axis, if there is one."""
    fields = varying(row.key for row in table)
    return fields, next((name for name in NUMERIC if name in fields), None)


def line_name(key: Key, fields: Sequence[str], axis: str) -> str:
    """The name of a point's line: the varying fields except its phase and the horizontal axis."""
    return label(key, [name for name in fields if name not in (axis, "phase")])


def _strips(timed: Sequence[Row], fields: Sequence[str]) -> Iterator[tuple[str, tuple[Taken, ...]]]:
    for row in timed:
        taken = (
            Taken(
                name=time_title(name),
                meaning=TIMES[name].caption,
                series=row.series[name],
                time=time,
                text=median_text(row) if name == row.time_kind else interval_text(time.median),
            )
            for name, time in row.times.items()
        )
        yield label(row.key, fields), tuple(taken)


def _predicted(
    forecasts: Sequence[Forecast],
    named: Sequence[tuple[str, Row]],
    fields: Sequence[str],
    axis: str,
) -> _Predicted:
    found: dict[tuple[str, str], list[tuple[str, Key, Interval]]] = {}
    for curve, points in ((one.curve, one.points) for one in forecasts):
        of_curve = found.setdefault((curve.phase, curve.quantity), [])
        for point in points:
            key = key_of(point.pair, curve.phase, named[0][1].key.precision)
            if point.source == INTERPOLATED and point.value is not None:
                of_curve.append((line_name(key, fields, axis), key, point.value))
    return found


def chart_of(
    caption: Caption,
    named: Sequence[tuple[str, Row]],
    axis: str,
    *,
    fitted: bool = False,
    predicted: _Predicted | None = None,
) -> Chart:
    """Panels of times, one for each phase and kind of time, of rates, memory and energy, over a numeric axis.

    Args:
        named: rows with the names of their lines.
        fitted: whether times over input sizes have their scaling model.
    """
    keys, predicted = [row.key for _, row in named], predicted or {}
    title, place = _scale(
        [*keys, *(key for points in predicted.values() for _, key, _ in points)], axis
    )
    placed = [Placed(name, place(row.key), row, row.status.value) for name, row in named]
    panels, phases = list[Panel](), dict.fromkeys(row.key.phase for _, row in named if row.time)
    for phase in phases:
        own = [one for one in placed if one.row and one.row.time and one.row.key.phase == phase]
        bands = {
            quantity: [(name, place(key), y) for name, key, y in points]
            for (of, quantity), points in predicted.items()
            if of == phase
        }
        prefix = f"{phase}: " if len(phases) > 1 else ""
        of_phase = _panels(own, bands, axis, fitted=fitted)
        panels += (replace(panel, title=prefix + panel.title) for panel in of_phase)
    ticks: dict[float, dict[str, None]] = {}
    for key in keys:
        ticks.setdefault(place(key), {})[
            str(key.batch_size) if axis == "batch_size" else key.size_label
        ] = None
    return Chart(
        caption=caption,
        axis=title,
        ticks={x: "\n".join(names) for x, names in ticks.items()},
        panels=tuple(panels),
        gaps=gaps_of(placed),
        is_doubling=axis == "batch_size",
    )


def _scale(keys: Iterable[Key], axis: str) -> tuple[str, Callable[[Key], float]]:
    """The title of a horizontal axis, and the position of a point on it: its batch, side of a square, or pixels."""
    if axis == "batch_size":
        return "batch size (samples per call)", lambda key: float(key.batch_size)
    if all(key.input_size[0] == key.input_size[1] for key in keys):
        return "input size (pixels a side)", lambda key: float(key.input_size[0])
    return "input size (height × width, pixels)", lambda key: float(key.pixels)


def _panels(placed: Sequence[Placed], bands: _Bands, axis: str, *, fitted: bool) -> Iterator[Panel]:
    """The panels of one phase."""
    for kind in dict.fromkeys(one.row.time_kind or "" for one in placed if one.row):
        own = [one for one in placed if one.row and one.row.time_kind == kind]
        lines = lines_of(
            own,
            lambda row: row.time.median if row.time else None,
            bands.get("time", ()),
            is_judged=True,
        )
        curves = _curves(own) if fitted and axis == "input_size" else ()
        title = f"{time_title(kind)} per call"
        yield Panel(
            title=title, lines=_with_latency(own, lines, kind), unit="seconds", curves=curves
        )
    lines = lines_of(placed, lambda row: row.samples_per_second)
    marks = _knee(lines[0]) if axis == "batch_size" and len(lines) == 1 else {}
    yield Panel(title="throughput", lines=lines, marks=marks)
    for title, metric, unit, quantity in _PANELS:
        if lines := lines_of(
            placed, partial(_metric, metric), bands.get(quantity, ()), metric=metric
        ):
            yield Panel(title=title, lines=lines, unit=unit)


def _with_latency(placed: Sequence[Placed], lines: tuple[Line, ...], kind: str) -> tuple[Line, ...]:
    """Add the latencies behind the times of a device."""
    if kind not in DEVICE_TIMES or len(lines) > _MOST_WITH_LATENCY:
        return lines
    latencies = lines_of(
        placed, lambda row: row.times["latency"].median if "latency" in row.times else None
    )
    behind = (
        replace(line, label=f"{line.label} · latency".removeprefix(" · "), is_light=True)
        for line in latencies
    )
    # a line alone has no name in other panels
    return (
        (*behind, *(replace(line, label=line.label or kind) for line in lines))
        if latencies
        else lines
    )


def _knee(rates: Line) -> dict[float, str]:
    """The batch from which on the rate stays near the best one, or the last one if no other is near it.

    None if the rate falls in between, up to the last batch or the one before, or if intervals are too wide for it.
    """
    widths = [y.relative_half_width for y in rates.y]
    if len(rates.x) < _LEAST_BATCHES or not all(
        width is not None and width <= (1 - _KNEE) / 2 for width in widths
    ):
        return {}
    best = max(y.value for y in rates.y)
    far = [x for x, y in zip(rates.x, rates.y, strict=True) if y.value < _KNEE * best]
    near = [x for x in rates.x if x > max(far, default=0.0)]
    if len(near) > 1:
        return {near[0]: f"{percent(_KNEE)} of the best rate from batch {near[0]:g} on"}
    is_rising = near and len(far) == len(rates.x) - 1
    return {near[0]: f"still rising at batch {near[0]:g}, the largest"} if is_rising else {}


def _metric(name: str, row: Row) -> Interval | None:
    return interval_of(row.metric(name))


def _curves(placed: Sequence[Placed]) -> tuple[Curve, ...]:
    """Growth of the times from the smallest size to the largest; sizes are sides if all are squares."""
    where = {one.row.key: one.x for one in placed if one.row}
    models = [
        scaling for scaling in scalings([one.row for one in placed if one.row]) if not scaling.doubt
    ]
    curves = list[Curve]()
    for scaling in models:
        start, end = where[scaling.keys[0]], where[scaling.keys[-1]]
        power = 1 if end == scaling.key.pixels else 2
        x = numpy.linspace(start, end, _CURVE_SEGMENTS + 1).tolist()
        y = tuple(scaling.fit.at(position**power / scaling.key.pixels) for position in x)
        curves.append(
            Curve(
                label=scaling_text(scaling) if len(models) == 1 else "scaling model",
                x=tuple(x),
                y=y,
            )
        )
    return tuple(curves)


def gaps_of(placed: Sequence[Placed]) -> dict[float, str]:
    """Status of failed points by position, with the line that they are missing from if there are several."""
    several, failures = len({one.name for one in placed}) > 1, dict[float, list[str]]()
    for one in placed:
        if not one.row or not one.row.time:
            failures.setdefault(one.x, []).append(
                f"{one.name}: {one.status}" if several else one.status
            )
    return {
        position: "\n".join(texts[:3] + ["…"] * (len(texts) > 3))
        for position, texts in failures.items()
    }


def lines_of(
    placed: Sequence[Placed],
    value: Callable[[Row], Interval | None],
    predicted: Sequence[tuple[str, float, Interval]] = (),
    *,
    metric: str = "",
    is_judged: bool = False,
) -> tuple[Line, ...]:
    """A line of a value of the rows for each name, with a color of its own.

    Args:
        predicted: names of lines with predicted points.
        metric: the metric that the value is, which may be estimated.
        is_judged: whether odd sizes of the times are ringed.
    """
    lines = []
    for color, name in enumerate(dict.fromkeys(one.name for one in placed)):
        own = sorted(
            ((one.x, one.row) for one in placed if one.name == name and one.row),
            key=lambda point: point[0],
        )
        points = [(x, row, known) for x, row in own if (known := value(row))]
        odd = odd_sizes([row for _, row in own]) if is_judged else {}
        if points:
            line = Line(
                label=name,
                x=tuple(x for x, _, _ in points),
                y=tuple(y for _, _, y in points),
                color=color,
                rough=tuple(_rough(row, y, metric) for _, row, y in points),
                odd={x: _odd_text(row.key, odd[row.key]) for x, row in own if row.key in odd},
                predicted=dict(sorted((x, y) for label, x, y in predicted if label == name)),
            )
            lines.append(line)
    return tuple(lines)


def _rough(row: Row, value: Interval, metric: str) -> str:
    """Why the marker of a value is hollow; empty where it is not."""
    if (found := row.metric(metric)) and found.estimated:
        return "estimated"
    # a peak of the memory has no interval
    return "no interval" if value.low is None and metric != PEAK_MEMORY else ""


def _odd_text(key: Key, odd: Odd) -> str:
    sign, against = "+" if odd.ratio > 1 else "−", odd.other.size_label if odd.other else "the fit"
    return f"{key.size_label}: {sign}{percent(abs(odd.ratio - 1))} against {against}"


def subtitle(table: Sequence[Row], device: str | None) -> str:
    """The kinds of the values, the scope of their intervals, and the device."""
    kinds = ", ".join(dict.fromkeys(time_title(row.time_kind) for row in table if row.time_kind))
    of = f" of {scope}" if (scope := wording.scope(table)) else ""
    return f"{kinds} per call: medians with their 95 % interval{of}, on {device or 'an unknown device'}"


def footer(
    table: Sequence[Row], records: Sequence[Record], of_sweep: Iterable[Diagnostic] = ()
) -> str:
    """The codes of the errors and warnings of records, rows and a sweep."""
    of_records = [doubt for record in records for doubt in record.doubts]
    return footer_of([*of_records, *(doubt for row in table for doubt in row.doubts), *of_sweep])
