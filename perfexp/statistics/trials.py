"""Trials: statistics of repeated trainings that reach a target, or do not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.estimators import Interval, percentile_interval, windows_half_width


def median_time(reached: Sequence[float], trials: int) -> Interval | None:
    """Return the median time over all trials, with its 95 % interval by order statistics.

    A trial that does not reach the target counts as infinitely long, whatever time it took. The
    median and the ranks of its interval stay exact then, unlike a mean.

    Args:
        reached: times of the trials that reached the target, in seconds.
        trials: number of all trials, at least 1.

    Returns:
        an interval; without ends for fewer than 6 trials, or if the upper end is infinite. None if
        the median is infinite.
    """
    if 2 * len(reached) <= trials:
        return None
    times = [*reached, *[math.inf] * (trials - len(reached))]
    median = percentile_interval(times, 50, tau=1.0)
    if median.high == math.inf:
        return Interval(value=median.value, low=None, high=None)
    return median


def share(successes: int, trials: int) -> Interval:
    """Return a share with its exact 95 % interval.

    Source: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case
    of the binomial" (1934).
    """
    from scipy import special

    low, high, failures = 0.0, 1.0, trials - successes
    if successes:
        low = float(special.betaincinv(successes, failures + 1, ALPHA / 2))
    if failures:
        high = float(special.betaincinv(successes + 1, failures, 1 - ALPHA / 2))
    return Interval(value=successes / trials, low=low, high=high)


def mean(shares: Sequence[float]) -> Interval:
    """Return the mean of one or more shares with its 95 % interval by Student's t.

    The interval ends at 0 and 1, which no mean of shares exceeds. A single share has no interval.
    """
    value, half = statistics.fmean(shares), windows_half_width(shares, [1.0] * len(shares))
    if half is None:
        return Interval(value=value, low=None, high=None)
    # a damaged record may have a mean that is none of shares
    least, most = min(value, 0.0), max(value, 1.0)
    return Interval(value=value, low=max(value - half, least), high=min(value + half, most))


def p_above(values: Sequence[float], target: float) -> float | None:
    """Return the one-sided p-value for a mean above a target, by Student's t.

    A small value shows that the mean of all possible values is above the target. None if the values
    do not vary, or for a single value.
    """
    spread, degrees = statistics.pstdev(values), len(values) - 1
    if not spread:
        return None
    from scipy import special

    distance = (target - statistics.fmean(values)) / spread
    return float(special.stdtr(degrees, distance * math.sqrt(degrees)))
