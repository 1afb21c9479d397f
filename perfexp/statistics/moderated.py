"""Moderated variance: how much a figure differs between processes, by those that measured it and by a prior.

Few processes say little about how much processes differ: Student's t of two is 12.7. Most figures of a kind differ by
similar amounts, which other measurements have shown. The variance of few processes is therefore shrunk towards the
typical one: Smyth, "Linear models and empirical Bayes methods for assessing differential expression in microarray
experiments" (2004).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import msgspec
import numpy as np

from perfexp.statistics.blockwise import Summary, block_mean, block_median
from perfexp.statistics.distributions import ALPHA, POWER, Z95, student, student95
from perfexp.statistics.estimators import (
    FEW,
    FEW_TOO_NARROW,
    Interval,
    Samples,
    percentile_interval,
)
from perfexp.statistics.prior import Prior

#: Degrees of freedom beyond which Student's distribution is a normal one.
MOST_DEGREES = 1e6
#: Samples from which their spread is an error of their center where they have no interval.
_FEWEST = 6
#: Most degrees that a prior gains where the samples of a process explain how much processes differ: their correlations
#: are estimates, too.
_MOST_OF_SAMPLES = 5.0


@dataclass(frozen=True, kw_only=True)
class Component:
    """Variance of the logarithm of a figure between processes.

    Attributes:
        variance: variance of the logarithm.
        degrees: degrees of freedom of the estimate.
    """

    variance: float
    degrees: float

    @property
    def spread(self) -> float:
        """Standard deviation between processes, as a fraction of the figure."""
        return math.expm1(math.sqrt(self.variance))

    @property
    def spread_interval(self) -> Interval:
        """`spread` with its 95 % interval, by the chi-square distribution of a normal sample's variance."""
        from scipy import special

        low, high = (
            math.expm1(
                math.sqrt(self.variance * self.degrees / float(special.chdtri(self.degrees, tail)))
            )
            for tail in (ALPHA / 2, 1 - ALPHA / 2)
        )
        return Interval(value=self.spread, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """A figure that one process or more have measured; its mean and interval are those of a mean over processes.

    Attributes:
        values: the figure of each process, above 0 for a mean with an interval.
        within: variance of the logarithm of one process's figure that its samples explain; None if they are too few.
        prior: typical variance of such figures; None if it is unknown.
        is_estimate: whether a value is estimated from others, not measured.
    """

    values: tuple[float, ...]
    within: float | None = 0.0
    prior: Prior | None = None
    is_estimate: bool = False

    @classmethod
    def of(
        cls,
        figures: Sequence[Interval],
        prior: Prior | None = None,
        *,
        samples: Sequence[Samples] = (),
        effective: float = math.inf,
    ) -> Repeats:
        """The figure of each process with the interval that its samples show.

        Args:
            samples: samples of each process, by which those without an interval have an error, if they are not too few.
            effective: effective samples of a single process: few of them show an interval that is too narrow.
        """
        errors = [
            None if (width := one.log_half_width) is None else (width / Z95) ** 2 for one in figures
        ]
        if len(figures) == 1 and effective < FEW:
            errors = [None if one is None else FEW_TOO_NARROW**2 * one for one in errors]
        errors = [
            _of_few(of) if one is None else one
            for one, of in zip_longest(errors, samples, fillvalue=None)
        ]
        known = [one for one in errors if one is not None]
        within = sum(known) / len(known) if len(known) == len(errors) else None
        return cls(values=tuple(one.value for one in figures), within=within, prior=prior)

    def without_server(self) -> Repeats:
        """The same figure without the variance between servers, which another one of the same server shares."""
        prior = self.prior and msgspec.structs.replace(self.prior, server=0.0)
        return replace(self, prior=prior)

    @property
    def mean(self) -> float:
        """Geometric mean over the processes; 0 if a figure is."""
        if len(self.values) == 1:
            return self.values[0]
        return math.exp(float(np.mean(np.log(self.values)))) if min(self.values) > 0 else 0.0

    @property
    def own(self) -> Component | None:
        """Variance between the processes that measured it; None for one, and for figures of 0."""
        if len(self.values) < 2 or min(self.values) <= 0:
            return None
        return Component(
            variance=float(np.var(np.log(self.values), ddof=1)), degrees=len(self.values) - 1
        )

    @property
    def component(self) -> Component | None:
        """Variance between processes: the posterior of prior and own one; None if neither is known."""
        if self.prior is None or self.within is None:
            return self.own
        variance, degrees = (
            self.prior.variance,
            self.prior.degrees,
        )  # which include samples of the usual number
        if self.within > variance:  # samples that explain more are known better
            degrees = min(degrees * (self.within / variance) ** 2, max(degrees, _MOST_OF_SAMPLES))
            variance = self.within
        return pooled(
            [Component(variance=variance, degrees=degrees), *([self.own] if self.own else [])]
        )

    @property
    def error(self) -> Component | None:
        """Variance of the logarithm of the mean, with that between servers; None if nothing is known."""
        return self.error_of(len(self.values))

    def error_of(self, processes: int) -> Component | None:
        """`error` of a mean over another number of processes, which differ as these do."""
        if (one := self.component) is None or min(self.values) <= 0:
            return None
        degrees, own = (
            one.degrees + processes - len(self.values),
            max(one.variance, self.within or 0.0) / processes,
        )
        server = self.prior.server if self.prior else 0.0
        if server and own:  # counts as exact
            degrees = min(degrees * ((own + server) / own) ** 2, MOST_DEGREES)
        return Component(variance=own + server, degrees=degrees)

    @property
    def is_of_servers(self) -> bool:
        """Whether the variance between servers, which processes of one server cannot show, is most of the mean's."""
        error = self.error
        return (
            error is not None and self.prior is not None and 2 * self.prior.server > error.variance
        )

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval in logarithms, t · √variance; None if nothing is known of processes."""
        error = self.error
        return None if error is None else student95(error.degrees) * math.sqrt(error.variance)

    @property
    def interval(self) -> Interval:
        """The mean with its 95 % interval; without ends if nothing is known of processes."""
        return around(self.mean, self.half_width)


def _of_few(samples: Samples | None) -> float | None:
    """Variance of the logarithm of the center of a few samples, whose correlations are unknown; None of too few."""
    if samples is None or samples.size < _FEWEST or samples.min() <= 0:
        return None
    return FEW_TOO_NARROW**2 * float(np.var(np.log(samples), ddof=1)) / samples.size


def pooled(components: Sequence[Component]) -> Component:
    """Return the mean of at least one component, weighted by degrees of freedom."""
    degrees = sum(one.degrees for one in components)
    return Component(
        variance=sum(one.variance * one.degrees for one in components) / degrees, degrees=degrees
    )


def geometric_mean(values: Sequence[float]) -> Interval:
    """Return the geometric mean of at least two exact values above 0, with its interval by Student's t."""
    return Repeats(values=tuple(values)).interval


def around(value: float, log_half_width: float | None) -> Interval:
    """Return the interval whose ends are a factor away from the value; without ends if the width is unknown."""
    if log_half_width is None:
        return Interval(value=value, low=None, high=None)
    factor = math.exp(min(log_half_width, 700.0))
    return Interval(value=value, low=value / factor, high=value * factor)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Statistics of a time over the processes that took it.

    Attributes:
        summary: statistics of all samples, with the intervals of means over processes.
        medians: the median of each process, in seconds per call.
        means: its mean.
    """

    summary: Summary
    medians: Repeats
    means: Repeats


def combined(
    summaries: Sequence[Summary],
    samples: Sequence[Samples],
    *,
    time: Prior | None = None,
    rate: Prior | None = None,
) -> Together:
    """Combine the statistics of the processes that took a time.

    Percentiles are those of all samples, with an interval that is at least as wide as the processes' own percentiles
    demand, and that ends at the median's. Median and mean of times of 0 are those of all samples, with a process as a
    block.

    Args:
        summaries: statistics of each process, with the same percentiles.
        samples: samples of each process, warm-up excluded.
        time: prior of the medians and percentiles.
        rate: prior of the means.
    """
    first = summaries[0]
    effective = min(one.n / one.tau for one in summaries)
    medians = Repeats.of(
        [one.median for one in summaries], time, samples=samples, effective=effective
    )
    means = Repeats.of([one.mean for one in summaries], rate, samples=samples, effective=effective)
    of_numbers = {
        number: Repeats.of(
            [one.percentiles[number] for one in summaries], time, effective=effective
        )
        for number in first.percentiles
    }
    together = np.concatenate(samples)
    tau = together.size / sum(one.n / one.tau for one in summaries)
    if medians.mean and means.mean:
        median, mean = medians.interval, means.interval
    else:
        median, mean = block_median(samples, tau), block_mean(samples, tau)
    starts = np.cumsum([0, *(one.n for one in summaries)])
    summary = replace(
        first,
        n=together.size,
        tau=tau,
        median=median,
        mean=mean,
        std=float(together.std(ddof=1)) if together.size > 1 else None,
        minimum=float(together.min()),
        maximum=float(together.max()),
        percentiles={
            number: median
            if number == 50
            else _percentile(percentile_interval(together, number, tau), of_each, number, median)
            for number, of_each in of_numbers.items()
        },
        outliers=tuple(
            int(start) + index
            for start, one in zip(starts, summaries, strict=False)
            for index in one.outliers
        ),
        drift=max(
            (one.drift for one in summaries if one.drift),
            key=lambda drift: abs(drift.relative),
            default=None,
        ),
    )
    return Together(summary=summary, medians=medians, means=means)


def _percentile(
    together: Interval, processes: Repeats, number: float, median: Interval
) -> Interval:
    """Widen the percentile of all samples to the one over processes, up to the interval of the median."""
    if together.low is None or together.high is None:
        return together
    factor = math.exp(min(processes.half_width or 0.0, 700.0))
    low, high = (
        min(together.low, together.value / factor),
        max(together.high, together.value * factor),
    )
    if number > 50:
        low = min(together.value, max(low, median.low or 0.0))
    elif median.high is not None:
        high = max(together.value, min(high, median.high))
    return Interval(value=together.value, low=low, high=high)


def detectable_ratio(component: Component, processes: int) -> float:
    """Return the smallest relative difference that a comparison of two times shows.

    By Welch's t-test, two-sided at 5 % with a power of 80 %: (t₀.₉₇₅ + t₀.₈) · √(2 s² / P) of the logarithms, with
    2 P (P - 1) / (P + 1) degrees of freedom. These follow from the expected value of Welch's formula for equal
    variances, "The generalization of Student's problem" (1947).

    Args:
        component: variance between processes.
        processes: P ≥ 3, the number of processes that measure each of the two times.
    """
    degrees = 2 * processes * (processes - 1) / (processes + 1)
    quantiles = student95(degrees) + student(degrees, POWER)
    return math.expm1(quantiles * math.sqrt(2 * component.variance / processes))
