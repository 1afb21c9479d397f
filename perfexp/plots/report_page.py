"""Interactive report of a run or a sweep by plotly, which needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from perfexp.plots import layer_plot, page, plotly_figures, plotly_layers, record_plots, sweep_plots
from perfexp.plots.chart import Bars, Caption, Chart, Strips
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.tables.layer_tables import doubt_text, representative_point


def of_run(record: Record, lines: Iterable[str]) -> bytes:
    """Return the page of a run; the lines are those of the console."""
    plot, chosen = record_plots.plot(record), representative_point(record)
    layers = list[Any]()
    if chosen is not None and chosen.facts["layers"]["lines"]:
        caption = layer_plot.caption(record, chosen)
        heading = ", ".join(filter(None, ("Layers", doubt_text(chosen))))
        layers = [f"<h2>{heading}</h2>", f"<p>{page.text(caption.subtitle)}</p>", *plotly_layers.of_point(chosen)]
    return _page(record.name, plot, lines, layers)


def of_sweep(sweep: Sweep, records: Sequence[Record], lines: Iterable[str]) -> bytes:
    """Return the page of a sweep; the lines are those of the console."""
    return _page(sweep.name, sweep_plots.plot(sweep, records), lines)


def _page(name: str, plot: Chart | Bars | Strips | None, lines: Iterable[str], more: Sequence[Any] = ()) -> bytes:
    caption = plot.caption if plot else Caption(title=name, subtitle="nothing was timed", footer="")
    console = html.escape("\n".join(lines))
    parts: list[Any] = [f"<h1>{page.text(caption.title)}</h1>", f"<pre>{console}</pre>"]
    if plot:
        parts += ["<h2>Times</h2>", f"<p>{page.text(caption.subtitle)}</p>", *plotly_figures.of_plot(plot)]
    return page.document(name, [*parts, *more])
