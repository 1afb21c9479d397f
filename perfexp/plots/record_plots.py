"""The plots of a record and of a sweep as data; `canvas` draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from perfexp.forecast.predictions import INTERPOLATED, Forecast, key_of
from perfexp.plots.chart import Band, Bars, Caption, Chart, Curve, Line, Panel, Strips, footer_of
from perfexp.records import units
from perfexp.records.record import Key, Record
from perfexp.records.summary import MEGAPIXEL, TIME_KINDS, Row, rows, scalings
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.statistics import estimators
from perfexp.summaries.subject import constant, label, one_line, shape, subject, varying
from perfexp.summaries.sweep_summary import paired
from perfexp.summaries.wording import ENERGY, PEAK_MEMORY, find_metric, interval_of, scaling_text

#: Limit on points of one size and batch size as distributions side by side; more are bars.
_MOST_STRIPS = 3
#: Fields that make an axis if they vary.
_NUMERIC = ("input_size", "batch_size")
#: Panels below the times, if measured: title, metric, unit.
_PANELS = (("energy per call", ENERGY, "joules"), ("peak memory", PEAK_MEMORY, "bytes"))
#: Legend of predictions.
_BAND = "predicted, with 90 % interval"
#: Line segments of a fitted curve.
_CURVE_SEGMENTS = 60


class _Named(NamedTuple):
    """A row with the name of its line."""

    name: str
    row: Row


def plot(record: Record, forecasts: Sequence[Forecast] = ()) -> Chart | Bars | Strips | None:
    """Return the plot of a record.

    It shows time against input size, or against batch size if only that varies, with the throughput if batch sizes
    vary; if neither varies, the samples. None if nothing was timed.

    Args:
        forecasts: predictions of a sparse sweep, shown as bands in place of the scaling model.
    """
    table = rows(record)
    timed = [row for row in table if row.time]
    if not timed:
        return None
    about = subject(record.plan, record.environment)
    title = " · ".join(filter(None, (str(about), shape(row.key for row in table))))
    caption = Caption(title=title, subtitle=_subtitle(timed, about.device), footer=_footer(table, [record]))
    fields, axis = _axes(table)
    named = [_Named(label(row.key, [name for name in fields if name != axis]), row) for row in table]
    if axis:
        chart = _chart(caption, named, axis, fitted=axis == "input_size" and not forecasts)
        return _with_bands(chart, table[0].key, fields, axis, forecasts)
    if len(timed) <= _MOST_STRIPS:
        return Strips(caption=caption, rows=tuple(entry for entry in named if entry.row.time))
    return _bars(caption, named)


def sweep_plot(sweep: Sweep, records: Sequence[Record]) -> Chart | Bars | None:
    """Return the plot of a sweep: a line for each combination of the axes that are not numbers; None for none."""
    pairs = _by_one_time([(child, row) for child, record in paired(sweep, records) if record for row in rows(record)])
    table = [row for _, row in pairs]
    if not any(row.time for row in table):
        return None
    subjects = [subject(record.plan, record.environment) for record in records]
    devices = dict.fromkeys(about.device for about in subjects if about.device)
    same = label(table[0].key, constant(row.key for row in table))
    title = " · ".join(filter(None, (one_line(sweep.name), same, units.counted(len(sweep.children), "run"))))
    caption = Caption(title=title, subtitle=_subtitle(table, ", ".join(devices)), footer=_footer(table, records))
    fields, axis = _axes(table)
    named = [_Named(_sweep_label(child.axes, row.key, fields, axis), row) for child, row in pairs]
    return _chart(caption, named, axis) if axis else _bars(caption, named)


def _axes(table: Sequence[Row]) -> tuple[tuple[str, ...], str | None]:
    fields = varying(row.key for row in table)
    return fields, next((name for name in _NUMERIC if name in fields), None)


def _by_one_time(pairs: Sequence[tuple[SweepChild, Row]]) -> list[tuple[SweepChild, Row]]:
    """The rows of a sweep with the first kind of time that all have; unchanged if there is none."""
    timed = [row for _, row in pairs if row.time]
    kind = next((kind for kind in TIME_KINDS if all(kind in row.times for row in timed)), None)
    return [(child, replace(row, time_kind=kind) if kind and row.time else row) for child, row in pairs]


def _chart(caption: Caption, named: Sequence[_Named], axis: str, *, fitted: bool = False) -> Chart:
    where, title, ticks = _positions([entry.row.key for entry in named], axis)
    timed = [entry for entry in named if entry.row.time]
    distinct = _with_kinds(timed)
    times = _lines(distinct, where, lambda row: row.time.median if row.time else None)
    curves = _curves(distinct, where) if fitted else ()
    panels = [Panel(title="time per call", lines=times, unit="seconds", curves=curves)]
    if len({entry.row.key.batch_size for entry in named}) > 1:
        panels.append(Panel(title="throughput", lines=_lines(timed, where, lambda row: row.samples_per_second)))
    optional = ((about, _lines(timed, where, partial(_metric, name)), unit) for about, name, unit in _PANELS)
    panels += [Panel(title=about, lines=lines, unit=unit) for about, lines, unit in optional if lines]
    return Chart(caption=caption, axis=title, ticks=ticks, panels=tuple(panels), gaps=_gaps(named, where))


def _with_bands(chart: Chart, key: Key, fields: Sequence[str], axis: str, forecasts: Sequence[Forecast]) -> Chart:
    """Add the predictions of times and energies beside the measured points.

    Args:
        chart: measured points.
        key: any key of the record, for the fields that are the same in all.
        fields: fields that differ between points.
        axis: field of the horizontal axis.
    """
    bands: dict[str, list[Band]] = {}
    for forecast in forecasts:
        of_line: dict[str, list[tuple[float, estimators.Interval]]] = {}
        for point in forecast.points:
            own = key_of(point.pair, forecast.curve.phase, key.precision)
            where, _, _ = _positions([own], axis)
            if point.source == INTERPOLATED and point.value is not None and chart.axis == _positions([own], axis)[1]:
                name = label(own, [name for name in fields if name != axis])
                of_line.setdefault(name, []).append((where[own], point.value))
        for name, points in of_line.items():
            points.sort(key=lambda point: point[0])
            x, y = zip(*points, strict=True)
            title = _BAND if not bands.get(forecast.curve.quantity) else ""
            bands.setdefault(forecast.curve.quantity, []).append(Band(label=title, line=name, x=x, y=y))
    titles = {"time": "time per call", "energy": "energy per call"}
    return replace(
        chart,
        panels=tuple(
            replace(panel, bands=tuple(bands.get(quantity, ())))
            for panel in chart.panels
            for quantity in [next((name for name, title in titles.items() if title == panel.title), "")]
        ),
    )


def _metric(name: str, row: Row) -> estimators.Interval | None:
    metric = find_metric(row, name)
    if metric is None or metric.value is None:
        return None
    return interval_of(metric)


def _curves(named: Sequence[_Named], where: dict[Key, float]) -> tuple[Curve, ...]:
    """Growth of the times from the smallest size to the largest; sizes are sides if all are squares."""
    labels = {entry.row.key: entry.name for entry in named}
    models, curves = scalings([entry.row for entry in named]), list[Curve]()
    for number, scaling in enumerate(models):
        start, end = where[scaling.keys[0]], where[scaling.keys[-1]]
        power = 1 if end == scaling.key.pixels else 2
        x = [start + (end - start) * step / _CURVE_SEGMENTS for step in range(_CURVE_SEGMENTS + 1)]
        y = tuple(scaling.fit.at(position**power / MEGAPIXEL) for position in x)
        text = scaling_text(scaling) if len(models) == 1 else "" if number else "scaling model"
        curves.append(Curve(label=text, line=labels[scaling.key], x=tuple(x), y=y))
    return tuple(curves)


def _with_kinds(named: Sequence[_Named]) -> Sequence[_Named]:
    """The same rows, with the kinds of their times in their names if there are several kinds."""
    if len({entry.row.time_kind for entry in named if entry.row.time}) < 2:
        return named
    return [_Named(" · ".join(filter(None, (name, row.time_kind))), row) for name, row in named]


def _gaps(named: Sequence[_Named], where: dict[Key, float]) -> dict[float, str]:
    """Status of failed points by position, with the line that they are missing from if there are several."""
    several = len({entry.name for entry in named}) > 1
    failures: dict[float, list[str]] = {}
    for entry in named:
        if not entry.row.time:
            text = f"{entry.name}: {entry.row.status.value}" if several else entry.row.status.value
            failures.setdefault(where[entry.row.key], []).append(text)
    return {position: "\n".join(texts[:3] + ["…"] * (len(texts) > 3)) for position, texts in failures.items()}


def _bars(caption: Caption, named: Sequence[_Named]) -> Bars:
    return Bars(
        caption=caption,
        labels=tuple(entry.name for entry in _with_kinds(named)),
        values=tuple(entry.row.time.median if entry.row.time else None for entry in named),
        remarks=tuple("" if entry.row.time else entry.row.status.value for entry in named),
    )


def _positions(keys: Sequence[Key], axis: str) -> tuple[dict[Key, float], str, dict[float, str]]:
    if axis == "batch_size":
        where = {key: float(key.batch_size) for key in keys}
        return where, "batch size (samples per call)", {where[key]: str(key.batch_size) for key in keys}
    if all(key.input_size[0] == key.input_size[1] for key in keys):
        where, title = {key: float(key.input_size[0]) for key in keys}, "input size (pixels a side)"
    else:
        where, title = {key: float(key.pixels) for key in keys}, "input size (height × width, pixels)"
    ticks: dict[float, list[str]] = {}
    for key in keys:
        if key.size_label not in ticks.setdefault(where[key], []):
            ticks[where[key]].append(key.size_label)
    return where, title, {position: "\n".join(labels) for position, labels in ticks.items()}


def _lines(
    named: Iterable[_Named], where: dict[Key, float], value: Callable[[Row], estimators.Interval | None]
) -> tuple[Line, ...]:
    points_of: dict[str, list[tuple[float, estimators.Interval]]] = {}
    for entry in named:
        if y := value(entry.row):
            points_of.setdefault(entry.name, []).append((where[entry.row.key], y))
    lines = []
    for name, points in points_of.items():
        points.sort(key=lambda point: point[0])
        lines.append(Line(label=name, x=tuple(x for x, _ in points), y=tuple(y for _, y in points)))
    return tuple(lines)


def _sweep_label(axes: dict[str, str], key: Key, fields: Sequence[str], axis: str | None) -> str:
    """The values of the axes that are not the horizontal one, then other differences of a point."""
    shown = {"phase" if name == "mode" else name for name in axes}
    words = [_axis_text(name, value) for name, value in axes.items() if name not in _NUMERIC or not axis]
    rest = [name for name in fields if name != axis and (name not in shown or name in _NUMERIC)]
    return " · ".join([*words, *filter(None, [label(key, rest)])])


def _axis_text(name: str, value: str) -> str:
    """The value of an axis, with its name unless the value is a word."""
    return one_line(value) if value[:1].isalpha() else one_line(f"{name.rsplit('.', 1)[-1]}={value}")


def _subtitle(table: Sequence[Row], device: str | None) -> str:
    kinds = ", ".join(dict.fromkeys(row.time_kind for row in table if row.time_kind))
    return f"{kinds} per call, median with its 95 % interval where there is one, on {device or 'an unknown device'}"


def _footer(table: Sequence[Row], records: Sequence[Record]) -> str:
    of_records = [doubt for record in records for doubt in record.doubts]
    return footer_of(of_records + [doubt for row in table for doubt in row.doubts])
