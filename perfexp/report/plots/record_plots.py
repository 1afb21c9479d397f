"""A record's plot as data; `drawing` draws it.

Points that differ in input size or batch size become lines over that number, otherwise all samples
are shown. A line has a point for each row with its name, such as a precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy

from perfexp.prediction.predictions import INTERPOLATED, Forecast, key_of
from perfexp.records import wording
from perfexp.records.analysis import Analysis
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.growth import Odd, odd_sizes, scalings
from perfexp.records.point_times import DEVICE_TIMES, GRAPH, interval_of
from perfexp.records.quantities import ENERGY, PEAK_MEMORY, TIMES, time_title
from perfexp.records.record import Key, Record
from perfexp.records.rows import Row
from perfexp.records.subject import label, shape, varying
from perfexp.records.wording import interval_text, median_text, percent, scaling_text
from perfexp.report.plots.chart import (
    Caption,
    Chart,
    ChartLine,
    FittedCurve,
    Panel,
    Strips,
    Taken,
    footer_of,
)
from perfexp.statistics.estimators import Interval

#: Fields that become an axis if they vary.
NUMERIC = ("input_size", "batch_size")
#: Panels below the times, if measured: title, metric, unit, forecast quantity.
_PANELS = (
    ("peak memory", PEAK_MEMORY, "bytes", ""),
    ("energy per call", ENERGY, "joules", "energy"),
)
#: Predictions: quantity (`time` or `energy`), line name, point, and value in SI units.
Predicted = Sequence[tuple[str, str, Key, Interval]]
#: Predictions by quantity: line name, position on the horizontal axis, and value.
_Bands = Mapping[str, Sequence[tuple[str, float, Interval]]]
#: Line segments of a fitted curve.
_CURVE_SEGMENTS = 60
#: Maximum number of lines with latency behind them.
_MOST_WITH_LATENCY = 2
#: Share of the best rate at the knee, and minimum number of batches for a knee.
_KNEE, _LEAST_BATCHES = 0.9, 3


class Placed(NamedTuple):
    """A row at its position on the horizontal axis, with its line's name.

    Attributes:
        row: the row; None for a failed run.
        status: status of a failed run.
    """

    name: str
    x: float
    row: Row | None
    status: str


def plot(analysis: Analysis, forecasts: Sequence[Forecast] = ()) -> Chart | Strips | None:
    """Return a record's plot; None if nothing was timed.

    It shows times, samples per second and memory against input size, or against batch size if only
    that varies. If neither varies, it shows all samples of all times. The run writes it as
    time.png, and the HTML page embeds it.

    Args:
        forecasts: predictions from a sparse sweep, shown as bands instead of the scaling model.
    """
    table, about = analysis.rows, analysis.about
    timed = [row for row in table if row.time]
    if not timed:
        return None
    keys = [row.key for row in table]
    title = " · ".join(filter(None, (str(about), shape(keys))))
    caption = Caption(
        title=title, subtitle=subtitle(timed, about.device), footer=footer(table, [analysis.record])
    )
    fields, axis = axes_of(keys)
    if not axis:
        content = "all samples of all times after the warm-up"
        if scope := wording.scope(timed):
            content += f"; 95 % intervals of {scope}"
        scope_text = f"{content}, on {about.device or 'an unknown device'}"
        points = tuple(_strips(timed, fields))
        return Strips(caption=replace(caption, subtitle=scope_text), points=points)
    named = [(line_name(row.key, fields, axis), row) for row in table]
    return chart_of(
        caption,
        named,
        axis,
        fitted=not forecasts,
        predicted=_predicted(forecasts, named, fields, axis),
    )


def axes_of(keys: Sequence[Key]) -> tuple[tuple[str, ...], str | None]:
    """Return the varying fields, and the field for the horizontal axis, if any.

    Plots of runs and sweeps choose lines or another kind of plot by it.
    """
    fields = varying(keys)
    for name in NUMERIC:
        if name in fields:
            return fields, name
    return fields, None


def line_name(key: Key, fields: Sequence[str], axis: str) -> str:
    """Return the name of a point's line: varying fields except phase and horizontal axis."""
    return label(key, [name for name in fields if name not in (axis, "phase")])


def _strips(timed: Sequence[Row], fields: Sequence[str]) -> Iterator[tuple[str, tuple[Taken, ...]]]:
    """Yield each row's label and all its times with their samples.

    Args:
        fields: key fields that vary, for the labels.
    """
    for row in timed:
        taken = []
        for name, time in row.times.items():
            taken_time = Taken(
                name=time_title(name),
                meaning=TIMES[name].caption,
                series=row.series[name],
                time=time,
                text=median_text(row) if name == row.time_kind else interval_text(time.median),
            )
            taken.append(taken_time)
        yield label(row.key, fields), tuple(taken)


def _predicted(
    forecasts: Sequence[Forecast],
    named: Sequence[tuple[str, Row]],
    fields: Sequence[str],
    axis: str,
) -> Predicted:
    """Return interpolated values of forecasts; measured ones are in the rows already."""
    predictions = []
    for forecast in forecasts:
        curve = forecast.curve
        for point in forecast.points:
            if point.source == INTERPOLATED and point.value is not None:
                key = key_of(point.pair, curve.phase, named[0][1].key.precision)
                predictions.append((curve.quantity, line_name(key, fields, axis), key, point.value))
    return predictions


def chart_of(
    caption: Caption,
    named: Sequence[tuple[str, Row]],
    axis: str,
    *,
    fitted: bool = False,
    predicted: Predicted = (),
) -> Chart:
    """Return a chart of times by phase and kind, rates, memory and energy over a numeric axis.

    Args:
        named: rows with their lines' names.
        axis: key field for the horizontal axis, `input_size` or `batch_size`.
        fitted: whether times over input sizes have a scaling model.
        predicted: predictions to draw as bands.
    """
    is_batch = axis == "batch_size"
    keys = [row.key for _, row in named]
    keys += [key for _, _, key, _ in predicted]
    title, position_of = scale(keys, axis)
    placed = list[Placed]()
    ticks: dict[float, str] = {}
    by_phase: dict[str, list[Placed]] = {}
    for name, row in named:
        x = position_of(row.key)
        point = Placed(name, x, row, row.status.value)
        placed.append(point)
        text = str(row.key.batch_size) if is_batch else row.key.size_label
        # sizes with the same number of pixels share a tick
        if text not in ticks.setdefault(x, text).split("\n"):
            ticks[x] += f"\n{text}"
        if row.time:
            by_phase.setdefault(row.key.phase, []).append(point)
    panels = list[Panel]()
    for phase, phase_points in by_phase.items():
        bands: dict[str, list[tuple[str, float, Interval]]] = {}
        for quantity, name, key, y in predicted:
            if key.phase == phase:
                bands.setdefault(quantity, []).append((name, position_of(key), y))
        prefix = ""
        if len(by_phase) > 1:
            prefix = f"{phase}: "
        for panel in _panels(phase_points, bands, axis, fitted=fitted):
            panels.append(replace(panel, title=prefix + panel.title))
    return Chart(
        caption=caption,
        axis=title,
        ticks=ticks,
        panels=tuple(panels),
        gaps=gaps_of(placed),
        is_doubling=is_batch,
    )


def scale(keys: Iterable[Key], axis: str) -> tuple[str, Callable[[Key], float]]:
    """Return a horizontal axis's title, and a function for a point's position.

    The position is, for example, the batch size, the side of a square or the pixels. Plots of runs
    and campaigns place points by it.
    """
    if axis == "batch_size":
        return "batch size (samples per call)", lambda key: float(key.batch_size)
    if all(key.input_size[0] == key.input_size[1] for key in keys):
        return "input size (pixels a side)", lambda key: float(key.input_size[0])
    return "input size (height × width, pixels)", lambda key: float(key.pixels)


def _panels(placed: Sequence[Placed], bands: _Bands, axis: str, *, fitted: bool) -> Iterator[Panel]:
    """Yield the panels of a phase's timed points: each kind of time, throughput, memory, energy.

    Args:
        bands: predictions by quantity.
        axis: key field for the horizontal axis.
        fitted: whether times over input sizes have a scaling model.
    """
    by_kind: dict[str, list[Placed]] = {}
    for point in placed:
        if point.row and (kind := point.row.time_kind):
            shared = DEVICE_TIMES[0] if kind in DEVICE_TIMES else kind
            by_kind.setdefault(shared, []).append(point)
    for kind_points in by_kind.values():
        kinds = wording.time_kinds(point.row for point in kind_points if point.row)
        lines = lines_of(
            kind_points, _median, bands.get("time", ()), is_judged=True, mixes=len(kinds) > 1
        )
        curves = _curves(kind_points) if fitted and axis == "input_size" else ()
        kind = min(kinds)
        yield Panel(
            title=f"{time_title(kind)} per call",
            lines=_with_latency(kind_points, lines, kind),
            unit="seconds",
            curves=curves,
        )
    lines = lines_of(placed, lambda row: row.samples_per_second)
    marks = _knee(lines[0]) if axis == "batch_size" and len(lines) == 1 else {}
    yield Panel(title="throughput", lines=lines, marks=marks)
    for title, metric, unit, quantity in _PANELS:
        if lines := lines_of(
            placed, partial(_metric, metric), bands.get(quantity, ()), metric=metric
        ):
            yield Panel(title=title, lines=lines, unit=unit)


def _with_latency(
    placed: Sequence[Placed], lines: tuple[ChartLine, ...], kind: str
) -> tuple[ChartLine, ...]:
    """Return a panel's lines with latencies behind device times; unchanged for other kinds.

    A caller waits longer than the device works, so a panel shows both.
    """
    if kind not in DEVICE_TIMES or len(lines) > _MOST_WITH_LATENCY:
        return lines
    latencies = lines_of(placed, partial(_median, kind="latency"))
    if not latencies:
        return lines
    shown = []
    for line in latencies:
        name = f"{line.label} · latency".removeprefix(" · ")
        shown.append(replace(line, label=name, is_light=True))
    for line in lines:
        # a single line has no name in other panels
        shown.append(replace(line, label=line.label or kind))
    return tuple(shown)


def _knee(rates: ChartLine) -> dict[float, str]:
    """Return a mark at the smallest batch that keeps the rate near its best, with its text.

    The last batch is returned, as still rising, if only it is near. Empty if the rate falls in
    between, or if intervals are too wide to tell.
    """
    if len(rates.x) < _LEAST_BATCHES:
        return {}
    best = 0.0
    for y in rates.y:
        width = y.relative_half_width
        if width is None or width > (1 - _KNEE) / 2:
            return {}
        best = max(best, y.value)
    far, near = 0, list[float]()
    for x, y in zip(rates.x, rates.y, strict=True):
        if y.value < _KNEE * best:
            far += 1
            near = []
        else:
            near.append(x)
    if len(near) > 1:
        return {near[0]: f"{percent(_KNEE)} of the best rate from batch {near[0]:g} on"}
    if near and far == len(rates.x) - 1:
        return {near[0]: f"still rising at batch {near[0]:g}, the largest"}
    return {}


def _median(row: Row, kind: str | None = None) -> Interval | None:
    """Return the median of a kind of time, or of the row's representative time, if it has it."""
    time = row.times.get(kind or row.time_kind or "")
    if time:
        return time.median
    return None


def _metric(name: str, row: Row) -> Interval | None:
    """Return a row's metric with its interval; None without a value."""
    return interval_of(row.metric(name))


def _curves(placed: Sequence[Placed]) -> tuple[FittedCurve, ...]:
    """Return fitted times from the smallest to the largest size.

    Sizes are sides if all are squares.
    """
    positions, rows = dict[Key, float](), list[Row]()
    for point in placed:
        if point.row:
            positions[point.row.key] = point.x
            rows.append(point.row)
    models = [scaling for scaling in scalings(rows) if not scaling.doubt]
    curves = list[FittedCurve]()
    for scaling in models:
        start, end = positions[scaling.keys[0]], positions[scaling.keys[-1]]
        # the model is over pixels; positions are sides unless the axis shows pixels itself
        power = 2
        if end == scaling.key.pixels:
            power = 1
        x = numpy.linspace(start, end, _CURVE_SEGMENTS + 1).tolist()
        y = tuple(scaling.fit.at(position**power / scaling.key.pixels) for position in x)
        name = "scaling model"
        if len(models) == 1:
            name = scaling_text(scaling)
        curves.append(FittedCurve(label=name, x=tuple(x), y=y))
    return tuple(curves)


def gaps_of(placed: Sequence[Placed]) -> dict[float, str]:
    """Return the status of failed points by position, with the line name if there are several.

    Charts mark these positions with a cross.
    """
    has_names = len({point.name for point in placed}) > 1
    failures: dict[float, list[str]] = {}
    for point in placed:
        if not point.row or not point.row.time:
            text = f"{point.name}: {point.status}" if has_names else point.status
            failures.setdefault(point.x, []).append(text)
    for texts in failures.values():
        if len(texts) > 3:
            texts[3:] = ["…"]
    return {position: "\n".join(texts) for position, texts in failures.items()}


def lines_of(
    placed: Sequence[Placed],
    value: Callable[[Row], Interval | None],
    predicted: Sequence[tuple[str, float, Interval]] = (),
    *,
    metric: str = "",
    is_judged: bool = False,
    mixes: bool = False,
) -> tuple[ChartLine, ...]:
    """Return a line with its own color for each name, without names that have no value.

    Each panel of a chart has its own lines.

    Args:
        value: returns a row's value, or None without one.
        predicted: line names with predicted points.
        metric: name of the metric, which may be estimated.
        is_judged: whether to ring odd sizes.
        mixes: whether device times of CUDA graphs stand beside others.
    """
    by_name: dict[str, list[tuple[float, Row]]] = {}
    for placed_point in placed:
        points_of_line = by_name.setdefault(placed_point.name, [])
        if placed_point.row:
            points_of_line.append((placed_point.x, placed_point.row))
    lines = []
    for color, (name, points_of_line) in enumerate(by_name.items()):
        points_of_line.sort(key=lambda point: point[0])
        odd = odd_sizes([row for _, row in points_of_line]) if is_judged else {}
        points, rings = list[tuple[float, Interval, str]](), dict[float, str]()
        for x, row in points_of_line:
            if y := value(row):
                is_graph = mixes and row.time_kind == GRAPH
                points.append((x, y, _rough(row, y, metric) or is_graph * "as a CUDA graph"))
            if row.key in odd:
                rings[x] = _odd_text(row.key, odd[row.key])
        if points:
            xs, ys, rough = zip(*points, strict=True)
            bands = dict(sorted((x, y) for label, x, y in predicted if label == name))
            lines.append(
                ChartLine(
                    label=name, x=xs, y=ys, color=color, rough=rough, odd=rings, predicted=bands
                )
            )
    return tuple(lines)


def _rough(row: Row, value: Interval, metric: str) -> str:
    """Return why a value's marker is hollow; empty if it is not."""
    if (own_metric := row.metric(metric)) and own_metric.estimated:
        return "≈ estimated"
    # a memory peak has no interval
    if (value.low is None and metric != PEAK_MEMORY) or wording.says_nothing(value):
        return "≈ no useful interval"
    return ""


def _odd_text(key: Key, odd: Odd) -> str:
    """Return the text at a ring: `224: +35 % against the fit`, or against another size."""
    sign = "−"
    if odd.ratio > 1:
        sign = "+"
    reference = "the fit"
    if odd.other:
        reference = odd.other.size_label
    return f"{key.size_label}: {sign}{percent(abs(odd.ratio - 1))} against {reference}"


def subtitle(table: Sequence[Row], device: str | None) -> str:
    """Return the kinds of values, the scope for intervals, and the device.

    Plots of runs and sweeps have it below their title.
    """
    kinds = ", ".join(dict.fromkeys(time_title(row.time_kind) for row in table if row.time_kind))
    interval = "interval"
    if scope := wording.scope(table):
        interval += f" of {scope}"
    on_device = device or "an unknown device"
    return f"{kinds} per call: medians with their 95 % {interval}, on {on_device}"


def footer(
    table: Sequence[Row], records: Sequence[Record], of_sweep: Iterable[Diagnostic] = ()
) -> str:
    """Return the codes of errors and warnings in records, rows and a sweep; empty without any.

    Plots of runs and sweeps show it below the axes.
    """
    raised = list[Diagnostic]()
    for record in records:
        raised += record.doubts
    for row in table:
        raised += row.doubts
    return footer_of([*raised, *of_sweep])
