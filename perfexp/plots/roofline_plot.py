"""Plot of a roofline by matplotlib: a log-log plane with ceilings and numbered work below them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from perfexp.plots import roofline_ceilings as plane
from perfexp.plots.canvas import HALO, caption_of, matplotlib, new_figure, plain, save, style
from perfexp.plots.chart import Caption
from perfexp.plots.roofline_ceilings import COLORS, Ceiling, Window
from perfexp.records.diagnostics import Severity
from perfexp.records.units import digits
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.placement import Limit, Roofline, Row
from perfexp.roofline.sentences import pretty
from perfexp.summaries.subject import one_line

_GREY, _USED, _UNUSED = "#5f5f5f", "#202020", "#9a9a9a"
#: Area of a marker in square points: of a part without time, on top of it for all of the time, and of other rows.
_MIN_AREA, _FULL_AREA = 28, 2400
_AREAS = {"range": 60, "total": 190}
_NAME_LENGTH = 34
#: Directions from a marker to its number, in degrees, the best first; and distances in pixels from its edge.
_ANGLES, _DISTANCES = (0, 180, 90, 270, 30, 150, 330, 210, 60, 120, 300, 240), (12, 22, 34, 50, 68, 88, 110)
#: Radius of the smallest marker with its number on it, in pixels.
_WIDE = 11
#: Line between a marker and its number.
_LEADER = {"arrowstyle": "-", "color": "#808080", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
#: Distance of a ceiling from its name, in pixels.
_BESIDE = 5
#: Left, bottom, width and height of the axes, as fractions of the figure; the legend is right of them.
_AXES = (0.078, 0.125, 0.597, 0.765)


def plot(roofline: Roofline, form: str) -> bytes:
    """A plot of 1200 × 800 pixels as `png` or `svg`; the same roofline gives the same bytes."""
    # the SVG backend has 72 pixels per inch, whatever the figure's dpi
    return save(partial(compose, roofline, dpi=100 if form == "png" else 72), form)


def compose(roofline: Roofline, dpi: int = 100) -> Any:
    """The matplotlib figure, whose texts are placed in pixels."""
    figure = new_figure(8, dpi=dpi)
    axes, window = figure.add_axes(_AXES), plane.window_of(roofline)
    _scales(axes, window)
    _markers(axes, roofline, window)
    rows = [*plane.distinct_ranges(roofline), *plane.numbered(roofline)]
    markers = [_marker_box(axes, row, window) for row in rows]
    taken = [_marker_box(axes, roofline.total, window)] if _has_star(roofline) else []
    taken += [_ceiling(axes, ceiling) for ceiling in plane.ceilings_of(roofline, window)]
    taken += [_ridge(axes, *at, window)] if (at := plane.ridge(roofline)) else []
    for i, row in enumerate(rows):
        _number(axes, row.number, markers[i], taken, markers[:i] + markers[i + 1 :])
    _legend(axes, roofline)
    caption_of(figure, caption(roofline))
    return figure


def _scales(axes: Any, window: Window) -> None:
    axes.set(xscale="log", yscale="log", xlim=window.x, ylim=window.y)
    axes.set_xlabel(plane.X_TITLE, fontsize=13)
    axes.set_ylabel(plane.Y_TITLE, fontsize=13)
    axes.xaxis.set_major_formatter(lambda value, _: digits(value, 1) if value < 1 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: pretty(value, "", stated=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.LogLocator(numticks=12))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    style(axes, grid="#e4e4e4")


def _place(row: Row, window: Window) -> tuple[float, float]:
    return window.clip(row.load.intensity, row.load.flops_per_second)


def _area(row: Row) -> float:
    return _AREAS.get(row.level, _MIN_AREA + _FULL_AREA * row.time_share)


def _markers(axes: Any, roofline: Roofline, window: Window) -> None:
    parts = plane.placed_parts(roofline)
    xs, ys = ([_place(row, window)[axis] for row in parts] for axis in (0, 1))
    areas, colors = [_area(row) for row in parts], [COLORS[row.limit] for row in parts]
    axes.scatter(xs, ys, s=areas, c=colors, alpha=0.6, edgecolors="white", linewidths=0.8, zorder=4)
    for row in plane.with_l2(roofline):
        (x, y), color = _place(row, window), COLORS[row.limit]
        inner, _ = window.clip(row.load.l2_intensity, y)
        axes.plot([inner, x], [y, y], color=color, linewidth=0.7, alpha=0.5, zorder=3)
        axes.scatter(inner, y, s=22, facecolors="white", edgecolors=color, linewidths=1.2, zorder=3.5)
    for row in plane.distinct_ranges(roofline):
        axes.scatter(*_place(row, window), s=_area(row), marker="D", facecolors="white", edgecolors="black", zorder=5)
    if _has_star(roofline):
        place, area = _place(roofline.total, window), _area(roofline.total)
        axes.scatter(*place, s=area, marker="*", color="black", edgecolors="white", zorder=6)


def _has_star(roofline: Roofline) -> bool:
    return roofline.total.has_place and len(roofline.parts) > 1


def _number(axes: Any, number: str, marker: Any, taken: list[Any], others: list[Any]) -> None:
    """Write a number on its marker, or as near as there is room, with a line to the marker; its box becomes `taken`.

    The boxes of other markers are covered only if need be.
    """
    (x, y), radius, inside = (marker.min + marker.max) / 2, marker.width / 2, axes.get_window_extent()
    places = [(radius + distance, angle) for distance in _DISTANCES for angle in _ANGLES]
    places = [(0.0, 0), *places] if radius > _WIDE else places
    text = _text(axes, number, "black", ha="center", va="center", weight="bold", zorder=8)
    for obstacles in (taken + others, taken):
        for distance, angle in places:
            end = x + distance * math.cos(math.radians(angle)), y + distance * math.sin(math.radians(angle))
            text.set_position(end)
            box = text.get_window_extent()
            if inside.contains(*box.min) and inside.contains(*box.max) and not box.count_overlaps(obstacles):
                taken.append(box)
                if distance > radius + _DISTANCES[0]:
                    axes.annotate("", end, (x, y), xycoords="figure pixels", arrowprops=_LEADER, zorder=3.8)
                return
    text.remove()


def _ceiling(axes: Any, ceiling: Ceiling) -> Any:
    """Draw a ceiling with its name beside the line, and return the name's box."""
    color, dash = _USED if ceiling.used else _UNUSED, (0, (5, 3)) if ceiling.measured else "-"
    axes.plot(ceiling.x, ceiling.y, color=color, linestyle=dash, linewidth=2.0 if ceiling.used else 1.2, zorder=2)
    (x0, y0), (x1, y1) = (axes.transData.transform(end) for end in zip(ceiling.x, ceiling.y, strict=True))
    angle, beside = math.atan2(y1 - y0, x1 - x0), -_BESIDE if ceiling.below else _BESIDE
    # level names end at the right, sloping ones begin at the left; names of measured ceilings keep clear of them
    part = (0.35 if ceiling.measured else 0.04) if angle else (0.6 if ceiling.measured else 0.99)
    align = {"ha": "left" if angle else "right", "va": "top" if ceiling.below else "bottom", "rotation_mode": "anchor"}
    x, y = x0 + part * (x1 - x0) - beside * math.sin(angle), y0 + part * (y1 - y0) + beside * math.cos(angle)
    name = _text(axes, ceiling.name, color, x=x, y=y, zorder=2.5, rotation=math.degrees(angle), **align)
    return name.get_window_extent()


def _ridge(axes: Any, intensity: float, rate: float, window: Window) -> Any:
    """Mark the intensity from which compute limits, and return the box of its label."""
    axes.plot([intensity] * 2, [window.y[0], rate], color=_GREY, linestyle=":", linewidth=1.2, zorder=1.5)
    x, y = axes.transData.transform((intensity, window.y[0]))
    words = f"ridge: {digits(intensity)} FLOP/B"
    return _text(axes, words, _GREY, x=x + 5, y=y + 6, ha="left", va="bottom").get_window_extent()


def _marker_box(axes: Any, row: Row, window: Window) -> Any:
    (x, y), dpi = axes.transData.transform(_place(row, window)), axes.figure.dpi
    radius = math.sqrt(_area(row) / math.pi) * dpi / 72
    return matplotlib.transforms.Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius)


def _text(axes: Any, words: str, color: str, **style: Any) -> Any:
    """A text whose place is in pixels."""
    settings = {"x": 0, "y": 0, "fontsize": 10, "path_effects": HALO, "transform": None, **style}
    return axes.text(**settings, color=color, s=plain(words))


def _legend(axes: Any, roofline: Roofline) -> None:
    """Meaning of colors, sizes and markers with the time in each, and the names of the numbered rows."""
    handles = []
    for limit, color in COLORS.items():
        rows = [row for row in roofline.parts if row.limit is limit]
        if limit in (Limit.cached, Limit.unclear) and not rows:
            continue
        share = sum(row.time_share for row in rows)
        handles.append(_handle("o", f"{roofline.noun} {limit.value}: {share:.0%} of the time", color=color, alpha=0.7))
    if plane.with_l2(roofline):
        handles.append(_handle("o", "at its intensity by L2 bytes", markerfacecolor="white", markeredgecolor=_GREY))
    if _has_star(roofline):
        handles.append(_handle("*", "total", color="black", markersize=12))
    diamond = {"markerfacecolor": "white", "markeredgecolor": "black"}
    ranges, parts = plane.distinct_ranges(roofline), plane.numbered(roofline)
    handles += [_handle("D", _entry(row, row.name.rsplit("/", 1)[-1]), **diamond) for row in ranges]
    handles += [_handle("o", _entry(row, row.label), color=COLORS[row.limit], alpha=0.7) for row in parts]
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(handles=handles, fontsize=8.5, title="area: share of the time", **place)


def _entry(row: Row, name: str) -> str:
    share = f"{row.time_share:.0%}" if row.time_share >= 0.095 else f"{row.time_share:.1%}"
    return plain(f"{row.number}  {share}  {cut(one_line(name), _NAME_LENGTH)}")


def _handle(marker: str, label: str, **style: Any) -> Any:
    return matplotlib.lines.Line2D([], [], linestyle="none", marker=marker, label=label, **style)


def _short(note: str) -> str:
    """A diagnostic by its code, and another note by its beginning."""
    is_diagnostic = note.partition(":")[0] in list(Severity)
    return note.rpartition("(")[2].rstrip(")") if is_diagnostic else note.partition(": ")[0].rstrip(".")


def caption(roofline: Roofline) -> Caption:
    """The title, the sources of the peaks, and the caveats in short."""
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
