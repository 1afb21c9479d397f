"""Drawing of a call's layers with matplotlib: by kind, in execution order, and the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.plots.canvas import caption_of, columns, matplotlib, name_rows, plain, save, title_of
from perfexp.plots.chart import COLORS, GREY, Caption, footer_of, unit_of
from perfexp.records.layer_lines import disagreement
from perfexp.records.record import Point, Record, timed_key
from perfexp.records.units import format_seconds
from perfexp.roofline.kernel_names import cut
from perfexp.summaries.subject import subject
from perfexp.tables.layer_groups import (
    GAPS,
    OTHERS,
    Layer,
    Stretch,
    by_kind,
    call_seconds,
    in_order,
    merged,
)
from perfexp.tables.layer_tables import doubt_text, representative_point

#: Color of gaps, and alternating colors for neighbors without a kind.
_GAP, _SHADES = "#e3e3e3", ("#d0d0d0", "#ececec")
#: Maximum number of layers with a bar, and of kernels in a layer's tooltip.
_MOST_LAYERS, _MOST_KERNELS = 15, 4
#: Opacity of a kind's passes, in order.
_OPACITIES = (1.0, 0.62, 0.38, 0.25)
#: Heights of a bar, of a strip row, and of the surroundings, in inches.
_BAR, _ROW, _AROUND = 0.34, 0.42, 2.9
#: Maximum characters of a name left of a bar; widths of the figure and of a character, in pixels.
_LONGEST, _WIDTH, _CHARACTER = 60, 1150, 7
#: Backgrounds lighter than this get black text.
_LIGHT = 0.45


def draw(record: Record) -> bytes | None:
    """Return the representative point's layers as PNG; None unless layers were profiled."""
    figure = compose(record)
    return save(figure) if figure else None


def caption(record: Record, chosen: Point) -> Caption:
    """Return the text around a point's layers."""
    about, key, footer = (
        subject(record.plan, record.environment),
        timed_key(chosen.key),
        footer_of(chosen.doubts),
    )
    which, where = (
        f"{key.phase} {key.size_label}, batch {key.batch_size}",
        about.device or "an unknown device",
    )
    if doubt := disagreement(chosen):
        # without the part after the parentheses
        message = doubt.message.partition(");")[0].removesuffix(")") + ")"
        why = f"{which}: {message}, on {where}: {doubt.help or ''}".removesuffix(": ")
        return Caption(title=f"{about} · {doubt_text(chosen)}", subtitle=why, footer=footer)
    text = f"{which}: {format_seconds(call_seconds(chosen))} a call on {where}; medians, times are share × call"
    return Caption(title=str(about), subtitle=text, footer=footer)


@dataclass(frozen=True, kw_only=True)
class _Measure:
    """Display of a call's parts: times, or shares if the layers disagree with the call.

    Attributes:
        call: call time, seconds.
        factor: factor from seconds to the axes' unit.
        unit: name of that unit.
        has_times: whether the times are valid.
    """

    call: float
    factor: float
    unit: str
    has_times: bool

    def text(self, seconds: float, share: float | None = None) -> str:
        """Return a part, for example `1.23 ms · 5.3 %`, or only its share.

        Args:
            share: share to use instead of the share computed from seconds.
        """
        percent = f"{(seconds / self.call if share is None else share) * 1e2:.1f} %"
        return f"{format_seconds(seconds)} · {percent}" if self.has_times else percent

    def brief(self, seconds: float) -> str:
        """Return a part, for example `1.2 ms`, or its share."""
        return format_seconds(seconds, 2) if self.has_times else self.text(seconds)


def _measure(chosen: Point) -> _Measure:
    """Return how to display a point's layers."""
    call = call_seconds(chosen)
    if disagreement(chosen):
        return _Measure(call=call, factor=1e2 / call, unit="% of the call", has_times=False)
    factor, unit = unit_of("seconds", call)
    return _Measure(call=call, factor=factor, unit=unit, has_times=True)


def compose(record: Record) -> Any:
    """Return the representative point's layers as a figure; None unless layers were profiled."""
    chosen = representative_point(record)
    if chosen is None or not by_kind(chosen):
        return None
    kinds, strip, layers = by_kind(chosen), in_order(chosen), merged(chosen)[:_MOST_LAYERS]
    heights = [_BAR * len(kinds) + 0.4, _ROW * len(strip) + 0.3, _BAR * len(layers) + 0.3]
    figure, (by_kinds, order, longest) = columns(heights, _AROUND)
    named = [kind for kind in kinds if kind not in (OTHERS, GAPS)]
    colors = dict(zip(named, COLORS, strict=False)) | {GAPS: _GAP}
    measure = _measure(chosen)
    _kinds(by_kinds, kinds, colors, measure)
    names = _longest(longest, layers, colors, measure)
    _strip(order, strip, colors, measure, room=_WIDTH / _CHARACTER - max(map(len, names)))
    caption_of(figure, caption(record, chosen))
    return figure


def _kinds(
    axes: Any,
    kinds: Mapping[str, Mapping[str, float]],
    colors: Mapping[str, str],
    measure: _Measure,
) -> None:
    """Draw a bar per kind, with time and share at its end.

    Its passes follow each other, ever paler.
    """
    has_passes = len({which for of_kind in kinds.values() for which in of_kind}) > 1
    for position, (kind, of_kind) in enumerate(kinds.items()):
        left, parts = 0.0, list[str]()
        for number, (which, seconds) in enumerate(of_kind.items()):
            alpha = _OPACITIES[min(number, len(_OPACITIES) - 1)]
            words = title_of(kind, which, measure.text(seconds))
            color = colors.get(kind, GREY)
            axes.barh(
                position,
                seconds * measure.factor,
                left=left,
                height=0.7,
                color=color,
                alpha=alpha,
                **words,
            )
            left += seconds * measure.factor
            parts += [f"{which} {measure.brief(seconds)}"] * (seconds > 0)
        text = measure.text(sum(of_kind.values())) + (
            f"  ({', '.join(parts)})" if has_passes else ""
        )
        axes.text(left, position, f"  {plain(text)}", va="center", fontsize=11)
    most = max(sum(of_kind.values()) for of_kind in kinds.values()) * measure.factor
    name_rows(axes, list(kinds), (1.8 if has_passes else 1.3) * most, f"by kind ({measure.unit})")


def _longest(
    axes: Any, layers: Sequence[Layer], colors: Mapping[str, str], measure: _Measure
) -> list[str]:
    """Draw a bar for each of the longest layers; return their names."""
    most = max(layer.seconds for layer in layers) * measure.factor
    for position, layer in enumerate(layers):
        length, text = layer.seconds * measure.factor, measure.text(layer.seconds, layer.share)
        words = title_of(layer.label, layer.which, layer.kind, text, *layer.kernels[:_MOST_KERNELS])
        axes.barh(position, length, height=0.66, color=colors.get(layer.kind, GREY), **words)
        axes.text(length + 0.01 * most, position, f"{text}  {plain(layer.kind)}", va="center")
    several = len({layer.which for layer in layers}) > 1
    names = [
        cut(layer.label, _LONGEST) + (f" · {layer.which}" if several else "") for layer in layers
    ]
    title = f"the longest, identical layers together ({measure.unit}); % with the gaps before them"
    name_rows(axes, names, 1.3 * most, title)
    axes.tick_params(axis="y", labelsize=10)
    return names


def _strip(
    axes: Any,
    rows: list[tuple[str, list[Stretch]]],
    colors: Mapping[str, str],
    measure: _Measure,
    *,
    room: float,
) -> None:
    """Draw rows of neighbors, as wide as their times, with names if they fit.

    Args:
        room: width in characters.
    """
    whole = max(stretch.start + stretch.seconds for _, row in rows for stretch in row)
    for position, (title, row) in enumerate(rows):
        for number, one in enumerate(row):
            is_layer = title == "layer"
            color = colors.get(one.name, GREY) if is_layer else _SHADES[number % 2]
            look = {
                "height": 0.92,
                "color": color,
                "edgecolor": "white",
                "linewidth": 0.4 if is_layer else 1.0,
            }
            look |= title_of(one.path or one.name, one.which, one.name, measure.text(one.seconds))
            axes.barh(
                position, one.seconds * measure.factor, left=one.start * measure.factor, **look
            )
            if len(one.label) + 1 < room * one.seconds / whole:
                words = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": 9,
                    "clip_on": True,
                    "color": _ink(color),
                }
                axes.text(
                    (one.start + one.seconds / 2) * measure.factor,
                    position,
                    plain(one.label),
                    **words,
                )
    title = f"in the order of execution ({measure.unit})"
    name_rows(axes, [title for title, _ in rows], whole * measure.factor, title)
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def _ink(color: str) -> str:
    """Return black or white, whichever is readable on a color."""
    red, green, blue = matplotlib.colors.to_rgb(color)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT else "white"
