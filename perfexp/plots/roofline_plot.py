"""Picture of a roofline: a log-log plane with all roofs and the work below them, by matplotlib's objects."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
from perfexp.plots.roofline_ceilings import Kind, Roof, Window, kind_of, roofs_of, window_of
from perfexp.plots.roofline_labels import Box, Spot, place
from perfexp.records.units import digits
from perfexp.roofline.below import Roofline
from perfexp.roofline.placement import Row
from perfexp.roofline.sentences import pretty
from perfexp.roofline.short_names import cut
from perfexp.summaries.subject import one_line

_COLOURS = {Kind.memory: "#0072B2", Kind.compute: "#D55E00", Kind.neither: "#7f7f7f"}
_GREY, _USED, _UNUSED = "#5f5f5f", "#202020", "#9a9a9a"
_WHITE = [withStroke(linewidth=3, foreground="white")]
#: Area of a marker in square points: of a part that takes no time, and on top of it for all of the time.
_LEAST_AREA, _WHOLE_AREA = 28, 2400
#: Larger discs have their middle marked.
_MARKED_AREA = 250
#: So many parts and ranges have a name in the picture, of those with at least this part of the time.
_MOST_LABELS, _MOST_RANGES, _LABELLED = 12, 5, 0.01
_NAME_LENGTH = 34
#: Where the axes are, parts of the figure.
_AXES = (0.07, 0.125, 0.91, 0.765)
#: Between a name and what is beside it, and between a roof and its name, pixels.
_AIR, _BESIDE = 2.0, 5.0


@dataclass
class Drawn:
    """A picture with what is written in it.

    Attributes:
        figure: of matplotlib.
        labels: boxes of the names of parts and ranges, pixels.
        names: what they say.
        others: boxes of the names of roofs and of the legend.
    """

    figure: Any
    labels: list[Box] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    others: list[Box] = field(default_factory=list)


def picture(roofline: Roofline, form: str) -> bytes:
    """A picture of 1200 × 800 pixels; the same roofline gives the same bytes.

    Args:
        roofline: of any file or record.
        form: `png` or `svg`.
    """
    buffer = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "perfexp"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        compose(roofline).figure.savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


def compose(roofline: Roofline) -> Drawn:
    """The picture before it is written.

    Args:
        roofline: of any file or record.
    """
    figure = Figure(figsize=(12, 8), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    drawn = Drawn(figure=figure)
    axes = figure.add_axes(_AXES)
    placed = [row for row in roofline.parts if _has_place(row)]
    window = window_of(roofline, [row for row in (*placed, *_ranges(roofline), roofline.total) if _has_place(row)])
    _scales(axes, window)
    roofs = roofs_of(roofline, window)
    _parts(axes, roofline, placed, window)
    _legend(axes, roofline, placed, drawn)
    lines = [box for roof in roofs for box in _roof(axes, roof, drawn)]
    _names(axes, roofline, placed, window, drawn, lines)
    caption_of(figure, _caption(roofline, len(placed)))
    return drawn


def _has_place(row: Row) -> bool:
    return bool(row.load.intensity and row.load.flops_per_second)


def _at(row: Row, window: Window) -> tuple[float, float]:
    """Where a row lies; one that lies outside is drawn at the edge."""
    return window.held(row.load.intensity or 0.0, row.load.flops_per_second or 0.0)


def _scales(axes: Any, window: Window) -> None:
    axes.set(xscale="log", yscale="log", xlim=window.x, ylim=window.y)
    axes.set_xlabel("arithmetic intensity (FLOP per byte of DRAM)", fontsize=13)
    axes.set_ylabel("achieved rate (FLOP/s)", fontsize=13)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value, 1) if value < 1 else f"{value:g}"))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: pretty(value, "").replace(".00", "").replace(".0", ""))
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=12))
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=11)
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _parts(axes: Any, roofline: Roofline, placed: Sequence[Row], window: Window) -> None:
    """Parts as discs, the largest behind; ranges as diamonds, all of it as a star."""
    ordered = sorted(placed, key=lambda row: -row.time_share)
    _discs(axes, ordered, window)
    for row in ordered:
        if _shows_l2(roofline, row):
            (x, y), colour = _at(row, window), _COLOURS[kind_of(row)]
            inner, _ = window.held(row.load.l2_intensity or 0.0, y)
            axes.plot([inner, x], [y, y], color=colour, linewidth=0.7, alpha=0.5, zorder=3)
            axes.scatter(inner, y, s=22, facecolors="white", edgecolors=colour, linewidths=1.2, zorder=3.5)
    for row in _ranges(roofline):
        axes.scatter(*_at(row, window), s=60, marker="D", facecolors="white", edgecolors="black", zorder=5)
    if _has_place(roofline.total) and len(roofline.parts) > 1:
        axes.scatter(*_at(roofline.total, window), s=190, marker="*", color="black", edgecolors="white", zorder=6)


def _discs(axes: Any, rows: Sequence[Row], window: Window) -> None:
    """Parts in their order, the middle of large ones marked."""
    places, areas = [_at(row, window) for row in rows], [_area(row) for row in rows]
    x, y = ([each[axis] for each in places] for axis in (0, 1))
    colours = [_COLOURS[kind_of(row)] for row in rows]
    axes.scatter(x, y, s=areas, c=colours, alpha=0.6, edgecolors="white", linewidths=0.8, zorder=4)
    for middle in (each for each, area in zip(places, areas, strict=True) if area > _MARKED_AREA):
        axes.scatter(*middle, s=12, color="white", zorder=4.5)


def _ranges(roofline: Roofline) -> list[Row]:
    """Ranges that are worth a place of their own: those that are not all of it."""
    apart = [row for row in roofline.ranges if _LABELLED <= row.time_share < 0.999 and _has_place(row)]
    return sorted(apart, key=lambda row: -row.time_share)[:_MOST_RANGES]


def _shows_l2(roofline: Roofline, row: Row) -> bool:
    """Whether a part has a second place, by its L2 bytes: the slow ones, and only below a roof of L2."""
    known = row.load.l2_intensity and roofline.peaks.l2_bytes_per_second
    return bool(known) and row.time_share >= _LABELLED


def _area(row: Row) -> float:
    return _LEAST_AREA + _WHOLE_AREA * row.time_share


def _roof(axes: Any, roof: Roof, drawn: Drawn) -> list[Box]:
    """A roof with its name; boxes along it, that names keep away from."""
    colour = _USED if roof.used else _UNUSED
    style = {"linestyle": (0, (5, 3)) if roof.seen else "-", "linewidth": 2.0 if roof.used else 1.2}
    axes.plot(roof.x, roof.y, color=colour, zorder=2, **style)
    (x0, y0), (x1, y1) = (axes.transData.transform(end) for end in zip(roof.x, roof.y, strict=True))
    if roof.level:
        _level_name(axes, roof, (x0, x1, y0), colour, drawn)
    else:
        _sloping_name(axes, roof, (x0, y0, x1, y1), colour, drawn)
    steps = max(int(math.hypot(x1 - x0, y1 - y0) / 12), 1)
    along = ((x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps) for step in range(steps + 1))
    return [Box(x - 3, y - 3, x + 3, y + 3) for x, y in along]


def _level_name(axes: Any, roof: Roof, ends: tuple[float, float, float], colour: str, drawn: Drawn) -> None:
    """At the right end, above the line or below it, wherever there is room; further left if there is not."""
    left, right, y = ends
    text = _text(axes, roof.name, right - 6, y + 4, colour, ha="right", va="bottom")
    box = _box(text)
    for x in _steps(right - 6, left + (box.x1 - box.x0), 40):
        for above in (True, False):
            text.set_position((x, y + 4 if above else y - 5))
            text.set_verticalalignment("bottom" if above else "top")
            box = _box(text)
            if not any(map(box.overlaps, drawn.others)):
                drawn.others.append(box)
                return
    text.remove()


def _sloping_name(axes: Any, roof: Roof, ends: tuple[float, float, float, float], colour: str, drawn: Drawn) -> None:
    """Along the line, above it or below it."""
    x0, y0, x1, y1 = ends
    angle = math.atan2(y1 - y0, x1 - x0)
    slant = {"rotation": math.degrees(angle), "rotation_mode": "anchor", "ha": "left"}
    aside = -_BESIDE if roof.below else _BESIDE
    for part in (0.04, 0.3, 0.5, 0.7):
        x = x0 + part * (x1 - x0) - aside * math.sin(angle)
        y = y0 + part * (y1 - y0) + aside * math.cos(angle)
        text = _text(axes, roof.name, x, y, colour, va="top" if roof.below else "bottom", **slant)
        text.set_rotation(0)
        flat = _box(text)
        text.set_rotation(math.degrees(angle))
        boxes = _slanted(x, y, flat.x1 - flat.x0, flat.y1 - flat.y0, angle, below=roof.below)
        if _box(text).within(_inside(axes)) and not any(one.overlaps(two) for one in boxes for two in drawn.others):
            drawn.others += boxes
            return
        text.remove()


def _slanted(x: float, y: float, width: float, height: float, angle: float, *, below: bool) -> list[Box]:
    """Small boxes that together cover a slanted text."""
    steps, half = max(int(width / height), 1), height * 0.75
    aside = -height / 2 if below else height / 2
    found = []
    for step in range(steps + 1):
        along = width * step / steps
        middle_x = x + along * math.cos(angle) - aside * math.sin(angle)
        middle_y = y + along * math.sin(angle) + aside * math.cos(angle)
        found.append(Box(middle_x - half, middle_y - half, middle_x + half, middle_y + half))
    return found


def _names(
    axes: Any, roofline: Roofline, placed: Sequence[Row], window: Window, drawn: Drawn, lines: Sequence[Box]
) -> None:
    """The names of the slowest parts and of the ranges, none over another."""
    named = [row for row in placed if row.time_share >= _LABELLED][:_MOST_LABELS] or list(placed[:3])
    rows = [*_ranges(roofline), *named]
    texts, wanted = [], []
    for row in rows:
        bold = row.level == "range"
        text = _text(axes, _label(row), 0, 0, "black" if bold else "#303030", weight="bold" if bold else "normal")
        size = _box(text)
        radius = 5.0 if bold else math.sqrt(_area(row) / math.pi) * axes.figure.dpi / 72
        texts.append(text)
        wanted.append((_spot(axes, row, window, radius), size.x1 - size.x0 + 2 * _AIR, size.y1 - size.y0 + 2 * _AIR))
    small = [_spot(axes, row, window, 2.0).box for row in placed if row not in named]
    starred = _has_place(roofline.total) and len(roofline.parts) > 1
    star = [_spot(axes, roofline.total, window, 9.0).box] if starred else []
    boxes = place(wanted, within=_inside(axes), taken=[*drawn.others, *star], avoided=[*lines, *small])
    for row, text, box, (spot, _, _) in zip(rows, texts, boxes, wanted, strict=True):
        if box is None:
            text.remove()
            continue
        text.set_position((box.x0 + _AIR, box.y0 + _AIR))
        drawn.labels.append(box)
        drawn.names.append(_label(row))
        _leader(axes, spot, box)


def _spot(axes: Any, row: Row, window: Window, radius: float) -> Spot:
    x, y = axes.transData.transform(_at(row, window))
    return Spot(float(x), float(y), radius)


def _leader(axes: Any, spot: Spot, box: Box) -> None:
    """A thin line from a name to its point, where they are apart."""
    x, y = min(max(spot.x, box.x0), box.x1), min(max(spot.y, box.y0), box.y1)
    distance = math.hypot(x - spot.x, y - spot.y)
    if distance > spot.radius + 8:
        edge = spot.radius / distance
        start = (spot.x + (x - spot.x) * edge, spot.y + (y - spot.y) * edge)
        line = Line2D([start[0], x], [start[1], y], color="#808080", linewidth=0.8, zorder=3.8, transform=None)
        axes.figure.add_artist(line)


def _legend(axes: Any, roofline: Roofline, placed: Sequence[Row], drawn: Drawn) -> None:
    """What colours, sizes and signs mean, with how much time is where."""
    handles = []
    for kind, colour in _COLOURS.items():
        share = sum(row.time_share for row in roofline.parts if kind_of(row) is kind)
        words = f"{roofline.noun} {kind.value}: {share:.0%} of the time"
        handles.append(_sign("o", words, color=colour, markersize=9, alpha=0.7))
    if any(_shows_l2(roofline, row) for row in placed):
        handles.append(_sign("o", "at its intensity by L2 bytes", markerfacecolor="white", markeredgecolor=_GREY))
    if _ranges(roofline):
        named = "pass" if roofline.analytic else "NVTX range"
        handles.append(_sign("D", named, markerfacecolor="white", markeredgecolor="black"))
    if _has_place(roofline.total) and len(roofline.parts) > 1:
        handles.append(_sign("*", "all of it", color="black", markersize=12))
    legend = axes.legend(
        handles=handles, loc="lower right", fontsize=10, framealpha=0.9, title="area: share of the time"
    )
    box = legend.get_window_extent(axes.figure.canvas.get_renderer())
    drawn.others.append(Box(box.x0, box.y0, box.x1, box.y1))


def _sign(marker: str, label: str, **style: Any) -> Any:
    return Line2D([], [], linestyle="none", marker=marker, label=label, **style)


def _text(axes: Any, words: str, x: float, y: float, colour: str, **style: Any) -> Any:
    """Words at a place in pixels."""
    settings = {"fontsize": 10, "color": colour, "zorder": 7, "path_effects": _WHITE, "transform": None, **style}
    return axes.figure.text(x, y, plain(words), **settings)


def _box(text: Any) -> Box:
    extent = text.get_window_extent(text.figure.canvas.get_renderer())
    return Box(extent.x0, extent.y0, extent.x1, extent.y1)


def _inside(axes: Any) -> Box:
    extent = axes.get_window_extent()
    return Box(extent.x0 + 2, extent.y0 + 2, extent.x1 - 2, extent.y1 - 2)


def _steps(start: float, end: float, by: float) -> Iterable[float]:
    yield start
    while (start := start - by) > end:
        yield start


def _label(row: Row) -> str:
    name = one_line(row.name.rsplit("/", 1)[-1] if row.level == "range" else row.label)
    name = cut(name, one_line(row.mark), _NAME_LENGTH)
    return f"{name} {row.time_share:.0%}" if row.time_share >= 0.095 else f"{name} {row.time_share:.1%}"


def _caption(roofline: Roofline, placed: int) -> Caption:
    told = "; ".join(note.partition(": ")[0].rstrip(".") for note in roofline.notes)
    count, parts = roofline.total.load.launches, len(roofline.parts)
    launches = "" if roofline.analytic else f"{count} launch{'es' if count > 1 else ''} of "
    noun = roofline.noun if parts > 1 else roofline.noun[:-1]
    peaks = ", ".join(roofline.peaks.sources) or "unknown source"
    peaks += f", another device than {roofline.peaks.foreign}" if roofline.peaks.foreign else ""
    apart = f" ({placed} with a place here)" if placed < parts else ""
    return Caption(
        title=one_line(roofline.title),
        subtitle=f"{launches}{parts} {noun}{apart}; peaks: {one_line(peaks)}",
        footer=f"{told}: see the console or the CSV" if told else "",
    )
