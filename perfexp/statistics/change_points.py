"""Change points: where the level of a series changes, for example a time over commits.

The method is E-divisive means with a t-test: Matteson and James, "A nonparametric approach for
multiple change point analysis of multivariate data" (2014); Fleming and others, "Hunter: Using
change point detection to hunt for performance regressions" (2023).
"""

from __future__ import annotations

import math

import numpy as np

from perfexp.statistics.estimators import Samples
from perfexp.statistics.ratios import LogRatio

#: Least number of values between two changes.
_LEAST = 3
#: p-value of a change. It is small since each change is the most striking of many places.
_LEVEL = 5e-5
#: Variance of a rounded logarithm, so that rounding is never a change in a constant series.
_ROUNDING = 1e-24


def segments(logs: Samples) -> list[Samples]:
    """Return a series in segments: its level changes from each segment to the next.

    Args:
        logs: logarithms of the figures, in order.
    """
    if logs.size < 2 * _LEAST:
        return [logs]
    start, end = _most_divergent(logs)
    if shift(logs[:start], logs[start:end]).p_beyond(0.0) > _LEVEL:
        return [logs]
    return segments(logs[:start]) + segments(logs[start:])


def shift(before: Samples, after: Samples) -> LogRatio:
    """Return the ratio between the levels of two segments, by Student's t for equal variances."""
    degrees = before.size + after.size - 2
    variance = (before.var() * before.size + after.var() * after.size) / degrees
    error = math.sqrt(variance * (1 / before.size + 1 / after.size) + _ROUNDING)
    return LogRatio(value=float(after.mean() - before.mean()), error=error, degrees=degrees)


def _most_divergent(logs: Samples) -> tuple[int, int]:
    """Return the start and the end of the segment that differs most from all values before it.

    The segment may end early, since a change that is undone later would otherwise stay hidden. The
    criterion is the energy distance, weighted by size.
    """
    # sums[i, j]: summed distances between the first i and the first j values
    sums = np.pad(np.abs(np.subtract.outer(logs, logs)).cumsum(0).cumsum(1), (1, 0))
    # all candidates at once: segments of at least _LEAST values, after at least as many
    start, end = np.array(np.triu_indices(logs.size + 1 - _LEAST, _LEAST)) + _LEAST
    before = sums[start, start]
    within = sums[end, end] - 2 * sums[start, end] + before
    distances = before / (start - 1) + within / (end - start - 1)
    best = int(np.argmax((sums[end, end] - (end - 1) * distances) / end))
    return int(start[best]), int(end[best])
