"""Interactive page of a comparison by plotly, which needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from perfexp.comparison import comparison_table
from perfexp.comparison.comparison_table import ratio_of, verdict_of
from perfexp.comparison.document import Compared, Comparison, LayerDifference, SideFacts, Verdict
from perfexp.comparison.measures import MEASURES
from perfexp.plots import page

#: Okabe and Ito's colors by verdict; each has a marker of its own as well.
_STYLES = {
    Verdict.BETTER: ("#009E73", "triangle-up"),
    Verdict.WORSE: ("#D55E00", "triangle-down"),
    Verdict.SAME: ("#0072B2", "square"),
    Verdict.UNDECIDED: ("#5f5f5f", "circle-open"),
    Verdict.NOT_COMPARABLE: ("#b0b0b0", "x"),
}
#: Colors of the sides of a curve, the baseline first.
_SIDES = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
#: Height in pixels of a row of few and of many pairs.
_ROW, _NARROW_ROW, _MANY = 26, 15, 40
#: Height in pixels of the titles, of ticks, and of a row of the legend, which has at least two names.
_TITLES, _TICKS, _LEGEND_ROW, _NAMES_PER_ROW = 60, 34, 22, 2
#: Layers and points in plots of layers (comparison.json has all), and sizes from which there is a curve.
_MOST_LAYERS, _MOST_POINTS, _LEAST_SIZES = 15, 6, 3
#: Symbols that plotly numbers.
_SYMBOLS = 50


def of_comparison(comparison: Comparison) -> bytes:
    """Ratios, layers and curves over the size; the same comparison gives the same bytes."""
    parts: list[Any] = [
        f"<h1>{page.text(comparison_table.conclusion(comparison))}</h1>",
        f"<p>{'<br>'.join(map(page.text, comparison_table.header(comparison)))}</p>",
    ]
    for side in comparison.sides[1:]:
        parts.append(f"<h2>{page.text(comparison_table.title(comparison, side))}</h2>")
        parts += [f"<p>{page.text(line)}</p>" for line in comparison_table.doubts(comparison, side)]
        for heading, lines in comparison_table.sections(comparison, side):
            parts.append(f"<details open><summary>{heading}</summary>{'<br>'.join(map(page.text, lines))}</details>")
        parts += [*_of_side(comparison, side), page.table(comparison_table.grid(comparison, side))]
    parts += _curves(comparison)
    return page.document(f"Comparison of {', '.join(side.source for side in comparison.sides)}", parts)


def _of_side(comparison: Comparison, side: SideFacts) -> Iterator[Any]:
    for measure in MEASURES:
        pairs = [pair for pair in comparison.pairs if (pair.side, pair.measure) == (side.name, measure)]
        if with_ratio := {pair: pair.ratio for pair in pairs if pair.ratio is not None}:
            yield _forest(comparison, side, with_ratio)
    layers = [line for line in comparison.layers if line.side == side.name and line.agrees]
    for point in list(dict.fromkeys(line.point for line in layers))[:_MOST_POINTS]:
        yield _layers([line for line in layers if line.point == point])
    yield from (f"<p>{page.text(line)}</p>" for line in comparison_table.explained(comparison, side))


def _forest(comparison: Comparison, side: SideFacts, ratios: Mapping[Compared, float]) -> Any:
    """Ratios with their intervals, the largest regression on top, and the band of the margin."""
    figure, margin, pairs = go.Figure(), 1 + comparison.margin, list(ratios)
    figure.add_vrect(x0=1 / margin, x1=margin, fillcolor="#0072B2", opacity=0.12, line_width=0)
    figure.add_vline(x=1, line_color="#202020", line_width=1)
    for verdict, (color, symbol) in _STYLES.items():
        rows = {number: pair for number, pair in enumerate(pairs) if pair.verdict is verdict}
        if rows:
            figure.add_scatter(
                x=[ratios[pair] for pair in rows.values()],
                y=list(rows),
                mode="markers",
                name=next(iter(rows.values())).word,
                marker={"color": color, "symbol": symbol, "size": 10},
                error_x={
                    "array": [(pair.high or ratios[pair]) - ratios[pair] for pair in rows.values()],
                    "arrayminus": [ratios[pair] - (pair.low or ratios[pair]) for pair in rows.values()],
                    "color": color,
                },
                hovertext=[_hover(pair) for pair in rows.values()],
                hoverinfo="text",
            )
    direction = "lower" if MEASURES[pairs[0].measure].is_better_if_lower else "higher"
    title = f"{pairs[0].measure}, {pairs[0].side}/{comparison.sides[0].name}: {direction} is better"
    about = f"ratio with its {comparison_table.confidence(side.level)} interval; the band is the margin"
    _lay_out(figure, title, about, [pair.point for pair in pairs])
    ends = [end for pair in pairs for end in (pair.ratio, pair.low, pair.high) if end]
    low, high = math.log10(min(margin**-2, *ends)), math.log10(max(margin**2, *ends))
    room = 0.03 * (high - low)
    figure.update_xaxes(type="log", range=[low - room, high + room])
    return figure


def _layers(lines: Sequence[LayerDifference]) -> Any:
    """The layers with the largest contributions to a difference, as bars."""
    figure, shown = go.Figure(), lines[:_MOST_LAYERS]
    milliseconds = [1e3 * (line.other_seconds - line.baseline_seconds) for line in shown]
    figure.add_bar(
        x=milliseconds,
        y=list(range(len(shown))),
        orientation="h",
        marker_color=[_STYLES[Verdict.WORSE if value > 0 else Verdict.BETTER][0] for value in milliseconds],
        text=[f"{line.share:.0%}" for line in shown],
        hovertext=[f"{', '.join(line.baseline_kernels)} → {', '.join(line.other_kernels)}" for line in shown],
        hoverinfo="x+text",
    )
    title = f"layers that differ most, {shown[0].point}: {len(shown)} of {len(lines)}"
    about = f"{shown[0].side} - A in ms, with the share of the whole difference"
    _lay_out(figure, title, about, [f"{line.layer} {line.which}" for line in shown])
    return figure


def _curves(comparison: Comparison) -> Iterator[Any]:
    """All sides over the input size, for measures with several sizes."""
    names = [side.name for side in comparison.sides]
    for measure in MEASURES:
        pairs = [pair for pair in comparison.pairs if pair.measure == measure]
        if len({pair.key.input_size for pair in pairs}) < _LEAST_SIZES:
            continue
        lines: dict[tuple[str, str], dict[int, float]] = {}
        for pair in sorted(pairs, key=lambda pair: pair.key.pixels):
            for name, value in ((names[0], pair.baseline), (pair.side, pair.other)):
                lines.setdefault((name, pair.curve), {})[pair.key.pixels] = value
        figure, is_time = go.Figure(), pairs[0].unit == "seconds"
        curves = sorted({curve for _, curve in lines})
        for (name, curve), values in sorted(lines.items()):
            figure.add_scatter(
                x=[math.sqrt(pixels) for pixels in values],
                y=[1e3 * value if is_time else value for value in values.values()],
                mode="lines+markers",
                name=page.text(f"{name} {curve}".strip()),
                line={"color": _SIDES[names.index(name) % len(_SIDES)]},
                marker={"symbol": curves.index(curve) % _SYMBOLS},
            )
        unit = "ms" if is_time else pairs[0].unit
        _lay_out(figure, f"{measure} over the input size", f"{unit} over pixels, the root of height × width")
        figure.update_layout(xaxis_type="log", yaxis_type="log")
        yield figure


def _lay_out(figure: Any, title: str, about: str, rows: Sequence[str] = ()) -> None:
    """Set titles and height; `rows` are the labels of a vertical axis from 0, the first one on top."""
    is_long, names = len(rows) > _MANY, [trace.name for trace in figure.data if trace.name]
    bottom = _TICKS + math.ceil(len(names) / _NAMES_PER_ROW) * _LEGEND_ROW
    figure.update_layout(
        template="plotly_white",
        title={"text": page.text(title), "font": {"size": 15}, "subtitle": {"text": page.text(about)}},
        height=_TITLES + bottom + (len(rows) or 12) * (_NARROW_ROW if is_long else _ROW),
        margin={"t": _TITLES, "l": 10, "r": 10, "b": bottom},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        showlegend=bool(names),
    )
    if rows:
        ticks = {"tickvals": list(range(len(rows))), "ticktext": list(map(page.text, rows))}
        font = {"size": 10 if is_long else 12}
        figure.update_yaxes(range=[len(rows) - 0.5, -0.5], automargin=True, tickfont=font, **ticks)


def _hover(pair: Compared) -> str:
    lines = (pair.point, f"{pair.measure}: {ratio_of(pair)}", verdict_of(pair), ", ".join(pair.confounders))
    return "<br>".join(page.text(line) for line in lines if line)
