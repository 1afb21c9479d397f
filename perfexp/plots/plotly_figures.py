"""Charts, bars and strips as figures of plotly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perfexp.plots.chart import (
    COLORS,
    GREY,
    Bars,
    Chart,
    Facet,
    Line,
    Panel,
    Strips,
    Taken,
    centers,
    dotted,
    spans_decades,
    unit_of,
)
from perfexp.plots.page import text
from perfexp.statistics.estimators import Interval

#: Heights in pixels of a panel, of a bar, and of what is around them.
_PANEL, BAR, AROUND = 300, 26, 110
#: Limits on positions with ticks of their own, and on the samples of a time.
_MOST_TICKS, _MOST_SAMPLES = 12, 2000
#: Room for the words at the end of the longest bar, as a share of it.
WORDS = 1.4
#: Gap between the end of a bar and its words, as a share of the longest.
_GAP = 0.01
#: Width of an interval's end and of a line.
_THIN, _LINE = 1.5, 2


def of_plot(plot: Chart | Bars | Strips) -> Iterator[Any]:
    """Yield the figures of a plot."""
    if isinstance(plot, Chart):
        yield _chart(plot)
    elif isinstance(plot, Bars):
        yield from (_facet(facet, plot.hollow) for facet in plot.facets)
    else:
        yield from (_strips(name, taken) for name, taken in plot.points)


def name_rows(figure: Any, labels: Sequence[str]) -> None:
    """Name the rows of a vertical axis from 0, the first one on top."""
    ticks = {"tickvals": list(range(len(labels))), "ticktext": list(map(text, labels))}
    figure.update_yaxes(range=[len(labels) - 0.5, -0.5], automargin=True, **ticks)


def laid_out(figure: Any, height: int) -> Any:
    """Set the look that all figures have in common, and the height in pixels."""
    return figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"t": 30, "l": 10, "r": 10, "b": 50},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        hoverlabel={"align": "left", "bgcolor": "white"},
    )


def _chart(chart: Chart) -> Any:
    figure = make_subplots(rows=len(chart.panels), cols=1, shared_xaxes=True, vertical_spacing=0.05)
    for row, panel in enumerate(chart.panels, 1):
        _panel(figure, chart, panel, {"row": row, "col": 1})
    ticks = {"tickvals": list(chart.ticks), "ticktext": [text(name) for name in chart.ticks.values()]}
    scale = {"type": "log"} if _is_log(chart) else {}
    figure.update_xaxes(**scale, **(ticks if len(chart.ticks) <= _MOST_TICKS else {}))
    if chart.hollow:
        look = {"mode": "markers", "marker": {"symbol": "circle-open", "size": 8, "color": GREY}}
        figure.add_scatter(x=[None], y=[None], name=text(f"≈ {chart.hollow}"), **look, row=1, col=1)
    figure.update_xaxes(title=text(chart.axis), row=len(chart.panels), col=1)
    named = set[str]()
    for trace in figure.data:  # a line has one entry in the legend, whatever the number of its panels
        trace.showlegend = bool(trace.name) and trace.showlegend is not False and trace.name not in named
        named.add(trace.name)
    return laid_out(figure, AROUND + _PANEL * len(chart.panels))


def _is_log(chart: Chart) -> bool:
    return chart.is_doubling or spans_decades(sorted(chart.ticks))


def _panel(figure: Any, chart: Chart, panel: Panel, place: dict[str, int]) -> None:
    values = [y.value for line in panel.lines for y in line.y]
    factor, unit = unit_of(panel.unit, values)
    for curve in panel.curves:
        look = {"mode": "lines", "line": {"color": GREY, "dash": "dash"}, "name": text(curve.label)}
        figure.add_scatter(x=curve.x, y=[value * factor for value in curve.y], hoverinfo="skip", **look, **place)
    for line in panel.lines:
        figure.add_trace(_line(chart, panel, line, factor, unit), **place)
        for x, y in zip(line.x, line.y, strict=True):
            if (words := panel.odd.get((x, line.label))) is not None and not line.is_light:
                ring = {"symbol": "circle-open", "size": 20, "color": "black", "line": {"width": 2}}
                words_above = {"mode": "markers+text", "text": [text(words)], "textposition": "top center"}
                at = {"x": [x], "y": [y.value * factor]}
                figure.add_scatter(**at, marker=ring, hoverinfo="skip", showlegend=False, **words_above, **place)
    for x, words in panel.marks.items():
        figure.add_vline(x=x, line_dash="dot", annotation_text=text(words), annotation_position="bottom left", **place)
        if _is_log(chart):  # on such an axis plotly takes logarithms as the positions of words, but not of lines
            figure.layout.annotations[-1].x = math.log10(x)
    scale = {"type": "log"} if spans_decades(values) else {"rangemode": "tozero"}
    figure.update_yaxes(title=text(f"{panel.title} ({unit})"), **scale, **place)


def _line(chart: Chart, panel: Panel, line: Line, factor: float, unit: str) -> Any:
    """A line whose points show value and interval to the mouse."""
    name, hover, hollow = text(line.label), [], panel.hollow(line)
    symbols = ["circle-open" if is_hollow else "circle" for is_hollow in hollow]
    for x, y, is_hollow in zip(line.x, line.y, hollow, strict=True):
        ends = "no interval" if y.low is None or y.high is None else f"{y.low * factor:.4g} … {y.high * factor:.4g}"
        value = f"{'≈ ' * is_hollow}{y.value * factor:.4g} {unit}"
        hover.append(f"<b>{text(chart.ticks[x])}</b> {name}<br>{value}<br>{ends}")
    return go.Scatter(
        x=line.x,
        y=[y.value * factor for y in line.y],
        name=name,
        legendgroup=name,
        opacity=0.5 if line.is_light else 1.0,
        mode="lines+markers",
        line={"color": COLORS[line.color % len(COLORS)], "width": _LINE},
        marker={"symbol": symbols, "size": 8},
        error_y=_errors(line.y, factor),
        hovertext=hover,
        hoverinfo="text",
    )


def _errors(intervals: Sequence[Interval | None], factor: float) -> dict[str, object]:
    """The ends of intervals as error bars; none for a missing one."""
    known = [(one.value, one.low, one.high) if one else (0.0, None, None) for one in intervals]
    high = [(value if end is None else end) - value for value, _, end in known]
    low = [value - (value if end is None else max(end, 0.0)) for value, end, _ in known]
    ends = {"array": [end * factor for end in high], "arrayminus": [end * factor for end in low]}
    return {**ends, "thickness": _THIN}


def _facet(facet: Facet, hollow: str) -> Any:
    """Bars with their words at the end; the pale bar of a caller's time lies behind that of the device.

    Args:
        hollow: meaning of hollow bars.
    """
    rows = [(name, bar) for name, group in facet.groups.items() for bar in group]
    times = [one for _, bar in rows for one in (bar.value, bar.behind) if one]
    most = max((one.high or one.value for one in times), default=0.0)
    factor, unit = unit_of("seconds", [most])
    labels = [" · ".join(filter(None, (name, bar.label))) for name, bar in rows]
    figure, places = go.Figure(), list(range(len(rows)))
    behind = [bar.behind.value * factor if bar.behind else None for _, bar in rows]
    if any(behind):
        look = {"marker_color": COLORS[0], "opacity": 0.25, "error_x": _errors([bar.behind for _, bar in rows], factor)}
        figure.add_bar(x=behind, y=places, orientation="h", name="latency", **look)
    looks = (False, facet.title.partition(";")[0], COLORS[0]), (True, f"≈ {hollow}", "white")
    for is_hollow, name, color in looks:
        chosen = {place: bar for place, (_, bar) in enumerate(rows) if bar.is_hollow is is_hollow}
        if chosen:
            figure.add_bar(
                x=[bar.value.value * factor if bar.value else 0 for bar in chosen.values()],
                y=list(chosen),
                orientation="h",
                name=text(name),
                width=0.5,
                marker={"color": color, "line": {"color": COLORS[0], "width": _THIN}},
                error_x=_errors([bar.value for bar in chosen.values()], factor),
                hovertext=[f"{text(labels[place])}<br>{text(bar.text)}" for place, bar in chosen.items()],
                hoverinfo="text",
            )
    ends = [max((one.high or one.value for one in (bar.value, bar.behind) if one), default=0.0) for _, bar in rows]
    words = {"mode": "text", "text": [text(bar.text) for _, bar in rows], "textposition": "middle right"}
    x = [(end + _GAP * most) * factor for end in ends]
    figure.add_scatter(x=x, y=places, showlegend=False, hoverinfo="skip", **words)
    figure.update_layout(barmode="overlay")
    name_rows(figure, labels)
    figure.update_xaxes(title=text(f"{facet.title} ({unit})"), range=[0, WORDS * most * factor])
    return laid_out(figure, AROUND + BAR * len(rows))


def _strips(name: str, taken: Sequence[Taken]) -> Any:
    factor, unit = unit_of("seconds", [one.time.median.value for one in taken])
    figure = go.Figure()
    for position, one in enumerate(taken):
        samples = [sample * factor for sample in one.series.measured[:_MOST_SAMPLES]]
        figure.add_box(
            x=samples,
            y=[position] * len(samples),
            orientation="h",
            name=text(f"{one.name}: {one.text}"),
            boxpoints="all",
            jitter=0.6,
            pointpos=0,
            fillcolor="rgba(0,0,0,0)",
            line={"color": "rgba(0,0,0,0)"},
            marker={"size": 4, "color": COLORS[position % len(COLORS)], "opacity": 0.6},
            hovertemplate=f"%{{x:.4g}} {unit}<extra></extra>",
        )
        look = {"color": "black", "width": _LINE, "dash": "dot" if one.is_dotted else "solid"}
        mark = {"mode": "lines", "line": look, "hoverinfo": "skip"}
        ends = [position - 0.35, position + 0.35]
        figure.add_scatter(x=[one.time.median.value * factor] * 2, y=ends, showlegend=False, **mark)
    name_rows(figure, [one.name for one in taken])
    prefix = f"{name}: " if name else ""
    meaning = f"black: {centers(taken)}" + (f"; dotted, ≈: {about}" if (about := dotted(taken)) else "")
    figure.update_xaxes(title=text(f"{prefix}time per call ({unit}), {meaning}"), rangemode="tozero")
    return laid_out(figure, AROUND + 3 * BAR * len(taken))
