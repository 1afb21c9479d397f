"""Variance components: what an interval has to include so that it holds for another run, not only for other calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfexp.statistics.distributions import Z95, student95
from perfexp.statistics.estimators import Interval, Samples, Summary, percentile_interval


@dataclass(frozen=True, kw_only=True)
class Component:
    """Variance of the logarithm of a time between processes.

    Attributes:
        variance: of log seconds.
        degrees: degrees of freedom of the estimate.
    """

    variance: float
    degrees: int

    @property
    def spread(self) -> float:
        """Standard deviation between processes, as a fraction of the time."""
        return math.expm1(math.sqrt(self.variance))


def between_processes(groups: Sequence[Sequence[float]]) -> Component | None:
    """Return the variance between processes, pooled over several points.

    Args:
        groups: for each point, the medians of the processes that measured it, in seconds.

    Returns:
        None if no point was measured by two processes.
    """
    logs = [np.log(np.asarray(group)) for group in groups if len(group) > 1 and min(group) > 0]
    degrees = sum(values.size - 1 for values in logs)
    if not degrees:
        return None
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in logs)
    return Component(variance=squares / degrees, degrees=degrees)


def widened(interval: Interval, component: Component) -> Interval:
    """Widen the interval of one process to one that also holds for other processes.

    The variances add up. Student's t has the degrees of freedom of Welch and Satterthwaite (Satterthwaite, "An
    approximate distribution of estimates of variance components", 1946); the interval itself counts as exact.

    Args:
        interval: statistic of one process; without an interval it stays as it is.
        component: variance between processes, estimated from other points.
    """
    width = interval.relative_half_width
    if width is None:
        return interval
    within = (width / Z95) ** 2
    total = within + component.variance
    degrees = component.degrees * (total / component.variance) ** 2 if component.variance > 0 else math.inf
    return _around(interval.value, max(student95(min(degrees, 1e6)) * math.sqrt(total), width))


def of_processes(statistics: Sequence[Interval]) -> Interval:
    """Return the geometric mean of a statistic over processes; its interval holds for other processes.

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
    within = math.hypot(*(one.relative_half_width or 0.0 for one in statistics)) / logs.size
    return _around(math.exp(float(logs.mean())), max(half, within))


def combined(summaries: Sequence[Summary], samples: Sequence[Samples]) -> Summary:
    """Combine the statistics of several processes.

    Median and mean are those of `of_processes`. Percentiles are those of all samples, with an interval that is at least
    as wide as the processes' own percentiles demand.

    Args:
        summaries: statistics of each process, with the same percentiles.
        samples: samples of each process, warm-up excluded.
    """
    if len(summaries) == 1 or any(one.minimum <= 0 for one in summaries):
        return summaries[0]
    together = np.concatenate(samples)
    tau = together.size / sum(one.n / one.tau for one in summaries)
    starts = np.cumsum([0, *(one.n for one in summaries)])
    median = of_processes([one.median for one in summaries])
    return Summary(
        n=together.size,
        tau=tau,
        median=median,
        mean=of_processes([one.mean for one in summaries]),
        std=float(together.std(ddof=1)),
        minimum=float(together.min()),
        maximum=float(together.max()),
        percentiles={
            number: median
            if number == 50
            else _percentile(number, [one.percentiles[number] for one in summaries], together, tau)
            for number in summaries[0].percentiles
        },
        outliers=tuple(
            int(start) + index for start, one in zip(starts, summaries, strict=False) for index in one.outliers
        ),
        drift=max((one.drift for one in summaries if one.drift), key=lambda drift: abs(drift.relative), default=None),
    )


def _percentile(number: float, of_each: Sequence[Interval], samples: Samples, tau: float) -> Interval:
    pooled = percentile_interval(samples, number, tau)
    if pooled.low is None or pooled.high is None:
        return pooled
    width = of_processes([replace(one, low=None, high=None) for one in of_each]).relative_half_width or 0.0
    wide = _around(pooled.value, width)
    assert wide.low is not None and wide.high is not None
    return Interval(value=pooled.value, low=min(pooled.low, wide.low), high=max(pooled.high, wide.high))


def detectable_ratio(component: Component, processes: int) -> float:
    """Return the smallest relative difference that a comparison of two times shows.

    Two-sided at 5 % with a power of 80 %: (t₀.₉₇₅ + t₀.₈) · √(2 s² / P) of the logarithms, with 2 (P - 1) degrees of
    freedom (Cohen, "Statistical Power Analysis", 1988, section 2.4).

    Args:
        component: variance between processes.
        processes: P ≥ 2, the number of processes that measure each of the two times.
    """
    from scipy import special

    degrees = 2 * (processes - 1)
    quantiles = student95(degrees) + float(special.stdtrit(degrees, 0.8))
    return math.expm1(quantiles * math.sqrt(2 * component.variance / processes))


def _around(value: float, half_width: float) -> Interval:
    """Return the interval whose ends are a factor away from the value."""
    factor = math.exp(half_width)
    return Interval(value=value, low=value / factor, high=value * factor)
