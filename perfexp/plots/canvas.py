"""Canvas: plots as PNG of 1200 × 800 pixels; matplotlib is imported here only. Equal plots give equal bytes.

A matplotlibrc in the current folder is not read: it may be a pipe, name a backend or have LaTeX run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from perfexp.plots.chart import Bars, Caption, Chart, Panel, Strips
from perfexp.records.summary import Row
from perfexp.roofline.kernel_names import cut
from perfexp.statistics import estimators

try:
    with contextlib.chdir(Path(__file__).parent):
        import matplotlib
except FileNotFoundError:  # the current folder is gone, and has no such file
    import matplotlib

import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.lines
import matplotlib.patches
import matplotlib.patheffects
import matplotlib.ticker

__all__ = ["LONGEST_LABEL", "caption_of", "draw", "matplotlib", "new_figure", "plain", "save", "style"]

matplotlib.rcdefaults()
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports the fonts that it does not find

#: Okabe and Ito's colors, safe for any kind of color vision, without yellow, which is too light on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_BLUE, _ORANGE, _GREEN = _COLORS[:3]
_GREY = "#5f5f5f"
_MARKERS = ("o", "s", "^", "D", "v")
#: Characters of a bar's name.
LONGEST_LABEL = 55
#: Values further apart than this factor get a logarithmic axis.
_LOG_FROM = 10.0
#: Limit on measured positions with ticks of their own; matplotlib places the ticks of more.
_MOST_TICKS = 12
#: An axis from zero reaches this far beyond the largest value, to show its whole marker.
_HEADROOM = 1.05
#: Units of shown values, the largest first.
_SCALES = {
    "seconds": ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")),
    "bytes": ((2**-30, "GiB"), (2**-20, "MiB"), (2**-10, "KiB")),
    "joules": ((1e-3, "kJ"), (1.0, "J"), (1e3, "mJ"), (1e6, "µJ")),
}
#: Height of a plot, and of each panel beyond the second, in inches.
_HEIGHT, _PANEL_HEIGHT = 8, 3
#: Limit on lines with the legend inside the axes.
_MOST_INSIDE = 3
#: Limit on points with error bars; more have a band.
_MOST_ERROR_BARS = 25


def new_figure(height: float, **settings: Any) -> Any:
    """An empty figure, 12 inches wide and some inches high."""
    figure = matplotlib.figure.Figure(figsize=(12, height), facecolor="white", **{"dpi": 100, **settings})
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure


def save(compose: Callable[[], Any], form: str = "png") -> bytes:
    """Compose a figure and return it as PNG or SVG."""
    buffer = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "perfexp"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        compose().savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


def draw(plot: Chart | Bars | Strips) -> bytes:
    """Return a plot as PNG."""
    return save(partial(_compose, plot))


def _compose(plot: Chart | Bars | Strips) -> Any:
    panels = len(plot.panels) if isinstance(plot, Chart) else 1
    figure = new_figure(_HEIGHT + _PANEL_HEIGHT * max(panels - 2, 0), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    if isinstance(plot, Chart):
        _chart(figure, plot)
    elif isinstance(plot, Bars):
        _bars(figure, plot)
    else:
        _strips(figure, plot)
    caption_of(figure, plot.caption)
    return figure


def caption_of(figure: Any, caption: Caption) -> None:
    """Set title and subtitle above a figure of matplotlib with axes, and the footer below it."""
    figure.suptitle(_wrapped(caption.title, 90), x=0.01, ha="left", fontsize=16, fontweight="bold")
    figure.axes[0].set_title(_wrapped(caption.subtitle, 130), loc="left", fontsize=12, color=_GREY)
    if caption.footer:
        figure.supxlabel(_wrapped(caption.footer, 150), x=0.01, ha="left", fontsize=11, color="#a33c00")


def _chart(figure: Any, chart: Chart) -> None:
    column = figure.subplots(len(chart.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(column, chart.panels, strict=True):
        _panel(axes, panel)
        _gaps(axes, chart.gaps)
    if len(chart.panels[0].lines) > 1 or chart.panels[0].curves or chart.panels[0].bands or chart.gaps:
        _legend(column[0], outside=len(chart.panels[0].lines) > _MOST_INSIDE)
    axes, positions = column[-1], sorted(chart.ticks)
    if _far_apart(positions):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_plain_number)
    if len(positions) <= _MOST_TICKS:
        axes.minorticks_off()
        axes.set_xticks(positions, [chart.ticks[position] for position in positions])
    axes.set_xlabel(chart.axis, fontsize=13)


def _panel(axes: Any, panel: Panel) -> None:
    factor, unit = _unit(panel.unit, [y for line in panel.lines for y in line.y])
    for number, line in enumerate(panel.lines):
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        values, low, high = _scaled(line.y, factor)
        for band in (band for band in panel.bands if band.line == line.label):
            predicted, least, most = _scaled(band.y, factor)
            axes.fill_between(band.x, least, most, color=color, alpha=0.2, linewidth=0, label=plain(band.label) or None)
            axes.plot(band.x, predicted, color=color, linewidth=1, zorder=1.5)
        curves = [curve for curve in panel.curves if curve.line == line.label]
        for curve in curves:
            y = [value * factor for value in curve.y]
            axes.plot(curve.x, y, color=color, linewidth=1, zorder=1.5, label=plain(curve.label) or None)
        text, width = plain(line.label) or None, 0.0 if curves or panel.bands else 1.5
        axes.plot(line.x, values, color=color, marker=marker, markersize=6, linewidth=width, label=text)
        if len(line.x) > _MOST_ERROR_BARS:
            axes.fill_between(line.x, low, high, color=color, alpha=0.25, linewidth=0)
        else:
            error = (values - low, high - values)
            axes.errorbar(line.x, values, yerr=error, fmt="none", ecolor=color, elinewidth=1.5, capsize=5)
    axes.set_ylabel(f"{panel.title} ({unit})", fontsize=13)
    _vertical_scale(axes, [y.value * factor for line in panel.lines for y in line.y])
    style(axes)


def _gaps(axes: Any, gaps: dict[float, str]) -> None:
    foot = axes.get_xaxis_transform()
    cross = {"marker": "x", "color": _GREY, "markersize": 9, "markeredgewidth": 2, "linestyle": "none"}
    if gaps:
        axes.plot(list(gaps), [0.04] * len(gaps), transform=foot, label="not measured", **cross)
    for position, status in gaps.items():
        words = {"ha": "center", "fontsize": 10, "color": _GREY, "rotation": 90 if len(gaps) > 3 else 0}
        axes.annotate(plain(status), (position, 0.04), (0, 9), xycoords=foot, textcoords="offset points", **words)


def _bars(figure: Any, bars: Bars) -> None:
    axes = figure.subplots()
    values = [value for value in bars.values if value is not None]
    factor, unit = _unit("seconds", values)
    for position, (value, remark) in enumerate(zip(bars.values, bars.remarks, strict=True)):
        if value is None:
            words = {"va": "center", "color": _GREY, "fontsize": 11}
            axes.text(0.01, position, remark, transform=axes.get_yaxis_transform(), **words)
            continue
        length, low, high = _scaled([value], factor)
        axes.barh(position, length, height=0.6, color=_BLUE, alpha=0.75)
        axes.errorbar(length, position, xerr=(length - low, high - length), ecolor="black", elinewidth=1.5, capsize=5)
    axes.set_xlim(0, 1.08 * factor * max(value.high or value.value for value in values))
    axes.set_yticks(range(len(bars.labels)), [plain(cut(text, LONGEST_LABEL)) for text in bars.labels], fontsize=11)
    axes.set_ylim(len(bars.labels) - 0.4, -0.6)
    axes.set_xlabel(f"time per call ({unit})", fontsize=13)
    style(axes)


def _strips(figure: Any, strips: Strips) -> None:
    """Samples in order of time and their distribution, side by side; one row of axes for each point."""
    grid = figure.subplots(len(strips.rows), 2, sharey="row", squeeze=False, width_ratios=(5, 1))
    for (samples, distribution), (name, row) in zip(grid, strips.rows, strict=True):
        _samples(samples, distribution, row)
        samples.set_ylabel("\n".join(filter(None, (plain(name), samples.get_ylabel()))), fontsize=13)
        samples.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))
        distribution.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3, integer=True))
    grid[-1][0].set_xlabel("sample, in the order of time", fontsize=13)
    grid[-1][1].set_xlabel("samples", fontsize=13)
    _legend(grid[0][0])


def _samples(axes: Any, distribution: Any, row: Row) -> None:
    """Every sample, the warm-up shaded, outliers ringed; next to it the distribution of the measured ones."""
    assert row.series is not None
    assert row.time is not None
    warmup, median = row.series.warmup, row.time.median
    factor, unit = _unit("seconds", [median])
    y = [sample * factor for sample in row.series.samples]
    axes.plot(range(warmup, len(y)), y[warmup:], ".", color=_BLUE, markersize=5, label="sample")
    if warmup:
        axes.plot(range(warmup), y[:warmup], ".", color=_GREY, markersize=5)
        axes.axvspan(-0.5, warmup - 0.5, color="#d9d9d9", alpha=0.6, linewidth=0, label="warm-up, not counted")
    if row.time.outliers:
        at = [warmup + index for index in row.time.outliers]
        ring = {"color": _ORANGE, "fillstyle": "none", "markersize": 9, "label": "outlier, counted"}
        axes.plot(at, [y[index] for index in at], "o", **ring)
    for number, start in enumerate(row.series.blocks[1:]):
        axes.axvline(start - 0.5, color=_GREY, linewidth=1, linestyle="--", label=None if number else "next process")
    distribution.hist(y[warmup:], bins=_bins(y[warmup:]), orientation="horizontal", color=_BLUE, alpha=0.75)
    _vertical_scale(axes, y, from_zero=False)
    axes.set_xlim(-0.5, len(y) - 0.5)
    axes.set_ylim(axes.get_ylim())  # those of the samples: the interval of a few processes may be far wider
    axes.set_ylabel(f"{row.time_kind} per call ({unit})")
    for panel in (axes, distribution):
        style(panel)
        panel.axhline(median.value * factor, color=_GREEN, linewidth=1.5, label="median")
        if median.low is not None and median.high is not None:
            band = {"color": _GREEN, "alpha": 0.35, "linewidth": 0, "label": "95 % interval of the median"}
            panel.axhspan(median.low * factor, median.high * factor, **band)


def _bins(y: Sequence[float]) -> Any:
    """Edges evenly spaced on the axis, which is logarithmic if the samples span more than a decade."""
    count, low, high = min(40, max(5, len(y) // 5)), min(y), max(y)
    return count if high <= 10 * low else numpy.geomspace(low, high, count + 1)


def _vertical_scale(axes: Any, values: Sequence[float], *, from_zero: bool = True) -> None:
    """Logarithmic if the values are far apart, otherwise from zero if lengths are to be compared."""
    if _far_apart(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(_plain_number)
        axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    elif from_zero:
        axes.set_ylim(0, max(axes.get_ylim()[1], _HEADROOM * max(values, default=0.0)) or None)


def _far_apart(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > _LOG_FROM


def _plain_number(value: float, _: int) -> str:
    return f"{value:g}"


def _scaled(intervals: Sequence[estimators.Interval], factor: float) -> Any:
    """Values, lower and upper ends in another unit; NaN for an end that is unknown."""
    return factor * numpy.array([(y.value, y.low, y.high) for y in intervals], dtype=float).T


def _unit(unit: str, values: Sequence[estimators.Interval]) -> tuple[float, str]:
    most = max((y.value for y in values), default=0.0)
    return next(((factor, name) for factor, name in _SCALES.get(unit, ()) if most * factor >= 1), (1.0, unit))


def _legend(axes: Any, *, outside: bool = False) -> None:
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if outside else {"loc": "best"}
    axes.legend(fontsize=11, framealpha=0.9, **place)


def style(axes: Any, grid: str = "#dddddd") -> None:
    """Draw a grid behind the data, and no frame above and on the right."""
    axes.grid(True, color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _wrapped(text: str, width: int) -> str:
    return plain("\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …")))


def plain(text: str) -> str:
    """Return a text that matplotlib does not parse as a formula."""
    return text.replace("$", r"\$")
