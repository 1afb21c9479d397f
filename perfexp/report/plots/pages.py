"""HTML pages with sortable tables and SVG plots, in a single file that needs no network.

`perfexp show --html` and `perfexp compare` write them, and `perfexp roofline` a page beside its
plot.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perfexp.comparison import comparison_table
from perfexp.comparison.document import Comparison, SideFacts, Verdict
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.grid import Grid, Section
from perfexp.records.subject import one_line
from perfexp.report.plots import drawing, layer_plot, record_plots, sweep_plots
from perfexp.report.plots.canvas import (
    DARK,
    caption_of,
    columns,
    legend,
    matplotlib,
    name_rows,
    name_ticks,
    save,
    title_of,
)
from perfexp.report.plots.chart import GREY, Caption
from perfexp.report.plots.roofline_table import grid
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.placement import Roofline
from perfexp.roofline.sentences import meaning

_STYLE = """body { font: 14px sans-serif; margin: 1em auto; max-width: 1200px; padding: 0 1em }
svg { max-width: 100%; height: auto } .wide { overflow-x: auto } table { border-collapse: collapse }
th, td { padding: .15em .7em; text-align: right; white-space: nowrap; \
border-bottom: 1px solid #eee }
th { cursor: pointer; border-bottom: 1px solid #999 } .prose { text-align: left } \
p { margin: .2em 0 }
tr:target { background: #fff0c0 } .note { color: #5f5f5f }"""
#: Sorts table rows by the clicked column: numbers with their units, then words.
_SCRIPT = """
const powers = {n: 1e-9, "µ": 1e-6, m: 1e-3, k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15};
const factors = {min: 60, h: 3600};
function value(cell) {
  const found = cell.textContent.match(\
/^[≈!▲▼=?✕ ]*([-+−]?[\\d.]+(?:e[-+]?\\d+)?)\\s*([^\\s\\d]*)/);
  if (!found) return null;
  const unit = found[2], prefixed = unit.length > 1 && powers[unit[0]];
  return Number(found[1].replace("−", "-")) * (factors[unit] || prefixed || 1);
}
function order(a, b) {
  const one = value(a), two = value(b);
  if (one !== null && two !== null) return one - two;
  if (one !== null || two !== null) return one === null ? 1 : -1;
  return a.textContent.localeCompare(b.textContent);
}
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], index = head.cellIndex;
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  body.append(...[...body.rows].sort((a, b) => sign * order(a.cells[index], b.cells[index])));
};
"""

#: Okabe and Ito's colors by verdict, each with its own marker.
_STYLES = {
    Verdict.BETTER: ("#009E73", "^"),
    Verdict.WORSE: ("#D55E00", "v"),
    Verdict.SAME: ("#0072B2", "s"),
    Verdict.UNDECIDED: (DARK, "o"),
    Verdict.NOT_COMPARABLE: (GREY, "x"),
}
#: Maximum pairs in a plot and characters of their names.
_MOST_PAIRS, _LONGEST = 80, 60
#: Heights of a row and of the surroundings, in inches.
_ROW, _AROUND = 0.26, 1.6


def of_run(analysis: Analysis, sections: Sequence[Section]) -> bytes:
    """Return a run's page: its results, with plots below the headline."""
    plot = record_plots.plot(analysis)
    figures = [plot and drawing.compose(plot), layer_plot.compose(analysis.record)]
    return _results(analysis.record.name, sections, figures, after=1)


def of_sweep(
    sweep_analysis: SweepAnalysis, sections: Sequence[Section], folder: Path | None = None
) -> bytes:
    """Return a sweep's page: its results, with the plot below the table of runs.

    Args:
        folder: the sweep's folder, for predictions; None to leave them out.
    """
    plot = sweep_plots.plot(sweep_analysis, folder)
    return _results(sweep_analysis.sweep.name, sections, [plot and drawing.compose(plot)], after=2)


def of_comparison(comparison: Comparison) -> bytes:
    """Return a comparison's page: the conclusion, and ratios, plot and layers for each side."""
    parts = list(_lines(comparison_table.header(comparison)))
    for side in comparison.sides[1:]:
        title, grid, *others = comparison_table.of_side(comparison, side, has_kernels=True)
        parts += [*_section(*title), *_section(*grid)]
        if figure := ratio_plot(comparison, side):
            parts.append(_svg(figure))
        for section in others:
            parts += _section(*section)
    return _page(comparison_table.conclusion(comparison), parts)


def ratio_plot(comparison: Comparison, side: SideFacts) -> Any:
    """Return a matplotlib figure with a side's ratios and intervals; None without ratios.

    A row is one figure at one point, in the order of the comparison's document. A ratio is the
    side's figure over the baseline's, so that 1 means equal; the band around 1 is the margin.
    """
    with_ratio = [pair for pair in comparison.of_side(side.name) if pair.ratio is not None]
    pairs = with_ratio[:_MOST_PAIRS]
    margin = 1 + comparison.margin
    if not pairs:
        return None
    figure, (axes,) = columns([_ROW * len(pairs)], _AROUND)
    axes.axvspan(1 / margin, margin, color="#0072B2", alpha=0.12, linewidth=0)
    axes.axvline(1, color="black", linewidth=1)
    for position, pair in enumerate(pairs):
        color, marker = _STYLES[pair.verdict]
        if pair.low is not None and pair.high is not None:
            axes.plot([pair.low, pair.high], [position] * 2, color=color, linewidth=1.5)
        words = title_of(
            pair.measure,
            pair.point,
            comparison_table.ratio_of(pair),
            comparison_table.verdict_of(pair),
            *pair.confounders,
        )
        face = "white" if pair.verdict is Verdict.UNDECIDED else color
        look = {"linestyle": "none", "markerfacecolor": face, "label": pair.word, **words}
        axes.plot([pair.ratio], [position], marker, color=color, **look)
    labels = [cut(f"{pair.measure} · {pair.point}", _LONGEST) for pair in pairs]
    name_rows(axes, labels, margin, f"{side.name}/{comparison.sides[0].name}")
    axes.set_xscale("log")
    axes.autoscale(axis="x")
    low, high = axes.get_xlim()
    if high > 10 * low:
        name_ticks(axes.xaxis, matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    else:
        name_ticks(axes.xaxis, matplotlib.ticker.MaxNLocator(7))
    legend(axes)
    level = comparison_table.confidence(side.level)
    about = f"ratios with their {level} intervals; the band is the margin"
    if len(pairs) < len(with_ratio):
        about += f"; {len(pairs)} of {len(with_ratio)}, the table has all"
    caption_of(
        figure, Caption(title=comparison_table.title(comparison, side), subtitle=about, footer="")
    )
    return figure


def of_roofline(roofline: Roofline, svg: bytes) -> bytes:
    """Return a roofline's page: the plot, with markers that link to rows in the table below."""
    rows = (roofline.total, *roofline.ranges, *roofline.parts)
    below = table(grid(roofline, rows, roofline.notes), [row.number for row in rows])
    parts = [*_lines([meaning(roofline, roofline.total)]), _inline(svg), below]
    return _page(roofline.title, parts)


def _results(
    name: str, sections: Sequence[Section], figures: Iterable[Any], *, after: int
) -> bytes:
    """Return a page of sections with figures after the first `after` sections.

    The first section contains the headline.
    """
    title = sections[0][0] if sections else name
    parts = []
    for number, (heading, lines) in enumerate(sections):
        parts.append("".join(_section(heading if number else "", lines)))
    return _page(title, [*parts[:after], *map(_svg, filter(None, figures)), *parts[after:]])


def _section(title: str, content: Grid | Sequence[str]) -> Iterator[str]:
    """Yield a section as HTML: its title unless empty, then a table or paragraphs."""
    if title:
        yield f"<h2>{text(title)}</h2>"
    if isinstance(content, Grid):
        yield table(content)
    else:
        yield from _lines(content)


def _page(title: str, parts: Iterable[str]) -> bytes:
    """Return HTML parts as a page in UTF-8; equal parts give equal bytes."""
    phone = "<meta name=viewport content='width=device-width'>"
    head = f"<meta charset=utf-8>{phone}<title>{text(title)}</title><style>{_STYLE}</style>"
    body = f"<h1>{text(title)}</h1>{''.join(parts)}<script>{_SCRIPT}</script>"
    content = f"<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>"
    return content.encode("utf-8", errors="replace")


def table(grid: Grid, ids: Sequence[str] = ()) -> str:
    """Return a grid as an HTML table with its notes below it.

    Args:
        ids: identifiers of the rows, which markers in a plot link to.
    """

    def cells(tag: str, texts: Iterable[str]) -> str:
        """Return texts as the cells of a row, with the tag `td` or `th`."""
        parts = []
        for column, cell in zip(grid.columns, texts, strict=True):
            look = " class=prose" if column.prose else ""
            parts.append(f"<{tag}{look}>{text(cell)}</{tag}>")
        return "".join(parts)

    rows = ""
    for name, line in zip(ids or [""] * len(grid.lines), grid.lines, strict=True):
        named = f" id='{text(name)}'" if name else ""
        rows += f"<tr{named}>{cells('td', line)}</tr>"
    head = cells("th", (column.title for column in grid.columns))
    notes = "".join(f"<p class=note>{text(note)}</p>" for note in grid.notes)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<div class=wide>{body}</div>{notes}"


def text(words: str) -> str:
    """Return a text as a single line that HTML shows unchanged."""
    return html.escape(one_line(words))


def _lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines as HTML paragraphs."""
    for line in lines:
        yield f"<p>{text(line)}</p>"


def _svg(figure: Any) -> str:
    """Return a matplotlib figure as SVG to embed in a page."""
    return _inline(save(figure, "svg"))


def _inline(svg: bytes) -> str:
    """Return the content of an SVG file without its file header, to embed in a page."""
    return svg[svg.index(b"<svg") :].decode()
