"""Treemap: rectangles of given areas, as square as possible.

The algorithm is that of Bruls, Huizing and van Wijk, Squarified Treemaps (2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """A rectangle; x and y are of its lower left corner."""

    x: float
    y: float
    width: float
    height: float


def squarify(values: Sequence[float], within: Tile) -> list[Tile]:
    """Return a rectangle for each value, in order, with an area in proportion to it; together they fill `within`.

    Args:
        values: positive values, the largest first.
        within: rectangle to fill.
    """
    total = sum(values)
    areas = [value / total * within.width * within.height for value in values]
    tiles: list[Tile] = []
    rest, row = within, list[float]()
    for area in areas:
        side = min(rest.width, rest.height)
        if row and _worst([*row, area], side) > _worst(row, side):
            placed, rest = _place(row, rest)
            tiles += placed
            row = []
        row.append(area)
    return tiles + (_place(row, rest)[0] if row else [])


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of the sides of rectangles that lie in a row along a side."""
    whole = sum(row)
    return max(max(side**2 * area / whole**2, whole**2 / (side**2 * area)) for area in row)


def _place(row: Sequence[float], within: Tile) -> tuple[list[Tile], Tile]:
    """A row along the shorter side, and the rest."""
    tiles, x, y = [], within.x, within.y
    if within.width >= within.height:
        thickness = sum(row) / within.height
        for area in row:
            tiles.append(Tile(x, y, thickness, area / thickness))
            y += area / thickness
        return tiles, Tile(x + thickness, within.y, within.width - thickness, within.height)
    thickness = sum(row) / within.width
    for area in row:
        tiles.append(Tile(x, y, area / thickness, thickness))
        x += area / thickness
    return tiles, Tile(within.x, y + thickness, within.width, within.height - thickness)
