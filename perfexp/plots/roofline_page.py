"""Interactive page of a roofline by plotly, which needs no network."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from perfexp.plots import page
from perfexp.plots.chart import COLORS as PALETTE
from perfexp.plots.roofline_ceilings import COLORS, X_TITLE, Y_TITLE, ceilings_of, numbered, placed_parts, window_of
from perfexp.plots.roofline_table import grid
from perfexp.roofline.placement import Roofline, Row
from perfexp.roofline.sentences import meaning, pretty
from perfexp.summaries.subject import one_line

#: Diameter in pixels of a part that takes all of the time, and of the smallest.
_LARGEST, _SMALLEST = 70, 6
#: Diameter of the smallest marker with its number on it.
_WIDE = 18


def of_roofline(roofline: Roofline) -> bytes:
    """A plot with all rows in a table below it; the same roofline gives the same bytes."""
    figure, window = go.Figure(), window_of(roofline)
    for ceiling in ceilings_of(roofline, window):
        is_level = ceiling.y[0] == ceiling.y[1]
        color, width = ("#202020", 2.5) if ceiling.used else ("#9a9a9a", 1.5)
        figure.add_scatter(
            x=ceiling.x,
            y=ceiling.y,
            name=ceiling.name,
            mode="lines+text",
            text=("", ceiling.name) if is_level else (ceiling.name, ""),
            textposition="top left" if is_level else "middle right",
            hoverinfo="name",
            line={"color": color, "dash": "dash" if ceiling.measured else "solid", "width": width},
            legendgroup="ceilings",
            legendgrouptitle_text="ceilings",
        )
    parts = placed_parts(roofline)
    for limit, color in COLORS.items():
        rows = [row for row in parts if row.limit is limit]
        _points(figure, roofline, rows, f"{roofline.noun} {limit.value}", color=color)
    l2 = [row for row in parts if row.load.l2_intensity and roofline.peaks.l2_bytes_per_second]
    _points(figure, roofline, l2, "by L2 bytes", by_l2=True, size=12, symbol="circle-open", color=PALETTE[4])
    _points(figure, roofline, roofline.ranges, "ranges", size=12, symbol="diamond-open", color="black")
    _points(figure, roofline, [roofline.total], "total", size=12, symbol="star", color="black")
    _points(figure, roofline, roofline.launches, "each launch", symbol="circle-open", color=PALETTE[2])
    figure.update_layout(
        template="plotly_white",
        height=780,
        margin={"t": 20},
        legend={"itemsizing": "constant"},
        hoverlabel={"align": "left", "bgcolor": "white"},
    )
    figure.update_xaxes(type="log", title=X_TITLE, range=list(map(math.log10, window.x)), dtick=1)
    figure.update_yaxes(type="log", title=Y_TITLE, range=list(map(math.log10, window.y)), **_decades(window.y))
    listed = (roofline.total, *roofline.ranges, *roofline.parts)
    notes = "".join(f"<p class=note>{page.text(note)}</p>" for note in roofline.notes)
    table = page.table(grid(roofline, listed), [row.number for row in listed])
    head = f"<h1>{page.text(roofline.title)}</h1><p>{page.text(meaning(roofline, roofline.total))}</p>"
    return page.document(roofline.title, [head, figure, notes + table])


def _decades(ends: tuple[float, float]) -> dict[str, list[object]]:
    """Powers of ten with SI prefixes, of which plotly knows none above tera."""
    first, last = (math.floor(math.log10(end)) for end in ends)
    powers = [10.0**power for power in range(first, last + 1)]
    return {"tickvals": [*powers], "ticktext": [pretty(power, "", stated=True) for power in powers]}


def _points(
    figure: Any,
    roofline: Roofline,
    rows: Iterable[Row],
    name: str,
    *,
    size: int = 0,
    by_l2: bool = False,
    **marker: Any,
) -> None:
    """Add rows to the figure, with the numbers of the slowest; launches stay hidden until the reader wants them."""
    rows = [row for row in rows if row.has_place]
    if not rows:
        return
    sizes = [size or max(_LARGEST * row.time_share**0.5, _SMALLEST) for row in rows]
    shown = [row.number for row in (*roofline.ranges, *numbered(roofline))]
    is_launch = rows[0].level == "launch"
    figure.add_scatter(
        x=[row.load.l2_intensity if by_l2 else row.load.intensity for row in rows],
        y=[row.load.flops_per_second for row in rows],
        mode="markers+text",
        name=name,
        visible="legendonly" if is_launch else True,
        text=[row.number if row.number in shown and not is_launch and not by_l2 else "" for row in rows],
        textposition=["middle center" if diameter >= _WIDE else "middle right" for diameter in sizes],
        hovertext=[_hover(roofline, row) for row in rows],
        hoverinfo="text",
        customdata=[row.number for row in rows],
        marker={"size": sizes, "opacity": 0.75, **marker},
    )


def _hover(roofline: Roofline, row: Row) -> str:
    table = grid(roofline, [row])
    figures = ", ".join(f"{column.title} {column.cells[0]}" for column in table.columns[2:])
    shares = [f"{'≈ ' * row.is_estimated(name)}{share:.1%} of {name}" for name, share in row.shares.items()]
    name = row.name if row.name != row.label else ""
    texts = (name, row.where, figures, ", ".join(shares), meaning(roofline, row))
    lines = (line for text in texts for line in textwrap.wrap(one_line(text), 100, max_lines=4, placeholder=" …"))
    head = f"<b>{html.escape(one_line(f'{row.number} {row.label}'))}</b>"
    return "<br>".join([head, *map(html.escape, lines)])
