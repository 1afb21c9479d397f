"""Page of a roofline: an interactive one by plotly, whole in itself."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from perfexp.plots.roofline_ceilings import Kind, kind_of, roofs_of, window_of
from perfexp.records.units import digits, format_seconds
from perfexp.roofline.below import Roofline
from perfexp.roofline.placement import DRAM, L2, Row
from perfexp.roofline.sentences import pretty
from perfexp.summaries.subject import one_line

_COLOURS = {Kind.memory: "#0072B2", Kind.compute: "#D55E00", Kind.neither: "#7f7f7f"}
#: Diameter in pixels of a part that takes all of the time, and the least of all.
_LARGEST, _SMALLEST = 70, 6


def page(roofline: Roofline) -> bytes:
    """A page that needs no network; the same roofline gives the same bytes.

    Args:
        roofline: of any file or record.
    """
    placed = [row for row in roofline.parts if row.load.intensity and row.load.flops_per_second]
    figure = go.Figure()
    window = window_of(roofline, [*placed, *(row for row in roofline.ranges if row.load.intensity)])
    for roof in roofs_of(roofline, window):
        dash, width = ("dash" if roof.seen else "solid"), (2.5 if roof.used else 1.5)
        line = {"color": "#202020" if roof.used else "#9a9a9a", "dash": dash, "width": width}
        x, y = ((ends[0], ends[0] ** 0.85 * ends[1] ** 0.15, ends[1]) for ends in (roof.x, roof.y))
        texts = ("", "", roof.name) if roof.level else ("", roof.name, "")
        position = "bottom right" if roof.below else "top left"
        where = {"x": x, "y": y, "mode": "lines+text", "text": texts, "textposition": position}
        group = {"legendgroup": "roofs", "legendgrouptitle_text": "roofs"}
        figure.add_trace(go.Scatter(**where, line=line, name=roof.name, hoverinfo="name", **group))
    for kind, colour in _COLOURS.items():
        rows = [row for row in placed if kind_of(row) is kind]
        figure.add_trace(_points(roofline, rows, f"{roofline.noun} {kind.value}", color=colour))
    inner = [row for row in placed if row.load.l2_intensity and roofline.peaks.l2_bytes_per_second]
    if inner:
        figure.add_trace(_points(roofline, inner, "by L2 bytes", l2=True, symbol="circle-open", color="#009E73"))
    ranges = [row for row in roofline.ranges if row.load.intensity]
    if ranges:
        figure.add_trace(_points(roofline, ranges, "ranges", symbol="diamond-open", color="black"))
    if roofline.total.load.intensity:
        figure.add_trace(_points(roofline, [roofline.total], "all of it", symbol="star", color="black"))
    if launches := [row for row in roofline.launches if row.load.intensity]:
        hidden = _points(roofline, launches, "each launch", symbol="circle-open", color="#CC79A7")
        figure.add_trace(hidden.update(visible="legendonly"))
    _layout(figure, roofline, window.x, window.y)
    text = figure.to_html(include_plotlyjs=True, full_html=True, div_id="roofline", config={"displaylogo": False})
    return str(text).replace("<head>", f"<head><title>{html.escape(one_line(roofline.title))}</title>", 1).encode()


def _points(
    roofline: Roofline, rows: Sequence[Row], name: str, *, l2: bool = False, symbol: str = "circle", **marker: Any
) -> Any:
    fixed = symbol in ("star", "diamond-open") or l2
    size = 12 if fixed else [max(_LARGEST * row.time_share**0.5, _SMALLEST) for row in rows]
    return go.Scatter(
        x=[row.load.l2_intensity if l2 else row.load.intensity for row in rows],
        y=[row.load.flops_per_second for row in rows],
        mode="markers",
        name=name,
        text=[_hover(roofline, row) for row in rows],
        hovertemplate="%{text}<extra></extra>",
        marker={"size": size, "symbol": symbol, "opacity": 0.75, **marker},
    )


def _hover(roofline: Roofline, row: Row) -> str:
    """What is known of a row, in lines."""
    load = row.load
    of_flops, of_bytes = ("≈ " if each else "" for each in (row.flops_are_estimated, row.bytes_are_estimated))
    facts = [
        f"<b>{_escaped(row.label, 80)}</b>",
        _escaped(row.name, 100) if row.name != row.label else "",
        _escaped(row.where, 100),
        f"{load.launches} launches, {format_seconds(load.seconds)}, {row.time_share:.1%} of the time",
        f"{of_flops}{pretty(load.total_flops or 0.0, 'FLOP')}, "
        f"{of_bytes}{pretty(load.dram_bytes or 0.0, 'B')} of DRAM, "
        f"{of_flops or of_bytes}{digits(load.intensity or 0.0)} FLOP/B",
        f"{of_flops}{pretty(load.flops_per_second or 0.0, 'FLOP/s')}, "
        f"{of_bytes}{pretty(load.dram_bytes_per_second or 0.0, 'B/s')}",
        ", ".join(
            f"{'≈ ' if _is_estimated(row, name) else ''}{share:.1%} of {name}"
            for name, share in row.standing.shares.items()
        ),
        _escaped(roofline.meaning(row), 100),
    ]
    return "<br>".join(filter(None, facts))


def _is_estimated(row: Row, roof: str) -> bool:
    """Whether the part of a roof is; bytes of L2 are counted or not there."""
    return roof != L2 and (row.memory_is_estimated if roof == DRAM else row.compute_is_estimated)


def _escaped(text: str, width: int) -> str:
    lines = textwrap.wrap(one_line(text), width, max_lines=4, placeholder=" …")
    return "<br>".join(map(html.escape, lines))


def _layout(figure: Any, roofline: Roofline, x: tuple[float, float], y: tuple[float, float]) -> None:
    notes = "<br>".join(_escaped(note, 180) for note in roofline.notes)
    title, said = _escaped(roofline.title, 100), _escaped(roofline.meaning(roofline.total), 160)
    figure.update_layout(
        title={"text": f"<b>{title}</b><br><sub>{said}</sub>"},
        template="plotly_white",
        height=820,
        margin={"t": 90, "b": 70 + 16 * (notes.count("<br>") + 1)},
        legend={"itemsizing": "constant"},
        hoverlabel={"align": "left", "bgcolor": "white"},
        xaxis={"type": "log", "title": "arithmetic intensity (FLOP per byte of DRAM)", "minor": {"showgrid": False}},
        yaxis={"type": "log", "title": "achieved rate (FLOP/s)", "exponentformat": "SI"},
    )
    figure.update_xaxes(range=[_log(x[0]), _log(x[1])], dtick=1)
    figure.update_yaxes(range=[_log(y[0]), _log(y[1])], dtick=1)
    if notes:
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": 0, "yshift": -60, "yanchor": "top", "xanchor": "left"}
        figure.add_annotation(text=notes, showarrow=False, align="left", font={"size": 11, "color": "#a33c00"}, **at)


def _log(value: float) -> float:
    return math.log10(value)
