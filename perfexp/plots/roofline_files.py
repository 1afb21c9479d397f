"""Roofline: its picture, its table and its page, as bytes and as files."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from perfexp.host.files import write_atomically
from perfexp.records.units import digits, format_seconds
from perfexp.roofline.below import Roofline
from perfexp.roofline.placement import Row
from perfexp.roofline.sentences import pretty
from perfexp.roofline.short_names import cut
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import one_line
from perfexp.tables import csv_tables
from perfexp.tables.csv_tables import Line

#: Parts and ranges that the console shows.
_SHOWN, _RANGES = 10, 8
#: Longer names are cut on the console; the CSV has them whole.
_NAME_LENGTH = 44
#: What makes the interactive page.
_PLOTLY = "plotly"


def draw(roofline: Roofline) -> bytes:
    """The picture as PNG of 1200 × 800 pixels.

    Args:
        roofline: of any file or record.
    """
    return _drawn(roofline, "png")


def to_svg(roofline: Roofline) -> bytes:
    """The same picture as SVG.

    Args:
        roofline: of any file or record.
    """
    return _drawn(roofline, "svg")


def to_html(roofline: Roofline) -> bytes | None:
    """An interactive page that needs no network; None where plotly is not installed (`pip install "perfexp[html]"`).

    Args:
        roofline: of any file or record.
    """
    if importlib.util.find_spec(_PLOTLY) is None:
        return None
    from perfexp.plots import roofline_page  # late: it takes long to import

    return roofline_page.page(roofline)


def to_csv(roofline: Roofline) -> bytes:
    """Total, ranges, parts and launches as CSV, a line each.

    Args:
        roofline: of any file or record.
    """
    rows = (roofline.total, *roofline.ranges, *roofline.parts, *roofline.launches)
    return csv_tables.to_csv(lines(roofline, rows))


def files(stem: Path) -> dict[str, Path]:
    """The files that are written, by what they are.

    Args:
        stem: path without suffix.
    """
    return {kind: stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "html", "csv")}


def write(roofline: Roofline, targets: dict[str, Path]) -> list[Path]:
    """Write the files of a roofline.

    Args:
        roofline: of any file or record.
        targets: as `files` gives them.

    Returns:
        Those that were written: without plotly there is no page.

    Raises:
        OSError: a file can't be written; it is the error's `filename`.
    """
    make: dict[str, Callable[[Roofline], bytes | None]] = {"png": draw, "svg": to_svg, "html": to_html, "csv": to_csv}
    written = []
    for kind, path in targets.items():
        content = make[kind](roofline)
        if content is None:
            continue
        try:
            write_atomically(path, content)
        except OSError as error:  # it names the file that was to be renamed, or none
            raise OSError(error.errno, error.strerror, str(path)) from error
        written.append(path)
    return written


def lines(roofline: Roofline, rows: Iterable[Row]) -> list[Line]:
    """One line for each row, every figure in full precision, its unit in the column's name.

    Args:
        roofline: to which the rows belong.
        rows: of any level.
    """
    kinds = sorted({kind for row in (roofline.total, *roofline.parts) for kind in row.load.flops or {}})
    roofs = sorted({name for row in (roofline.total, *roofline.parts) for name in row.standing.shares})
    return [_line(roofline, row, kinds, roofs) for row in rows]


def _line(roofline: Roofline, row: Row, kinds: Iterable[str], roofs: Iterable[str]) -> Line:
    load, standing = row.load, row.standing
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
        "compute_roof_percent": _percent(standing.compute_share),
        "memory_roof_percent": _percent(standing.memory_share),
        "binding_roof": standing.binds,
        "estimated": row.flops_are_estimated or row.bytes_are_estimated,
        "flops_basis": row.load.flops_basis.value,
        "bytes_basis": row.load.bytes_basis.value,
        "meaning": roofline.meaning(row),
        "notes": " ".join(roofline.notes) if row is roofline.total else None,
        **{f"flops_{kind.replace(' ', '_')}": (load.flops or {}).get(kind) for kind in kinds},
        **{f"roof_{name.lower().replace(' ', '_')}_percent": _percent(standing.shares.get(name)) for name in roofs},
    }


def grid(roofline: Roofline) -> Grid:
    """The total, the ranges and the slowest parts, for the console.

    Args:
        roofline: of any file or record.
    """
    rows = [roofline.total, *roofline.ranges[:_RANGES], *roofline.parts[:_SHOWN]]
    return Grid(
        columns=(
            Column(title=roofline.noun[:-1], cells=tuple(map(_name, rows)), prose=True),
            Column(
                title="rows" if roofline.analytic else "launches",
                cells=tuple(str(row.load.launches) for row in rows),
                rank=3,
            ),
            Column(title="time", cells=tuple(format_seconds(row.load.seconds) for row in rows)),
            Column(title="share", cells=tuple(f"{row.time_share:.1%}" for row in rows)),
            Column(title="work", cells=tuple(_flops(row, row.load.total_flops, "FLOP") for row in rows), rank=2),
            Column(title="moved", cells=tuple(_moved(row) for row in rows), rank=1),
            Column(title="FLOP/B", cells=tuple(map(_intensity, rows))),
            Column(title="rate", cells=tuple(_flops(row, row.load.flops_per_second, "FLOP/s") for row in rows)),
            Column(
                title="of compute",
                cells=tuple(_share(row.standing.compute_share, row.compute_is_estimated) for row in rows),
            ),
            Column(
                title="of memory",
                cells=tuple(_share(row.standing.memory_share, row.memory_is_estimated) for row in rows),
            ),
            Column(title="binds", cells=tuple(row.standing.binds or "–" for row in rows)),
        ),
        notes=tuple(_more(roofline)),
    )


def _more(roofline: Roofline) -> Iterable[str]:
    left = roofline.parts[_SHOWN:]
    if left:
        share = sum(row.time_share for row in left)
        yield f"{len(left)} more {roofline.noun} with {share:.1%} of the time are in the CSV"


def _name(row: Row) -> str:
    if row.level != "range":
        return cut(one_line(row.label), one_line(row.mark), _NAME_LENGTH)
    return cut(one_line(f"range {row.name}"), "", _NAME_LENGTH)


def _flops(row: Row, value: float | None, unit: str) -> str:
    return "–" if value is None else f"{_sign(row.flops_are_estimated)}{pretty(value, unit)}"


def _moved(row: Row) -> str:
    moved = row.load.dram_bytes
    return "–" if moved is None else f"{_sign(row.bytes_are_estimated)}{pretty(moved, 'B')}"


def _intensity(row: Row) -> str:
    found = row.load.intensity
    return "–" if found is None else f"{_sign(row.flops_are_estimated or row.bytes_are_estimated)}{digits(found)}"


def _share(value: float | None, estimated: bool) -> str:
    return "–" if value is None else f"{_sign(estimated)}{value:.1%}"


def _sign(estimated: bool) -> str:
    return "≈ " if estimated else ""


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _drawn(roofline: Roofline, form: str) -> bytes:
    """The picture; matplotlib is imported only here, and does not talk of the fonts that it finds."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from perfexp.plots import roofline_plot

    return roofline_plot.picture(roofline, form)
