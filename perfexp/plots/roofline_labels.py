"""Labels of a roofline's picture: where names stand so that none covers another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: Directions in which a label may stand beside its point, the best first: right, left, above, below, between.
_ANGLES = (0, 180, 90, 270, 30, 150, 330, 210, 60, 120, 300, 240)
#: How far it may go, pixels.
_DISTANCES = (3, 14, 28, 45, 65, 90, 120)
#: What covering a point, crossing a line, or a leader through another label costs, in pixels of distance.
_COVERED, _CROSSED, _THROUGH = 60, 12, 40


class Box(NamedTuple):
    """A rectangle in pixels, its lower left corner first."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlaps(self, other: Box) -> bool:
        """Whether they have an area in common."""
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def within(self, other: Box) -> bool:
        """Whether it lies inside."""
        return self.x0 >= other.x0 and self.y0 >= other.y0 and self.x1 <= other.x1 and self.y1 <= other.y1


class Spot(NamedTuple):
    """A point with the radius of its marker, in pixels."""

    x: float
    y: float
    radius: float

    @property
    def box(self) -> Box:
        """Around the marker, somewhat inside its corners."""
        reach = 0.8 * self.radius
        return Box(self.x - reach, self.y - reach, self.x + reach, self.y + reach)


def place(
    wanted: Sequence[tuple[Spot, float, float]], *, within: Box, taken: Sequence[Box], avoided: Sequence[Box]
) -> list[Box | None]:
    """A place for each label, the most important first; None where there is no room.

    Args:
        wanted: the point of each label, its width and its height.
        within: where labels may be.
        taken: where none may be.
        avoided: what is covered only if need be.
    """
    found: list[Box | None] = []
    used, soft = list(taken), list(avoided)
    spots = [spot for spot, _, _ in wanted]
    for spot, width, height in wanted:
        others = [other.box for other in spots if other is not spot]
        free = (
            (cost + _COVERED * _hits([box], others) + _CROSSED * _hits([box], soft) + _THROUGH * through, box)
            for cost, box in _candidates(spot, width, height)
            if box.within(within) and not any(map(box.overlaps, used))
            for through in [_hits(_leader(spot, box), used)]
        )
        best = min(free, default=None)
        found.append(best[1] if best else None)
        if best:
            used.append(best[1])
            soft += _leader(spot, best[1])
    return found


def _hits(boxes: Sequence[Box], others: Sequence[Box]) -> int:
    return sum(box.overlaps(other) for box in boxes for other in others)


def _leader(spot: Spot, box: Box) -> list[Box]:
    """Small boxes between a point and its label."""
    x, y = min(max(spot.x, box.x0), box.x1), min(max(spot.y, box.y0), box.y1)
    places = ((spot.x + (x - spot.x) * part / 8, spot.y + (y - spot.y) * part / 8) for part in range(1, 8))
    return [Box(at - 1, height - 1, at + 1, height + 1) for at, height in places]


def _candidates(spot: Spot, width: float, height: float) -> Iterator[tuple[float, Box]]:
    """Places around a point, each with what it costs."""
    for distance in _DISTANCES:
        for rank, degrees in enumerate(_ANGLES):
            across, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            reach = spot.radius + distance
            x = spot.x + reach * across + width / 2 * (across > 0.01) - width / 2 * (across < -0.01)
            y = spot.y + reach * up + height / 2 * up
            yield distance + rank, Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
