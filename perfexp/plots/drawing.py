"""Draw charts, bars and strips by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

from perfexp.plots.canvas import DARK, HALO, caption_of, constrained, matplotlib, plain, save, style
from perfexp.plots.chart import COLORS, GREY, Bar, Bars, Chart, Facet, Line, Panel, Strips, spans_decades, unit_of
from perfexp.plots.strips import compose as strips_figure
from perfexp.roofline.kernel_names import cut
from perfexp.statistics import estimators

#: Characters of a bar's name, and of the reason why there is none.
LONGEST_LABEL, _LONGEST_REASON = 55, 90
_MARKERS = ("o", "s", "^", "D", "v")
#: Looks of hollow markers, and of the edges of bars.
_HOLLOW = {"markerfacecolor": "white", "markersize": 6}
_EDGE = {"edgecolor": COLORS[0], "linewidth": 1.5}
#: Middle of the axes, right of which the label of a line is left of it.
_MIDDLE = 0.5
#: Limit on measured positions with ticks of their own; matplotlib places the ticks of more.
_MOST_TICKS = 12
#: An axis from zero reaches this far beyond the largest value, to show its whole marker and the label of a ring.
_HEADROOM = 1.15
#: Height of a panel, of a bar and of what is around them, in inches.
_PANEL, _BAR, _AROUND = 2.9, 0.36, 1.6
#: Limit on lines with the legend above the axes, and on its characters in a row; those that a mark takes the room of.
_MOST_ABOVE, _LEGEND_ROW, _LEGEND_MARK = 3, 130, 6
#: Limit on points with error bars; more have a band.
_MOST_ERROR_BARS = 25
#: Width of a stub for a run without a time, and room for the words at the end of the longest bar, as shares of it.
_STUB, _WORDS = 0.04, 1.3


def draw(plot: Chart | Bars | Strips) -> bytes:
    """Return a plot as PNG."""
    return save(partial(compose, plot))


def compose(plot: Chart | Bars | Strips) -> Any:
    """Return a plot as a figure of matplotlib."""
    if isinstance(plot, Strips):
        return strips_figure(plot)
    figure = _chart(plot) if isinstance(plot, Chart) else _bars(plot)
    caption_of(figure, plot.caption)
    return figure


def _chart(chart: Chart) -> Any:
    figure = constrained(max(8.0, _AROUND + _PANEL * len(chart.panels)))
    column = figure.subplots(len(chart.panels), 1, sharex=True, squeeze=False)[:, 0]
    axes, positions = column[-1], sorted(chart.ticks)
    if chart.is_doubling:
        axes.set_xscale("log", base=2)
    elif spans_decades(positions):
        axes.set_xscale("log")
    for axes, panel in zip(column, chart.panels, strict=True):
        _panel(axes, panel)
        _gaps(axes, chart.gaps)
        is_first = axes is column[0]
        has_names = len(panel.lines) > 1 or panel.curves or panel.bands or chart.gaps or chart.hollow
        if (has_names and is_first) or any(line.is_light for line in panel.lines):
            _legend(axes, chart.hollow if is_first else "", beside=len(panel.lines) > _MOST_ABOVE)
    axes = column[-1]
    if axes.get_xscale() == "log":
        axes.xaxis.set_major_formatter(_plain_number)
    if len(positions) <= _MOST_TICKS:
        axes.minorticks_off()
        axes.set_xticks(positions, [chart.ticks[position] for position in positions])
    axes.set_xlabel(chart.axis, fontsize=13)
    return figure


def _panel(axes: Any, panel: Panel) -> None:
    factor, unit = unit_of(panel.unit, (y.value for line in panel.lines for y in line.y))
    for curve in panel.curves:
        y = [value * factor for value in curve.y]
        axes.plot(curve.x, y, color=DARK, linewidth=1.2, linestyle="--", zorder=1.5, label=plain(curve.label) or None)
    for line in panel.lines:
        color = COLORS[line.color % len(COLORS)]
        for band in (band for band in panel.bands if band.line == line.label):
            predicted, least, most = _scaled(band.y, factor)
            axes.fill_between(band.x, least, most, color=color, alpha=0.2, linewidth=0, label=plain(band.label) or None)
            axes.plot(band.x, predicted, color=color, linewidth=1, zorder=1.5)
        _line(axes, line, factor, panel)
        for (x, label), text in panel.odd.items():
            if label == line.label and x in line.x:
                _ring(axes, x, line.y[line.x.index(x)].value * factor, text)
    axes.set_ylabel(f"{panel.title} ({unit})", fontsize=12)
    for x, text in panel.marks.items():
        axes.axvline(x, color=DARK, linewidth=1.2, linestyle=":")
        is_right = axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0] > _MIDDLE
        place = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "path_effects": HALO}
        side, shift = ("right", -6) if is_right else ("left", 6)
        axes.annotate(plain(text), (x, 0.06), (shift, 0), fontsize=11, ha=side, **place)
    values = [y.value * factor for line in panel.lines for y in line.y]
    _vertical_scale(axes, values, base=2 if panel.unit == "bytes" else 10)
    top = axes.get_ylim()[1]
    beyond = [x for line in panel.lines for x, y in zip(line.x, line.y, strict=True) if (y.high or 0) * factor > top]
    if beyond:
        mark = {"marker": "^", "color": DARK, "markersize": 5, "linestyle": "none", "clip_on": False}
        axes.plot(beyond, [1.0] * len(beyond), transform=axes.get_xaxis_transform(), label="beyond the axis", **mark)
    style(axes)


def _line(axes: Any, line: Line, factor: float, panel: Panel) -> None:
    """One line with its intervals."""
    color = COLORS[line.color % len(COLORS)]
    # six lines and more have other pairs of color and marker
    marker = _MARKERS[(line.color + line.color // len(COLORS)) % len(_MARKERS)]
    values, low, high = _scaled(line.y, factor)
    look = {"color": color, "alpha": 0.45 if line.is_light else 1.0, "label": plain(line.label) or None}
    dash = {"linewidth": 0.0 if panel.bands else 1.4 if line.is_light else 2.0, "linestyle": "-"}
    axes.plot(line.x, values, marker=marker, markersize=4 if line.is_light else 6, **dash, **look)
    hollow = numpy.array(panel.hollow(line))
    axes.plot(numpy.array(line.x)[hollow], values[hollow], marker, color=color, zorder=2.5, **_HOLLOW)
    if line.is_light:  # its intervals may leave the axes, whose scale is that of the values
        ends = [((x, one[0]), (x, one[1])) for x, one in zip(line.x, zip(low, high, strict=True), strict=True)]
        bars = matplotlib.collections.LineCollection(ends, colors=color, alpha=0.45, linewidths=1.2)
        axes.add_collection(bars, autolim=False)
        return
    if len(line.x) > _MOST_ERROR_BARS:
        axes.fill_between(line.x, low, high, color=color, alpha=0.25, linewidth=0)
    else:
        error = (values - low, high - values)
        axes.errorbar(line.x, values, yerr=error, fmt="none", ecolor=color, elinewidth=1.5, capsize=5)


def _ring(axes: Any, x: float, y: float, text: str) -> None:
    axes.plot([x], [y], "o", color="black", fillstyle="none", markersize=15, markeredgewidth=1.6, zorder=5)
    if text:
        place = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
        axes.annotate(plain(text), (x, y), (0, 11), fontsize=11, path_effects=HALO, zorder=6, **place)


def _gaps(axes: Any, gaps: dict[float, str]) -> None:
    foot = axes.get_xaxis_transform()
    cross = {"marker": "x", "color": DARK, "markersize": 9, "markeredgewidth": 2, "linestyle": "none"}
    if gaps:
        axes.plot(list(gaps), [0.04] * len(gaps), transform=foot, label="not measured", **cross)
    for position, status in gaps.items():
        words = {"ha": "center", "fontsize": 10, "color": DARK, "rotation": 90 if len(gaps) > 3 else 0}
        axes.annotate(plain(status), (position, 0.04), (0, 9), xycoords=foot, textcoords="offset points", **words)


def _bars(bars: Bars) -> Any:
    rows = [sum(len(group) + bool(name) for name, group in facet.groups.items()) for facet in bars.facets]
    figure = constrained(max(4.0, _AROUND + _BAR * sum(rows) + 0.8 * len(rows)))
    column = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[number + 1.5 for number in rows])[:, 0]
    for axes, facet in zip(column, bars.facets, strict=True):
        _facet(axes, facet)
    if bars.hollow:
        look: dict[str, Any] = {"facecolor": "white", **_EDGE}
        _legend_of(column[0], [matplotlib.patches.Patch(label=f"≈ {bars.hollow}", **look)])
    return figure


def _facet(axes: Any, facet: Facet) -> None:
    """Bars from zero with their words at the end; the groups one below the other, each under its name."""
    known = [bar for group in facet.groups.values() for bar in group]
    most = max(
        (end for bar in known for one in (bar.value, bar.behind) if one for end in (one.value, one.high or 0)),
        default=1.0,
    )
    factor, unit = unit_of("seconds", [most])
    position, ticks = 0, list[tuple[int, str]]()
    for name, group in facet.groups.items():
        if name:
            words = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center", "fontweight": "bold"}
            axes.text(-0.01, position, plain(cut(name, LONGEST_LABEL)), fontsize=11, **words)
            position += 1
        for bar in group:
            _bar(axes, bar, position, factor, most * factor)
            ticks.append((position, plain(cut(bar.label, LONGEST_LABEL))))
            position += 1
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
    axes.set_ylim(position - 0.4, -0.6)
    axes.set_xlim(0, _WORDS * most * factor)
    axes.set_xlabel(f"{facet.title} ({unit})", fontsize=12)
    style(axes, axis="x")
    axes.tick_params(axis="y", length=0)


def _bar(axes: Any, bar: Bar, position: int, factor: float, most: float) -> None:
    if bar.value is None:
        axes.barh(position, _STUB * most, height=0.62, color="white", edgecolor=GREY, hatch="////", linewidth=1)
        words = bar.text if len(bar.text) <= _LONGEST_REASON else f"{bar.text[:_LONGEST_REASON]}…"
        axes.text(_STUB * most * 1.3, position, plain(words), va="center", fontsize=10, color=DARK)
        return
    length, low, high = _scaled([bar.value], factor)
    if bar.behind is not None:
        whole, least, most_behind = _scaled([bar.behind], factor)
        axes.barh(position, whole, height=0.8, color=COLORS[0], alpha=0.22)
        faint = {"ecolor": COLORS[0], "elinewidth": 1.2, "capsize": 2, "alpha": 0.6, "fmt": "none"}
        axes.errorbar(whole, position + 0.33, xerr=(whole - numpy.maximum(least, 0), most_behind - whole), **faint)
    axes.barh(position, length, height=0.5, color="white" if bar.is_hollow else COLORS[0], **_EDGE)
    error = {"ecolor": "black", "elinewidth": 1.5, "capsize": 4}
    axes.errorbar(length, position, xerr=(length - numpy.maximum(low, 0), high - length), **error)
    ends = [end for one in (bar.value, bar.behind) if one for end in (one.value, one.high or 0.0)]
    end = max(ends) * factor
    axes.text(end + 0.012 * most, position, plain(bar.text), va="center", fontsize=11)


def _vertical_scale(axes: Any, values: Sequence[float], *, base: int = 10) -> None:
    """Logarithmic if the values are far apart, otherwise from zero."""
    if spans_decades(values):
        axes.set_yscale("log", base=base)
        subs = (1, 2, 5) if base == 10 else (1,)
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(base=base, subs=subs))
        axes.yaxis.set_major_formatter(_plain_number)
        axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    else:
        axes.set_ylim(0, max(axes.get_ylim()[1], _HEADROOM * max(values, default=0.0)) or None)


def _plain_number(value: float, _: int) -> str:
    return f"{value:g}"


def _scaled(intervals: Sequence[estimators.Interval], factor: float) -> Any:
    """Values, lower and upper ends in another unit; NaN for an end that is unknown."""
    return factor * numpy.array([(y.value, y.low, y.high) for y in intervals], dtype=float).reshape(-1, 3).T


def _legend(axes: Any, hollow: str, *, beside: bool) -> None:
    """The names of the lines, and the meaning of hollow markers if there are any."""
    handles, _ = axes.get_legend_handles_labels()
    if hollow:
        look: dict[str, Any] = {"color": DARK, "linestyle": "none", "marker": "o", **_HOLLOW}
        handles.append(matplotlib.lines.Line2D([], [], label=f"≈ {hollow}", **look))
    _legend_of(axes, handles, beside=beside)


def _legend_of(axes: Any, handles: Sequence[Any], *, beside: bool = False) -> None:
    """A legend above the axes or beside them, where it covers no data."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    if not beside:
        lengths = [len(handle.get_label()) + _LEGEND_MARK for handle in handles]
        columns = {number: numpy.array_split(lengths, number) for number in range(1, len(handles) + 1)}
        fitting = [number for number, split in columns.items() if sum(map(max, split)) <= _LEGEND_ROW]
        place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": max(fitting, default=1)}
    axes.legend(handles=handles, fontsize=10.5, frameon=beside, **place)
