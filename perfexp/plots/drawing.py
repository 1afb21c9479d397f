"""Drawing of charts, bars and sample strips with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from perfexp.plots.canvas import (
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
)
from perfexp.plots.chart import (
    COLORS,
    GREY,
    Bar,
    Bars,
    Chart,
    Facet,
    Line,
    Panel,
    Strips,
    Taken,
    spans_decades,
    unit_of,
)
from perfexp.records.units import format_seconds
from perfexp.roofline.kernel_names import cut
from perfexp.statistics.estimators import Interval

#: Maximum characters of a bar's name, and of the reason for a missing bar.
LONGEST_LABEL, _LONGEST_REASON = 55, 90
_MARKERS = ("o", "s", "^", "D", "v")
#: Up to this many measured positions get their own ticks; otherwise matplotlib places ticks.
_MOST_TICKS = 12
#: An axis from zero extends this far beyond the largest value, to show its marker and ring label.
_HEADROOM = 1.15
#: Height of a panel, of a bar and of the surroundings, in inches.
_PANEL, _BAR, _AROUND = 2.9, 0.36, 1.6
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
    """Return a plot as a matplotlib figure."""
    if isinstance(plot, Chart):
        figure = _chart(plot)
    elif isinstance(plot, Bars):
        figure = _bars(plot)
    else:
        figure = _strips(plot)
    caption_of(figure, plot.caption)
    return figure


def _chart(chart: Chart) -> Any:
    panels = [max(_PANEL, (8 - _AROUND) / len(chart.panels))] * len(chart.panels)
    figure, column = columns(panels, _AROUND, sharex=True)
    axes, positions = column[-1], sorted(chart.ticks)
    if chart.is_doubling or spans_decades(positions):
        axes.set_xscale("log", base=2 if chart.is_doubling else 10)
        name_ticks(axes.xaxis, axes.xaxis.get_major_locator())
    for one, panel in zip(column, chart.panels, strict=True):
        _panel(one, panel, chart.ticks)
        _gaps(one, chart.gaps)
    legend(*column)
    if len(positions) <= _MOST_TICKS:
        axes.minorticks_off()
        axes.set_xticks(positions, [chart.ticks[position] for position in positions])
    axes.set_xlabel(chart.axis, fontsize=13)
    return figure


def _panel(axes: Any, panel: Panel, ticks: Mapping[float, str]) -> None:
    values = [y.value for line in panel.lines for y in line.y]
    factor, unit = unit_of(panel.unit, max(values, default=0.0))
    # intervals of light lines do not set the scale
    own = [
        y for line in panel.lines if not line.is_light for y in (*line.y, *line.predicted.values())
    ]
    ends = [
        *(y.high for y in own if y.high),
        *(value for curve in panel.curves for value in curve.y),
    ]
    most = max([_HEADROOM * max(values, default=0.0), *(1.02 * end for end in ends)])
    _vertical_scale(
        axes,
        [value * factor for value in values],
        most * factor,
        base=2 if panel.unit == "bytes" else 10,
    )
    axes.set_ylabel(f"{panel.title} ({unit})", fontsize=12)
    style(axes)
    for curve in panel.curves:
        y = numpy.array(curve.y) * factor
        axes.plot(
            curve.x,
            y,
            color=DARK,
            linewidth=1.2,
            linestyle="--",
            zorder=1.5,
            label=plain(curve.label),
        )
    for line in panel.lines:
        _line(axes, line, factor)
        for x, one in zip(line.x, line.y, strict=True):
            known = [f"{end * factor:.4g}" for end in (one.low, one.high) if end is not None]
            words = f"{one.value * factor:.4g} {unit}", " … ".join(known)
            tip(axes, x, one.value * factor, line.label, ticks[x], *words)
    for x, text in panel.marks.items():
        axes.axvline(x, color=DARK, linewidth=1.2, linestyle=":", label=text)


def _line(axes: Any, line: Line, factor: float) -> None:
    """Draw a line with its intervals.

    Predictions are a band that replaces the line between points.
    """
    color = COLORS[line.color % len(COLORS)]
    # from the sixth line on, colors repeat with other markers
    marker = _MARKERS[(line.color + line.color // len(COLORS)) % len(_MARKERS)]
    x, (values, low, high) = numpy.array(line.x), _scaled(line.y, factor)
    alpha, size, width = (0.45, 4, 1.4) if line.is_light else (1.0, 6, 2.0)
    look = {
        "color": color,
        "alpha": alpha,
        "markersize": size,
        "linewidth": 0 if line.predicted else width,
    }
    axes.plot(x, values, marker=marker, label=plain(line.label), **look)
    caps = {"elinewidth": 1.5, "capsize": 0 if line.is_light else 5}
    axes.errorbar(
        x, values, yerr=(values - low, high - values), fmt="none", ecolor=color, alpha=alpha, **caps
    )
    for reason in dict.fromkeys(filter(None, line.rough)):
        hollow = numpy.array(line.rough) == reason
        look = {"markersize": 6, "markerfacecolor": "white", "zorder": 2.5, "label": f"≈ {reason}"}
        axes.plot(x[hollow], values[hollow], marker, color=color, **look)
    if line.predicted:
        predicted, least, most = _scaled(list(line.predicted.values()), factor)
        look = {"alpha": 0.2, "linewidth": 0, "label": "predicted, with 90 % interval"}
        axes.fill_between(list(line.predicted), least, most, color=color, **look)
        axes.plot(list(line.predicted), predicted, color=color, linewidth=1, zorder=1.5)
    for place, text in line.odd.items():
        at = place, values[line.x.index(place)]
        axes.plot(
            *at, "o", color="black", fillstyle="none", markersize=15, markeredgewidth=1.6, zorder=5
        )
        _above(axes, text, at, 11, axes.transData, fontsize=11)
    if (is_beyond := high > axes.get_ylim()[1]).any():
        look = {
            "transform": axes.get_xaxis_transform(),
            "color": DARK,
            "markersize": 5,
            "clip_on": False,
        }
        axes.plot(x[is_beyond], numpy.ones(is_beyond.sum()), "^", label="beyond the axis", **look)


def _above(
    axes: Any, text: str, place: tuple[float, float], points: float, coordinates: Any, **look: Any
) -> None:
    """Write text some points above a position."""
    look |= {
        "textcoords": "offset points",
        "ha": "center",
        "va": "bottom",
        "path_effects": HALO,
        "zorder": 6,
    }
    axes.annotate(plain(text), place, (0, points), xycoords=coordinates, **look)


def _gaps(axes: Any, gaps: Mapping[float, str]) -> None:
    foot = axes.get_xaxis_transform()
    if gaps:
        look = {
            "transform": foot,
            "color": DARK,
            "markersize": 9,
            "markeredgewidth": 2,
            "label": "not measured",
        }
        axes.plot(list(gaps), [0.04] * len(gaps), "x", **look)
    for position, status in gaps.items():
        _above(
            axes, status, (position, 0.04), 9, foot, color=DARK, rotation=90 if len(gaps) > 3 else 0
        )


def _bars(bars: Bars) -> Any:
    rows = [
        sum(len(group) + bool(name) for name, group in facet.groups.items())
        for facet in bars.facets
    ]
    figure, column = columns([_BAR * (number + 1.5) for number in rows], _AROUND)
    for axes, facet in zip(column, bars.facets, strict=True):
        _facet(axes, facet)
    legend(*column)
    return figure


def _facet(axes: Any, facet: Facet) -> None:
    """Draw bars from zero with their text at the end, in groups below their names."""
    known = [
        one
        for group in facet.groups.values()
        for bar in group
        for one in (bar.value, bar.behind)
        if one
    ]
    most = max((one.high or one.value for one in known), default=1.0)
    factor, unit = unit_of("seconds", most)
    labels, headings = list[str](), list[int]()
    for name, group in facet.groups.items():
        if name:
            headings.append(len(labels))
            labels.append(name)
        for bar in group:
            _bar(axes, bar, len(labels), factor, most * factor)
            labels.append(bar.label)
    labels = [cut(text, LONGEST_LABEL) for text in labels]
    name_rows(axes, labels, _WORDS * most * factor, f"{facet.title} ({unit})")
    for position in headings:
        axes.get_yticklabels()[position].set_fontweight("bold")


def _bar(axes: Any, bar: Bar, position: int, factor: float, most: float) -> None:
    look = {"edgecolor": COLORS[0], "linewidth": 1.5, **title_of(bar.label, bar.text)}
    if bar.value is None:
        end, words = _STUB * most, {"fontsize": 10, "color": DARK}
        axes.barh(
            position,
            end,
            height=0.62,
            **look | {"color": "white", "edgecolor": GREY, "hatch": "////"},
        )
    else:
        end, words = (
            factor * max(one.high or one.value for one in (bar.value, bar.behind) if one),
            {"fontsize": 11},
        )
        if bar.behind:
            axes.barh(position, bar.behind.value * factor, height=0.8, color=COLORS[0], alpha=0.22)
            faint = {"ecolor": COLORS[0], "elinewidth": 1.2, "capsize": 2, "alpha": 0.6}
            _whisker(axes, bar.behind, position + 0.33, factor, **faint)
        face = (
            {"color": "white", "label": "≈ no interval"} if bar.is_hollow else {"color": COLORS[0]}
        )
        axes.barh(position, bar.value.value * factor, height=0.5, **look, **face)
        _whisker(axes, bar.value, position, factor, ecolor="black", elinewidth=1.5, capsize=4)
    axes.text(
        end + 0.012 * most, position, plain(cut(bar.text, _LONGEST_REASON)), va="center", **words
    )


def _whisker(axes: Any, one: Interval, position: float, factor: float, **look: Any) -> None:
    if one.low is not None and one.high is not None:
        error = [[(one.value - max(one.low, 0.0)) * factor], [(one.high - one.value) * factor]]
        axes.errorbar(one.value * factor, position, xerr=error, fmt="none", **look)


def _strips(strips: Strips) -> Any:
    """Draw each point's times from zero, with the representative samples over time below."""
    counts = [len(taken) for _, taken in strips.points]
    heights = [height for count in counts for height in (_STRIP * count + 0.5, _OVER_TIME)]
    figure, column = columns(heights, _AROUND_STRIPS)
    for number, (name, taken) in enumerate(strips.points):
        _strip_rows(column[2 * number], name, taken)
        _over_time(column[2 * number + 1], taken[0])
    return figure


def _strip_rows(axes: Any, name: str, taken: Sequence[Taken]) -> None:
    """Draw a row per time: samples, their center with interval, and values at the right."""
    ends = [
        max(float(numpy.percentile(one.series.measured, _MOST_SHOWN)), one.time.median.value)
        for one in taken
    ]
    factor, unit = unit_of("seconds", max(ends))
    edge = 1.1 * factor * max(ends)
    for position, one in enumerate(taken):
        samples, median = factor * numpy.array(one.series.measured), one.time.median
        color = COLORS[position % len(COLORS)]
        heights = position + 0.5 * ((numpy.arange(samples.size) * _SPREAD) % 1 - 0.5)
        ends_of_center = [position - 0.36, position + 0.36]
        _dots(axes, samples, heights, color, alpha=0.45)
        if (beyond := samples > edge).any():
            axes.plot(
                numpy.full(beyond.sum(), edge),
                heights[beyond],
                ">",
                color=color,
                clip_on=False,
                markersize=5,
            )
        if median.low is not None and median.high is not None:
            low, high = max(median.low, 0.0) * factor, min(median.high * factor, edge)
            axes.fill_betweenx(ends_of_center, low, high, color="black", alpha=0.25, linewidth=0)
        dash = ":" if one.is_dotted else "-"
        axes.plot(
            [median.value * factor] * 2, ends_of_center, color="black", linewidth=2, linestyle=dash
        )
        tip(axes, median.value * factor, position, one.name, one.text, f"{samples.size} samples")
        axes.text(
            1.015,
            position,
            plain(one.text),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=12,
        )
    centers = " or ".join(dict.fromkeys(one.center for one in taken))
    dotted = "; dotted, ≈: no interval" if any(one.is_dotted for one in taken) else ""
    prefix = f"{name}: " if name else ""
    title = f"{prefix}time per call ({unit}); black: {centers}, shaded: its 95 % interval{dotted}"
    name_rows(axes, [f"{one.name}\n{one.meaning}" for one in taken], edge, title)


def _over_time(axes: Any, one: Taken) -> None:
    """Draw a time's samples as percent deviation from their center, over elapsed seconds."""
    series, samples = one.series, numpy.array(one.series.samples)
    seconds = numpy.cumsum(samples) * series.calls_per_sample
    percent = (samples / one.time.median.value - 1) * 100
    most = max(
        _LEAST_PERCENT,
        1.2 * float(numpy.percentile(numpy.abs(percent[series.warmup :]), _MOST_SHOWN)),
    )
    start, end = float(seconds[series.warmup - 1]) if series.warmup else 0.0, float(seconds[-1])
    first = max(0.0, start - _MOST_WARMUP * (end - start))
    is_warmup, is_shown = numpy.arange(samples.size) < series.warmup, seconds >= first
    for chosen, color in ((is_warmup & is_shown, GREY), (~is_warmup, COLORS[0])):
        _dots(
            axes,
            seconds[chosen],
            numpy.where(numpy.abs(percent) > most, numpy.nan, percent)[chosen],
            color,
        )
    for marker, side in (("^", 1), ("v", -1)):
        if (beyond := is_shown & (side * percent > most)).any():
            ends = numpy.full(beyond.sum(), side * most)
            axes.plot(
                seconds[beyond], ends, marker, color=DARK, markersize=5, label="beyond the axis"
            )
    if series.warmup:
        name = f"end of the {format_seconds(start, 2)} warm-up" if first else "warm-up"
        axes.axvspan(
            first, start, color="#d9d9d9", alpha=0.6, linewidth=0, label=f"{name}, not counted"
        )
    for block in series.blocks[1:]:
        axes.axvline(
            seconds[block - 1], color=DARK, linewidth=1, linestyle="--", label="next process"
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.set_ylim(-1.08 * min(most, 100.0), 1.08 * most)  # times are never negative
    axes.set_xlim(first, end + 0.01 * (end - first) or None)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:+g} %" if value else one.center.partition(" ")[0]
    )
    axes.set_xlabel(
        f"samples of {one.name} against the {one.center}, over the seconds that the calls took"
    )
    style(axes)
    legend(axes)


def _dots(axes: Any, x: Any, y: Any, color: str, **look: Any) -> None:
    axes.plot(x, y, ".", color=color, markersize=4, rasterized=x.size > _MOST_SHAPES, **look)


def _vertical_scale(axes: Any, values: Sequence[float], highest: float, *, base: int) -> None:
    """Use a logarithmic axis if the values are far apart, otherwise an axis from zero."""
    if not spans_decades(values):
        axes.set_ylim(0, highest or None)
        return
    axes.set_yscale("log", base=base)
    axes.set_ylim(min(values) / _HEADROOM**2, highest)
    subs = (1, 2, 5) if base == 10 else (1,)
    name_ticks(axes.yaxis, matplotlib.ticker.LogLocator(base=base, subs=subs))


def _scaled(intervals: Sequence[Interval], factor: float) -> Any:
    """Return values, lower and upper ends in another unit; NaN for an unknown end."""
    return (
        factor
        * numpy.array([(y.value, y.low, y.high) for y in intervals], dtype=float).reshape(-1, 3).T
    )
