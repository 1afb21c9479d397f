"""Canvas: plots as PNG, 1200 pixels wide; matplotlib is imported here only. Equal plots give equal bytes.

A matplotlibrc in the current folder is not read: it may be a pipe, name a backend or have LaTeX run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfexp.plots.chart import Caption

try:
    with contextlib.chdir(Path(__file__).parent):
        import matplotlib
except FileNotFoundError:  # the current folder is gone, and has no such file
    import matplotlib

import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.lines
import matplotlib.patches
import matplotlib.patheffects
import matplotlib.ticker

__all__ = ["DARK", "HALO", "caption_of", "constrained", "matplotlib", "new_figure", "plain", "save", "style"]

matplotlib.rcdefaults()
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports the fonts that it does not find

#: Color of words beside the data, and of a diagnostic.
DARK, _WARNING = "#5f5f5f", "#a33c00"
#: Height of a line of the title, in inches.
_TITLE_LINE = 0.27
#: Outline of words over data.
HALO = [matplotlib.patheffects.withStroke(linewidth=3, foreground="white")]


def new_figure(height: float, **settings: Any) -> Any:
    """An empty figure, 12 inches wide and some inches high."""
    figure = matplotlib.figure.Figure(figsize=(12, height), facecolor="white", **{"dpi": 100, **settings})
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure


def constrained(height: float) -> Any:
    """An empty figure that finds the places of its axes."""
    figure = new_figure(height, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    return figure


def save(compose: Callable[[], Any], form: str = "png") -> bytes:
    """Compose a figure and return it as PNG or SVG."""
    buffer = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "perfexp"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        compose().savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


def caption_of(figure: Any, caption: Caption) -> None:
    """Set title and subtitle above a figure of matplotlib, both from its left edge, and the footer below it."""
    title, subtitle = wrapped(caption.title, 90), wrapped(caption.subtitle, 135)
    lines = subtitle.count("\n") + 1
    figure.suptitle(title + "\n" * lines, x=0.01, ha="left", fontsize=16, fontweight="bold")
    # below the title, in the room of its empty lines: only the title has a place in the layout
    top = 1 - (0.15 + _TITLE_LINE * (title.count("\n") + 1)) / figure.get_figheight()
    figure.text(0.01, top, subtitle, ha="left", va="top", fontsize=11.5, color=DARK)
    if caption.footer:
        figure.supxlabel(wrapped(caption.footer, 150), x=0.01, ha="left", fontsize=11, color=_WARNING)


def style(axes: Any, grid: str = "#dddddd", *, axis: Any = "both") -> None:
    """Draw a grid behind the data, and no frame above and on the right."""
    axes.grid(True, axis=axis, color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def wrapped(text: str, width: int) -> str:
    """Return a text in at most two lines."""
    return plain("\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …")))


def plain(text: str) -> str:
    """Return a text that matplotlib does not parse as a formula."""
    return text.replace("$", r"\$")
