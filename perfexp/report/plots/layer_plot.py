"""Layer plot: a call's layers drawn with matplotlib, by kind, in execution order, and the longest.

It shows one point of a record. Times are shown only if the layers agree with the call without
profiling (`layer_lines.disagreement`); otherwise all lengths are shares of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.records.layer_lines import disagreement
from perfexp.records.record import Point, Record, timed_key
from perfexp.records.subject import subject
from perfexp.records.units import format_seconds
from perfexp.report.plots.canvas import (
    caption_of,
    columns,
    matplotlib,
    name_rows,
    plain,
    save,
    title_of,
)
from perfexp.report.plots.chart import COLORS, GREY, Caption, footer_of, unit_of
from perfexp.report.tables.layer_groups import (
    GAPS,
    OTHERS,
    LayerGroup,
    Stretch,
    by_kind,
    call_seconds,
    in_order,
    merged,
)
from perfexp.report.tables.layer_tables import doubt_text, representative_point
from perfexp.roofline.kernel_names import cut

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
    """Return the representative point's layers as PNG; None unless layers were profiled.

    The run writes it as layers.png.
    """
    figure = compose(record)
    if figure:
        return save(figure)
    return None


def caption(record: Record, chosen: Point) -> Caption:
    """Return the text around the plot: subject, point, call time or diagnostic, warnings.

    If the layers disagree with the call, the diagnostic and its advice replace the call time.
    """
    about = subject(record.plan, record.environment)
    key = timed_key(chosen.key)
    device = about.device or "an unknown device"
    title, text = str(about), f"{key.phase} {key.size_label}, batch {key.batch_size}"
    if doubt := disagreement(chosen):
        # without the part after the parentheses
        message = doubt.message.partition(");")[0].removesuffix(")") + ")"
        title += f" · {doubt_text(chosen)}"
        text += f": {message}, on {device}: {doubt.help or ''}".removesuffix(": ")
    else:
        call = format_seconds(call_seconds(chosen))
        text += f": {call} a call on {device}; medians, times are share × call"
    return Caption(title=title, subtitle=text, footer=footer_of(chosen.doubts))


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
        if share is None:
            share = seconds / self.call
        percent = f"{share * 1e2:.1f} %"
        if self.has_times:
            return f"{format_seconds(seconds)} · {percent}"
        return percent

    def brief(self, seconds: float) -> str:
        """Return a part, for example `1.2 ms`, or its share."""
        if self.has_times:
            return format_seconds(seconds, 2)
        return self.text(seconds)


def _measure(chosen: Point) -> _Measure:
    """Return how to display a point's layers."""
    call = call_seconds(chosen)
    if disagreement(chosen):
        return _Measure(call=call, factor=1e2 / call, unit="% of the call", has_times=False)
    factor, unit = unit_of("seconds", call)
    return _Measure(call=call, factor=factor, unit=unit, has_times=True)


def compose(record: Record) -> Any:
    """Return the representative point's layers as a figure; None unless layers were profiled.

    HTML pages embed the figure as SVG; `draw` saves it as PNG.
    """
    chosen = representative_point(record)
    if chosen is None or not by_kind(chosen):
        return None
    kinds, strip = by_kind(chosen), in_order(chosen)
    layers = merged(chosen)[:_MOST_LAYERS]
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
    """Draw a bar per kind of layer, with time and share at its end.

    Its passes follow each other, each paler than the one before.

    Args:
        kinds: seconds by kind and pass.
    """
    has_passes = len(set().union(*kinds.values())) > 1
    most = 0.0
    for position, (kind, of_kind) in enumerate(kinds.items()):
        left, parts = 0.0, list[str]()
        for number, (pass_name, seconds) in enumerate(of_kind.items()):
            alpha = _OPACITIES[min(number, len(_OPACITIES) - 1)]
            look = {"height": 0.7, "color": colors.get(kind, GREY), "alpha": alpha}
            look |= title_of(kind, pass_name, measure.text(seconds))
            length = seconds * measure.factor
            axes.barh(position, length, left=left, **look)
            left += length
            if seconds > 0:
                parts.append(f"{pass_name} {measure.brief(seconds)}")
        text = measure.text(sum(of_kind.values()))
        if has_passes:
            text += f"  ({', '.join(parts)})"
        axes.text(left, position, f"  {plain(text)}", va="center", fontsize=11)
        most = max(most, left)
    room = 1.3
    if has_passes:
        room = 1.8
    name_rows(axes, list(kinds), room * most, f"by kind ({measure.unit})")


def _longest(
    axes: Any, layers: Sequence[LayerGroup], colors: Mapping[str, str], measure: _Measure
) -> list[str]:
    """Draw a bar for each of the longest layers; return the names at the left.

    Their length limits the width of the other axes in the figure.
    """
    most = max(layer.seconds for layer in layers) * measure.factor
    has_passes = len({layer.which for layer in layers}) > 1
    names = []
    for position, layer in enumerate(layers):
        length = layer.seconds * measure.factor
        text = measure.text(layer.seconds, layer.share)
        words = title_of(layer.label, layer.which, layer.kind, text, *layer.kernels[:_MOST_KERNELS])
        axes.barh(position, length, height=0.66, color=colors.get(layer.kind, GREY), **words)
        axes.text(length + 0.01 * most, position, f"{text}  {plain(layer.kind)}", va="center")
        name = cut(layer.label, _LONGEST)
        names.append(f"{name} · {layer.which}" if has_passes else name)
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
    """Draw rows of neighbors in execution order, as wide as their times, with names if they fit.

    Args:
        rows: stretches by row title, from `layer_groups.in_order`.
        room: width of the axes in characters.
    """
    factor = measure.factor
    end_seconds = max(part.start + part.seconds for _, row in rows for part in row)
    for position, (title, row) in enumerate(rows):
        for number, part in enumerate(row):
            color, linewidth = _SHADES[number % 2], 1.0
            if title == "layer":
                color, linewidth = colors.get(part.name, GREY), 0.4
            look: dict[str, Any] = {
                "facecolor": color,
                "edgecolor": "white",
                "linewidth": linewidth,
            }
            look |= title_of(
                part.path or part.name, part.which, part.name, measure.text(part.seconds)
            )
            corner = (part.start * factor, position - 0.46)
            # barh takes three times as long for a deep model's thousand bars
            axes.add_artist(
                matplotlib.patches.Rectangle(corner, part.seconds * factor, 0.92, **look)
            )
            if len(part.label) + 1 < room * part.seconds / end_seconds:
                words = {"ha": "center", "va": "center", "fontsize": 9, "color": _ink(color)}
                middle = (part.start + part.seconds / 2) * factor
                axes.text(middle, position, plain(part.label), clip_on=True, **words)
    title = f"in the order of execution ({measure.unit})"
    name_rows(axes, [title for title, _ in rows], end_seconds * factor, title)
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def _ink(color: str) -> str:
    """Return black or white, whichever is readable on a color."""
    red, green, blue = matplotlib.colors.to_rgb(color)
    if 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT:
        return "black"
    return "white"
