"""Roofline plot with matplotlib: a log-log plane with ceilings and numbered work below them.

The horizontal axis is arithmetic intensity, FLOP per byte of DRAM, the vertical axis FLOP/s. A row
is the total, an NVTX range, or a part (kernel or layer). Compute ceilings are level; memory
ceilings slope, since FLOP/s = intensity × bytes/s. They meet at the ridge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from perfexp.records.diagnostics import Severity
from perfexp.records.subject import one_line
from perfexp.records.units import digits, pretty
from perfexp.report.plots.canvas import (
    DARK,
    HALO,
    caption_of,
    legend,
    matplotlib,
    name_ticks,
    new_figure,
    plain,
    style,
    title_of,
)
from perfexp.report.plots.chart import COLORS as PALETTE
from perfexp.report.plots.chart import GREY, Caption
from perfexp.report.plots.roofline_table import figures_of
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.peaks import NAMES
from perfexp.roofline.placement import Limit, Roofline, RooflineRow
from perfexp.roofline.sentences import meaning

_COLORS = dict(zip(Limit, (PALETTE[0], PALETTE[2], PALETTE[1], PALETTE[3], GREY), strict=True))
#: Looks of ceilings that work uses, of others, of measured ones, and of the ridge.
_USED, _UNUSED = {"color": "#202020", "linewidth": 2.0}, {"color": GREY, "linewidth": 1.2}
_MEASURED = {"linestyle": (0, (5, 3)), "zorder": 2, **_UNUSED}
_RIDGE = {"color": DARK, "linestyle": ":", "linewidth": 1.2, "zorder": 1.5}
#: Looks of markers by the level of their rows, and of a part's place by its L2 bytes.
_PART = {"marker": "o", "markeredgecolor": "white", "markeredgewidth": 0.8, "alpha": 0.6}
_RANGE = {"marker": "D", "markerfacecolor": "white", "markeredgecolor": "black"}
_TOTAL = {"marker": "*", "color": "black", "markeredgecolor": "white"}
_BY_L2 = {"marker": "o", "markersize": 5, "markerfacecolor": "white", "markevery": [0]}
#: Area of a part's marker in square points: without time, and added for all of the time.
_MIN_AREA, _FULL_AREA = 28, 2400
#: Area of the markers of other rows, by level.
_AREAS = {"range": 60, "total": 190}
#: Maximum number of parts and ranges with a number, and the minimum time share for a number.
_MAX_NUMBERED, _MAX_RANGES, _WORTH_A_NUMBER = 5, 3, 0.01
#: Maximum characters of a legend name and a legend line.
_NAME_LENGTH, _LEGEND_WIDTH = 34, 50
#: Height of a number and width of its characters, in points.
_HIGH, _WIDE = 11, 7.5
#: Data types with a ceiling only if something was computed in them.
_RARE = ("fp64", "fp64_vector", "fp8", "half")
#: Factors around the drawn points, and between the highest and the lowest point.
_MARGIN, _DEPTH = 2.5, 1e7
#: Maximum relative difference between equal ceilings.
_EQUAL = 0.005
#: Left, bottom, width and height of the axes, as fractions of the figure. The legend is on the
#: right.
_AXES = (0.078, 0.125, 0.597, 0.765)


def compose(roofline: Roofline) -> Any:
    """Return a roofline as a matplotlib figure, 1200 × 800 pixels.

    Parts that take at least 1 % of the time have a mark at their L2 intensity, too, and the longest
    rows a number, which the legend explains.
    """
    figure = new_figure(8)
    axes = figure.add_axes(_AXES)
    parts, total = _slowest(roofline.parts), roofline.total
    worthy = [row for row in parts if row.time_share >= _WORTH_A_NUMBER]
    ranges = []
    for row in _slowest(roofline.ranges):
        # a range of all the time has the place of the total
        if _WORTH_A_NUMBER <= row.time_share < 0.999:
            ranges.append(row)
    del ranges[_MAX_RANGES:]
    numbered = [*ranges, *(worthy[:_MAX_NUMBERED] or parts[:3])]
    _scales(axes, roofline)
    _ceilings(axes, roofline)
    for row in worthy:
        if row.load.l2_intensity and roofline.peaks.l2_bytes_per_second:
            look = {"color": _COLORS[row.limit], "linewidth": 0.7, "label": "by L2 bytes", **_BY_L2}
            places = [row.load.l2_intensity, row.load.intensity]
            axes.plot(places, [row.load.flops_per_second] * 2, **look)
    for row in parts:
        _marker(axes, roofline, row, color=_COLORS[row.limit], zorder=4, **_PART)
    for row in ranges:
        _marker(axes, roofline, row, zorder=5, **_RANGE)
    if total.has_place and len(roofline.parts) > 1:
        _marker(axes, roofline, total, zorder=6, **_TOTAL)
        axes.plot([], [], linestyle="none", markersize=12, label="total", **_TOTAL)
    _numbers(axes, numbered)
    _legend(axes, roofline, numbered)
    caption_of(figure, caption(roofline))
    return figure


def _slowest(rows: Iterable[RooflineRow]) -> list[RooflineRow]:
    """Return the rows that have a place in the plane, by time, longest first."""
    return sorted((row for row in rows if row.has_place), key=lambda row: -row.time_share)


def _scales(axes: Any, roofline: Roofline) -> None:
    """Scale the axes to all rows, and to the ceilings in use with their ridges.

    Rows far below the others are moved to the edge, so that one tiny kernel does not stretch the
    plot.
    """
    peaks, rows = roofline.peaks, (*roofline.parts, *roofline.ranges, roofline.total)
    used = [height for _, height, is_used in _levels(roofline) if is_used]
    x, y = list[float](), [*used, used[-1] / 10]
    for slope in (peaks.dram_bytes_per_second, peaks.l2_bytes_per_second):
        if slope:
            x += (used[0] / slope, used[-1] / slope)
    for row in rows:
        if row.has_place:
            x.append(row.load.intensity or 0.0)
            y.append(row.load.flops_per_second or 0.0)
            if row.load.l2_intensity and peaks.dram_bytes_per_second and peaks.l2_bytes_per_second:
                x.append(row.load.l2_intensity)
    left = max(min(x), max(x) / _DEPTH) / _MARGIN
    bottom = max(min(y), max(y) / _DEPTH) / _MARGIN
    right, top = 2 * _MARGIN * max(x), _MARGIN * max(y)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    style(axes)
    axes.set_xlabel("arithmetic intensity (FLOP per byte of DRAM)", fontsize=13)
    axes.set_ylabel("achieved rate (FLOP/s)", fontsize=13)
    locator = partial(matplotlib.ticker.LogLocator, numticks=12)
    name_ticks(axes.xaxis, locator(), lambda value: digits(value, 1) if value < 1 else f"{value:g}")
    name_ticks(axes.yaxis, locator(), lambda value: pretty(value, "", stated=True))


def _ceilings(axes: Any, roofline: Roofline) -> None:
    """Draw compute ceilings, memory ceilings, and the ridge between the highest in use.

    Compute ceilings are horizontal, memory ceilings slope.
    """
    peaks, levels = roofline.peaks, _levels(roofline)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    memory, highest = peaks.dram_bytes_per_second or 1.0, levels[0][1]

    def ends(rate: float, unit: str) -> list[tuple[float, float]]:
        """Return the two ends of a ceiling, in FLOP per byte and FLOP/s.

        A compute ceiling runs from the ridge to the right edge, a memory ceiling from the left edge
        up to the highest compute ceiling.
        """
        if unit == "FLOP/s":
            return [(rate / memory, rate), (right, rate)]
        start = max(left, bottom / rate)
        return [(start, start * rate), (highest / rate, highest)]

    for name, rate, is_used in levels:
        if is_used or rate < top:
            words = f"{name} {pretty(rate, 'FLOP/s', stated=True)}"
            _ceiling(axes, words, ends(rate, "FLOP/s"), _USED if is_used else _UNUSED)
    for name, rate in (("DRAM", memory), ("L2", peaks.l2_bytes_per_second or 0.0)):
        if rate:
            words = f"{name} {pretty(rate, 'B/s', stated=True)}"
            _ceiling(axes, words, ends(rate, "B/s"), _USED)
    for kind, rate in peaks.measured.items():
        unit, stated = "FLOP/s", peaks.flops_per_second.get(kind)
        if kind == "dram":
            unit, stated = "B/s", memory
        if not _is_equal(rate, stated):
            name = f"measured: {NAMES.get(kind, kind.upper())} {pretty(rate, unit, stated=True)}"
            axes.plot(*zip(*ends(rate, unit), strict=True), label=name, **_MEASURED)
    height = next(height for _, height, is_used in levels if is_used)
    name = f"ridge: {digits(height / memory)} FLOP/B"
    axes.plot([height / memory] * 2, [bottom, height], label=name, **_RIDGE)


def _levels(roofline: Roofline) -> list[tuple[str, float, bool]]:
    """Return the compute ceilings, highest first: name, FLOP/s, and whether any work uses it.

    Equal ceilings are merged. Rare data types are left out unless they are used.
    """
    peaks = roofline.peaks
    ceilings = []
    for row in (roofline.total, *roofline.parts):
        for kind, amount in (row.load.flops or {}).items():
            if amount:
                ceilings.append(peaks.of(kind))
    used = {ceiling[0] for ceiling in ceilings or [peaks.reference] if ceiling}
    merged: dict[float, list[str]] = {}
    for name, height in sorted(peaks.flops_per_second.items(), key=lambda item: -item[1]):
        if name in used or name not in _RARE:
            for equal, names in merged.items():
                if _is_equal(equal, height):
                    names.append(name)
                    break
            else:
                merged[height] = [name]
    levels = []
    for height, names in merged.items():
        title = " = ".join(NAMES[name] for name in names)
        levels.append((title, height, not used.isdisjoint(names)))
    return levels


def _is_equal(first: float, second: float | None) -> bool:
    """Return whether two ceilings are equal within the tolerance; never with an unknown one."""
    return second is not None and abs(first - second) <= _EQUAL * second


def _ceiling(axes: Any, name: str, ends: Any, look: dict[str, Any]) -> None:
    """Draw a ceiling with its name above it, at the right end if level, otherwise at its start.

    Args:
        ends: two positions in FLOP per byte and FLOP/s.
    """
    axes.plot(*zip(*ends, strict=True), zorder=2, **look)
    (x0, y0), (x1, y1) = axes.transData.transform(ends)
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    turned = {"rotation": angle, "rotation_mode": "anchor", "color": look["color"]}
    words = {"textcoords": "offset points", "fontsize": 10, "path_effects": HALO, **turned}
    if angle:
        axes.annotate(name, ends[0], (10, 16), ha="left", **words)
    else:
        axes.annotate(name, ends[1], (-4, 4), ha="right", **words)


def _place(axes: Any, row: RooflineRow) -> tuple[float, float]:
    """Return a row's intensity and FLOP/s, moved to the edge of the axes if it lies outside."""
    (left, _), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    return max(row.load.intensity or 0.0, left), max(row.load.flops_per_second or 0.0, bottom)


def _size(row: RooflineRow) -> float:
    """Return the diameter of a row's marker in points."""
    area = _AREAS.get(row.level, _MIN_AREA + _FULL_AREA * row.time_share)
    return 2 * math.sqrt(area / math.pi)


def _marker(axes: Any, roofline: Roofline, row: RooflineRow, **look: Any) -> None:
    """Draw a row with its values as a tooltip, and a link to its row in the page's table."""
    x, y = _place(axes, row)
    figures = [f"{title} {text}" for title, text in figures_of(roofline, row).items()]
    words = title_of(f"{row.number} {row.label}", row.where, *figures, meaning(roofline, row))
    look |= {"linestyle": "none", "markersize": _size(row), "url": f"#{row.number}", **words}
    axes.plot([x], [y], **look)


def _numbers(axes: Any, rows: Sequence[RooflineRow]) -> None:
    """Write numbers to the right of markers.

    Numbers that would touch are joined, such as `1, 3`.
    """
    placed = []
    for row in rows:
        x, y = axes.transData.transform(_place(axes, row)) * 72 / axes.figure.dpi
        placed.append((x + _size(row) / 2 + 2, y, row.number))
    texts: list[tuple[float, float, str]] = []
    # from left to right, so that growing text only reaches later numbers
    for x, y, number in sorted(placed):
        for index, (start, height, text) in enumerate(texts):
            if abs(height - y) < _HIGH and x < start + _WIDE * (len(text) + 1):
                texts[index] = start, height, f"{text}, {number}"
                break
        else:
            texts.append((x, y, number))
    look = {"va": "center", "weight": "bold", "fontsize": 10, "path_effects": HALO, "zorder": 8}
    for x, y, text in texts:
        axes.annotate(text, (x, y), xycoords="figure points", **look)


def _legend(axes: Any, roofline: Roofline, rows: Sequence[RooflineRow]) -> None:
    """Add the meaning of colors, sizes and markers, and the names of numbered rows.

    Each color also shows its time share.
    """
    for limit, color in _COLORS.items():
        time_shares = [row.time_share for row in roofline.parts if row.limit is limit]
        if time_shares or limit not in (Limit.cached, Limit.unclear):
            words = f"{roofline.noun} {limit.value}: {sum(time_shares):.0%} of the time"
            axes.plot([], [], "o", color=color, alpha=0.7, label=words)
    for row in rows:
        name = row.label
        look: dict[str, Any] = {**_PART, "color": _COLORS[row.limit]}
        if row.level == "range":
            name = row.name.rsplit("/", 1)[-1]
            look = _RANGE
        share = f"{row.time_share:.0%}" if row.time_share >= 0.095 else f"{row.time_share:.1%}"
        words = f"{row.number}  {share}  {cut(one_line(name), _NAME_LENGTH)}"
        axes.plot([], [], linestyle="none", label=plain(words), **look)
    legend(axes, width=_LEGEND_WIDTH, fontsize=8.5, title="area: share of the time")


def _short(note: str) -> str:
    """Return a diagnostic's code, or the beginning of another note."""
    if note.partition(":")[0] in list(Severity):
        return note.rpartition("(")[2].rstrip(")")
    return note.partition(": ")[0].rstrip(".")


def caption(roofline: Roofline) -> Caption:
    """Return the text around the plot: title, number of parts, peak sources and short caveats.

    The footer names diagnostics by code; console and CSV have their full texts.
    """
    launches, parts = roofline.total.load.launches, len(roofline.parts)
    noun = roofline.noun if parts > 1 else roofline.noun[:-1]
    subtitle = f"{parts} {noun}"
    if not roofline.analytic:
        plural = ""
        if launches > 1:
            plural = "es"
        subtitle = f"{launches} launch{plural} of {subtitle}"
    placed = sum(row.has_place for row in roofline.parts)
    if placed < parts:
        subtitle += f" ({placed} with a place here)"
    peaks = ", ".join(roofline.peaks.sources) or "unknown source"
    if roofline.peaks.foreign:
        peaks += f", another device than {roofline.peaks.foreign}"
    notes = "; ".join(dict.fromkeys(map(_short, roofline.notes)))
    return Caption(
        title=one_line(roofline.title),
        subtitle=f"{subtitle}; peaks: {one_line(peaks)}",
        footer=f"{notes}: see the console or the CSV" if notes else "",
    )
