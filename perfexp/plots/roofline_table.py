"""The rows of a roofline as lines of CSV and as words for console and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfexp.records.units import digits, format_seconds
from perfexp.roofline.kernel_names import cut
from perfexp.roofline.placement import DRAM, Limit, Roofline, Row, ratio
from perfexp.roofline.sentences import meaning, pretty
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import one_line
from perfexp.tables.flat import Line

#: Parts and ranges on the console.
_MAX_PARTS, _MAX_RANGES = 10, 8
#: Longest name on the console; page and CSV have whole names.
_NAME_LENGTH = 44


def lines(roofline: Roofline) -> list[Line]:
    """Total, ranges, parts and launches, every figure in full precision and its unit in the column's name."""
    kinds = sorted({kind for row in (roofline.total, *roofline.parts) for kind in row.load.flops or {}})
    ceilings = sorted({name for row in (roofline.total, *roofline.parts) for name in row.shares})
    rows = (roofline.total, *roofline.ranges, *roofline.parts, *roofline.launches)
    return [_line(roofline, row, kinds, ceilings) for row in rows]


def _line(roofline: Roofline, row: Row, kinds: Sequence[str], ceilings: Sequence[str]) -> Line:
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
        "dram_bytes_per_second": ratio(load.dram_bytes, load.seconds),
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


def console_grid(roofline: Roofline) -> Grid:
    """The total, the first ranges and the slowest parts."""
    rows = [roofline.total, *roofline.ranges[:_MAX_RANGES], *roofline.parts[:_MAX_PARTS]]
    left = roofline.parts[_MAX_PARTS:]
    share = sum(row.time_share for row in left)
    notes = [f"{len(left)} more {roofline.noun} with {share:.1%} of the time are in the CSV"] if left else []
    return grid(roofline, rows, notes, name_length=_NAME_LENGTH)


def grid(roofline: Roofline, rows: Sequence[Row], notes: Sequence[str] = (), *, name_length: int | None = None) -> Grid:
    """Rows of a roofline as words; `≈` marks estimates."""

    def name(row: Row) -> str:
        text = one_line(f"range {row.name}" if row.level == "range" else row.label)
        return cut(text, name_length) if name_length else text

    def amount(value: float | None, unit: str, is_estimated: bool) -> str:
        return _word(value, lambda value: pretty(value, unit), is_estimated)

    def intensity(row: Row) -> str:
        return _word(row.load.intensity, digits, row.flops_are_estimated or row.bytes_are_estimated)

    columns: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
        ("no.", 0, lambda row: row.number),
        (roofline.noun[:-1], 0, name),
        ("rows" if roofline.analytic else "launches", 3, lambda row: str(row.load.launches)),
        ("time", 0, lambda row: format_seconds(row.load.seconds)),
        ("share", 0, lambda row: f"{row.time_share:.1%}"),
        ("work", 2, lambda row: amount(row.load.total_flops, "FLOP", row.flops_are_estimated)),
        ("moved", 1, lambda row: amount(row.load.dram_bytes, "B", row.bytes_are_estimated)),
        ("FLOP/B", 0, intensity),
        ("rate", 0, lambda row: amount(row.load.flops_per_second, "FLOP/s", row.flops_are_estimated)),
        ("of compute", 0, lambda row: _word(row.compute_share, "{:.1%}".format, row.is_estimated("compute"))),
        ("of memory", 0, lambda row: _word(row.memory_share, "{:.1%}".format, row.is_estimated(DRAM))),
        ("limit", 0, _limit),
    )
    made = (
        Column(title=title, cells=tuple(map(word, rows)), rank=rank, prose=word is name, is_key=word is name)
        for title, rank, word in columns
    )
    return Grid(columns=tuple(made), notes=tuple(notes))


def _limit(row: Row) -> str:
    """The ceiling that a row is near; `neither` where time goes into other things."""
    if row.binds is None:
        return "–"
    if row.limit in (Limit.memory, Limit.compute):
        return row.binds
    return {Limit.cached: f"above {row.binds}", Limit.unclear: "unclear"}.get(row.limit, "neither")


def _word(value: float | None, text: Callable[[float], str], is_estimated: bool) -> str:
    return "–" if value is None else f"{'≈ ' if is_estimated else ''}{text(value)}"
