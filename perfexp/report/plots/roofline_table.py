"""Roofline rows as CSV lines and as text for console and page.

A row is the total, an NVTX range, a part (kernel or layer), or a single launch. Its load is the
work, bytes and time; shares are relative to the device's ceilings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from perfexp.records.grid import Column, Grid
from perfexp.records.subject import one_line
from perfexp.records.units import digits, format_seconds, pretty
from perfexp.report.tables.flat import Line
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.placement import DRAM, Limit, Roofline, RooflineRow, ratio
from perfexp.roofline.sentences import meaning

#: Maximum parts and ranges on the console.
_MAX_PARTS, _MAX_RANGES = 10, 8
#: Columns that move to a further table first, by title.
_RANKS = {"rows": 3, "launches": 3, "work": 2, "moved": 1}
#: Maximum name length on the console; page and CSV have whole names.
_NAME_LENGTH = 44


def lines(roofline: Roofline) -> list[Line]:
    """Return total, ranges, parts and launches in full precision, with units in column names.

    They are the CSV file of a roofline and the JSON of `perfexp roofline --json`.
    """
    kinds, ceilings = set[str](), set[str]()
    for row in (roofline.total, *roofline.parts):
        kinds.update(row.load.flops or ())
        ceilings.update(row.shares)
    rows = (roofline.total, *roofline.ranges, *roofline.parts, *roofline.launches)
    return [_line(roofline, row, sorted(kinds), sorted(ceilings)) for row in rows]


def _line(
    roofline: Roofline, row: RooflineRow, kinds: Sequence[str], ceilings: Sequence[str]
) -> Line:
    """Return a row's CSV cells, in SI units and percent.

    Args:
        kinds: kinds of FLOPs, each with a column.
        ceilings: names of ceilings, each with a column.
    """
    load = row.load
    line: Line = {
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
        "dram_bytes_per_second": ratio(load.dram_bytes, load.seconds),
        "compute_roof_percent": _percent(row.compute_share),
        "memory_roof_percent": _percent(row.memory_share),
        "binding_roof": row.binds,
        "estimated": row.flops_are_estimated or row.bytes_are_estimated,
        "flops_basis": load.flops_basis.value,
        "bytes_basis": load.bytes_basis.value,
        "meaning": meaning(roofline, row),
        "notes": " ".join(roofline.notes) if row is roofline.total else None,
    }
    for kind in kinds:
        line[f"flops_{kind.replace(' ', '_')}"] = (load.flops or {}).get(kind)
    for name in ceilings:
        share = row.shares.get(name)
        line[f"roof_{name.lower().replace(' ', '_')}_percent"] = _percent(share)
    line["number"] = row.number
    return line


def _percent(share: float | None) -> float | None:
    """Return a share in percent; None for None."""
    if share is None:
        return None
    return 100 * share


def console_grid(roofline: Roofline) -> Grid:
    """Return the console's table: the total, the first ranges and the slowest parts."""
    rows = [roofline.total, *roofline.ranges[:_MAX_RANGES], *roofline.parts[:_MAX_PARTS]]
    notes = []
    if left := roofline.parts[_MAX_PARTS:]:
        share = sum(row.time_share for row in left)
        more = f"{len(left)} more {roofline.noun} with {share:.1%} of the time"
        notes.append(f"{more} are in the CSV")
    return grid(roofline, rows, notes, name_length=_NAME_LENGTH)


def grid(
    roofline: Roofline,
    rows: Sequence[RooflineRow],
    notes: Sequence[str] = (),
    *,
    name_length: int = 10_000,
) -> Grid:
    """Return roofline rows as a table of texts; `≈` marks estimates.

    Args:
        notes: lines below the table.
        name_length: maximum characters of a name.
    """
    numbers, names = list[str](), list[str]()
    figures: dict[str, list[str]] = {}
    for row in rows:
        numbers.append(row.number)
        name = f"range {row.name}" if row.level == "range" else row.label
        names.append(cut(one_line(name), name_length))
        for title, text in figures_of(roofline, row).items():
            figures.setdefault(title, []).append(text)
    columns = [
        Column("no.", numbers),
        Column(roofline.noun[:-1], names, prose=True, is_key=True),
    ]
    for title, texts in figures.items():
        columns.append(Column(title, texts, rank=_RANKS.get(title, 0)))
    return Grid(columns, tuple(notes))


def figures_of(roofline: Roofline, row: RooflineRow) -> dict[str, str]:
    """Return a row's values as text, by column title.

    Tables show them in columns, and the plot in tooltips.
    """
    load, is_work, is_moved = row.load, row.flops_are_estimated, row.bytes_are_estimated
    return {
        "rows" if roofline.analytic else "launches": str(load.launches),
        "time": format_seconds(load.seconds),
        "share": f"{row.time_share:.1%}",
        "work": _word(load.total_flops, partial(pretty, unit="FLOP"), is_work),
        "moved": _word(load.dram_bytes, partial(pretty, unit="B"), is_moved),
        "FLOP/B": _word(load.intensity, digits, is_work or is_moved),
        "rate": _word(load.flops_per_second, partial(pretty, unit="FLOP/s"), is_work),
        "of compute": _word(row.compute_share, "{:.1%}".format, row.is_estimated("compute")),
        "of memory": _word(row.memory_share, "{:.1%}".format, row.is_estimated(DRAM)),
        "limit": _limit(row),
    }


def _limit(row: RooflineRow) -> str:
    """Return the ceiling near a row; `neither` if time goes into other things."""
    if row.binds is None:
        return "–"
    if row.limit in (Limit.memory, Limit.compute):
        return row.binds
    return {Limit.cached: f"above {row.binds}", Limit.unclear: "unclear"}.get(row.limit, "neither")


def _word(value: float | None, text: Callable[[float], str], is_estimated: bool) -> str:
    """Return a value as text, with `≈` if it is estimated; `–` if it is unknown."""
    if value is None:
        return "–"
    if is_estimated:
        return f"≈ {text(value)}"
    return text(value)
