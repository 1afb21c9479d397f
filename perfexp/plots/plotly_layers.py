"""Layers of a call as figures of plotly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from perfexp.plots.chart import COLORS, GREY, unit_of
from perfexp.plots.layer_plot import SHADES, colors_of
from perfexp.plots.page import text
from perfexp.plots.plotly_figures import AROUND, BAR, WORDS, laid_out, name_rows
from perfexp.records.record import Point
from perfexp.records.units import format_seconds
from perfexp.tables.layer_groups import Layer, Stretch, by_kind, call_seconds, in_order, merged, time_text

#: Limits on layers with a bar, and on the kernels that one shows to the mouse.
_MOST_LAYERS, _MOST_KERNELS = 40, 4
#: Height in pixels of a row of the strip.
_ROW = 40


def of_point(point: Point) -> Iterator[Any]:
    """Yield the layers of a point by kind, in the order of execution, and the longest."""
    kinds, (factor, unit) = by_kind(point), unit_of("seconds", [call_seconds(point)])
    colors = colors_of(kinds)
    yield _kinds(kinds, call_seconds(point), factor, unit)
    yield _order(in_order(point), colors, factor, unit)
    yield _longest(merged(point)[:_MOST_LAYERS], colors, factor, unit)


def _kinds(kinds: Mapping[str, Mapping[str, float]], whole: float, factor: float, unit: str) -> Any:
    figure = go.Figure()
    for which in dict.fromkeys(which for of_kind in kinds.values() for which in of_kind):
        seconds = {kind: of_kind.get(which, 0.0) for kind, of_kind in kinds.items()}
        figure.add_bar(
            x=[value * factor for value in seconds.values()],
            y=list(range(len(kinds))),
            orientation="h",
            name=text(which),
            hovertext=[_hover(kind, which, _time(value, whole)) for kind, value in seconds.items()],
            hoverinfo="text",
        )
    figure.update_layout(barmode="stack", colorway=COLORS)
    name_rows(figure, [f"{kind} · {sum(of_kind.values()) / whole:.1%}" for kind, of_kind in kinds.items()])
    figure.update_xaxes(title=f"by kind ({unit})")
    return laid_out(figure, AROUND + BAR * len(kinds))


def _order(rows: Sequence[tuple[str, list[Stretch]]], colors: Mapping[str, str], factor: float, unit: str) -> Any:
    figure = go.Figure()
    for position, (title, row) in enumerate(rows):
        shades = [SHADES[number % 2] for number in range(len(row))]
        if title == "layer":
            shades = [colors.get(one.name, GREY) for one in row]
        figure.add_bar(
            x=[one.seconds * factor for one in row],
            base=[one.start * factor for one in row],
            y=[position] * len(row),
            orientation="h",
            width=0.92,
            marker={"color": shades, "line": {"color": "white", "width": 0.5}},
            text=[text(one.label) for one in row],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertext=[_hover(one.path or one.name, one.which, one.name, format_seconds(one.seconds)) for one in row],
            hoverinfo="text",
            showlegend=False,
        )
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"})
    name_rows(figure, [title for title, _ in rows])
    figure.update_xaxes(title=f"in the order of execution ({unit})")
    return laid_out(figure, AROUND + _ROW * len(rows))


def _longest(layers: Sequence[Layer], colors: Mapping[str, str], factor: float, unit: str) -> Any:
    figure = go.Figure(
        go.Bar(
            x=[layer.seconds * factor for layer in layers],
            y=list(range(len(layers))),
            orientation="h",
            marker_color=[colors.get(layer.kind, GREY) for layer in layers],
            text=[text(time_text(layer)) for layer in layers],
            textposition="outside",
            hovertext=[
                _hover(one.label, one.which, one.kind, time_text(one), *one.kernels[:_MOST_KERNELS]) for one in layers
            ],
            hoverinfo="text",
        )
    )
    name_rows(figure, [f"{layer.label} · {layer.which}" for layer in layers])
    most = max((layer.seconds for layer in layers), default=0.0)
    figure.update_xaxes(title=f"the longest, identical layers together ({unit})", range=[0, WORDS * most * factor])
    return laid_out(figure, AROUND + BAR * len(layers))


def _time(seconds: float, whole: float) -> str:
    return f"{format_seconds(seconds)} · {seconds / whole:.1%}"


def _hover(name: str, *words: str) -> str:
    return "<br>".join([f"<b>{text(name)}</b>", *(text(word) for word in words if word and word != name)])
