"""A roofline as plot, page and tables, in memory and in files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from perfexp.host.files import write_atomically
from perfexp.records.units import digits, format_seconds
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.placement import DRAM, Roofline, Row
from perfexp.roofline.sentences import meaning, pretty
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import one_line
from perfexp.tables import csv_tables
from perfexp.tables.csv_tables import Line

#: Parts and ranges on the console.
_MAX_PARTS, _MAX_RANGES = 10, 8
#: Longest name on the console; the CSV has whole names.
_NAME_LENGTH = 44


def draw(roofline: Roofline, form: str = "png") -> bytes:
    """The plot as PNG of 1200 × 800 pixels, or as SVG."""
    from perfexp.plots import roofline_plot  # late: matplotlib takes long to import

    return roofline_plot.plot(roofline, form)


def to_html(roofline: Roofline) -> bytes | None:
    """An interactive page that needs no network; None where plotly is not installed (`pip install "perfexp[html]"`)."""
    if importlib.util.find_spec("plotly") is None:
        return None
    from perfexp.plots import roofline_page  # late: plotly takes long to import

    return roofline_page.page(roofline, grid(roofline, is_whole=True))


def to_csv(roofline: Roofline) -> bytes:
    """Total, ranges, parts and launches as CSV, a line each."""
    rows = (roofline.total, *roofline.ranges, *roofline.parts, *roofline.launches)
    kinds = sorted({kind for row in (roofline.total, *roofline.parts) for kind in row.load.flops or {}})
    ceilings = sorted({name for row in (roofline.total, *roofline.parts) for name in row.shares})
    return csv_tables.to_csv([_line(roofline, row, kinds, ceilings) for row in rows])


def _line(roofline: Roofline, row: Row, kinds: Iterable[str], ceilings: Iterable[str]) -> Line:
    """Every figure in full precision, its unit in the column's name."""
    load = row.load
    return {
        "level": row.level,
        "name": row.name,
        "label": row.label,
        "where": row.where,
        "launches": load.launches,
        "seconds": load.seconds,
        "time_percent": 100 * row.time_share,
        "flops": load.total_flops,
        "dram_bytes": load.dram_bytes,
        "l2_bytes": load.l2_bytes,
        "intensity_flops_per_byte": load.intensity,
        "l2_intensity_flops_per_byte": load.l2_intensity,
        "flops_per_second": load.flops_per_second,
        "dram_bytes_per_second": load.dram_bytes_per_second,
        "compute_roof_percent": _percent(row.compute_share),
        "memory_roof_percent": _percent(row.memory_share),
        "binding_roof": row.binds,
        "estimated": row.flops_are_estimated or row.bytes_are_estimated,
        "flops_basis": load.flops_basis.value,
        "bytes_basis": load.bytes_basis.value,
        "meaning": meaning(roofline, row),
        "notes": " ".join(roofline.notes) if row is roofline.total else None,
        **{f"flops_{kind.replace(' ', '_')}": (load.flops or {}).get(kind) for kind in kinds},
        **{f"roof_{name.lower().replace(' ', '_')}_percent": _percent(row.shares.get(name)) for name in ceilings},
        "number": row.number,
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def grid(roofline: Roofline, *, is_whole: bool = False) -> Grid:
    """The total, the ranges and the parts as words, the slowest of them for the console.

    Args:
        is_whole: whether all of them are in the table.
    """
    parts, ranges = (len(roofline.parts), len(roofline.ranges)) if is_whole else (_MAX_PARTS, _MAX_RANGES)
    rows = [roofline.total, *roofline.ranges[:ranges], *roofline.parts[:parts]]

    def column(title: str, words: Callable[[Row], str], rank: int = 0, *, is_prose: bool = False) -> Column:
        return Column(title=title, cells=tuple(map(words, rows)), rank=rank, prose=is_prose)

    left = roofline.parts[parts:]
    share = sum(row.time_share for row in left)
    return Grid(
        columns=(
            column("no.", lambda row: row.number),
            column(roofline.noun[:-1], lambda row: cut(_name(row), 10**6 if is_whole else _NAME_LENGTH), is_prose=True),
            column("rows" if roofline.analytic else "launches", lambda row: str(row.load.launches), 3),
            column("time", lambda row: format_seconds(row.load.seconds)),
            column("share", lambda row: f"{row.time_share:.1%}"),
            column("work", lambda row: _flops(row, row.load.total_flops, "FLOP"), 2),
            column("moved", _moved, 1),
            column("FLOP/B", _intensity),
            column("rate", lambda row: _flops(row, row.load.flops_per_second, "FLOP/s")),
            column("of compute", lambda row: _share(row.compute_share, row.is_estimated("compute"))),
            column("of memory", lambda row: _share(row.memory_share, row.is_estimated(DRAM))),
            column("binds", lambda row: row.binds or "–"),
        ),
        notes=(f"{len(left)} more {roofline.noun} with {share:.1%} of the time are in the CSV",) if left else (),
    )


def _name(row: Row) -> str:
    return one_line(f"range {row.name}" if row.level == "range" else row.label)


def _flops(row: Row, value: float | None, unit: str) -> str:
    return "–" if value is None else f"{_sign(row.flops_are_estimated)}{pretty(value, unit)}"


def _moved(row: Row) -> str:
    moved = row.load.dram_bytes
    return "–" if moved is None else f"{_sign(row.bytes_are_estimated)}{pretty(moved, 'B')}"


def _intensity(row: Row) -> str:
    value = row.load.intensity
    return "–" if value is None else f"{_sign(row.flops_are_estimated or row.bytes_are_estimated)}{digits(value)}"


def _share(value: float | None, is_estimated: bool) -> str:
    return "–" if value is None else f"{_sign(is_estimated)}{value:.1%}"


def _sign(is_estimated: bool) -> str:
    return "≈ " if is_estimated else ""


def files(stem: Path) -> dict[str, Path]:
    """The paths of the files by kind.

    Args:
        stem: path without suffix.
    """
    return {kind: stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "html", "csv")}


def stems(layers: Mapping[str, Roofline]) -> dict[str, Roofline]:
    """The rooflines of a record's phases by the names of their files, without suffix."""
    return {f"roofline_{phase}" if len(layers) > 1 else "roofline": one for phase, one in layers.items()}


def write(roofline: Roofline, targets: dict[str, Path]) -> list[Path]:
    """Write the files of a roofline, and return their paths: without plotly there is no page.

    Args:
        targets: paths by kind, as from `files`.

    Raises:
        OSError: a file can't be written; its path is the error's `filename`.
    """
    make: dict[str, Callable[[], bytes | None]] = {
        "png": lambda: draw(roofline),
        "svg": lambda: draw(roofline, "svg"),
        "html": lambda: to_html(roofline),
        "csv": lambda: to_csv(roofline),
    }
    written = []
    for kind, path in targets.items():
        content = make[kind]()
        if content is None:
            continue
        try:
            write_atomically(path, content)
        except OSError as error:  # it names the temporary file, or none
            raise OSError(error.errno, error.strerror, str(path)) from error
        written.append(path)
    return written
