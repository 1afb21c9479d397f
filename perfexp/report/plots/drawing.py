"""Drawing of charts, bars and sample strips with matplotlib.

The plots come as data from `chart`. Values there are in SI units; a `factor` converts them to the
unit on the axis.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from perfexp.records.units import format_seconds
from perfexp.report.plots.canvas import (
    DARK,
    HALO,
    caption_of,
    columns,
    legend,
    matplotlib,
    name_rows,
    name_ticks,
    plain,
    save,
    style,
    tip,
    title_of,
    wrapped,
)
from perfexp.report.plots.chart import (
    COLORS,
    GREY,
    Bar,
    Bars,
    Chart,
    ChartLine,
    Facet,
    Panel,
    Strips,
    Taken,
    spans_decades,
    unit_of,
)
from perfexp.roofline.kernel_names import cut
from perfexp.statistics.estimators import Interval

#: Maximum characters of a bar's name, and of the reason for a missing bar.
LONGEST_LABEL, _LONGEST_REASON = 55, 90
_MARKERS, _DASHES = ("o", "s", "^", "D", "v"), ("-", "--", ":")
#: Up to this many measured positions get their own ticks; otherwise matplotlib places ticks.
_MOST_TICKS = 12
#: Width of a tick's label, as a share of the axis.
_TICK_SHARE = 0.045
#: An axis from zero extends this far beyond the largest value, to show its marker and ring label.
_HEADROOM = 1.15
#: An interval extends an axis to at most this multiple of its value.
_MOST_HEIGHT = 3.0
#: Height of a panel, of a bar and of the surroundings, in inches.
_PANEL, _BAR, _AROUND = 2.9, 0.36, 1.6
#: Height of the markers of the best lines above their panel, in inches.
_LIFT = 0.1
#: Width of a stub for a run without a time, and room up to the end of the longest bar's text, both
#: relative to the longest bar.
_STUB, _WORDS = 0.04, 1.3

#: Heights of a strip, of a panel over time, and of the surroundings, in inches.
_STRIP, _OVER_TIME, _AROUND_STRIPS = 0.75, 1.6, 1.9
#: A strip ends at this percentile of the samples. Triangles at the edge mark the others.
_MOST_SHOWN = 98.0
#: More samples than this become an image in an SVG.
_MOST_SHAPES = 1000
#: Minimum half-height of the panel over time, in percent of the center.
_LEAST_PERCENT = 2.0
#: Maximum warm-up time shown, as a share of the time after it.
_MOST_WARMUP = 1 / 3
#: Golden ratio: spreads samples over the height of their strip evenly and reproducibly.
_SPREAD = 0.618034


def draw(plot: Chart | Bars | Strips) -> bytes:
    """Return a plot as PNG."""
    return save(compose(plot))


def compose(plot: Chart | Bars | Strips) -> Any:
    """Return a plot as a matplotlib figure.

    HTML pages embed the figure as SVG; `draw` saves it as PNG.
    """
    if isinstance(plot, Chart):
        figure = _chart(plot)
    elif isinstance(plot, Bars):
        figure = _bars(plot)
    else:
        figure = _strips(plot)
    caption_of(figure, plot.caption)
    return figure


def _chart(chart: Chart) -> Any:
    """Return a figure with a chart's panels row by row, over a common horizontal axis.

    Few measured positions get a tick each, with the size or batch as text.
    """
    rows = -(-len(chart.panels) // chart.across)
    heights = [max(_PANEL, (8 - _AROUND) / rows)] * rows
    figure, cells = columns(heights, _AROUND, across=chart.across, sharex=True)
    positions = sorted(chart.ticks)
    axes = cells[0]
    if chart.is_doubling or spans_decades(positions):
        axes.set_xscale("log", base=2 if chart.is_doubling else 10)
        name_ticks(axes.xaxis, axes.xaxis.get_major_locator())
    if chart.across > 1:  # all lines in order: each panel has some of them
        lines = {(line.color, line.label) for panel in chart.panels for line in panel.lines}
        for place, name in sorted(lines):
            color, marker, dash = _look_of(place)
            look = {"marker": marker, "color": color, "linestyle": dash, "label": plain(name)}
            cells[chart.across - 1].plot([], [], **look)
    for panel_axes, panel in zip(cells, chart.panels, strict=False):
        _panel(panel_axes, panel, chart.ticks)
        _gaps(panel_axes, chart.gaps)
    for unused in cells[len(chart.panels) :]:
        unused.set_visible(False)
    legend(cells[chart.across - 1], *cells)
    if len(positions) * chart.across <= _MOST_TICKS:
        axes.minorticks_off()
        axes.set_xticks(positions, _apart(axes, chart.ticks, positions))
    for foot in cells[: len(chart.panels)][-chart.across :]:
        foot.tick_params(labelbottom=True)
        foot.set_xlabel(chart.axis, fontsize=13 if chart.across == 1 else 11)
    return figure


def _apart(axes: Any, ticks: Mapping[float, str], positions: Sequence[float]) -> list[str]:
    """Return the labels of ticks in order; empty where it would cover the one before."""
    labels, taken = list[str](), -1.0
    places = axes.transScale + axes.transLimits  # to shares of the axis
    for position in positions:
        share = places.transform((position, 1.0))[0]
        is_free = share - taken >= _TICK_SHARE
        labels.append(ticks[position] if is_free else "")
        taken = share if is_free else taken
    return labels


def _panel(axes: Any, panel: Panel, ticks: Mapping[float, str]) -> None:
    """Draw a panel's lines, curves and marks, on a vertical axis that shows all values.

    Args:
        ticks: labels of measured positions, for the tooltips.
    """
    values, ends = list[float](), [0.0]
    for line in panel.lines:
        values += [y.value for y in line.y]
        # intervals of light lines do not set the scale
        if not line.is_light:
            intervals = (*line.y, *line.predicted.values())
            ends += [min(y.high or 0.0, _MOST_HEIGHT * y.value) for y in intervals]
    for curve in panel.curves:
        ends += curve.y
    most = max(values, default=0.0)
    factor, unit = unit_of(panel.unit, most)
    highest = max(_HEADROOM * most, 1.02 * max(ends)) * factor
    base = 2 if panel.unit == "bytes" else 10
    _vertical_scale(axes, [value * factor for value in values], highest, base=base)
    axes.set_ylabel(f"{panel.title} ({unit})", fontsize=12)
    style(axes)
    dashes = {"color": DARK, "linewidth": 1.2, "linestyle": "--", "zorder": 1.5}
    for curve in panel.curves:
        axes.plot(curve.x, numpy.array(curve.y) * factor, label=plain(curve.label), **dashes)
    for line in panel.lines:
        _line(axes, line, factor)
        for x, y in zip(line.x, line.y, strict=True):
            value = y.value * factor
            shown_ends = [f"{end * factor:.4g}" for end in (y.low, y.high) if end is not None]
            interval = " … ".join(shown_ends)
            tip(axes, x, value, line.label, ticks[x], f"{value:.4g} {unit}", interval)
    for x, text in panel.marks.items():
        axes.axvline(x, color=DARK, linewidth=1.2, linestyle=":", label=text)
    if panel.note:
        axes.set_title(wrapped(panel.note, 36), fontsize=9, color=DARK, loc="right", pad=18)
    if panel.heading:
        axes.set_title(plain(panel.heading), fontsize=12, fontweight="bold", loc="left", pad=18)
    lift = matplotlib.transforms.ScaledTranslation(0, _LIFT, axes.figure.dpi_scale_trans)
    above: dict[str, Any] = {"clip_on": False, "markersize": 6}
    above["transform"] = axes.get_xaxis_transform() + lift
    for x, place in panel.best.items():
        if place is None:
            axes.plot([x], [1], "x", color=GREY, **above)
            continue
        color, marker, _ = _look_of(place[0])
        face = color if place[1] else "white"
        axes.plot([x], [1], marker, color=color, markerfacecolor=face, **above)


def _look_of(place: int) -> tuple[str, str, str]:
    """Return color, marker and line style of a line, by its place among the lines.

    From the sixth line on, colors repeat with other markers and dashes.
    """
    turn = place // len(COLORS)
    marker = _MARKERS[(place + turn) % len(_MARKERS)]
    return COLORS[place % len(COLORS)], marker, _DASHES[turn % len(_DASHES)]


def _line(axes: Any, line: ChartLine, factor: float) -> None:
    """Draw a line with its intervals, hollow markers, rings for odd sizes, and predictions.

    Predictions are a band that replaces the line between points.
    """
    color, marker, dash = _look_of(line.color)
    x = numpy.array(line.x)
    values, low, high = _scaled(line.y, factor)
    look: dict[str, Any] = {"markersize": 6, "linewidth": 2.0, "linestyle": dash}
    caps: dict[str, Any] = {"elinewidth": 1.5, "capsize": 5, "alpha": 1.0}
    if line.is_light:
        look |= {"markersize": 4, "linewidth": 1.4}
        caps |= {"capsize": 0, "alpha": 0.45}
    if line.predicted:
        look["linewidth"] = 0
    look |= {"color": color, "alpha": caps["alpha"], "label": plain(line.label)}
    axes.plot(x, values, marker=marker, **look)
    axes.errorbar(x, values, yerr=(values - low, high - values), fmt="none", ecolor=color, **caps)
    for reason in dict.fromkeys(filter(None, line.rough)):
        hollow = numpy.array(line.rough) == reason
        look = {"markersize": 6, "markerfacecolor": "white", "zorder": 2.5, "label": reason}
        axes.plot(x[hollow], values[hollow], marker, color=color, **look)
    if line.predicted:
        predicted, least, most = _scaled(list(line.predicted.values()), factor)
        look = {"alpha": 0.2, "linewidth": 0, "label": "predicted, with 90 % interval"}
        axes.fill_between(list(line.predicted), least, most, color=color, **look)
        thin = {"linewidth": 1, "linestyle": dash, "zorder": 1.5}
        axes.plot(list(line.predicted), predicted, color=color, **thin)
    for position, text in line.odd.items():
        at = (position, values[line.x.index(position)])
        axes.plot(
            *at, "o", color="black", fillstyle="none", markersize=15, markeredgewidth=1.6, zorder=5
        )
        _above(axes, text, at, 11, axes.transData, fontsize=11)
    if (is_beyond := high > axes.get_ylim()[1]).any():
        top = axes.get_xaxis_transform()
        look = {"transform": top, "color": DARK, "markersize": 5, "clip_on": False}
        axes.plot(x[is_beyond], numpy.ones(is_beyond.sum()), "^", label="beyond the axis", **look)


def _above(
    axes: Any,
    text: str,
    position: tuple[float, float],
    points: float,
    coordinates: Any,
    **look: Any,
) -> None:
    """Write text some points above a position."""
    look |= {
        "textcoords": "offset points",
        "ha": "center",
        "va": "bottom",
        "path_effects": HALO,
        "zorder": 6,
    }
    axes.annotate(plain(text), position, (0, points), xycoords=coordinates, **look)


def _gaps(axes: Any, gaps: Mapping[float, str]) -> None:
    """Mark positions of failed points at the foot of a panel, with their status."""
    if not gaps:
        return
    foot = axes.get_xaxis_transform()
    look = {"color": DARK, "markersize": 9, "markeredgewidth": 2, "label": "not measured"}
    axes.plot(list(gaps), [0.04] * len(gaps), "x", transform=foot, **look)
    rotation = 90 if len(gaps) > 3 else 0
    for position, status in gaps.items():
        _above(axes, status, (position, 0.04), 9, foot, color=DARK, rotation=rotation)


def _bars(bars: Bars) -> Any:
    """Return a figure with a facet of bars for each phase and kind of time."""
    heights = []
    for facet in bars.facets:
        rows = sum(len(group) + bool(name) for name, group in facet.groups.items())
        heights.append(_BAR * (rows + 1.5))
    figure, column = columns(heights, _AROUND)
    for axes, facet in zip(column, bars.facets, strict=True):
        _facet(axes, facet)
    legend(*column)
    return figure


def _facet(axes: Any, facet: Facet) -> None:
    """Draw bars from zero with their text at the end, in groups below their names.

    With several groups, such as models, their names are bold lines above their bars.
    """
    bars = itertools.chain.from_iterable(facet.groups.values())
    most = max((bar.end for bar in bars if bar.end), default=1.0)
    factor, unit = unit_of("seconds", most)
    labels, headings = list[str](), list[int]()
    for name, group in facet.groups.items():
        if name:
            headings.append(len(labels))
            labels.append(cut(name, LONGEST_LABEL))
        for bar in group:
            _bar(axes, bar, len(labels), factor, most * factor)
            labels.append(cut(bar.label, LONGEST_LABEL))
    name_rows(axes, labels, _WORDS * most * factor, f"{facet.title} ({unit})")
    for position in headings:
        axes.get_yticklabels()[position].set_fontweight("bold")


def _bar(axes: Any, bar: Bar, position: int, factor: float, most: float) -> None:
    """Draw a run's bar with its text, over a pale bar for its latency; a hatched stub if it failed.

    Args:
        position: row from the top.
        most: longest bar in the facet, in the axis's unit.
    """
    look = {"edgecolor": COLORS[0], "linewidth": 1.5, **title_of(bar.label, bar.text)}
    if bar.value is None:
        end = _STUB * most
        words = {"fontsize": 10, "color": DARK}
        look |= {"color": "white", "edgecolor": GREY, "hatch": "////"}
        axes.barh(position, end, height=0.62, **look)
    else:
        end = factor * bar.end
        words = {"fontsize": 11}
        if bar.behind:
            axes.barh(position, bar.behind.value * factor, height=0.8, color=COLORS[0], alpha=0.22)
            faint = {"ecolor": COLORS[0], "elinewidth": 1.2, "capsize": 2, "alpha": 0.6}
            _whisker(axes, bar.behind, position + 0.33, factor, **faint)
        look["color"] = COLORS[0]
        if bar.is_hollow:
            look |= {"color": "white", "label": "≈ no useful interval"}
        axes.barh(position, bar.value.value * factor, height=0.5, **look)
        _whisker(axes, bar.value, position, factor, ecolor="black", elinewidth=1.5, capsize=4)
    text = plain(cut(bar.text, _LONGEST_REASON))
    axes.text(end + 0.012 * most, position, text, va="center", **words)


def _whisker(axes: Any, time: Interval, position: float, factor: float, **look: Any) -> None:
    """Draw a time's interval at the end of its bar, if it has one."""
    if time.low is not None and time.high is not None:
        below, above = time.value - max(time.low, 0.0), time.high - time.value
        error = [[below * factor], [above * factor]]
        axes.errorbar(time.value * factor, position, xerr=error, fmt="none", **look)


def _strips(strips: Strips) -> Any:
    """Draw each point's times from zero, with the representative samples over time below."""
    heights = list[float]()
    for _, times in strips.points:
        heights += (_STRIP * len(times) + 0.5, _OVER_TIME)
    figure, column = columns(heights, _AROUND_STRIPS)
    for number, (name, times) in enumerate(strips.points):
        _strip_rows(column[2 * number], name, times)
        _over_time(column[2 * number + 1], times[0])
    return figure


def _strip_rows(axes: Any, name: str, strips: Sequence[Taken]) -> None:
    """Draw a row per time: samples, their center with interval, and values at the right.

    The axis ends where most samples do; triangles at its edge mark the others.
    """
    end = 0.0
    for strip in strips:
        most_samples = float(numpy.percentile(strip.series.measured, _MOST_SHOWN))
        end = max(end, most_samples, strip.time.median.value)
    factor, unit = unit_of("seconds", end)
    edge = 1.1 * factor * end
    labels, centers = list[str](), dict[str, None]()
    for position, strip in enumerate(strips):
        labels.append(f"{strip.name}\n{strip.meaning}")
        centers[strip.center] = None
        samples = factor * numpy.array(strip.series.measured)
        median = strip.time.median
        color = COLORS[position % len(COLORS)]
        # multiples of the golden ratio modulo 1 are spread evenly
        heights = position + 0.5 * ((numpy.arange(samples.size) * _SPREAD) % 1 - 0.5)
        ends_of_center = [position - 0.36, position + 0.36]
        _dots(axes, samples, heights, color, alpha=0.45)
        if (beyond := samples > edge).any():
            edges = numpy.full(beyond.sum(), edge)
            axes.plot(edges, heights[beyond], ">", color=color, clip_on=False, markersize=5)
        if median.low is not None and median.high is not None and not strip.is_dotted:
            low = max(median.low, 0.0) * factor
            high = min(median.high * factor, edge)
            axes.fill_betweenx(ends_of_center, low, high, color="black", alpha=0.25, linewidth=0)
        center = median.value * factor
        dash = ":" if strip.is_dotted else "-"
        axes.plot([center] * 2, ends_of_center, color="black", linewidth=2, linestyle=dash)
        tip(axes, center, position, strip.name, strip.text, f"{samples.size} samples")
        right = axes.get_yaxis_transform()
        axes.text(1.015, position, plain(strip.text), transform=right, va="center", fontsize=12)
    title = f"time per call ({unit}); black: {' or '.join(centers)}, shaded: its 95 % interval"
    if name:
        title = f"{name}: {title}"
    if any(strip.is_dotted for strip in strips):
        title += "; dotted, ≈: no useful one"
    name_rows(axes, labels, edge, title)


def _over_time(axes: Any, strip: Taken) -> None:
    """Draw a time's samples as percent deviation from their center, over elapsed seconds.

    Trends and outliers show here. The end of the warm-up is shaded; lines separate processes.
    """
    series = strip.series
    samples = numpy.array(series.samples)
    seconds = numpy.cumsum(samples) * series.calls_per_sample
    percent = (samples / strip.time.median.value - 1) * 100
    most_percent = float(numpy.percentile(numpy.abs(percent[series.warmup :]), _MOST_SHOWN))
    most = max(_LEAST_PERCENT, 1.2 * most_percent)
    start = float(seconds[series.warmup - 1]) if series.warmup else 0.0
    end = float(seconds[-1])
    first = max(0.0, start - _MOST_WARMUP * (end - start))
    is_warmup = numpy.arange(samples.size) < series.warmup
    is_shown = seconds >= first
    within = numpy.where(numpy.abs(percent) > most, numpy.nan, percent)
    for chosen, color in ((is_warmup & is_shown, GREY), (~is_warmup, COLORS[0])):
        _dots(axes, seconds[chosen], within[chosen], color)
    dark: dict[str, Any] = {"color": DARK, "label": "beyond the axis"}
    for marker, side in (("^", 1), ("v", -1)):
        if (beyond := is_shown & (side * percent > most)).any():
            ends = numpy.full(beyond.sum(), side * most)
            axes.plot(seconds[beyond], ends, marker, markersize=5, **dark)
    if series.warmup:
        name = f"end of the {format_seconds(start, 2)} warm-up" if first else "warm-up"
        shade = {"color": "#d9d9d9", "alpha": 0.6, "linewidth": 0}
        axes.axvspan(first, start, label=f"{name}, not counted", **shade)
    dark |= {"linewidth": 1, "linestyle": "--", "label": "next process"}
    for block in series.blocks[1:]:
        axes.axvline(seconds[block - 1], **dark)
    axes.axhline(0, color="black", linewidth=1)
    axes.set_ylim(-1.08 * min(most, 100.0), 1.08 * most)  # times are never negative
    axes.set_xlim(first, end + 0.01 * (end - first) or None)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:+g} %" if value else strip.center.partition(" ")[0]
    )
    label = f"samples of {strip.name} against the {strip.center}"
    axes.set_xlabel(f"{label}, over the seconds that the calls took")
    style(axes)
    legend(axes)


def _dots(axes: Any, x: Any, y: Any, color: str, **look: Any) -> None:
    """Draw samples as dots; many become an image in an SVG, which would be large otherwise."""
    axes.plot(x, y, ".", color=color, markersize=4, rasterized=x.size > _MOST_SHAPES, **look)


def _vertical_scale(axes: Any, values: Sequence[float], highest: float, *, base: int) -> None:
    """Use a logarithmic axis if the values are far apart, otherwise an axis from zero.

    Args:
        values: all values, in the axis's unit.
        highest: upper end of the axis.
        base: base of a logarithmic axis.
    """
    if not spans_decades(values):
        axes.set_ylim(0, highest or None)
        return
    axes.set_yscale("log", base=base)
    axes.set_ylim(min(values) / _HEADROOM**2, highest)
    subs = (1, 2, 5) if base == 10 else (1,)
    name_ticks(axes.yaxis, matplotlib.ticker.LogLocator(base=base, subs=subs))


def _scaled(intervals: Sequence[Interval], factor: float) -> Any:
    """Return values, lower and upper ends in the axis's unit, (3, N); NaN for an unknown end."""
    rows = list(map(operator.attrgetter("value", "low", "high"), intervals))
    return factor * numpy.array(rows, dtype=float).reshape(-1, 3).T
