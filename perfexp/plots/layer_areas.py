"""The time of one call by layer: a bar for each pass, and a treemap."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from perfexp.plots.canvas import caption_of, matplotlib, new_figure, plain, save
from perfexp.plots.chart import Caption, footer_of
from perfexp.records.layer_lines import gap_of, pass_of, seconds_of
from perfexp.records.record import Point, Record, is_layers, timed_key
from perfexp.records.units import format_seconds
from perfexp.summaries.subject import subject
from perfexp.tables.layer_tables import agrees, points, representative_point

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
_GAP_COLOR, _GAPS, _REST = "#d9d9d9", "gaps", "other kinds"
#: Limits on kinds with a color of their own, and on rows of the treemap; the rest is one row.
_KINDS, _ROWS = 7, 60
#: Smallest share of the whole with a label.
_LABELLED = 0.012


def draw(record: Record) -> bytes | None:
    """Return the layers of the representative point as PNG; None unless layers were profiled."""
    chosen = representative_point(record)
    return save(partial(_compose, record, chosen)) if chosen and _taken(chosen) else None


def _compose(record: Record, chosen: Point) -> Any:
    taken, about = _taken(chosen), subject(record.plan, record.environment)
    colors, figure = _colors(taken), new_figure(9, layout="constrained")
    bars, map_ = figure.subplots(2, 1, height_ratios=(1, 4))
    _bars(bars, taken, colors)
    _map(map_, taken, colors)
    whole = median(chosen.facts["layers"]["call_seconds"])
    where = about.device or "an unknown device"
    subtitle = f"{_which(record, chosen)}{format_seconds(whole)} a call on {where}{_closure(chosen)}"
    caption_of(figure, Caption(title=str(about), subtitle=subtitle, footer=footer_of(chosen.doubts)))
    return figure


def _taken(point: Point) -> list[Mapping[str, Any]]:
    return [line for line in point.facts["layers"]["lines"] if seconds_of(line) + gap_of(line) > 0]


def _colors(taken: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    sums: defaultdict[str, float] = defaultdict(float)
    for line in taken:
        sums[line["kind"]] += seconds_of(line)
    kinds = sorted(sums, key=lambda kind: -sums[kind])[:_KINDS]
    return dict(zip(kinds, _COLORS, strict=False))


def _bars(axes: Any, taken: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    passes = list(dict.fromkeys(map(pass_of, taken)))[::-1]
    whole = sum(seconds_of(line) + gap_of(line) for line in taken)
    parts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in taken:
        kind = line["kind"] if line["kind"] in colors else _REST
        parts[pass_of(line), kind] += seconds_of(line)
        parts[pass_of(line), _GAPS] += gap_of(line)
    left = dict.fromkeys(passes, 0.0)
    for name in (*colors, _REST, _GAPS):
        widths = [parts[which, name] / whole * 1e2 for which in passes]
        if any(widths):
            color = {_GAPS: _GAP_COLOR, _REST: _COLORS[-1]}.get(name) or colors[name]
            axes.barh(passes, widths, left=list(left.values()), color=color, label=plain(name))
            left = {which: left[which] + width for which, width in zip(passes, widths, strict=True)}
    axes.set_xlabel("% of the call", fontsize=11)
    axes.set_xlim(0, max(left.values()))
    axes.legend(fontsize=10, ncols=1, loc="upper left", bbox_to_anchor=(1.0, 1.02), labelspacing=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _map(axes: Any, taken: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    rows: defaultdict[tuple[str, str], float] = defaultdict(float)
    gaps = sum(map(gap_of, taken))
    for line in taken:
        path = line["key"]["path"] if line["key"] else None
        rows[str(path or line["kind"]), line["kind"]] += seconds_of(line)
    largest = sorted(((seconds, *row) for row, seconds in rows.items()), reverse=True)
    rest = sum(seconds for seconds, *_ in largest[_ROWS:])
    shown = [*largest[:_ROWS], (rest, f"{len(largest) - _ROWS} more", _REST), (gaps, _GAPS, _GAPS)]
    shown = sorted((row for row in shown if row[0] > 0), reverse=True)
    whole = sum(seconds for seconds, *_ in shown)
    tiles = squarify([seconds for seconds, *_ in shown], Tile(0.0, 0.0, 16.0, 9.0))
    for (seconds, name, kind), tile in zip(shown, tiles, strict=True):
        color = _GAP_COLOR if kind == _GAPS else colors.get(kind, _COLORS[-1])
        box = matplotlib.patches.Rectangle((tile.x, tile.y), tile.width, tile.height, edgecolor="white", linewidth=1.5)
        box.set_facecolor(color)
        axes.add_patch(box)
        share = seconds / whole
        if share >= _LABELLED:
            middle = (tile.x + tile.width / 2, tile.y + tile.height / 2)
            words = {"color": "black" if kind == _GAPS else "white", "fontsize": 9, "clip_on": True}
            text = plain(f"{wrapped(name, tile)}\n{share:.1%}")
            axes.text(*middle, text, ha="center", va="center", **words)
    axes.set_xlim(0, 16)
    axes.set_ylim(0, 9)
    axes.axis("off")


def wrapped(name: str, tile: Tile) -> str:
    """A layer's path in lines that fit its tile, broken after dots; of a path with too many lines the last ones."""
    most, num_lines = max(int(tile.width * 7), 4), max(int(tile.height * 4) - 1, 1)
    lines = [""]
    for part in re.findall(r"[^.]+\.?|\.", name):
        if lines[-1] and len(lines[-1]) + len(part) > most:
            lines.append("")
        lines[-1] += part
    lines = [line if len(line) <= most else f"{line[: most - 1]}…" for line in lines]
    before = "…" if len(lines) > num_lines else ""
    return before + "\n".join(lines[-num_lines:])


def _which(record: Record, chosen: Point) -> str:
    key, others = timed_key(chosen.key), [point.key for point in record.points if is_layers(point.key)]
    if len(others) < 2:
        return ""
    phase = f"{key.phase} " if len({other.phase for other in others}) > 1 else ""
    agreeing = sum(agrees(point) for point in points(record))
    those = f"{agreeing} whose layers agree" if 0 < agreeing < len(others) else f"{len(others)} points"
    return f"{phase}{key.size_label}, batch {key.batch_size}, the largest of {those}: "


def _closure(chosen: Point) -> str:
    closure = chosen.metric("layers/closure")
    if closure is None or closure.value is None:
        return ""
    return f"; profiled {closure.value:+.1%} against the call without profiling"


class Tile(NamedTuple):
    """A rectangle; x and y are of its lower left corner."""

    x: float
    y: float
    width: float
    height: float


def squarify(values: Sequence[float], within: Tile) -> list[Tile]:
    """Return a rectangle for each value, the largest first, with an area in proportion to it; they fill `within`.

    The algorithm is that of Bruls, Huizing and van Wijk, Squarified Treemaps (2000).
    """
    total = sum(values)
    areas = [value / total * within.width * within.height for value in values]
    tiles: list[Tile] = []
    rest, row = within, list[float]()
    for area in areas:
        side = min(rest.width, rest.height)
        if row and _worst([*row, area], side) > _worst(row, side):
            placed, rest = _row(row, rest)
            tiles += placed
            row = []
        row.append(area)
    return tiles + (_row(row, rest)[0] if row else [])


def _worst(row: Sequence[float], side: float) -> float:
    whole = sum(row)
    return max(max(side**2 * area / whole**2, whole**2 / (side**2 * area)) for area in row)


def _row(row: Sequence[float], within: Tile) -> tuple[list[Tile], Tile]:
    (x, y, width, height), tiles = within, list[Tile]()
    if width < height:
        placed, rest = _row(row, Tile(y, x, height, width))
        *tiles, rest = (Tile(tile.y, tile.x, tile.height, tile.width) for tile in (*placed, rest))
        return tiles, rest
    thickness = sum(row) / height
    for area in row:
        tiles.append(Tile(x, y, thickness, area / thickness))
        y += area / thickness
    return tiles, Tile(x + thickness, within.y, width - thickness, height)
