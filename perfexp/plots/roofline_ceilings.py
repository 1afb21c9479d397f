"""Ceilings and window of a roofline's plot, the same for matplotlib and plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfexp.plots.chart import COLORS as PALETTE
from perfexp.plots.chart import GREY
from perfexp.roofline.peaks import NAMES
from perfexp.roofline.placement import Limit, Roofline, Row, shares_of, together
from perfexp.roofline.sentences import pretty
from perfexp.tables.layer_groups import NUMBER, name_of_all

X_TITLE, Y_TITLE = "arithmetic intensity (FLOP per byte of DRAM)", "achieved rate (FLOP/s)"
COLORS = {
    Limit.memory: PALETTE[0],
    Limit.cached: PALETTE[2],
    Limit.compute: PALETTE[1],
    Limit.unclear: PALETTE[3],
    Limit.neither: GREY,
}
#: Parts with a number in the plot, and the least share of the time of a part or range that has one.
_MAX_NUMBERED, _MAX_RANGES, _WORTH_A_NUMBER = 5, 3, 0.01
#: Data types whose ceiling is drawn only if something was computed in them.
_RARE = ("fp64", "fp64_vector", "fp8", "half")
#: Factors around the drawn points, and from the highest ceiling to the lowest point.
_MARGIN, _DEPTH = 2.5, 1e7
#: Largest relative difference between equal ceilings.
_EQUAL = 0.005


@dataclass(frozen=True, kw_only=True)
class Window:
    """The visible part of the plane: ranges of intensity and of rate."""

    x: tuple[float, float]
    y: tuple[float, float]

    def clip(self, x: float | None, y: float | None) -> tuple[float, float]:
        """A point, moved to the edge if it lies outside."""
        return min(max(x or 0.0, self.x[0]), self.x[1]), min(max(y or 0.0, self.y[0]), self.y[1])


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A line of the plot with the intensities and rates of its ends, and its name with its height.

    Attributes:
        used: whether work stands below it.
        measured: whether the device reached it in the run; otherwise it is a stated peak.
        below: whether its name stands below the line, since another line is above.
    """

    name: str
    x: tuple[float, float]
    y: tuple[float, float]
    used: bool
    measured: bool
    below: bool


def placed_parts(roofline: Roofline) -> list[Row]:
    """The parts with a place, the slowest first; layers that do the same work are one, with the number of the first."""
    groups: dict[object, list[Row]] = {}
    for row in roofline.parts:
        work = (tuple((row.load.flops or {}).items()), row.load.dram_bytes, NUMBER.sub("0", row.label))
        groups.setdefault(work if roofline.analytic else row.number, []).append(row)
    rows = [_merged(group, roofline) for group in groups.values() if group[0].has_place]
    return sorted(rows, key=lambda row: -row.time_share)


def _merged(rows: Sequence[Row], roofline: Roofline) -> Row:
    if len(rows) == 1:
        return rows[0]
    load, label = together(row.load for row in rows), f"{name_of_all([row.label for row in rows])} ×{len(rows)}"
    share = sum(row.time_share for row in rows)
    return replace(rows[0], label=label, load=load, shares=shares_of(load, roofline.peaks), time_share=share)


def numbered(roofline: Roofline) -> list[Row]:
    """The slowest parts of a plot, which have their number in it."""
    parts = placed_parts(roofline)
    return [row for row in parts if row.time_share >= _WORTH_A_NUMBER][:_MAX_NUMBERED] or parts[:3]


def distinct_ranges(roofline: Roofline) -> list[Row]:
    """The longest ranges of a plot, except those that are all of the time."""
    ranges = [row for row in roofline.ranges if row.has_place and _WORTH_A_NUMBER <= row.time_share < 0.999]
    return sorted(ranges, key=lambda row: -row.time_share)[:_MAX_RANGES]


def with_l2(roofline: Roofline) -> list[Row]:
    """The parts that have a second place by their L2 bytes: the slow ones, if there is a ceiling of L2."""
    slow = [row for row in placed_parts(roofline) if row.load.l2_intensity and row.time_share >= _WORTH_A_NUMBER]
    return slow if roofline.peaks.l2_bytes_per_second else []


def window_of(roofline: Roofline) -> Window:
    """The part of the plane with all parts and ranges, and with the ceilings in use and their ridges."""
    peaks, memory = roofline.peaks, roofline.peaks.dram_bytes_per_second or 1.0
    loads = [row.load for row in (*roofline.parts, *roofline.ranges, roofline.total) if row.has_place]
    compute = [height for _, height, used in _heights(roofline) if used]
    x = [compute[0] / memory, compute[-1] / memory, *(load.intensity for load in loads if load.intensity)]
    if peaks.l2_bytes_per_second:
        x += [compute[-1] / peaks.l2_bytes_per_second, *(load.l2_intensity for load in loads if load.l2_intensity)]
    rates = [load.flops_per_second for load in loads if load.flops_per_second]
    top, bottom = max([*compute, *rates]), min([compute[-1] / 10, *rates])
    left = max(min(x), max(x) / _DEPTH)
    return Window(x=(left / _MARGIN, max(x) * _MARGIN * 2), y=(max(bottom, top / _DEPTH) / _MARGIN, top * _MARGIN))


def ceilings_of(roofline: Roofline, window: Window) -> list[Ceiling]:
    """The ceilings in the window: level ones of compute from the highest down, then sloping ones of memory."""
    peaks = roofline.peaks
    heights = [level for level in _heights(roofline) if level[2] or level[1] < window.y[1]]
    memory, highest = peaks.dram_bytes_per_second or 1.0, heights[0][1]
    levels = [(name, height, used, False) for name, height, used in heights]
    slopes = [("L2", peaks.l2_bytes_per_second, False)] if peaks.l2_bytes_per_second else []
    slopes.append(("DRAM", memory, False))
    for kind, rate in peaks.measured.items():
        if kind == "dram" and not _is_equal(rate, memory):
            slopes.append(("DRAM measured", rate, True))
        elif kind != "dram" and not _is_equal(rate, peaks.flops_per_second.get(kind)):
            levels.append((f"{NAMES.get(kind, kind)} measured", rate, False, True))
    ceilings = []
    for name, height, used, measured in levels:
        text, x = f"{name} {pretty(height, 'FLOP/s', stated=True)}", (height / memory, window.x[1])
        ceilings.append(Ceiling(name=text, x=x, y=(height, height), used=used, measured=measured, below=measured))
    for name, slope, measured in slopes:
        start, end, below = max(window.x[0], window.y[0] / slope), highest / slope, name != slopes[0][0]
        text, y = f"{name} {pretty(slope, 'B/s', stated=True)}", (start * slope, highest)
        ceilings.append(Ceiling(name=text, x=(start, end), y=y, used=not measured, measured=measured, below=below))
    return ceilings


def ridge(roofline: Roofline) -> tuple[float, float] | None:
    """Intensity and rate where the memory's ceiling meets the highest one of compute in use; None without memory's."""
    memory = roofline.peaks.dram_bytes_per_second
    height = max(height for _, height, used in _heights(roofline) if used)
    return (height / memory, height) if memory else None


def _heights(roofline: Roofline) -> list[tuple[str, float, bool]]:
    """Names, heights and use of the compute ceilings, the highest first; equal ones are merged."""
    peaks = roofline.peaks
    flops = roofline.total.load.flops or {kind: 1.0 for row in roofline.parts for kind in row.load.flops or {}}
    used = {ceiling[0] for kind, amount in flops.items() if amount and (ceiling := peaks.of(kind))}
    used = used or {ceiling[0] for ceiling in [peaks.reference] if ceiling}
    merged: dict[float, list[str]] = {}
    for name, height in sorted(peaks.flops_per_second.items(), key=lambda item: -item[1]):
        if name in used or name not in _RARE:
            merged.setdefault(next((other for other in merged if _is_equal(other, height)), height), []).append(name)
    return [
        (" = ".join(NAMES[name] for name in names), height, bool(used & set(names))) for height, names in merged.items()
    ]


def _is_equal(one: float, other: float | None) -> bool:
    return other is not None and abs(one - other) <= _EQUAL * other
