"""Interactive page of a comparison by plotly, which needs no network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from perfexp.comparison import comparison_table
from perfexp.comparison.comparison_table import ratio_of, verdict_of
from perfexp.comparison.document import Compared, Comparison, LayerDifference, SideFacts, Verdict
from perfexp.comparison.measures import MEASURES
from perfexp.summaries.grid import Grid
from perfexp.summaries.subject import one_line

#: Okabe and Ito's colors by verdict; each has a marker of its own as well.
_STYLES = {
    Verdict.BETTER: ("#009E73", "triangle-up"),
    Verdict.WORSE: ("#D55E00", "triangle-down"),
    Verdict.SAME: ("#0072B2", "square"),
    Verdict.UNDECIDED: ("#5f5f5f", "circle-open"),
    Verdict.NOT_COMPARABLE: ("#b0b0b0", "x"),
}
_SIDES = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
#: Height in pixels of a row of few pairs and of many, and of what surrounds the rows.
_ROW, _NARROW_ROW, _MANY, _FRAME = 26, 15, 40, 110
#: Layers and points with plots of layers; comparison.json has all.
_MOST_LAYERS, _MOST_POINTS, _LABEL = 15, 6, 48
_STYLE = """body { font: 14px sans-serif; margin: 1em auto; max-width: 1300px; padding: 0 1em }
table { border-collapse: collapse; display: block; overflow-x: auto }
h2 { border-top: 1px solid #ccc; padding-top: .6em }
td, th { padding: .1em .7em; text-align: left; white-space: nowrap } .note { color: #a33c00 }"""


def page(comparison: Comparison) -> bytes:
    """Ratios, curves over the size and layers of all sides; the same comparison gives the same bytes."""
    body = [f"<p>{'<br>'.join(map(_text, comparison_table.header(comparison)))}</p>"]
    figures = _Figures()
    for side in comparison.sides[1:]:
        body.append(f"<h2>{_text(comparison_table.title(comparison, side))}</h2>")
        for heading, lines in comparison_table.sections(comparison, side):
            items = "".join(f"<li>{_text(line)}</li>" for line in lines)
            fold = f"<details{' open' * (len(lines) < _MOST_POINTS)}><summary>{heading}</summary>"
            body.append(f"{fold}<ul>{items}</ul></details>")
        body += [figures.draw(figure) for figure in _of_side(comparison, side)]
        body += _table(comparison_table.grid(comparison, side))
    body += [figures.draw(figure) for figure in _curves(comparison)]
    title = _text(f"Comparison of {', '.join(side.source for side in comparison.sides)}")
    return (
        f"<!DOCTYPE html><html><head><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style></head>"
        f"<body><h1>Comparison</h1>{''.join(body)}</body></html>"
    ).encode()


class _Figures:
    """Figures as HTML; the first one brings plotly with it."""

    def __init__(self) -> None:
        self._number = 0

    def draw(self, figure: Any) -> str:
        """One figure as a part of the page."""
        self._number += 1
        return str(
            figure.to_html(
                include_plotlyjs=self._number == 1,
                full_html=False,
                div_id=f"figure{self._number}",
                config={"displaylogo": False, "responsive": True},
            )
        )


def _of_side(comparison: Comparison, side: SideFacts) -> Iterator[Any]:
    for measure in MEASURES:
        pairs = [pair for pair in comparison.pairs if (pair.side, pair.measure) == (side.name, measure)]
        if pairs:
            yield _forest(comparison, pairs)
    points = dict.fromkeys(line.point for line in comparison.layers if line.side == side.name)
    for point in list(points)[:_MOST_POINTS]:
        yield _layers([line for line in comparison.layers if (line.side, line.point) == (side.name, point)])


def _forest(comparison: Comparison, pairs: Sequence[Compared]) -> Any:
    """Ratios with their intervals, the largest regression on top, and the band of the margin."""
    figure, labels = go.Figure(), [_text(pair.point) for pair in pairs]
    margin = 1 + comparison.margin
    figure.add_vrect(x0=1 / margin, x1=margin, fillcolor="#0072B2", opacity=0.12, line_width=0)
    figure.add_vline(x=1, line_color="#202020", line_width=1)
    for verdict, (color, symbol) in _STYLES.items():
        rows = [number for number, pair in enumerate(pairs) if pair.verdict is verdict]
        if not rows:
            continue
        chosen = [pairs[number] for number in rows]
        figure.add_scatter(
            x=[pair.ratio for pair in chosen],
            y=rows,
            mode="markers",
            name=chosen[0].word,
            marker={"color": color, "symbol": symbol, "size": 10},
            error_x={
                "array": [(pair.high or pair.ratio) - pair.ratio for pair in chosen],
                "arrayminus": [pair.ratio - (pair.low or pair.ratio) for pair in chosen],
                "color": color,
            },
            hovertext=[_hover(pair) for pair in chosen],
            hoverinfo="text",
        )
    is_long = len(pairs) > _MANY
    name, direction = pairs[0].measure, "lower" if MEASURES[pairs[0].measure].is_better_if_lower else "higher"
    _lay_out(figure, f"{name}, {pairs[0].side}/{comparison.sides[0].name}: {direction} is better", len(pairs), is_long)
    ends = [end for pair in pairs for end in (pair.ratio, pair.low, pair.high) if end]
    window = [math.log10(min(margin**-2, *ends)), math.log10(max(margin**2, *ends))]
    room = 0.03 * (window[1] - window[0])
    title = "ratio with its 95 % interval; the band is the margin"
    figure.update_xaxes(title=title, type="log", range=[window[0] - room, window[1] + room])
    figure.update_yaxes(tickvals=list(range(len(pairs))), ticktext=labels, range=[len(pairs) - 0.5, -0.5])
    return figure


def _layers(lines: Sequence[LayerDifference]) -> Any:
    """The layers with the largest contributions to a difference, as bars."""
    figure, shown = go.Figure(), lines[:_MOST_LAYERS]
    differences = [line.other_seconds - line.baseline_seconds for line in shown]
    figure.add_bar(
        x=[1e3 * difference for difference in differences],
        y=list(range(len(shown))),
        orientation="h",
        marker_color=[_STYLES[Verdict.WORSE if value > 0 else Verdict.BETTER][0] for value in differences],
        text=[f"{line.share:.0%}" for line in shown],
        hovertext=[
            _text(f"{line.layer} {line.which}: {1e3 * line.baseline_seconds:.4g} → {1e3 * line.other_seconds:.4g} ms")
            for line in shown
        ],
        hoverinfo="text",
    )
    rest = f" (largest {len(shown)} of {len(lines)})" if len(lines) > len(shown) else ""
    _lay_out(figure, f"layers that explain the difference, {_text(shown[0].point)}{rest}", len(shown), False)
    figure.update_xaxes(title=f"{shown[0].side} - A in ms; the text is the share of the whole difference")
    labels = [_text(f"{line.layer} {line.which}"[-_LABEL:]) for line in shown]
    figure.update_yaxes(tickvals=list(range(len(shown))), ticktext=labels, range=[len(shown) - 0.5, -0.5])
    return figure


def _curves(comparison: Comparison) -> Iterator[Any]:
    """All sides over the input size, for measures with at least three sizes."""
    for measure in MEASURES:
        pairs = [pair for pair in comparison.pairs if pair.measure == measure]
        if len({pair.input_size for pair in pairs}) < _LEAST_SIZES:
            continue
        figure, unit = go.Figure(), pairs[0].unit
        factor = 1e3 if unit == "seconds" else 1.0
        for side, curve in dict.fromkeys((pair.side, pair.curve) for pair in pairs):
            same = [pair for pair in pairs if (pair.side, pair.curve) == (side, curve)]
            same.sort(key=lambda pair: pair.input_size[0] * pair.input_size[1])
            pixels = [(pair.input_size[0] * pair.input_size[1]) ** 0.5 for pair in same]
            is_first = side == comparison.sides[1].name
            for name, values in ((comparison.sides[0].name, [pair.baseline for pair in same]),) * is_first + (
                (side, [pair.other for pair in same]),
            ):
                color = _SIDES[(ord(name) - ord("A")) % len(_SIDES)]
                figure.add_scatter(
                    x=pixels,
                    y=[factor * value for value in values],
                    mode="lines+markers",
                    name=_text(f"{name} {curve}".strip()),
                    line={"color": color},
                )
        _lay_out(figure, f"{measure} over the input size", 12, False)
        figure.update_xaxes(title="input size in pixels (square root of height × width)", type="log")
        figure.update_yaxes(title=f"{measure} in {'ms' if unit == 'seconds' else unit}", type="log")
        yield figure


#: Sizes from which there is a curve.
_LEAST_SIZES = 3


def _lay_out(figure: Any, title: str, rows: int, is_long: bool) -> None:
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "font": {"size": 15}},
        height=_FRAME + 30 + rows * (_NARROW_ROW if is_long else _ROW),
        margin={"t": 46, "l": 10, "r": 10, "b": 50},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        showlegend=any(trace.name for trace in figure.data),
        hoverlabel={"align": "left", "bgcolor": "white"},
    )
    figure.update_yaxes(automargin=True, tickfont={"size": 10 if is_long else 12})


def _table(grid: Grid) -> Iterable[str]:
    lines = [("th", [column.title for column in grid.columns]), *(("td", cells) for cells in grid.lines)]
    cells = ("".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in line) for tag, line in lines)
    yield f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
    yield from (f"<p class=note>{_text(note)}</p>" for note in grid.notes)


def _hover(pair: Compared) -> str:
    lines = (pair.point, f"{pair.measure}: {ratio_of(pair)}", verdict_of(pair), ", ".join(pair.confounders))
    return "<br>".join(_text(line) for line in lines if line)


def _text(text: str) -> str:
    return html.escape(one_line(text))
