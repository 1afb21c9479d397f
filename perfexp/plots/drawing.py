"""The objects of matplotlib that plots use, imported here only.

A matplotlibrc in the current folder is not read: it may be a pipe, name a backend or have LaTeX run.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

try:
    with contextlib.chdir(Path(__file__).parent):
        import matplotlib
except FileNotFoundError:  # the current folder is gone, and has no such file
    import matplotlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

matplotlib.rcdefaults()
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports the fonts that it does not find

__all__ = [
    "ConstrainedLayoutEngine",
    "Figure",
    "FigureCanvasAgg",
    "FuncFormatter",
    "Line2D",
    "LogLocator",
    "MaxNLocator",
    "NullFormatter",
    "Rectangle",
    "matplotlib",
    "withStroke",
]
