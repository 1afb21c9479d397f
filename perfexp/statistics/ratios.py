"""Ratios of two repeated figures: Welch's interval of the logarithm, margins, false discovery rate, geometric mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfexp.statistics import variance
from perfexp.statistics.distributions import ALPHA, Z95, student95
from perfexp.statistics.estimators import Interval
from perfexp.statistics.variance import Component

#: Degrees of freedom beyond which Student's distribution is a normal one.
_MOST_DEGREES = 1e6
#: Probability that the number of processes that is named as sufficient decides, and its limit.
_POWER, MOST_PROCESSES = 0.8, 100
#: Resamples of the bootstrap and its seed; clusters from which there is an interval.
_RESAMPLES, _SEED, LEAST_CLUSTERS = 2000, 0, 3


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """A figure of one run, repeated by its processes.

    Attributes:
        values: the figure of each process, above 0 for a ratio.
        within: variance of the logarithm of their geometric mean, as the samples of each process show it; None if the
            samples show none.
        earlier: the figure of each process of earlier runs of the same command, oldest first.
        between: variance between processes that other points of the run show, for a figure of one process.
        uids: identifiers of the earlier runs, then that of this one; one that is unknown is empty.
        is_estimate: whether the samples are too few for an interval, or for one that is wide enough.
    """

    values: tuple[float, ...]
    within: float | None = 0.0
    earlier: tuple[tuple[float, ...], ...] = ()
    between: Component | None = None
    uids: tuple[str, ...] = ()
    is_estimate: bool = False

    @property
    def mean(self) -> float:
        """Geometric mean over the processes; 0 if a figure is."""
        return math.exp(float(np.mean(np.log(self.values)))) if min(self.values) > 0 else 0.0

    def earlier_without(self, other: Repeats) -> list[tuple[float, ...]] | None:
        """The earlier runs except `other`; None if it is not one of them."""
        if not other.uids or other.uids[-1] not in self.uids[:-1]:
            return None
        return [run for uid, run in zip(self.uids, self.earlier, strict=False) if uid != other.uids[-1]]


@dataclass(frozen=True, kw_only=True)
class LogRatio:
    """Logarithm of a ratio.

    Attributes:
        value: the logarithm.
        error: its standard error; None where a side shows nothing about other processes.
        degrees: degrees of freedom of the error.
        has_runs: whether the error includes how runs at other times differ.
    """

    value: float
    error: float | None = None
    degrees: float = _MOST_DEGREES
    has_runs: bool = False

    @property
    def interval(self) -> Interval:
        """The ratio with its 95 % interval."""
        return self.interval_at(ALPHA)

    def interval_at(self, level: float) -> Interval:
        """The ratio with the interval that misses it with this probability."""
        ratio = math.exp(self.value)
        if self.error is None:
            return Interval(value=ratio, low=None, high=None)
        from scipy import special

        factor = math.exp(float(special.stdtrit(self.degrees, 1 - level / 2)) * self.error)
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


def log_ratio(other: Repeats, baseline: Repeats) -> LogRatio:
    """Return the logarithm of `other` over `baseline`, with an error that holds for another pair of runs.

    The estimand is the ratio of what the two commands take on average over all of their runs. Each side's variance is
    that of its run's geometric mean: between processes, and between runs as soon as the side has a history of at least
    three runs. The two runs themselves do not count for the variance between runs, which would hide their difference.
    A side without a history varies between runs as the other one does. If neither has one, the error only holds for
    other processes of these two runs, and `has_runs` is False. Two runs of the same command share their history, whose
    variance then counts for both, with its degrees of freedom once; so it does where their runs are unknown.

    The variances add up; the degrees of freedom are those of Welch, "The generalization of Student's problem" (1947).
    """
    value = math.log(other.mean) - math.log(baseline.mean)
    shared = other.earlier_without(baseline)
    if shared is None:
        shared = baseline.earlier_without(other)
    one, two = (_Side.of(side, side.earlier if shared is None else shared) for side in (other, baseline))
    if one.total is None or two.total is None:
        return LogRatio(value=value)
    terms = [(one.total.variance, one.total.degrees), (two.total.variance, two.total.degrees)]
    has_runs = one.has_runs or two.has_runs
    may_share = shared is not None or (one.has_runs and two.has_runs and not all((*other.uids, *baseline.uids)))
    if may_share and has_runs:  # the same estimate twice, or perhaps
        terms = [(one.total.variance + two.total.variance, min(one.total.degrees, two.total.degrees))]
    elif one.has_runs != two.has_runs:
        known = 0 if one.has_runs else 1
        terms[known] = (terms[known][0] + (one, two)[known].between_runs, terms[known][1])
    return _welch(value, terms, has_runs=has_runs)


def _welch(value: float, terms: Sequence[tuple[float, float]], *, has_runs: bool) -> LogRatio:
    """The logarithm of a ratio by independent variances with their degrees of freedom."""
    total = sum(term for term, _ in terms)
    inverse = sum(term**2 / degrees for term, degrees in terms)
    degrees = min(total**2 / inverse, _MOST_DEGREES) if inverse else _MOST_DEGREES
    return LogRatio(value=value, error=math.sqrt(total), degrees=degrees, has_runs=has_runs)


@dataclass(frozen=True)
class _Side:
    """Variance of the logarithm of one side's figure.

    Attributes:
        total: variance of the run's geometric mean; None if nothing was repeated.
        between_runs: the part of it that more processes do not lower.
        has_runs: whether the history is long enough for that part.
    """

    total: Component | None
    between_runs: float = 0.0
    has_runs: bool = False

    @classmethod
    def of(cls, side: Repeats, history: Sequence[Sequence[float]]) -> _Side:
        """The variance of a side with a history of other runs."""
        processes = variance.between_processes([*history, side.values])
        explained = processes.variance / len(side.values) if processes else 0.0
        least = max(explained, side.within or 0.0)
        if len(history) >= variance.LEAST_RUNS:
            runs = max(variance.of_runs(history), 0.0)
            return cls(Component(variance=max(runs + explained, least), degrees=len(history) - 1), runs, has_runs=True)
        if processes:
            return cls(Component(variance=least, degrees=processes.degrees))
        if side.between is None or side.within is None:
            return cls(None)
        return cls(variance.with_exact(side.between, side.within))


def further_processes(other: Repeats, baseline: Repeats, ratio: LogRatio, margin: float) -> int | None:
    """Return how many more processes a side needs to decide between `beyond` and `within` a margin, if the ratio stays.

    With that many, the interval ends before the nearer end of the margin in 80 % of comparisons. None if more than
    `MOST_PROCESSES` are needed, if only more runs help, or if the variance between processes is unknown.
    """
    from scipy import special

    components = [variance.between_processes([side.values]) or side.between for side in (other, baseline)]
    distance, present = abs(abs(ratio.value) - math.log1p(margin)), max(len(other.values), len(baseline.values))
    if ratio.error is None or None in components:
        return None
    variances = [component.variance for component in components if component]
    sizes = len(other.values), len(baseline.values)
    rest = max(ratio.error**2 - sum(part / size for part, size in zip(variances, sizes, strict=True)), 0.0)
    for count in range(max(present, 1) + 1, MOST_PROCESSES + 1):
        parts = [(part / count, float(count - 1)) for part in variances]
        expected = _welch(ratio.value, [*parts, (rest, ratio.degrees)] if ratio.has_runs else parts, has_runs=True)
        quantiles = student95(expected.degrees) + float(special.stdtrit(expected.degrees, _POWER))
        if quantiles * (expected.error or 0.0) <= distance:
            return count - present
    return None


def benjamini_hochberg(p_values: Sequence[float], rate: float) -> list[bool]:
    """Return which hypotheses to reject so that at most a share `rate` of the rejected ones is true, on average.

    Benjamini and Hochberg, "Controlling the false discovery rate" (1995); valid for independent and for positively
    dependent tests, such as points of the same runs.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    most = max((rank for rank, index in enumerate(order, 1) if p_values[index] <= rate * rank / len(order)), default=0)
    rejected = set(order[:most])
    return [index in rejected for index in range(len(p_values))]


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
    low, high = (mean + stretch * (float(np.quantile(means, q)) - mean) for q in (ALPHA / 2, 1 - ALPHA / 2))
    return Interval(value=math.exp(mean), low=math.exp(low), high=math.exp(high))
