"""matplotlib, imported here only, and figures as files; equal figures give equal bytes.

A matplotlibrc in the current folder is not read: it may be a pipe, name a backend or have LaTeX run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

matplotlib.rcdefaults()
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports the fonts that it does not find

__all__ = ["matplotlib", "new_figure", "save"]


def new_figure(height: float, **settings: Any) -> Any:
    """An empty figure, 12 inches wide and some inches high."""
    figure = matplotlib.figure.Figure(figsize=(12, height), facecolor="white", **{"dpi": 100, **settings})
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure


def save(compose: Callable[[], Any], form: str = "png") -> bytes:
    """Compose a figure and return it as PNG or SVG."""
    buffer = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "perfexp"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        compose().savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()
