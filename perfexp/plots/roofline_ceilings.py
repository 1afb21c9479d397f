"""Roofs of a picture: which are drawn, from where to where, and which part of the plane is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from perfexp.roofline.below import Roofline
from perfexp.roofline.peaks import NAMES
from perfexp.roofline.placement import DRAM, L2, NEAR, Row
from perfexp.roofline.sentences import pretty

#: Data types whose roof is drawn only if something was computed in them.
_RARE = ("fp64", "fp64_vector", "fp8", "half")
#: Around what is drawn, and from the highest roof down: factors.
_MARGIN, _DEPTH = 2.5, 1e7


class Kind(Enum):
    """What holds a part back."""

    memory = "near a memory roof"
    compute = "near a compute roof"
    neither = "near neither"


@dataclass(frozen=True, kw_only=True)
class Window:
    """What is seen of the plane.

    Attributes:
        x: from and to, FLOP per byte.
        y: from and to, FLOP per second.
    """

    x: tuple[float, float]
    y: tuple[float, float]

    def held(self, x: float, y: float) -> tuple[float, float]:
        """A place, moved to the edge where it lies outside.

        Args:
            x: FLOP per byte.
            y: FLOP per second.
        """
        return min(max(x, self.x[0]), self.x[1]), min(max(y, self.y[0]), self.y[1])


@dataclass(frozen=True, kw_only=True)
class Roof:
    """A line of the picture.

    Attributes:
        name: with its height.
        x: of its ends.
        y: of its ends.
        level: whether it is a peak of compute, not of memory.
        used: whether something stands below it.
        below: whether its name stands below it, since another line is above.
        seen: whether the device reached it, in place of a peak that somebody states.
    """

    name: str
    x: tuple[float, float]
    y: tuple[float, float]
    level: bool
    used: bool = True
    below: bool = False
    seen: bool = False


def kind_of(row: Row) -> Kind:
    """What holds a row back.

    Args:
        row: of any level.
    """
    if row.standing.share is None or row.standing.share < NEAR:
        return Kind.neither
    return Kind.memory if row.standing.binds in (DRAM, L2) else Kind.compute


def window_of(roofline: Roofline, rows: Sequence[Row]) -> Window:
    """So much of the plane that all rows and all ridges are seen.

    Args:
        roofline: with its peaks.
        rows: with a place in the plane.
    """
    peaks, memory = roofline.peaks, roofline.peaks.dram_bytes_per_second or 1.0
    compute = [height for _, height, _ in _heights(roofline)]
    x = [compute[0] / memory, compute[-1] / memory]
    x += [row.load.intensity for row in rows if row.load.intensity]
    if peaks.l2_bytes_per_second:
        x += [row.load.l2_intensity for row in rows if row.load.l2_intensity]
        x.append(compute[-1] / peaks.l2_bytes_per_second)
    top = max([*compute, *(row.load.flops_per_second or 0.0 for row in rows)])
    bottom = min([compute[-1] / 10, *(row.load.flops_per_second or top for row in rows)])
    left = max(min(x), max(x) / _DEPTH)
    return Window(x=(left / _MARGIN, max(x) * _MARGIN * 2), y=(max(bottom, top / _DEPTH) / _MARGIN, top * _MARGIN))


def roofs_of(roofline: Roofline, window: Window) -> list[Roof]:
    """All roofs, those of compute first and the highest of them first.

    Args:
        roofline: with its peaks.
        window: what is seen.
    """
    peaks, memory = roofline.peaks, roofline.peaks.dram_bytes_per_second or 1.0
    heights, edge = _heights(roofline), window.x[1]
    found = [
        Roof(
            name=f"{name} {pretty(height, 'FLOP/s', stated=True)}",
            x=(height / memory, edge),
            y=(height,) * 2,
            level=True,
            used=used,
        )
        for name, height, used in heights
    ]
    highest = max(height for _, height, _ in heights)
    slopes = [(f"DRAM {pretty(memory, 'B/s', stated=True)}", memory, False)]
    if peaks.l2_bytes_per_second:
        slopes.append((f"L2 {pretty(peaks.l2_bytes_per_second, 'B/s', stated=True)}", peaks.l2_bytes_per_second, False))
    for kind, value in peaks.ceilings.items():
        if kind == "dram":
            slopes.append((f"DRAM as seen {pretty(value, 'B/s', stated=True)}", value, True))
        elif not _is_near(value, peaks.flops_per_second.get(kind)):
            name = f"{NAMES.get(kind, kind)} as seen {pretty(value, 'FLOP/s', stated=True)}"
            found.append(Roof(name=name, x=(value / memory, edge), y=(value, value), level=True, used=False, seen=True))
    slopes.sort(key=lambda each: -each[1])
    for number, (name, slope, seen) in enumerate(slopes):
        if seen and _is_near(slope, memory):
            continue
        start, end = max(window.x[0], window.y[0] / slope), highest / slope
        ends = {"x": (start, end), "y": (start * slope, highest)}
        found.append(Roof(name=name, **ends, level=False, used=not seen, seen=seen, below=number > 0))
    return found


def _heights(roofline: Roofline) -> list[tuple[str, float, bool]]:
    """Names, heights and use of the compute roofs, the highest first; equal ones are one."""
    peaks = roofline.peaks
    flops = roofline.total.load.flops or {kind: 1.0 for row in roofline.parts for kind in row.load.flops or {}}
    used = {roof[0] for kind, amount in flops.items() if amount and (roof := peaks.of(kind))}
    used = used or {roof[0] for roof in [peaks.reference] if roof}
    known = {name: height for name, height in peaks.flops_per_second.items() if name in used or name not in _RARE}
    together: dict[float, list[str]] = {}
    for name, height in sorted(known.items(), key=lambda item: -item[1]):
        near = next((other for other in together if _is_near(other, height)), height)
        together.setdefault(near, []).append(name)
    return [
        (" = ".join(NAMES[name] for name in names), height, bool(used & set(names)))
        for height, names in together.items()
    ]


def _is_near(one: float, other: float | None) -> bool:
    return other is not None and abs(one - other) <= 0.005 * other
