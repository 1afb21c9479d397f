"""Page: figures of plotly, tables and texts as one HTML file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from perfexp.summaries.grid import Grid
from perfexp.summaries.subject import one_line

_PHONE = "<meta name=viewport content='width=device-width'>"
#: The vertical scroll bar is always there: plots are drawn before the page needs it, and would be wider than the rest.
_STYLE = """html { overflow-y: scroll }
body { font: 14px sans-serif; margin: 1em auto; max-width: 1300px; padding: 0 1em }
table { display: block; overflow-x: auto } h2 { border-top: 1px solid #ccc; padding-top: .6em }
td, th { padding: .1em .7em; text-align: left; white-space: nowrap } .note { color: #a33c00 }
pre { overflow-x: auto; background: #f6f6f6; padding: .7em } tr:target { background: #fff0c0 }"""
#: Scrolls to the row of a table whose number a clicked marker has.
_CLICK = "document.getElementById('{plot_id}').on('plotly_click', e => {location.hash = e.points[0].customdata || ''})"


def document(title: str, parts: Sequence[Any]) -> bytes:
    """Return texts in HTML and figures as a page; equal parts give equal bytes."""
    head = f"<meta charset=utf-8>{_PHONE}<title>{text(title)}</title><style>{_STYLE}</style>"
    return f"<!DOCTYPE html><html><head>{head}</head><body>{''.join(_drawn(parts))}</body></html>".encode()


def _drawn(parts: Sequence[Any]) -> Iterator[str]:
    """Texts as they are and figures as HTML; the first figure brings plotly with it."""
    options = {"full_html": False, "config": {"displayModeBar": False, "responsive": True}}
    first = next((number for number, part in enumerate(parts) if not isinstance(part, str)), None)
    for number, part in enumerate(parts):
        if isinstance(part, str):
            yield part
            continue
        is_linked = any(trace.customdata is not None for trace in part.data)
        script = {"post_script": _CLICK} if is_linked else {}
        yield part.to_html(include_plotlyjs=number == first, div_id=f"part{number}", **options, **script)


def table(grid: Grid, ids: Sequence[str] = ()) -> str:
    """Return a table and its notes; the rows may have identities, to which clicked markers scroll."""
    lines = [("th", [column.title for column in grid.columns]), *(("td", cells) for cells in grid.lines)]
    cells = ["".join(f"<{tag}>{text(cell)}</{tag}>" for cell in line) for tag, line in lines]
    names = ["", *(f" id='{text(name)}'" if name else "" for name in ids)]
    names += [""] * (len(cells) - len(names))
    rows = "".join(f"<tr{name}>{line}</tr>" for name, line in zip(names, cells, strict=True))
    notes = "".join(f"<p class=note>{text(note)}</p>" for note in grid.notes)
    return f"<table>{rows}</table>{notes}"


def text(words: str) -> str:
    """Return one line that HTML shows as it is."""
    return html.escape(one_line(words))
