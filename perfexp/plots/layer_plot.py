"""Draw the layers of a call by matplotlib: by kind, in the order of execution, and the longest ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfexp.plots.canvas import caption_of, constrained, matplotlib, plain, save, style
from perfexp.plots.chart import COLORS, GREY, Caption, footer_of, unit_of
from perfexp.records.quantities import CLOSURE
from perfexp.records.record import Point, Record, is_layers, timed_key
from perfexp.records.units import format_seconds
from perfexp.roofline.kernel_names import cut
from perfexp.summaries.subject import subject
from perfexp.tables.layer_groups import GAPS, OTHERS, Stretch, by_kind, call_seconds, in_order, merged
from perfexp.tables.layer_tables import agrees, disagreement, doubt_text, points, representative_point

#: Color of gaps, and those of neighbors that have no kind, in turns.
_GAP, SHADES = "#e3e3e3", ("#d0d0d0", "#ececec")
#: Layers with a bar of their own.
MOST_LAYERS = 15
#: Opacity of the passes of a kind, in their order.
_OPACITIES = (1.0, 0.62, 0.38, 0.25)
#: Heights of a bar, of a row of the strip, and of what is around them, in inches.
_BAR, _ROW, _AROUND = 0.34, 0.42, 2.9
#: Characters of a name left of a bar; width of the figure beside them, and of a character, in pixels.
_LONGEST, _WIDTH, _CHARACTER = 60, 1150, 7
#: Lightness from which a background has black words.
_LIGHT = 0.45


def draw(record: Record) -> bytes | None:
    """Return the layers of the representative point as PNG; None unless layers were profiled."""
    chosen = representative_point(record)
    return save(partial(compose, record, chosen)) if chosen and by_kind(chosen) else None


def colors_of(kinds: Mapping[str, object]) -> dict[str, str]:
    """The colors of the largest kinds; those of the others and of gaps are greys."""
    named = [kind for kind in kinds if kind not in (OTHERS, GAPS)]
    return dict(zip(named, COLORS, strict=False)) | {OTHERS: GREY, GAPS: _GAP}


def caption(record: Record, chosen: Point) -> Caption:
    """The words around the layers of a point."""
    about = subject(record.plan, record.environment)
    where = about.device or "an unknown device"
    title, which, footer = str(about), _which(record, chosen), footer_of(chosen.doubts)
    if doubt := disagreement(chosen):
        why = f"{doubt.message.partition(';')[0]}, on {where}: {doubt.help or ''}".removesuffix(": ")
        return Caption(title=f"{title} · {doubt_text(chosen)}", subtitle=which + why, footer=footer)
    whole = format_seconds(call_seconds(chosen))
    text = f"{which}{whole} a call on {where}{_closure(chosen)}; medians, times are share × call"
    return Caption(title=title, subtitle=text, footer=footer)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How the parts of a call are shown: as times, or as shares where the layers disagree with the call.

    Attributes:
        call: seconds of the call.
        factor: factor from seconds to the unit of the axes.
        unit: name of that unit.
        has_times: whether the times hold.
    """

    call: float
    factor: float
    unit: str
    has_times: bool

    def text(self, seconds: float, share: float | None = None) -> str:
        """Return a part as `1.23 ms · 5.3 %`, or as a share alone; `share` replaces that of the seconds."""
        percent = f"{(seconds / self.call if share is None else share) * 1e2:.1f} %"
        return f"{format_seconds(seconds)} · {percent}" if self.has_times else percent

    def brief(self, seconds: float) -> str:
        """Return a part as `1.2 ms`, or as a share."""
        return format_seconds(seconds, 2) if self.has_times else self.text(seconds)


def measure_of(chosen: Point) -> Measure:
    """Return how the layers of a point are shown."""
    call = call_seconds(chosen)
    if disagreement(chosen):
        return Measure(call=call, factor=1e2 / call, unit="% of the call", has_times=False)
    factor, unit = unit_of("seconds", [call])
    return Measure(call=call, factor=factor, unit=unit, has_times=True)


def compose(record: Record, chosen: Point) -> Any:
    """Return the layers of a point as a figure of matplotlib."""
    kinds, strip, layers = by_kind(chosen), in_order(chosen), merged(chosen)[:MOST_LAYERS]
    heights = [_BAR * len(kinds) + 0.4, _ROW * len(strip) + 0.3, _BAR * len(layers) + 0.3]
    figure = constrained(_AROUND + sum(heights))
    by_kinds, order, longest = figure.subplots(3, 1, height_ratios=heights)
    colors = colors_of(kinds)
    measure = measure_of(chosen)
    factor, unit = measure.factor, measure.unit
    _kinds(by_kinds, kinds, colors, measure)
    by_kinds.set_xlabel(f"by kind ({unit})", fontsize=12)
    order.set_xlabel(f"in the order of execution ({unit})", fontsize=12)
    several = len({layer.which for layer in layers}) > 1
    most = max(layer.seconds for layer in layers) * factor
    for position, layer in enumerate(layers):
        color = colors.get(layer.kind, GREY)
        longest.barh(position, layer.seconds * factor, height=0.66, color=color)
        words = f"{measure.text(layer.seconds, layer.share)}  {plain(layer.kind)}"
        longest.text(layer.seconds * factor + 0.01 * most, position, words, va="center")
    names = [cut(layer.label, _LONGEST) + (f" · {layer.which}" if several else "") for layer in layers]
    longest.set_yticks(range(len(layers)), map(plain, names))
    _strip(order, strip, colors, factor, room=_WIDTH / _CHARACTER - max(map(len, names)))
    longest.set_xlim(0, 1.3 * most)
    longest.set_ylim(len(layers) - 0.5, -0.5)
    longest.set_xlabel(f"the longest, identical layers together ({unit}); % with the gaps before them", fontsize=12)
    for axes in (by_kinds, longest):
        style(axes, axis="x")
        axes.tick_params(axis="y", length=0)
    longest.tick_params(axis="y", labelsize=10)
    caption_of(figure, caption(record, chosen))
    return figure


def _kinds(axes: Any, kinds: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], measure: Measure) -> None:
    """A bar for each kind, its passes one after the other and ever paler, with the time and the share at its end."""
    factor = measure.factor
    passes = list(dict.fromkeys(which for of_kind in kinds.values() for which in of_kind))
    for position, (kind, of_kind) in enumerate(kinds.items()):
        left = 0.0
        for which, seconds in of_kind.items():
            alpha = _OPACITIES[min(list(of_kind).index(which), len(_OPACITIES) - 1)]
            axes.barh(position, seconds * factor, left=left, height=0.7, color=colors[kind], alpha=alpha, linewidth=0)
            left += seconds * factor
        shown = {which: seconds for which, seconds in of_kind.items() if seconds > 0}
        parts = ", ".join(f"{which} {measure.brief(seconds)}" for which, seconds in shown.items())
        text = measure.text(sum(of_kind.values()))
        text += f"  ({parts})" if len(passes) > 1 else ""
        axes.text(left, position, f"  {plain(text)}", va="center", fontsize=11)
    axes.set_yticks(range(len(kinds)), [plain(kind) for kind in kinds])
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_xlim(
        0, (1.8 if len(passes) > 1 else 1.3) * factor * max(sum(of_kind.values()) for of_kind in kinds.values())
    )


def _strip(
    axes: Any, rows: list[tuple[str, list[Stretch]]], colors: Mapping[str, str], factor: float, *, room: float
) -> None:
    """Rows of neighbors as wide as their times, with their names where they fit; `room` is the width in characters."""
    whole = max(stretch.start + stretch.seconds for _, row in rows for stretch in row)
    for position, (title, row) in enumerate(rows):
        for number, stretch in enumerate(row):
            is_layer = title == "layer"
            color = colors.get(stretch.name, GREY) if is_layer else SHADES[number % 2]
            edge = {"edgecolor": "white", "linewidth": 0.4 if is_layer else 1.0}
            axes.barh(position, stretch.seconds * factor, left=stretch.start * factor, height=0.92, color=color, **edge)
            name = stretch.label
            if len(name) + 1 < room * stretch.seconds / whole:
                words = {"ha": "center", "va": "center", "fontsize": 9, "clip_on": True, "color": _ink(color)}
                axes.text((stretch.start + stretch.seconds / 2) * factor, position, plain(name), **words)
    axes.set_yticks(range(len(rows)), [title for title, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, whole * factor)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=11)
    axes.tick_params(axis="y", length=0)


def _ink(color: str) -> str:
    """Black or white, whichever is readable on a color."""
    red, green, blue = matplotlib.colors.to_rgb(color)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT else "white"


def _which(record: Record, chosen: Point) -> str:
    key, others = timed_key(chosen.key), [point.key for point in record.points if is_layers(point.key)]
    phase = f"{key.phase} " if len({other.phase for other in others}) > 1 else ""
    agreeing = sum(agrees(point) for point in points(record))
    those = f"{agreeing} whose layers agree" if 0 < agreeing < len(others) else f"{len(others)} points"
    largest = f", the largest of {those}" if len(others) > 1 else ""
    return f"{phase}{key.size_label}, batch {key.batch_size}{largest}: "


def _closure(chosen: Point) -> str:
    closure = chosen.metric(CLOSURE)
    if closure is None or closure.value is None:
        return ""
    return f" without profiling, {closure.value:+.1%} with it"
