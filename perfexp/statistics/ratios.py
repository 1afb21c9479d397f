"""Ratios of repeated figures: Welch intervals, margins, false discovery rate, geometric mean.

`comparison` divides a figure of one run by the same figure of the baseline run. A difference
matters if the ratio lies beyond a margin, such as 2 %. `LogRatio` tests that on logarithms, on
which twice as fast and half as fast are equally far from 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfexp.statistics.distributions import ALPHA, POWER, Z95, student, student95
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import MOST_DEGREES, Repeats

#: Largest number of processes to recommend.
MOST_PROCESSES = 100
#: Limit for the logarithm of a ratio and of half its interval, so that the ends are finite numbers.
_MOST_LOG = 345.0
#: Bootstrap resamples, their seed, and the smallest number of clusters with an interval.
_RESAMPLES, _SEED, LEAST_CLUSTERS = 2000, 0, 3


@dataclass(frozen=True, kw_only=True)
class LogRatio:
    """Natural logarithm of a ratio of two figures, with its uncertainty.

    Attributes:
        error: standard error of the logarithm; None if a side's variance between processes is
            unknown.
        degrees: degrees of freedom in the error.
    """

    value: float
    error: float | None = None
    degrees: float = MOST_DEGREES

    def interval(self, level: float = ALPHA) -> Interval:
        """Return the ratio with its confidence interval at error probability `level`."""
        ratio = math.exp(min(max(self.value, -_MOST_LOG), _MOST_LOG))
        if self.error is None:
            return Interval(value=ratio, low=None, high=None)
        half_width = student(self.degrees, 1 - level / 2) * self.error
        factor = math.exp(min(half_width, _MOST_LOG))
        return Interval(value=ratio, low=ratio / factor, high=ratio * factor)

    def p_beyond(self, margin: float) -> float:
        """Return the two-sided p-value for the hypothesis that the ratio lies within the margin.

        A small value shows a ratio beyond the margin. It is 1 if the error is unknown.

        Args:
            margin: relative difference, as a fraction.
        """
        return self._p(abs(self.value) - math.log1p(margin))

    def p_within(self, margin: float) -> float:
        """Return the p-value for the hypothesis that the ratio lies beyond the margin.

        The method is two one-sided tests. A small value shows a ratio within the margin. It is 1 if
        the error is unknown.

        Args:
            margin: relative difference, as a fraction.
        """
        return self._p(math.log1p(margin) - abs(self.value))

    def _p(self, distance: float) -> float:
        """Return the two-sided p-value for a logarithm this far past the margin; 1 if not past."""
        if self.error is None or distance <= 0:
            return 1.0
        if self.error == 0:
            return 0.0
        from scipy import special

        return 2 * float(special.stdtr(self.degrees, -distance / self.error))


def log_ratio(other: Repeats, baseline: Repeats, processes: int | None = None) -> LogRatio:
    """Return the logarithm of `other` over `baseline`, with an error that covers other processes.

    The variances of the two means add up; degrees of freedom follow Welch, "The generalization of
    Student's problem" (1947). If a side's variance is unknown, there is no error.

    Args:
        processes: compute the error for this many similar processes on each side instead.
    """
    value = math.log(other.mean) - math.log(baseline.mean)
    errors = [side.error_of(processes or len(side.values)) for side in (other, baseline)]
    usable = [error for error in errors if error is not None]
    if len(usable) < len(errors):
        return LogRatio(value=value)
    variance = sum(error.variance for error in usable)
    inverse = sum(error.variance**2 / error.degrees for error in usable)
    degrees = min(variance**2 / inverse, MOST_DEGREES) if inverse else MOST_DEGREES
    return LogRatio(value=value, error=math.sqrt(variance), degrees=degrees)


def further_processes(
    other: Repeats, baseline: Repeats, ratio: LogRatio, margin: float
) -> int | None:
    """Return how many more processes each side needs for a verdict on the margin.

    The verdict is `beyond` or `within` the margin. With this many processes, 80 % of comparisons
    reach it if the ratio stays the same.

    Args:
        ratio: present `log_ratio` of both figures.
        margin: relative difference, as a fraction.

    Returns:
        the number of extra processes; None if more than `MOST_PROCESSES` are needed or the variance
        between processes is unknown.
    """
    distance = abs(abs(ratio.value) - math.log1p(margin))
    present = max(len(other.values), len(baseline.values))
    for count in range(present + 1, MOST_PROCESSES + 1):
        expected = log_ratio(other, baseline, count)
        if expected.error is None:
            return None
        quantiles = student95(expected.degrees) + student(expected.degrees, POWER)
        if quantiles * expected.error <= distance:
            return count - present
    return None


def benjamini_hochberg(p_values: Sequence[float], rate: float) -> list[bool]:
    """Return which hypotheses to reject at the false discovery rate `rate`, in their order.

    On average, this is the largest share of true hypotheses among the rejected. A comparison of
    many points uses it, so that chance differences do not count as verdicts. Source: Benjamini
    and Hochberg, "Controlling the false discovery rate" (1995). It is valid for independent tests
    and for positively dependent tests, such as points measured in the same runs.
    """
    ranked = enumerate(sorted(p_values), 1)
    largest = max((p for rank, p in ranked if p <= rate * rank / len(p_values)), default=-1.0)
    return [p <= largest for p in p_values]


def geometric_mean(clusters: Mapping[str, Sequence[float]]) -> Interval:
    """Return the geometric mean of all ratios, with a bootstrap interval.

    A cluster is a model, for example. The interval is for the mean over all such models, with the
    clusters as a sample. Whole clusters are drawn with replacement, because ratios from the same
    model resemble each other. The percentile interval for k clusters is too narrow. It is therefore
    stretched by √(k / (k - 1)), and by Student's t (k - 1 degrees) over the normal quantile. The
    seed is fixed. There is no interval for fewer than three clusters.

    Args:
        clusters: log ratios in each cluster.
    """
    sums = np.array([sum(logs) for logs in clusters.values()])
    sizes = np.array([len(logs) for logs in clusters.values()])
    mean, count = float(sums.sum() / sizes.sum()), len(sizes)
    if count < LEAST_CLUSTERS:
        return Interval(value=math.exp(mean), low=None, high=None)
    indices = np.random.default_rng(_SEED).integers(count, size=(_RESAMPLES, count))
    means = sums[indices].sum(axis=1) / sizes[indices].sum(axis=1)
    stretch = math.sqrt(count / (count - 1)) * student95(count - 1) / Z95
    low, high = (
        mean + stretch * (float(np.quantile(means, q)) - mean) for q in (ALPHA / 2, 1 - ALPHA / 2)
    )
    return Interval(value=math.exp(mean), low=math.exp(low), high=math.exp(high))
