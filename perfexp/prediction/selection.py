"""Selection of sizes to measure: a few first, then always the least certain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np

from perfexp.prediction.conformal import NORMAL_FACTOR
from perfexp.prediction.gaussian_process import Curve, predict
from perfexp.statistics.estimators import Samples

#: Number of points measured before any is chosen.
INITIAL = 6
#: Share of unmeasured points that must be within the target.
_CERTAIN_SHARE = 0.9
#: Points that a curve needs before further points are chosen.
_LEAST_POINTS = 3


def coordinates(pairs: Sequence[tuple[tuple[int, int], int]]) -> Samples:
    """Return log pixels and log batch size for each pair, shape (n, 2)."""
    return np.log([(height * width, batch) for (height, width), batch in pairs], dtype=np.float64)


def scaled(x: Samples, reference: Samples) -> Samples:
    """Return coordinates as shares of the reference range; constant coordinates become 0."""
    low, span = reference.min(axis=0), np.ptp(reference, axis=0)
    share: Samples = (x - low) / np.where(span > 0, span, 1.0)
    return share


def initial(x: Samples, number: int = INITIAL) -> list[int]:
    """Return the indices of about `number` points, spread evenly and including the corners.

    Args:
        x: scaled coordinates of all points, shape (n, 2).
        number: number of points, at least 1.
    """
    wide, high = np.ptp(x, axis=0) > 0
    across = (0.0, 1.0) if wide and high and number >= 4 else (0.0,)
    steps = np.linspace(0, 1, max(number // len(across), 1))
    targets = product(steps, across) if wide else product((0.0,), steps)
    return sorted({int(((x - np.array(target)) ** 2).sum(axis=1).argmin()) for target in targets})


def following(
    x: Samples,
    curves: Sequence[Curve],
    tried: Collection[int],
    *,
    target: float,
    impossible: Collection[int] = (),
) -> int | None:
    """Return the index of the next point to measure; None if all intervals are narrow enough.

    Args:
        x: scaled coordinates of all points, shape (n, 2).
        curves: measured values for each phase, over the same coordinates.
        tried: indices of points with a result.
        target: relative half-width that 90 % intervals must reach, without calibration by other
            curves.
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
