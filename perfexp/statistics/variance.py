"""Variance components: what an interval has to include so that it holds for the mean over processes, not over calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfexp.statistics.blockwise import Summary, block_mean, block_median
from perfexp.statistics.distributions import ALPHA, Z95, student95
from perfexp.statistics.estimators import Interval, Samples, median_error, percentile_interval

#: Number of runs from which their means show how runs differ.
LEAST_RUNS = 3
#: Degrees of freedom beyond which Student's distribution is a normal one.
_MOST_DEGREES = 1e6


@dataclass(frozen=True, kw_only=True)
class Component:
    """Variance of the logarithm of a time between processes.

    Attributes:
        variance: variance of log seconds.
        degrees: degrees of freedom of the estimate.
    """

    variance: float
    degrees: float

    @property
    def spread(self) -> float:
        """Standard deviation between processes, as a fraction of the time."""
        return math.expm1(math.sqrt(self.variance))

    @property
    def spread_interval(self) -> Interval:
        """`spread` with its 95 % interval, by the chi-square distribution of a normal sample's variance."""
        from scipy import special

        low, high = (
            math.expm1(math.sqrt(self.variance * self.degrees / float(special.chdtri(self.degrees, tail))))
            for tail in (ALPHA / 2, 1 - ALPHA / 2)
        )
        return Interval(value=self.spread, low=low, high=high)


def between_processes(groups: Sequence[Sequence[float]]) -> Component | None:
    """Return the variance between processes, pooled over several points.

    Args:
        groups: medians of the processes that measured each point, in seconds.

    Returns:
        None if no point was measured by two processes.
    """
    logs = [np.log(np.asarray(group)) for group in groups if len(group) > 1 and min(group) > 0]
    degrees = sum(values.size - 1 for values in logs)
    return Component(variance=_pooled(logs), degrees=degrees) if degrees else None


def pooled(components: Sequence[Component]) -> Component:
    """Return the mean of at least one component, weighted by degrees of freedom."""
    degrees = sum(one.degrees for one in components)
    return Component(variance=sum(one.variance * one.degrees for one in components) / degrees, degrees=degrees)


def widened(interval: Interval, component: Component) -> Interval:
    """Widen the interval of one process to one of the mean over processes.

    The variances add up. Student's t has the degrees of freedom of Welch and Satterthwaite (Satterthwaite, "An
    approximate distribution of estimates of variance components", 1946); the interval itself counts as exact.

    Args:
        interval: statistic of one process; without an interval it stays as it is.
        component: variance between processes, estimated from other points.
    """
    width = interval.log_half_width
    if width is None:
        return interval
    total = with_exact(component, (width / Z95) ** 2)
    return _union(interval, student95(total.degrees) * math.sqrt(total.variance))


def with_exact(component: Component, within: float) -> Component:
    """Add a variance that counts as exact; the degrees of freedom are those of Welch and Satterthwaite."""
    total = within + component.variance
    degrees = component.degrees * (total / component.variance) ** 2 if component.variance > 0 else math.inf
    return Component(variance=total, degrees=min(degrees, _MOST_DEGREES))


def of_processes(statistics: Sequence[Interval]) -> Interval:
    """Return the geometric mean of a statistic over processes; its interval is that of the mean over processes.

    exp(m ± t · s / √P) with m and s of the P logarithms and t of Student's distribution with P - 1 degrees: the
    process is the replicate, because processes differ by more than their calls do (Kalibera and Jones, "Rigorous
    benchmarking in reasonable time", 2013). The interval is never narrower than that of the mean of P exact processes
    whose calls vary.

    Args:
        statistics: the statistic of each process, P ≥ 1, all values above 0.
    """
    if len(statistics) < 2:
        return statistics[0]
    logs = np.log([one.value for one in statistics])
    half = student95(logs.size - 1) * float(logs.std(ddof=1)) / math.sqrt(logs.size)
    within = math.hypot(*(one.log_half_width or 0.0 for one in statistics)) / logs.size
    return _around(math.exp(float(logs.mean())), max(half, within))


def of_run(runs: Sequence[Sequence[float]]) -> Component | None:
    """Return the variance of the last run's geometric mean, by its processes and by earlier runs of the same command.

    From `LEAST_RUNS` runs on it is the variance of the runs' means, corrected for the number of processes: runs at
    other times also differ by the state of the machine. It is never below the variance that the processes explain.

    Args:
        runs: statistics of the processes of each run, above 0; the run in question is the last one.

    Returns:
        None if nothing was repeated.
    """
    logs = [np.log(np.asarray(run)) for run in runs]
    processes = between_processes(runs)
    within = processes.variance if processes else 0.0
    explained = within / logs[-1].size
    if len(runs) >= LEAST_RUNS:
        return Component(variance=max(of_runs(runs), 0.0) + explained, degrees=len(runs) - 1)
    return Component(variance=explained, degrees=processes.degrees) if processes else None


def of_runs(runs: Sequence[Sequence[float]]) -> float:
    """Return the variance between runs without that of their processes' means, below 0 if these explain more.

    Args:
        runs: statistics of the processes of each of at least two runs, above 0.
    """
    logs = [np.log(np.asarray(run)) for run in runs]
    processes = between_processes(runs)
    within = processes.variance if processes else 0.0
    return float(np.var([log.mean() for log in logs], ddof=1)) - within * float(np.mean([1 / log.size for log in logs]))


def at_least(interval: Interval, component: Component) -> Interval:
    """Widen an interval to that of a normal logarithm with this variance, on each side where it is not wider already.

    Without an interval it stays as it is.
    """
    return _union(interval, student95(component.degrees) * math.sqrt(component.variance))


def geometric_mean(values: Sequence[float]) -> Interval:
    """Return the geometric mean of exact values, such as one median per process, with the interval of `of_processes`.

    Args:
        values: P ≥ 2 values above 0.
    """
    return of_processes([Interval(value=value, low=None, high=None) for value in values])


def combined(summaries: Sequence[Summary], samples: Sequence[Samples]) -> Summary:
    """Combine the statistics of several processes.

    Median and mean are those of `of_processes`; where a process has one of 0, those of all samples, with a process as a
    block. Percentiles are those of all samples, with an interval that is at least as wide as the processes' own
    percentiles demand, if these are above 0, and that ends at the median's.

    Args:
        summaries: statistics of each process, with the same percentiles.
        samples: samples of each process, warm-up excluded.
    """
    if len(summaries) == 1:
        return summaries[0]
    together = np.concatenate(samples)
    tau = together.size / sum(one.n / one.tau for one in summaries)
    starts = np.cumsum([0, *(one.n for one in summaries)])
    if all(one.median.value > 0 and one.mean.value > 0 for one in summaries):
        median, mean = of_processes([one.median for one in summaries]), of_processes([one.mean for one in summaries])
    else:
        median, mean = block_median(samples, tau), block_mean(samples, tau)
    return Summary(
        n=together.size,
        tau=tau,
        median=median,
        mean=mean,
        std=float(together.std(ddof=1)),
        minimum=float(together.min()),
        maximum=float(together.max()),
        percentiles={
            number: median if number == 50 else _percentile(number, summaries, together, tau, median)
            for number in summaries[0].percentiles
        },
        outliers=tuple(
            int(start) + index for start, one in zip(starts, summaries, strict=False) for index in one.outliers
        ),
        drift=max((one.drift for one in summaries if one.drift), key=lambda drift: abs(drift.relative), default=None),
    )


def _percentile(
    number: float, summaries: Sequence[Summary], samples: Samples, tau: float, median: Interval
) -> Interval:
    pooled = percentile_interval(samples, number, tau)
    of_each = [one.percentiles[number] for one in summaries]
    if all(one.value > 0 for one in of_each):
        between = of_processes([replace(one, low=None, high=None) for one in of_each])
        pooled = _union(pooled, math.log(between.high / between.value) if between.high is not None else 0.0)
    return _beside(median, number, pooled)


def _beside(median: Interval, number: float, percentile: Interval) -> Interval:
    """End the interval of a percentile at that of the median, below or above which its true value cannot lie."""
    if None in (median.low, median.high, percentile.low, percentile.high):
        return percentile
    if number > 50:
        return replace(percentile, low=min(percentile.value, max(percentile.low or 0.0, median.low or 0.0)))
    return replace(percentile, high=max(percentile.value, min(percentile.high or 0.0, median.high or 0.0)))


def detectable_ratio(component: Component, processes: int) -> float:
    """Return the smallest relative difference that a comparison of two times shows.

    By Welch's t-test, two-sided at 5 % with a power of 80 %: (t₀.₉₇₅ + t₀.₈) · √(2 s² / P) of the logarithms, with
    2 P (P - 1) / (P + 1) degrees of freedom. These follow from the expected value of Welch's formula for equal
    variances, "The generalization of Student's problem" (1947).

    Args:
        component: variance between processes.
        processes: P ≥ 3, the number of processes that measure each of the two times.
    """
    from scipy import special

    degrees = 2 * processes * (processes - 1) / (processes + 1)
    quantiles = student95(degrees) + float(special.stdtrit(degrees, 0.8))
    return math.expm1(quantiles * math.sqrt(2 * component.variance / processes))


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Variance of log times by level, as estimated: a level without variance may come out below 0.

    Attributes:
        processes: between processes.
        blocks: between the blocks of a process; correlation between calls belongs to it.
        calls: between the calls of a block.
    """

    processes: float
    blocks: float
    calls: float

    @property
    def shares(self) -> dict[str, float]:
        """Share of each level in the sum, by its name; estimates below 0 count as 0."""
        parts = {name: max(value, 0.0) for name, value in vars(self).items()}
        total = sum(parts.values())
        return {name: value / total if total else 0.0 for name, value in parts.items()}


def nested(processes: Sequence[Sequence[Samples]]) -> Levels:
    """Split the variance of log times into processes, blocks of a process and calls of a block.

    Nested analysis of variance with random effects, by the method of moments: at each level the mean square minus its
    expected value from the levels below. Unequal numbers of blocks enter by their harmonic mean (Searle, Casella and
    McCulloch, "Variance Components", 1992). A block is represented by its median, whose error follows from the median
    absolute deviation of its calls, so that a few slow calls do not pass for blocks that differ.

    Args:
        processes: for each of P ≥ 2 processes, the seconds of each block's calls, above 0. If each has a single block,
            the variance between blocks counts as variance between processes.
    """
    logs = [[np.log(block) for block in blocks] for blocks in processes]
    every = [block for blocks in logs for block in blocks]
    medians = [np.array([np.median(block) for block in blocks]) for blocks in logs]
    calls = _pooled(every)
    blocks = _pooled(medians)
    between = float(np.var([one.mean() for one in medians], ddof=1))
    error = float(np.mean([median_error(block, 1.0) ** 2 for block in every]))
    inverse = float(np.mean([1 / one.size for one in medians]))
    return Levels(processes=between - blocks * inverse, blocks=blocks - error, calls=calls)


def _pooled(groups: Sequence[Samples]) -> float:
    """Return the variance within groups of any sizes; 0 if each has one value."""
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in groups)
    return squares / max(sum(values.size - 1 for values in groups), 1)


def _union(interval: Interval, log_half_width: float) -> Interval:
    """Widen each end of an interval to that of `_around`: the longer side of a skewed one stays."""
    if interval.low is None or interval.high is None:
        return interval
    wide = _around(interval.value, log_half_width)
    assert wide.low is not None
    assert wide.high is not None
    return Interval(value=interval.value, low=min(interval.low, wide.low), high=max(interval.high, wide.high))


def _around(value: float, log_half_width: float) -> Interval:
    """Return the interval whose ends are a factor away from the value."""
    factor = math.exp(log_half_width)
    return Interval(value=value, low=value / factor, high=value * factor)
