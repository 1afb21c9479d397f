"""Canvas: figures 12 inches wide as PNG or SVG. Only this module imports matplotlib.

`drawing`, `layer_plot`, `roofline_plot` and `pages` draw on these figures. Axes and figures are
matplotlib's (typed `Any`); lengths are in inches, positions in the units of the data. Equal figures
give equal bytes. A matplotlibrc in the current folder is not read: it may be a pipe, name a backend
or make LaTeX run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perfexp.records.subject import one_line
from perfexp.report.plots.chart import Caption

try:
    with contextlib.chdir(Path(__file__).parent):
        import matplotlib as matplotlib
except FileNotFoundError:  # the current folder is gone, so there is no such file
    import matplotlib as matplotlib

import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.lines
import matplotlib.patheffects
import matplotlib.ticker
import matplotlib.transforms

matplotlib.rcdefaults()
# it reports missing fonts
logging.getLogger("matplotlib").setLevel(logging.ERROR)

#: Color of text next to the data, and of a diagnostic.
DARK, _WARNING = "#5f5f5f", "#a33c00"
#: Height of a title line, in inches.
_TITLE_LINE = 0.27
#: Outline of text over data.
HALO = [matplotlib.patheffects.withStroke(linewidth=3, foreground="white")]
#: The group of an artist with its tooltip as id.
_TITLED = re.compile(rb'<g id="title: ([^"]*)">')


def new_figure(height: float, **settings: Any) -> Any:
    """Return an empty figure, 12 inches wide and `height` inches high."""
    figure = matplotlib.figure.Figure(figsize=(12, height), facecolor="white", dpi=100, **settings)
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure


def columns(
    heights: Sequence[float], around: float, *, across: int = 1, **settings: Any
) -> tuple[Any, Any]:
    """Return a figure and its axes in columns, row by row, with these row heights in inches.

    Args:
        around: additional height for titles, in inches.
        across: number of columns.
        settings: further settings of `Figure.subplots`, such as `sharex`.
    """
    figure = new_figure(around + sum(heights), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    return figure, figure.subplots(
        len(heights), across, squeeze=False, height_ratios=heights, **settings
    ).ravel()


def save(figure: Any, form: str = "png") -> bytes:
    """Return a figure as the content of a PNG or SVG file.

    In SVG, artists with `title_of` have tooltips.
    """
    buffer = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "perfexp"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format=form, metadata=metadata)
    content = buffer.getvalue()
    if form == "png":
        return content
    return _TITLED.sub(rb"<g><title>\1</title>", content)


def title_of(*words: str) -> dict[str, str]:
    """Return the artist setting for a tooltip in SVG; matplotlib escapes the words."""
    return {"gid": f"title: {one_line(', '.join(filter(None, words)))}"}


def tip(axes: Any, x: float, y: float, *words: str) -> None:
    """Add a tooltip in SVG at a position."""
    axes.plot([x], [y], "o", color="black", markersize=12, alpha=0, zorder=9, **title_of(*words))


def caption_of(figure: Any, caption: Caption) -> None:
    """Add title and subtitle above a matplotlib figure, left-aligned, and the footer below.

    Every figure gets its texts this way.
    """
    title, subtitle = wrapped(caption.title, 90), wrapped(caption.subtitle, 135)
    lines = subtitle.count("\n") + 1
    figure.suptitle(title + "\n" * lines, x=0.01, ha="left", fontsize=16, fontweight="bold")
    # in the title's empty lines, since only the title has room in the layout
    top = 1 - (0.15 + _TITLE_LINE * (title.count("\n") + 1)) / figure.get_figheight()
    figure.text(0.01, top, subtitle, ha="left", va="top", fontsize=11.5, color=DARK)
    if caption.footer:
        figure.supxlabel(
            wrapped(caption.footer, 150), x=0.01, ha="left", fontsize=11, color=_WARNING
        )


def style(axes: Any, *, axis: Any = "both") -> None:
    """Draw a grid behind the data, and no frame at the top and right."""
    axes.grid(True, axis=axis, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def name_rows(axes: Any, labels: Sequence[str], end: float, title: str) -> None:
    """Name rows at 0, 1, …, from the top, over a horizontal axis from zero with a title.

    Args:
        end: right end of the horizontal axis.
    """
    axes.set_yticks(range(len(labels)), list(map(plain, labels)))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xlabel(wrapped(title, 90), fontsize=11)
    style(axes, axis="x")
    axes.tick_params(axis="y", length=0)


def name_ticks(axis: Any, locator: Any, text: Callable[[float], str] = "{:g}".format) -> None:
    """Set positions and texts for an axis's major ticks. Minor ticks have no text.

    Args:
        locator: matplotlib object that chooses the positions.
        text: returns the text at a position.
    """
    axis.set_major_locator(locator)
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def legend(axes: Any, *others: Any, width: int = 34, **settings: Any) -> None:
    """Add a legend to the right of the axes, where it covers no data.

    Each name appears once, even if several axes have it.

    Args:
        others: further axes with names for the legend.
        width: characters per line.
    """
    entries = dict[str, Any]()
    for part in (axes, *others):
        for handle, label in zip(*part.get_legend_handles_labels(), strict=True):
            entries.setdefault(textwrap.fill(label, width), handle)
    if entries:
        look = {"fontsize": 10, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(entries.values(), entries, **look | settings)


def wrapped(text: str, width: int) -> str:
    """Return a text in at most two lines of `width` characters, cut with `…`."""
    return plain("\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …")))


def plain(text: str) -> str:
    """Return a text that matplotlib does not parse as a formula.

    Every text from users and records goes through it.
    """
    return text.replace("$", r"\$")
