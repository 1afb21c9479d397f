"""Selection of the sizes to measure: a few at first, then each time the least certain one, until all are certain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np

from perfexp.prediction.conformal import NORMAL_FACTOR
from perfexp.prediction.gaussian_process import Curve, predict
from perfexp.statistics.estimators import Samples

#: Number of points that are measured before any are chosen.
INITIAL = 6
#: Share of the unmeasured points whose intervals have to be within the target.
_CERTAIN_SHARE = 0.9
#: Fewest points of a curve from which further ones are chosen.
_LEAST_POINTS = 3


def coordinates(pairs: Sequence[tuple[tuple[int, int], int]]) -> Samples:
    """Return log pixels and log batch size of sizes and batch sizes, shape (n, 2)."""
    return np.log([(height * width, batch) for (height, width), batch in pairs], dtype=np.float64)


def scaled(x: Samples, reference: Samples) -> Samples:
    """Return coordinates as shares of the range of reference coordinates; those that are constant there become 0."""
    low, span = reference.min(axis=0), np.ptp(reference, axis=0)
    share: Samples = (x - low) / np.where(span > 0, span, 1.0)
    return share


def initial(x: Samples, number: int = INITIAL) -> list[int]:
    """Return the indices of about this number of points that are spread evenly over all, the corners included.

    Args:
        x: scaled coordinates of all points, shape (n, 2).
        number: number of points, at least 1.
    """
    wide, high = np.ptp(x, axis=0) > 0
    across = (0.0, 1.0) if wide and high and number >= 4 else (0.0,)
    steps = np.linspace(0, 1, max(number // len(across), 1))
    targets = product(steps, across) if wide else product((0.0,), steps)
    nearest = [int(((x - np.array(target)) ** 2).sum(axis=1).argmin()) for target in targets]
    return sorted(set(nearest))


def following(
    x: Samples,
    curves: Sequence[Curve],
    tried: Collection[int],
    *,
    target: float,
    impossible: Collection[int] = (),
) -> int | None:
    """Return the index of the point to measure next; None if the intervals of the others are narrow enough.

    Args:
        x: scaled coordinates of all points, shape (n, 2).
        curves: measured values of each phase, over the same coordinates.
        tried: indices of the points that have a result.
        target: relative half-width of the 90 % intervals that suffices; they are not calibrated by other curves.
        impossible: indices of points that cannot be measured.
    """
    left = np.setdiff1d(np.arange(len(x)), [*tried, *impossible])
    usable = [curve for curve in curves if len(curve.y) >= _LEAST_POINTS]
    if not left.size or not usable:
        return None
    deviation = np.max([predict(curve, x[left]).deviation for curve in usable], axis=0)
    if np.mean(np.expm1(NORMAL_FACTOR * deviation) <= target) >= _CERTAIN_SHARE:
        return None
    return int(left[np.argmax(deviation)])
