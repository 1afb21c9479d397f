"""Roofline plot with matplotlib: a log-log plane with ceilings and numbered work below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from perfexp.plots.canvas import (
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
from perfexp.plots.chart import COLORS as PALETTE
from perfexp.plots.chart import GREY, Caption
from perfexp.plots.roofline_table import figures_of
from perfexp.records.diagnostics import Severity
from perfexp.records.units import digits
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.peaks import NAMES
from perfexp.roofline.placement import Limit, Roofline, Row, shares_of, together
from perfexp.roofline.sentences import meaning, pretty
from perfexp.summaries.subject import one_line
from perfexp.tables.layer_groups import NUMBER, name_of_all

_COLORS = dict(zip(Limit, (PALETTE[0], PALETTE[2], PALETTE[1], PALETTE[3], GREY), strict=True))
#: Style of ceilings that work uses, and of others; of measured ceilings, and of text.
_USED, _UNUSED = {"color": "#202020", "linewidth": 2.0}, {"color": GREY, "linewidth": 1.2}
_MEASURED = {"linestyle": (0, (5, 3)), "zorder": 2, **_UNUSED}
_WORDS = {"textcoords": "offset points", "fontsize": 10, "path_effects": HALO}
#: Marker area in square points: for a part without time, the addition for 100 % of the time, and
#: for other rows.
_MIN_AREA, _FULL_AREA = 28, 2400
_AREAS = {"range": 60, "total": 190}
#: Maximum number of parts and ranges with a number, and the minimum time share for a number.
_MAX_NUMBERED, _MAX_RANGES, _WORTH_A_NUMBER = 5, 3, 0.01
#: Maximum characters of a legend name and a legend line; height of a number and width of its
#: characters, in points.
_NAME_LENGTH, _LEGEND_WIDTH, _HIGH, _WIDE = 34, 50, 11, 7.5
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
    """Return the figure, 1200 × 800 pixels."""
    figure = new_figure(8)
    axes, parts, ranges = figure.add_axes(_AXES), _parts(roofline), _ranges(roofline)
    _scales(axes, roofline)
    _ceilings(axes, roofline)
    slow = [row for row in parts if row.time_share >= _WORTH_A_NUMBER]
    for row in slow if roofline.peaks.l2_bytes_per_second else ():
        if row.load.l2_intensity:
            places, rates = (
                [row.load.l2_intensity, row.load.intensity],
                [row.load.flops_per_second] * 2,
            )
            axes.plot(places, rates, color=_COLORS[row.limit], linewidth=0.7, alpha=0.5)
            ring = {
                "markersize": 5,
                "markerfacecolor": "white",
                "label": "at its intensity by L2 bytes",
            }
            axes.plot(
                places[:1],
                rates[:1],
                color=_COLORS[row.limit],
                marker="o",
                linestyle="none",
                **ring,
            )
    for row in parts:
        disc = {
            "color": _COLORS[row.limit],
            "markeredgecolor": "white",
            "markeredgewidth": 0.8,
            "alpha": 0.6,
        }
        _marker(axes, roofline, row, marker="o", zorder=4, **disc)
    for row in ranges:
        _marker(
            axes,
            roofline,
            row,
            marker="D",
            markerfacecolor="white",
            markeredgecolor="black",
            zorder=5,
        )
    if roofline.total.has_place and len(roofline.parts) > 1:
        star = {"marker": "*", "color": "black", "markeredgecolor": "white"}
        _marker(axes, roofline, roofline.total, zorder=6, **star)
        axes.plot([], [], linestyle="none", markersize=12, label="total", **star)
    rows = [*ranges, *(slow[:_MAX_NUMBERED] or parts[:3])]
    _numbers(axes, rows)
    _legend(axes, roofline, rows)
    caption_of(figure, caption(roofline))
    return figure


def _parts(roofline: Roofline) -> list[Row]:
    """Return parts with a position, slowest first.

    Layers with the same work are merged under the first layer's number.
    """
    groups: dict[object, list[Row]] = {}
    for row in roofline.parts:
        work = (
            tuple((row.load.flops or {}).items()),
            row.load.dram_bytes,
            NUMBER.sub("0", row.label),
        )
        groups.setdefault(work if roofline.analytic else row.number, []).append(row)
    rows = [_merged(group, roofline) for group in groups.values() if group[0].has_place]
    return sorted(rows, key=lambda row: -row.time_share)


def _merged(rows: Sequence[Row], roofline: Roofline) -> Row:
    if len(rows) == 1:
        return rows[0]
    load, label = (
        together(row.load for row in rows),
        f"{name_of_all([row.label for row in rows])} ×{len(rows)}",
    )
    share = sum(row.time_share for row in rows)
    return replace(
        rows[0], label=label, load=load, shares=shares_of(load, roofline.peaks), time_share=share
    )


def _ranges(roofline: Roofline) -> list[Row]:
    """Return the longest ranges, except those that cover all of the time."""
    ranges = [
        row
        for row in roofline.ranges
        if row.has_place and _WORTH_A_NUMBER <= row.time_share < 0.999
    ]
    return sorted(ranges, key=lambda row: -row.time_share)[:_MAX_RANGES]


def _scales(axes: Any, roofline: Roofline) -> None:
    """Scale the axes to all parts and ranges, and to the ceilings in use with their ridges."""
    peaks = roofline.peaks
    loads = [
        row.load for row in (*roofline.parts, *roofline.ranges, roofline.total) if row.has_place
    ]
    used = [height for _, height, is_used in _levels(roofline) if is_used]
    slopes = [
        slope for slope in (peaks.dram_bytes_per_second or 1.0, peaks.l2_bytes_per_second) if slope
    ]
    x = [height / slope for height in (used[0], used[-1]) for slope in slopes]
    x += [
        one
        for load in loads
        for one in (load.intensity, load.l2_intensity if len(slopes) > 1 else None)
        if one
    ]
    y = [*used, used[-1] / 10, *(load.flops_per_second or 0.0 for load in loads)]
    left, bottom = (max(min(places), max(places) / _DEPTH) / _MARGIN for places in (x, y))
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, 2 * _MARGIN * max(x)),
        ylim=(bottom, _MARGIN * max(y)),
    )
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

    def level(height: float) -> tuple[tuple[float, float], tuple[float, float]]:
        return (height / memory, height), (right, height)

    def slope(rate: float) -> tuple[tuple[float, float], tuple[float, float]]:
        start = max(left, bottom / rate)
        return (start, start * rate), (highest / rate, highest)

    for name, height, is_used in levels:
        if is_used or height < top:
            _ceiling(
                axes,
                f"{name} {pretty(height, 'FLOP/s', stated=True)}",
                level(height),
                is_used=is_used,
            )
    l2 = peaks.l2_bytes_per_second
    _ceiling(axes, f"DRAM {pretty(memory, 'B/s', stated=True)}", slope(memory), is_below=bool(l2))
    if l2:
        _ceiling(axes, f"L2 {pretty(l2, 'B/s', stated=True)}", slope(l2))
    for kind, rate in peaks.measured.items():
        stated, unit = (
            (memory, "B/s") if kind == "dram" else (peaks.flops_per_second.get(kind), "FLOP/s")
        )
        if not _is_equal(rate, stated):
            name = f"measured: {NAMES.get(kind, kind.upper())} {pretty(rate, unit, stated=True)}"
            ends = slope(rate) if kind == "dram" else level(rate)
            axes.plot(*zip(*ends, strict=True), label=name, **_MEASURED)
    if peaks.dram_bytes_per_second:
        height = next(height for _, height, is_used in levels if is_used)
        look = {
            "color": DARK,
            "linestyle": ":",
            "linewidth": 1.2,
            "label": f"ridge: {digits(height / memory)} FLOP/B",
        }
        axes.plot([height / memory] * 2, [bottom, height], zorder=1.5, **look)


def _levels(roofline: Roofline) -> list[tuple[str, float, bool]]:
    """Return names, heights and use of compute ceilings, highest first.

    Equal ceilings are merged.
    """
    peaks = roofline.peaks
    flops = roofline.total.load.flops or {
        kind: 1.0 for row in roofline.parts for kind in row.load.flops or {}
    }
    used = {ceiling[0] for kind, amount in flops.items() if amount and (ceiling := peaks.of(kind))}
    used = used or {ceiling[0] for ceiling in [peaks.reference] if ceiling}
    merged: dict[float, list[str]] = {}
    for name, height in sorted(peaks.flops_per_second.items(), key=lambda item: -item[1]):
        if name in used or name not in _RARE:
            merged.setdefault(
                next((one for one in merged if _is_equal(one, height)), height), []
            ).append(name)
    return [
        (" = ".join(NAMES[name] for name in names), height, bool(used & set(names)))
        for height, names in merged.items()
    ]


def _is_equal(one: float, other: float | None) -> bool:
    return other is not None and abs(one - other) <= _EQUAL * other


def _ceiling(
    axes: Any, name: str, ends: Any, *, is_used: bool = True, is_below: bool = False
) -> None:
    """Draw a line with its name: at the right end of a horizontal line, at the start of a slope."""
    look = _USED if is_used else _UNUSED
    axes.plot(*zip(*ends, strict=True), zorder=2, **look)
    (x0, y0), (x1, y1) = axes.transData.transform(ends)
    angle, beside = math.atan2(y1 - y0, x1 - x0), -4 if is_below else 4
    place, along, align = (ends[0], 20, "left") if angle else (ends[1], -4, "right")
    shift = (
        along * math.cos(angle) - beside * math.sin(angle),
        along * math.sin(angle) + beside * math.cos(angle),
    )
    turned = {
        "rotation": math.degrees(angle),
        "rotation_mode": "anchor",
        "ha": align,
        "color": look["color"],
    }
    axes.annotate(name, place, shift, va="top" if is_below else "bottom", **turned, **_WORDS)


def _place(axes: Any, row: Row) -> tuple[float, float]:
    """Return a row's position, moved to the edge of the axes if it lies outside."""
    (left, _), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    return max(row.load.intensity or 0.0, left), max(row.load.flops_per_second or 0.0, bottom)


def _size(row: Row) -> float:
    """Return the diameter of a row's marker in points."""
    area = _AREAS.get(row.level, _MIN_AREA + _FULL_AREA * row.time_share)
    return 2 * math.sqrt(area / math.pi)


def _marker(axes: Any, roofline: Roofline, row: Row, **look: Any) -> None:
    """Draw a row with its values as a tooltip, and a link to its row in the page's table."""
    x, y = _place(axes, row)
    figures = [f"{title} {text}" for title, text in figures_of(roofline, row).items()]
    words = title_of(f"{row.number} {row.label}", row.where, *figures, meaning(roofline, row))
    axes.plot(
        [x], [y], linestyle="none", markersize=_size(row), url=f"#{row.number}", **look, **words
    )


def _numbers(axes: Any, rows: Sequence[Row]) -> None:
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
            if abs(height - y) < _HIGH and x < start + _WIDE * len(text):
                texts[index] = start, height, f"{text}, {number}"
                break
        else:
            texts.append((x, y, number))
    for x, y, text in texts:
        look = {"va": "center", "weight": "bold", "fontsize": 10, "path_effects": HALO}
        axes.annotate(text, (x, y), xycoords="figure points", zorder=8, **look)


def _legend(axes: Any, roofline: Roofline, rows: Sequence[Row]) -> None:
    """Add the meaning of colors, sizes and markers, and the names of numbered rows.

    Each color also shows its time share.
    """
    for limit, color in _COLORS.items():
        own = [row.time_share for row in roofline.parts if row.limit is limit]
        if own or limit not in (Limit.cached, Limit.unclear):
            words = f"{roofline.noun} {limit.value}: {sum(own):.0%} of the time"
            axes.plot([], [], "o", color=color, alpha=0.7, label=words)
    for row in rows:
        share = f"{row.time_share:.0%}" if row.time_share >= 0.095 else f"{row.time_share:.1%}"
        name, look = row.label, {"marker": "o", "color": _COLORS[row.limit], "alpha": 0.7}
        if row.level == "range":
            name = row.name.rsplit("/", 1)[-1]
            look = {"marker": "D", "markerfacecolor": "white", "markeredgecolor": "black"}
        words = f"{row.number}  {share}  {cut(one_line(name), _NAME_LENGTH)}"
        axes.plot([], [], linestyle="none", label=plain(words), **look)
    legend(axes, width=_LEGEND_WIDTH, fontsize=8.5, title="area: share of the time")


def _short(note: str) -> str:
    """Return a diagnostic's code, or the beginning of another note."""
    is_diagnostic = note.partition(":")[0] in list(Severity)
    return (
        note.rpartition("(")[2].rstrip(")")
        if is_diagnostic
        else note.partition(": ")[0].rstrip(".")
    )


def caption(roofline: Roofline) -> Caption:
    """Return title, peak sources and short caveats."""
    launches, parts = roofline.total.load.launches, len(roofline.parts)
    count = "" if roofline.analytic else f"{launches} launch{'es' if launches > 1 else ''} of "
    noun = roofline.noun if parts > 1 else roofline.noun[:-1]
    peaks = ", ".join(roofline.peaks.sources) or "unknown source"
    peaks += f", another device than {roofline.peaks.foreign}" if roofline.peaks.foreign else ""
    placed = sum(row.has_place for row in roofline.parts)
    here = f" ({placed} with a place here)" if placed < parts else ""
    notes = "; ".join(dict.fromkeys(map(_short, roofline.notes)))
    return Caption(
        title=one_line(roofline.title),
        subtitle=f"{count}{parts} {noun}{here}; peaks: {one_line(peaks)}",
        footer=f"{notes}: see the console or the CSV" if notes else "",
    )
