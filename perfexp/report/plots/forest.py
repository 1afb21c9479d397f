"""Drawing of a comparison's ratios and intervals, with the margin for equal results."""

from __future__ import annotations

from typing import Any

from perfexp.comparison.comparison_table import confidence, ratio_of, title, verdict_of
from perfexp.comparison.document import Comparison, SideFacts, Verdict
from perfexp.report.plots.canvas import (
    DARK,
    caption_of,
    columns,
    legend,
    matplotlib,
    name_rows,
    name_ticks,
    title_of,
)
from perfexp.report.plots.chart import GREY, Caption
from perfexp.roofline.kernel_names import cut

#: Okabe and Ito's colors by verdict, each with its own marker.
_STYLES = {
    Verdict.BETTER: ("#009E73", "^"),
    Verdict.WORSE: ("#D55E00", "v"),
    Verdict.SAME: ("#0072B2", "s"),
    Verdict.UNDECIDED: (DARK, "o"),
    Verdict.NOT_COMPARABLE: (GREY, "x"),
}
#: Maximum pairs in a plot and characters of their names, and heights of a row and the
#: surroundings, in inches.
_MOST_PAIRS, _LONGEST, _ROW, _AROUND = 80, 60, 0.26, 1.6


def compose(comparison: Comparison, side: SideFacts) -> Any:
    """Return the figure with a side's ratios in document order; None if there are none."""
    known = [pair for pair in comparison.of_side(side.name) if pair.ratio is not None]
    pairs = known[:_MOST_PAIRS]
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
            pair.measure, pair.point, ratio_of(pair), verdict_of(pair), *pair.confounders
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
    about = f"ratios with their {confidence(side.level)} intervals; the band is the margin"
    if len(pairs) < len(known):
        about += f"; {len(pairs)} of {len(known)}, the table has all"
    caption_of(figure, Caption(title=title(comparison, side), subtitle=about, footer=""))
    return figure
