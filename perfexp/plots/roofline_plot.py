"""Plot of a roofline by matplotlib: a log-log plane with all ceilings and numbered work below them."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

from perfexp.plots.canvas import caption_of, plain
from perfexp.plots.chart import Caption
from perfexp.plots.drawing import (
    Figure,
    FigureCanvasAgg,
    FuncFormatter,
    Line2D,
    LogLocator,
    NullFormatter,
    matplotlib,
    withStroke,
)
from perfexp.plots.roofline_ceilings import (
    COLORS,
    X_TITLE,
    Y_TITLE,
    Ceiling,
    Window,
    ceilings_of,
    distinct_ranges,
    numbered,
    window_of,
    with_l2,
)
from perfexp.records.units import digits
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.placement import Roofline, Row
from perfexp.roofline.sentences import pretty
from perfexp.summaries.subject import one_line

_GREY, _USED, _UNUSED = "#5f5f5f", "#202020", "#9a9a9a"
_HALO = [withStroke(linewidth=3, foreground="white")]
#: Area of a marker in square points: of a part without time, and on top of it for all of the time.
_MIN_AREA, _FULL_AREA = 28, 2400
#: Marker areas of ranges and of the total.
_RANGE_AREA, _TOTAL_AREA = 60, 190
_NAME_LENGTH = 34
#: Directions from a marker to its number, in degrees, the best first; and distances in pixels from its edge.
_ANGLES, _DISTANCES = (0, 180, 90, 270, 30, 150, 330, 210, 60, 120, 300, 240), (12, 22, 34, 50, 68, 88, 110)
#: Radius of the smallest marker with its number on it, in pixels.
_WIDE = 11
#: Distance of a ceiling from its name, in pixels.
_BESIDE = 5
#: Left, bottom, width and height of the axes, as fractions of the figure; the legend is right of them.
_AXES = (0.07, 0.125, 0.605, 0.765)


def plot(roofline: Roofline, form: str) -> bytes:
    """A plot of 1200 × 800 pixels; the same roofline gives the same bytes.

    Args:
        form: `png` or `svg`.
    """
    buffer = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "perfexp"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        compose(roofline).savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


def compose(roofline: Roofline) -> Any:
    """The matplotlib figure."""
    figure = Figure(figsize=(12, 8), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axes, window = figure.add_axes(_AXES), window_of(roofline)
    _scales(axes, window)
    _markers(axes, roofline, window)
    rows = [*distinct_ranges(roofline), *numbered(roofline)]
    markers = [_marker_box(axes, row, window) for row in rows]
    taken = [_marker_box(axes, roofline.total, window)] if _has_star(roofline) else []
    for ceiling in ceilings_of(roofline, window):
        _ceiling(axes, ceiling, taken, markers)
    for i, row in enumerate(rows):
        _number(axes, row, window, taken, markers[:i] + markers[i + 1 :])
    _legend(axes, roofline)
    caption_of(figure, caption(roofline))
    return figure


def _scales(axes: Any, window: Window) -> None:
    axes.set(xscale="log", yscale="log", xlim=window.x, ylim=window.y)
    axes.set_xlabel(X_TITLE, fontsize=13)
    axes.set_ylabel(Y_TITLE, fontsize=13)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value, 1) if value < 1 else f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: pretty(value, "", stated=True)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=12))
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=11)
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _place(row: Row, window: Window) -> tuple[float, float]:
    return window.clip(row.load.intensity, row.load.flops_per_second)


def _area(row: Row) -> float:
    """The area of a marker in square points."""
    fixed = {"range": _RANGE_AREA, "total": _TOTAL_AREA}
    return fixed.get(row.level, _MIN_AREA + _FULL_AREA * row.time_share)


def _markers(axes: Any, roofline: Roofline, window: Window) -> None:
    """Parts as discs, the largest behind; ranges as diamonds, the total as a star."""
    for row in (row for row in roofline.parts if row.has_place):
        color, place = COLORS[row.limit], _place(row, window)
        axes.scatter(*place, s=_area(row), color=color, alpha=0.6, edgecolors="white", linewidths=0.8, zorder=4)
    for row in with_l2(roofline):
        (x, y), color = _place(row, window), COLORS[row.limit]
        inner, _ = window.clip(row.load.l2_intensity, y)
        axes.plot([inner, x], [y, y], color=color, linewidth=0.7, alpha=0.5, zorder=3)
        axes.scatter(inner, y, s=22, facecolors="white", edgecolors=color, linewidths=1.2, zorder=3.5)
    for row in distinct_ranges(roofline):
        axes.scatter(*_place(row, window), s=_RANGE_AREA, marker="D", facecolors="white", edgecolors="black", zorder=5)
    if _has_star(roofline):
        place = _place(roofline.total, window)
        axes.scatter(*place, s=_TOTAL_AREA, marker="*", color="black", edgecolors="white", zorder=6)


def _has_star(roofline: Roofline) -> bool:
    return roofline.total.has_place and len(roofline.parts) > 1


def _number(axes: Any, row: Row, window: Window, taken: list[Any], others: list[Any]) -> None:
    """The number of a row on its marker, or as near as there is room, with a line to the marker."""
    (x, y), radius = axes.transData.transform(_place(row, window)), _radius(axes, row)
    places = [(0.0, 0), *((radius + distance, angle) for distance in _DISTANCES for angle in _ANGLES)]
    ends = [
        {"x": x + distance * math.cos(math.radians(angle)), "y": y + distance * math.sin(math.radians(angle))}
        for distance, angle in (places if radius > _WIDE else places[1:])
    ]
    text = _text(axes, row.number, "black", ha="center", va="center", weight="bold", zorder=8)
    # a number on another row's marker is better than none
    if _settle(axes, text, ends, taken + others) or _settle(axes, text, ends, taken):
        taken.append(text.get_window_extent())
        end_x, end_y = text.get_position()
        if math.hypot(end_x - x, end_y - y) > radius + _DISTANCES[0] + 1:
            line = Line2D([x, end_x], [y, end_y], color="#808080", linewidth=0.8, zorder=3.8, transform=None)
            axes.figure.add_artist(line)
    else:
        text.remove()


def _ceiling(axes: Any, ceiling: Ceiling, taken: list[Any], markers: list[Any]) -> None:
    """A ceiling with its name, which stands along the line where there is room."""
    color, style = _USED if ceiling.used else _UNUSED, (0, (5, 3)) if ceiling.measured else "-"
    axes.plot(ceiling.x, ceiling.y, color=color, linestyle=style, linewidth=2.0 if ceiling.used else 1.2, zorder=2)
    (x0, y0), (x1, y1) = (axes.transData.transform(end) for end in zip(ceiling.x, ceiling.y, strict=True))
    angle = math.atan2(y1 - y0, x1 - x0)
    places = [
        {
            "x": x0 + part * (x1 - x0) - side * _BESIDE * math.sin(angle),
            "y": y0 + part * (y1 - y0) + side * _BESIDE * math.cos(angle),
            "va": "bottom" if side > 0 else "top",
        }
        for side in ((-1, 1) if ceiling.below else (1, -1))
        for part in ([0.04 * step for step in range(1, 20)] if angle else [0.99 - 0.04 * step for step in range(15)])
    ]
    alignment = {"rotation": math.degrees(angle), "rotation_mode": "anchor", "ha": "left" if angle else "right"}
    text = _text(axes, ceiling.name, color, **alignment)
    if not (_settle(axes, text, places, taken + markers) or _settle(axes, text, places, taken)):
        text.set(**places[0])
    taken.append(text.get_window_extent())


def _settle(axes: Any, text: Any, places: Sequence[dict[str, Any]], taken: list[Any]) -> bool:
    """Move a text to the first place that is inside the axes and free; False where there is none."""
    inside = axes.get_window_extent()
    for place in places:
        text.set(**place)
        box = text.get_window_extent()
        if inside.contains(*box.min) and inside.contains(*box.max) and not box.count_overlaps(taken):
            return True
    return False


def _radius(axes: Any, row: Row) -> float:
    """The radius of a marker in pixels."""
    return math.sqrt(_area(row) / math.pi) * float(axes.figure.dpi) / 72


def _marker_box(axes: Any, row: Row, window: Window) -> Any:
    (x, y), radius = axes.transData.transform(_place(row, window)), _radius(axes, row)
    return matplotlib.transforms.Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius)


def _text(axes: Any, words: str, color: str, **style: Any) -> Any:
    """A text whose place is in pixels."""
    settings = {"fontsize": 10, "color": color, "zorder": 7, "path_effects": _HALO, "transform": None, **style}
    return axes.figure.text(0, 0, plain(words), **settings)


def _legend(axes: Any, roofline: Roofline) -> None:
    """Meaning of colors, sizes and markers with the time in each, and the names of the numbered rows."""
    handles = []
    for limit, color in COLORS.items():
        share = sum(row.time_share for row in roofline.parts if row.limit is limit)
        handles.append(_handle("o", f"{roofline.noun} {limit.value}: {share:.0%} of the time", color=color, alpha=0.7))
    if with_l2(roofline):
        handles.append(_handle("o", "at its intensity by L2 bytes", markerfacecolor="white", markeredgecolor=_GREY))
    if _has_star(roofline):
        handles.append(_handle("*", "total", color="black", markersize=12))
    diamond = {"markerfacecolor": "white", "markeredgecolor": "black"}
    ranges, parts = distinct_ranges(roofline), numbered(roofline)
    handles += [_handle("D", _entry(row, row.name.rsplit("/", 1)[-1]), **diamond) for row in ranges]
    handles += [_handle("o", _entry(row, row.label), color=COLORS[row.limit], alpha=0.7) for row in parts]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5, title="area: share of the time"
    )


def _entry(row: Row, name: str) -> str:
    share = f"{row.time_share:.0%}" if row.time_share >= 0.095 else f"{row.time_share:.1%}"
    return plain(f"{row.number}  {share}  {cut(one_line(name), _NAME_LENGTH)}")


def _handle(marker: str, label: str, **style: Any) -> Any:
    return Line2D([], [], linestyle="none", marker=marker, label=label, **style)


def caption(roofline: Roofline) -> Caption:
    """The title, the sources of the peaks, and the caveats in short."""
    launches, parts = roofline.total.load.launches, len(roofline.parts)
    count = "" if roofline.analytic else f"{launches} launch{'es' if launches > 1 else ''} of "
    noun = roofline.noun if parts > 1 else roofline.noun[:-1]
    peaks = ", ".join(roofline.peaks.sources) or "unknown source"
    peaks += f", another device than {roofline.peaks.foreign}" if roofline.peaks.foreign else ""
    placed = sum(row.has_place for row in roofline.parts)
    here = f" ({placed} with a place here)" if placed < parts else ""
    notes = "; ".join(note.partition(": ")[0].rstrip(".") for note in roofline.notes)
    return Caption(
        title=one_line(roofline.title),
        subtitle=f"{count}{parts} {noun}{here}; peaks: {one_line(peaks)}",
        footer=f"{notes}: see the console or the CSV" if notes else "",
    )
