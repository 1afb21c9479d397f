"""Layers of a call as figures of plotly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from perfexp.plots.chart import COLORS, GREY
from perfexp.plots.layer_plot import SHADES, Measure, colors_of, measure_of
from perfexp.plots.page import text
from perfexp.plots.plotly_figures import AROUND, BAR, WORDS, laid_out, name_rows
from perfexp.records.record import Point
from perfexp.tables.layer_groups import Layer, Stretch, by_kind, in_order, merged

#: Limits on layers with a bar, and on the kernels that one shows to the mouse.
_MOST_LAYERS, _MOST_KERNELS = 40, 4
#: Height in pixels of a row of the strip.
_ROW = 40


def of_point(point: Point) -> Iterator[Any]:
    """Yield the layers of a point by kind, in the order of execution, and the longest."""
    kinds, measure = by_kind(point), measure_of(point)
    colors = colors_of(kinds)
    yield _kinds(kinds, measure)
    yield _order(in_order(point), colors, measure)
    yield _longest(merged(point)[:_MOST_LAYERS], colors, measure)


def _kinds(kinds: Mapping[str, Mapping[str, float]], measure: Measure) -> Any:
    figure = go.Figure()
    for which in dict.fromkeys(which for of_kind in kinds.values() for which in of_kind):
        seconds = {kind: of_kind.get(which, 0.0) for kind, of_kind in kinds.items()}
        figure.add_bar(
            x=[value * measure.factor for value in seconds.values()],
            y=list(range(len(kinds))),
            orientation="h",
            name=text(which),
            hovertext=[_hover(kind, which, measure.text(value)) for kind, value in seconds.items()],
            hoverinfo="text",
        )
    figure.update_layout(barmode="stack", colorway=COLORS)
    name_rows(figure, [f"{kind} · {sum(of_kind.values()) / measure.call:.1%}" for kind, of_kind in kinds.items()])
    figure.update_xaxes(title=f"by kind ({measure.unit})")
    return laid_out(figure, AROUND + BAR * len(kinds))


def _order(rows: Sequence[tuple[str, list[Stretch]]], colors: Mapping[str, str], measure: Measure) -> Any:
    figure = go.Figure()
    for position, (title, row) in enumerate(rows):
        shades = [SHADES[number % 2] for number in range(len(row))]
        if title == "layer":
            shades = [colors.get(one.name, GREY) for one in row]
        figure.add_bar(
            x=[one.seconds * measure.factor for one in row],
            base=[one.start * measure.factor for one in row],
            y=[position] * len(row),
            orientation="h",
            width=0.92,
            marker={"color": shades, "line": {"color": "white", "width": 0.5}},
            text=[text(one.label) for one in row],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertext=[_hover(one.path or one.name, one.which, one.name, measure.text(one.seconds)) for one in row],
            hoverinfo="text",
            showlegend=False,
        )
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"})
    name_rows(figure, [title for title, _ in rows])
    figure.update_xaxes(title=f"in the order of execution ({measure.unit})")
    return laid_out(figure, AROUND + _ROW * len(rows))


def _longest(layers: Sequence[Layer], colors: Mapping[str, str], measure: Measure) -> Any:
    texts = [measure.text(layer.seconds, layer.share) for layer in layers]
    figure = go.Figure(
        go.Bar(
            x=[layer.seconds * measure.factor for layer in layers],
            y=list(range(len(layers))),
            orientation="h",
            marker_color=[colors.get(layer.kind, GREY) for layer in layers],
            text=list(map(text, texts)),
            textposition="outside",
            hovertext=[
                _hover(one.label, one.which, one.kind, words, *one.kernels[:_MOST_KERNELS])
                for one, words in zip(layers, texts, strict=True)
            ],
            hoverinfo="text",
        )
    )
    name_rows(figure, [f"{layer.label} · {layer.which}" for layer in layers])
    most = max((layer.seconds for layer in layers), default=0.0)
    about = f"the longest, identical layers together ({measure.unit})"
    figure.update_xaxes(title=about, range=[0, WORDS * most * measure.factor])
    return laid_out(figure, AROUND + BAR * len(layers))


def _hover(name: str, *words: str) -> str:
    return "<br>".join([f"<b>{text(name)}</b>", *(text(word) for word in words if word and word != name)])
