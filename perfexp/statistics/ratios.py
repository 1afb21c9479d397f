"""Ratios of two repeated figures: Welch's interval of the logarithm, margins, false discovery rate, geometric mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfexp.statistics.distributions import ALPHA, POWER, Z95, student, student95
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import MOST_DEGREES, Repeats

#: Largest number of processes that is named as sufficient.
MOST_PROCESSES = 100
#: Resamples of the bootstrap and its seed; clusters from which there is an interval.
_RESAMPLES, _SEED, LEAST_CLUSTERS = 2000, 0, 3


@dataclass(frozen=True, kw_only=True)
class LogRatio:
    """Logarithm of a ratio.

    Attributes:
        value: the logarithm.
        error: its standard error; None where a side shows nothing about other processes.
        degrees: degrees of freedom of the error.
    """

    value: float
    error: float | None = None
    degrees: float = MOST_DEGREES

    def interval(self, level: float = ALPHA) -> Interval:
        """The ratio with the interval that misses it with this probability."""
        ratio = math.exp(self.value)
        if self.error is None:
            return Interval(value=ratio, low=None, high=None)
        factor = math.exp(student(self.degrees, 1 - level / 2) * self.error)
        return Interval(value=ratio, low=ratio / factor, high=ratio * factor)

    def p_beyond(self, margin: float) -> float:
        """Two-sided p-value of the hypothesis that the ratio is within the margin, a fraction; 1 without an error."""
        return self._p(abs(self.value) - math.log1p(margin))

    def p_within(self, margin: float) -> float:
        """Like `p_beyond`, of the hypothesis that the ratio is beyond the margin (two one-sided tests)."""
        return self._p(math.log1p(margin) - abs(self.value))

    def _p(self, distance: float) -> float:
        if self.error is None or distance <= 0:
            return 1.0
        from scipy import special

        return 2 * float(special.stdtr(self.degrees, -distance / self.error)) if self.error else 0.0


def log_ratio(other: Repeats, baseline: Repeats, processes: int | None = None) -> LogRatio:
    """Return the logarithm of `other` over `baseline`, with an error that holds for other processes of both.

    The variances of the two means add up; the degrees of freedom are those of Welch, "The generalization of Student's
    problem" (1947). Without a variance of either side there is no error.

    Args:
        processes: another number of processes of each side, which differ as these do.
    """
    value = math.log(other.mean) - math.log(baseline.mean)
    errors = [side.error_of(processes or len(side.values)) for side in (other, baseline)]
    known = [one for one in errors if one is not None]
    if len(known) < len(errors):
        return LogRatio(value=value)
    total = sum(one.variance for one in known)
    inverse = sum(one.variance**2 / one.degrees for one in known)
    degrees = min(total**2 / inverse, MOST_DEGREES) if inverse else MOST_DEGREES
    return LogRatio(value=value, error=math.sqrt(total), degrees=degrees)


def further_processes(
    other: Repeats, baseline: Repeats, ratio: LogRatio, margin: float
) -> int | None:
    """Return how many more processes a side needs to decide between `beyond` and `within` a margin, if the ratio stays.

    With that many, the interval ends before the nearer end of the margin in 80 % of comparisons. None if more than
    `MOST_PROCESSES` are needed, or if the variance between processes is unknown.
    """
    distance, present = (
        abs(abs(ratio.value) - math.log1p(margin)),
        max(len(other.values), len(baseline.values)),
    )
    for count in range(present + 1, MOST_PROCESSES + 1):
        expected = log_ratio(other, baseline, count)
        if expected.error is None:
            return None
        quantiles = student95(expected.degrees) + student(expected.degrees, POWER)
        if quantiles * expected.error <= distance:
            return count - present
    return None


def benjamini_hochberg(p_values: Sequence[float], rate: float) -> list[bool]:
    """Return which hypotheses to reject so that at most a share `rate` of the rejected ones is true, on average.

    Benjamini and Hochberg, "Controlling the false discovery rate" (1995); valid for independent and for positively
    dependent tests, such as points of the same runs.
    """
    ranked = enumerate(sorted(p_values), 1)
    largest = max((p for rank, p in ranked if p <= rate * rank / len(p_values)), default=-1.0)
    return [p <= largest for p in p_values]


def geometric_mean(clusters: Mapping[str, Sequence[float]]) -> Interval:
    """Return the geometric mean of ratios with a bootstrap interval that holds for other clusters, such as models.

    Whole clusters are drawn with replacement, since ratios of one model resemble each other. The percentile interval
    of k clusters is too narrow: it is stretched by √(k / (k - 1)) and by Student's t of k - 1 degrees over the normal
    quantile. The seed is fixed. Fewer than three clusters have no interval.

    Args:
        clusters: logarithms of the ratios of each cluster.
    """
    sums = np.array([sum(logs) for logs in clusters.values()])
    sizes = np.array([len(logs) for logs in clusters.values()])
    mean, count = float(sums.sum() / sizes.sum()), len(sizes)
    if count < LEAST_CLUSTERS:
        return Interval(value=math.exp(mean), low=None, high=None)
    drawn = np.random.default_rng(_SEED).integers(count, size=(_RESAMPLES, count))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    stretch = math.sqrt(count / (count - 1)) * student95(count - 1) / Z95
    low, high = (
        mean + stretch * (float(np.quantile(means, q)) - mean) for q in (ALPHA / 2, 1 - ALPHA / 2)
    )
    return Interval(value=math.exp(mean), low=math.exp(low), high=math.exp(high))
