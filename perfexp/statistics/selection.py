"""Selection of sizes to measure in a sparse sweep: a few first, then always the least certain.

`sweep=sparse` measures some of the sizes and predicts the others (`plan/sparse`). A point here is a
pair of input size and batch size, given by its coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np

from perfexp.statistics.conformal import NORMAL_FACTOR
from perfexp.statistics.estimators import Samples
from perfexp.statistics.gaussian_process import Curve, predict

#: Number of points measured before any is chosen.
INITIAL = 6
#: Share of unmeasured points that must be within the target.
_CERTAIN_SHARE = 0.9
#: Points that a curve needs before further points are chosen.
_LEAST_POINTS = 3


def coordinates(pairs: Sequence[tuple[tuple[int, int], int]]) -> Samples:
    """Return log pixels and log batch size for each pair, shape (n, 2).

    Args:
        pairs: ((height, width), batch size) for each point.
    """
    return np.log([(height * width, batch) for (height, width), batch in pairs], dtype=np.float64)


def scaled(x: Samples, reference: Samples) -> Samples:
    """Return coordinates as shares of the reference range; constant coordinates become 0.

    Args:
        x: coordinates, shape (n, 2).
        reference: coordinates of the measured range, shape (m, 2); its ends become 0 and 1.
    """
    low, span = reference.min(axis=0), np.ptp(reference, axis=0)
    share: Samples = (x - low) / np.where(span > 0, span, 1.0)
    return share


def initial(x: Samples, number: int = INITIAL) -> list[int]:
    """Return the indices of about `number` points, spread evenly and including the corners.

    Args:
        x: scaled coordinates of all points, shape (n, 2).
        number: number of points, at least 1.
    """
    size_varies, batch_varies = np.ptp(x, axis=0) > 0
    batches = (0.0, 1.0) if size_varies and batch_varies and number >= 4 else (0.0,)
    steps = np.linspace(0, 1, max(number // len(batches), 1))
    targets = product(steps, batches) if size_varies else product((0.0,), steps)
    # the point nearest to each target; two targets may share it
    return sorted({int(((x - np.array(target)) ** 2).sum(axis=1).argmin()) for target in targets})


def following(
    x: Samples,
    curves: Sequence[Curve],
    tried: Collection[int],
    *,
    target: float,
    impossible: Collection[int] = (),
) -> int | None:
    """Return the index of the next point to measure, the one with the widest predicted interval.

    None if the intervals of 90 % of the unmeasured points reach the target, if no point is left,
    or if no curve has three points yet.

    Args:
        x: scaled coordinates of all points, shape (n, 2).
        curves: measured values for each phase (training, inference), over the same coordinates.
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
