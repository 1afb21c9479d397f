"""The plot of a record as data; `drawing` draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from perfexp.forecast.predictions import INTERPOLATED, Forecast, key_of
from perfexp.plots.chart import Band, Caption, Chart, Curve, Line, Panel, Strips, Taken, footer_of
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.growth import Odd, odd_sizes, scalings
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.quantities import ENERGY, PEAK_MEMORY, TIMES, time_title
from perfexp.records.record import Key, Record
from perfexp.records.summary import Row, joined, rows, series_of_processes
from perfexp.statistics import estimators
from perfexp.summaries import wording
from perfexp.summaries.subject import label, shape, subject, varying
from perfexp.summaries.wording import (
    find_metric,
    interval_of,
    interval_text,
    median_text,
    percent,
    scaling_text,
)

#: Fields that make an axis if they vary.
NUMERIC = ("input_size", "batch_size")
#: Panels below the times, if measured: title, metric, unit.
_PANELS = (("peak memory", PEAK_MEMORY, "bytes"), ("energy per call", ENERGY, "joules"))
#: Legend of predictions.
_BAND = "predicted, with 90 % interval"
#: Line segments of a fitted curve.
_CURVE_SEGMENTS = 60
#: Limit on lines that have the latency behind them, and share of the best rate at the knee, with its least batches.
_MOST_WITH_LATENCY, _KNEE, _LEAST_BATCHES = 2, 0.9, 3


class Named(NamedTuple):
    """A row with the name of its line."""

    name: str
    row: Row


def plot(record: Record, forecasts: Sequence[Forecast] = ()) -> Chart | Strips | None:
    """Return the plot of a record.

    It shows times, samples per second and memory against input size, or against batch size if only that varies. If
    neither varies, it shows all samples of all times. None if nothing was timed.

    Args:
        forecasts: predictions of a sparse sweep, shown as bands in place of the scaling model.
    """
    table = rows(record)
    timed = [row for row in table if row.time]
    if not timed:
        return None
    about = subject(record.plan, record.environment)
    title = " · ".join(filter(None, (str(about), shape(row.key for row in table))))
    caption = Caption(title=title, subtitle=subtitle(timed, about.device), footer=footer(table, [record]))
    fields, axis = axes_of(table)
    if not axis:
        of = f"; 95 % intervals of {scope}" if (scope := wording.scope(timed)) else ""
        where = f"all samples of all times after the warm-up{of}, on {about.device or 'an unknown device'}"
        points = tuple(_strips(record, timed, fields))
        return Strips(caption=replace(caption, subtitle=where), points=points)
    named = [Named(label(row.key, [name for name in fields if name not in (axis, "phase")]), row) for row in table]
    chart = chart_of(caption, named, axis, fitted=axis == "input_size" and not forecasts)
    return _with_bands(chart, table[0].key, fields, axis, forecasts)


def axes_of(table: Sequence[Row]) -> tuple[tuple[str, ...], str | None]:
    """The fields that vary, and the one of the horizontal axis, if there is one."""
    fields = varying(row.key for row in table)
    return fields, next((name for name in NUMERIC if name in fields), None)


def _strips(record: Record, timed: Sequence[Row], fields: Sequence[str]) -> Iterator[tuple[str, tuple[Taken, ...]]]:
    series = {(key, name): joined(processes) for key, name, processes in series_of_processes(record)}
    for row in timed:
        kinds = [row.time_kind or "", *(name for name in row.times if name != row.time_kind)]
        taken = (
            Taken(
                name=time_title(name),
                meaning=TIMES[name].caption,
                series=series[row.key, name],
                time=row.times[name],
                text=median_text(row) if name == row.time_kind else interval_text(row.times[name].median),
            )
            for name in kinds
        )
        yield label(row.key, fields), tuple(taken)


def chart_of(caption: Caption, named: Sequence[Named], axis: str, *, fitted: bool = False) -> Chart:
    """Panels of times, one for each phase and kind of time, of rates, memory and energy, over a numeric axis."""
    where, title, ticks = _positions([entry.row.key for entry in named], axis)
    timed = [entry for entry in named if entry.row.time]
    odd = dict[int, Odd]()
    for name in dict.fromkeys(entry.name for entry in timed) if axis == "input_size" else ():  # each line by itself
        of_line = [entry.row for entry in timed if entry.name == name]
        found = odd_sizes(of_line)
        odd |= {id(row): found[row.key] for row in of_line if row.key in found}
    panels = list[Panel]()
    for phase in dict.fromkeys(entry.row.key.phase for entry in timed):
        of_phase = [entry for entry in timed if entry.row.key.phase == phase]
        prefix = f"{phase}: " if len({entry.row.key.phase for entry in timed}) > 1 else ""
        panels += (_time_panel(prefix, kind, of_phase, where, odd, fitted=fitted) for kind in _kinds(of_phase))
        panels.append(_rate_panel(prefix, of_phase, where, odd, axis))
        for about, metric, unit in _PANELS:
            if lines := _lines(of_phase, where, partial(_metric, metric), partial(_is_estimated, metric)):
                panels.append(Panel(title=prefix + about, lines=lines, unit=unit, odd=_rings(of_phase, where, odd)))
    gaps = _gaps(named, where)
    is_doubling = axis == "batch_size"
    return Chart(caption=caption, axis=title, ticks=ticks, panels=tuple(panels), gaps=gaps, is_doubling=is_doubling)


def _kinds(named: Sequence[Named]) -> list[str]:
    return list(dict.fromkeys(entry.row.time_kind or "" for entry in named))


def _time_panel(
    prefix: str, kind: str, named: Sequence[Named], where: dict[Key, float], odd: dict[int, Odd], *, fitted: bool
) -> Panel:
    of_kind = [entry for entry in named if entry.row.time_kind == kind]
    lines = _lines(of_kind, where, lambda row: row.time.median if row.time else None)
    behind = tuple[Line, ...]()
    if kind in DEVICE_TIMES and len(lines) <= _MOST_WITH_LATENCY:
        having = [entry for entry in of_kind if "latency" in entry.row.times]
        light = _lines(having, where, lambda row: row.times["latency"].median)
        behind = tuple(replace(line, label=_joined(line.label, "latency"), is_light=True) for line in light)
        lines = tuple(replace(line, label=_joined(line.label, kind)) for line in lines) if behind else lines
        of_kind = [Named(_joined(name, kind), row) for name, row in of_kind] if behind else of_kind
    curves = _curves(of_kind, where) if fitted else ()
    rings = _rings(of_kind, where, odd, labeled=True)
    return Panel(
        title=f"{prefix}{time_title(kind)} per call", lines=(*behind, *lines), unit="seconds", curves=curves, odd=rings
    )


def _rate_panel(prefix: str, named: Sequence[Named], where: dict[Key, float], odd: dict[int, Odd], axis: str) -> Panel:
    lines = _lines(named, where, lambda row: row.samples_per_second)
    marks = _knee(lines[0]) if axis == "batch_size" and len(lines) == 1 else {}
    return Panel(title=f"{prefix}throughput", lines=lines, odd=_rings(named, where, odd), marks=marks)


def _knee(rates: Line) -> dict[float, str]:
    """The batch from which on the rate stays near the best one, or the last one if no other is near it.

    None if the rate falls in between, up to the last batch or the one before, or if intervals are too wide for it.
    """
    widths = [y.relative_half_width for y in rates.y]
    if len(rates.x) < _LEAST_BATCHES or not all(width is not None and width <= (1 - _KNEE) / 2 for width in widths):
        return {}
    best = max(y.value for y in rates.y)
    lower = max((x for x, y in zip(rates.x, rates.y, strict=True) if y.value < _KNEE * best), default=0.0)
    near = [x for x in rates.x if x > lower]
    is_rising = all(y.value < _KNEE * best for y in rates.y[:-1])
    if not near or (len(near) == 1 and not is_rising):
        return {}
    if len(near) == 1:
        return {near[0]: f"still rising at batch {near[0]:g}, the largest"}
    return {near[0]: f"{_KNEE:.0%} of the best rate from batch {near[0]:g} on".replace("%", " %")}


def _rings(
    named: Sequence[Named], where: dict[Key, float], odd: dict[int, Odd], *, labeled: bool = False
) -> dict[tuple[float, str], str]:
    """The odd sizes by position and line, each with its size and by how much it is odd."""
    return {
        (where[row.key], name): _ring_text(row.key, one) if labeled else ""
        for name, row in named
        if (one := odd.get(id(row)))
    }


def _ring_text(key: Key, odd: Odd) -> str:
    sign, against = "+" if odd.ratio > 1 else "−", f"{odd.other.size_label}" if odd.other else "the fit"
    return f"{key.size_label}: {sign}{percent(abs(odd.ratio - 1))} against {against}"


def _joined(*names: str) -> str:
    return " · ".join(filter(None, names))


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
                name = label(own, [name for name in fields if name not in (axis, "phase")])
                of_line.setdefault(name, []).append((where[own], point.value))
        prefix = f"{forecast.curve.phase}: " if "phase" in fields else ""
        for name, points in of_line.items():
            points.sort(key=lambda point: point[0])
            x, y = zip(*points, strict=True)
            known = bands.setdefault(prefix + forecast.curve.quantity, [])
            known.append(Band(label="" if known else _BAND, line=name, x=x, y=y))

    def banded(panel: Panel) -> Panel:
        prefix, _, title = panel.title.rpartition(": ")
        quantity = "energy" if title == "energy per call" else "time" if panel.unit == "seconds" else ""
        found = bands.get(f"{prefix}: {quantity}" if prefix else quantity, ())
        labels, kind = {line.label for line in panel.lines}, title.removesuffix(" per call")
        # a line that has the latency behind it has the kind of its time in its name
        own = (one if (one := _joined(band.line, kind)) in labels else band.line for band in found)
        return replace(panel, bands=tuple(replace(band, line=name) for band, name in zip(found, own, strict=True)))

    return replace(chart, panels=tuple(map(banded, chart.panels))) if bands else chart


def _metric(name: str, row: Row) -> estimators.Interval | None:
    metric = find_metric(row, name)
    if metric is None or metric.value is None:
        return None
    return interval_of(metric)


def _is_estimated(name: str, row: Row) -> bool:
    metric = find_metric(row, name)
    return metric is not None and metric.estimated


def _curves(named: Sequence[Named], where: dict[Key, float]) -> tuple[Curve, ...]:
    """Growth of the times from the smallest size to the largest; sizes are sides if all are squares."""
    models = [scaling for scaling in scalings([entry.row for entry in named]) if not scaling.doubt]
    curves = list[Curve]()
    for number, scaling in enumerate(models):
        start, end = where[scaling.keys[0]], where[scaling.keys[-1]]
        power = 1 if end == scaling.key.pixels else 2
        x = [start + (end - start) * step / _CURVE_SEGMENTS for step in range(_CURVE_SEGMENTS + 1)]
        y = tuple(scaling.fit.at(position**power / scaling.key.pixels) for position in x)
        text = scaling_text(scaling) if len(models) == 1 else "" if number else "scaling model"
        curves.append(Curve(label=text, x=tuple(x), y=y))
    return tuple(curves)


def _gaps(named: Sequence[Named], where: dict[Key, float]) -> dict[float, str]:
    """Status of failed points by position, with the line that they are missing from if there are several."""
    several = len({entry.name for entry in named}) > 1
    failures: dict[float, list[str]] = {}
    for entry in named:
        if not entry.row.time:
            text = f"{entry.name}: {entry.row.status.value}" if several else entry.row.status.value
            failures.setdefault(where[entry.row.key], []).append(text)
    return {position: "\n".join(texts[:3] + ["…"] * (len(texts) > 3)) for position, texts in failures.items()}


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
    named: Iterable[Named],
    where: dict[Key, float],
    value: Callable[[Row], estimators.Interval | None],
    is_estimated: Callable[[Row], bool] = lambda _: False,
) -> tuple[Line, ...]:
    points_of: dict[str, list[tuple[float, estimators.Interval, bool]]] = {}
    for entry in named:
        points = points_of.setdefault(entry.name, [])
        if known := value(entry.row):
            points.append((where[entry.row.key], known, is_estimated(entry.row)))
    lines = []
    for color, (name, points) in enumerate(points_of.items()):
        if points:
            points.sort(key=lambda point: point[0])
            x, y = tuple(x for x, _, _ in points), tuple(y for _, y, _ in points)
            estimated = frozenset(x for x, _, is_about in points if is_about)
            lines.append(Line(label=name, x=x, y=y, color=color, estimated=estimated))
    return tuple(lines)


def subtitle(table: Sequence[Row], device: str | None) -> str:
    """What the values are, whom their intervals hold for, and on which device."""
    kinds = ", ".join(dict.fromkeys(time_title(row.time_kind) for row in table if row.time_kind))
    of = f" of {scope}" if (scope := wording.scope(table)) else ""
    return f"{kinds} per call: medians with their 95 % interval{of}, on {device or 'an unknown device'}"


def footer(table: Sequence[Row], records: Sequence[Record], of_sweep: Iterable[Diagnostic] = ()) -> str:
    """The codes of the errors and warnings of records, rows and a sweep."""
    of_records = [doubt for record in records for doubt in record.doubts]
    return footer_of([*of_records, *(doubt for row in table for doubt in row.doubts), *of_sweep])
