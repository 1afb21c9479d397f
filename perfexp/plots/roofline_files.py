"""The files of a roofline: plot, interactive page and table."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from perfexp.host.files import write_atomically
from perfexp.plots import roofline_table
from perfexp.roofline.placement import Roofline
from perfexp.tables import csv_tables


def draw(roofline: Roofline, form: str = "png") -> bytes:
    """The plot as PNG of 1200 × 800 pixels, or as SVG."""
    from perfexp.plots import roofline_plot  # late: matplotlib takes long to import

    return roofline_plot.plot(roofline, form)


def to_html(roofline: Roofline) -> bytes | None:
    """An interactive page that needs no network; None where plotly is not installed (`pip install "perfexp[html]"`)."""
    if importlib.util.find_spec("plotly") is None:
        return None
    from perfexp.plots import roofline_page  # late: plotly takes long to import

    return roofline_page.page(roofline)


def to_csv(roofline: Roofline) -> bytes:
    """Total, ranges, parts and launches as CSV, a line each."""
    return csv_tables.to_csv(roofline_table.lines(roofline))


def files(stem: Path) -> dict[str, Path]:
    """The paths of the files by kind, from a path without suffix."""
    return {kind: stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "html", "csv")}


def stems(layers: Mapping[str, Roofline]) -> dict[str, Roofline]:
    """The rooflines of a record's phases by the names of their files, without suffix."""
    return {f"roofline_{phase}" if len(layers) > 1 else "roofline": one for phase, one in layers.items()}


def write(roofline: Roofline, targets: Mapping[str, Path]) -> list[Path]:
    """Write the files of a roofline to paths by kind, and return those written: without plotly there is no page.

    Raises:
        OSError: a file can't be written; its path is the error's `filename`.
    """
    contents = {"png": draw(roofline), "svg": draw(roofline, "svg"), "html": to_html(roofline), "csv": to_csv(roofline)}
    written = {path: content for kind, path in targets.items() if (content := contents[kind]) is not None}
    for path, content in written.items():
        try:
            write_atomically(path, content)
        except OSError as error:  # it names the temporary file, or none
            raise OSError(error.errno, error.strerror, str(path)) from error
    return list(written)
