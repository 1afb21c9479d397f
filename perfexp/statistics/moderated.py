"""Moderated variance: how much a figure varies between processes, from few processes and a prior.

A few processes say little about their variance: Student's t for two processes is 12.7. Other
measurements show that most figures of the same kind vary by similar amounts. The variance from few
processes is therefore shrunk toward the typical variance. Source: Smyth, "Linear models and
empirical Bayes methods for assessing differential expression in microarray experiments" (2004).
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

#: Degrees of freedom that count as infinite: Student's distribution is then normal.
MOST_DEGREES = 1e6
#: Number of samples from which their spread replaces a missing interval.
_FEWEST = 6
#: If sample scatter explains the variance between processes, the prior's degrees rise up to this
#: number. Autocorrelations are estimates, too.
_MOST_OF_SAMPLES = 5.0


@dataclass(frozen=True, kw_only=True)
class Component:
    """Variance between processes of a figure's logarithm.

    Attributes:
        degrees: degrees of freedom in the estimate.
    """

    variance: float
    degrees: float

    @property
    def spread(self) -> float:
        """Return the standard deviation between processes, as a fraction of the figure."""
        return math.expm1(math.sqrt(self.variance))

    @property
    def spread_interval(self) -> Interval:
        """Return `spread` with its 95 % interval, by the chi-square distribution."""
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
    """Figure measured by one or more processes, with an interval for variation between them.

    Attributes:
        values: each process's figure; a mean with an interval needs values > 0.
        within: log variance explained by a process's sample scatter; None if there are too few
            samples.
        prior: typical variance for such figures; None if unknown.
        is_estimate: whether a value was estimated from others instead of measured.
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
        """Build a `Repeats` from each process's figure and its interval.

        Args:
            figures: each process's figure, with the interval from its samples.
            prior: typical variance for such figures.
            samples: each process's samples; if a figure has no interval, their spread replaces it.
            effective: effective samples of a single process; the interval is widened if there are
                few.
        """
        errors = []
        for figure, of_process in zip_longest(figures, samples[: len(figures)]):
            width = figure.log_half_width
            if width is None:
                errors.append(_of_few(of_process))
                continue
            error = (width / Z95) ** 2
            if len(figures) == 1 and effective < FEW:
                error *= FEW_TOO_NARROW**2
            errors.append(error)
        known = [error for error in errors if error is not None]
        within = sum(known) / len(known) if len(known) == len(errors) else None
        return cls(values=tuple(figure.value for figure in figures), within=within, prior=prior)

    def without_server(self) -> Repeats:
        """Return the same figure without server variance.

        Use it to compare figures measured by processes forked from the same server, which share
        this variance.
        """
        prior = self.prior and msgspec.structs.replace(self.prior, server=0.0)
        return replace(self, prior=prior)

    @property
    def mean(self) -> float:
        """Return the geometric mean over processes; 0 if any figure is 0."""
        if len(self.values) == 1:
            return self.values[0]
        if min(self.values) <= 0:
            return 0.0
        return math.exp(float(np.mean(np.log(self.values))))

    @property
    def own(self) -> Component | None:
        """Return the measured variance between processes; None for one process or a figure of 0."""
        if len(self.values) < 2 or min(self.values) <= 0:
            return None
        return Component(
            variance=float(np.var(np.log(self.values), ddof=1)), degrees=len(self.values) - 1
        )

    @property
    def component(self) -> Component | None:
        """Return the variance between processes, prior and measured combined; None if unknown."""
        own = self.own
        if self.prior is None or self.within is None:
            return own
        # the prior already includes sample scatter at the usual number of samples
        variance, degrees = self.prior.variance, self.prior.degrees
        if self.within > variance:  # more scatter than the prior expects: its size is known better
            degrees = min(degrees * (self.within / variance) ** 2, max(degrees, _MOST_OF_SAMPLES))
            variance = self.within
        typical = Component(variance=variance, degrees=degrees)
        return pooled([typical, own] if own else [typical])

    @property
    def error(self) -> Component | None:
        """Return the log mean's variance, including server variance; None if unknown."""
        return self.error_of(len(self.values))

    def error_of(self, processes: int) -> Component | None:
        """Return `error` for a mean over another number of similar processes."""
        if (one := self.component) is None or min(self.values) <= 0:
            return None
        degrees = one.degrees + processes - len(self.values)
        own = max(one.variance, self.within or 0.0) / processes
        server = self.prior.server if self.prior else 0.0
        if server and own:  # the server variance counts as exact
            degrees = min(degrees * ((own + server) / own) ** 2, MOST_DEGREES)
        return Component(variance=own + server, degrees=degrees)

    @property
    def is_of_servers(self) -> bool:
        """Return whether server variance is more than half the mean's variance.

        Processes forked from one server cannot show it.
        """
        error = self.error
        return (
            error is not None and self.prior is not None and 2 * self.prior.server > error.variance
        )

    @property
    def half_width(self) -> float | None:
        """Return the interval's half-width in logarithms, t · √variance; None if unknown."""
        error = self.error
        if error is None:
            return None
        return student95(error.degrees) * math.sqrt(error.variance)

    @property
    def interval(self) -> Interval:
        """Return the mean with its 95 % interval; without ends if the variance is unknown."""
        return around(self.mean, self.half_width)


def _of_few(samples: Samples | None) -> float | None:
    """Return the variance of a small sample's log center; None if there are too few samples.

    It is widened, because so few samples do not show their correlation.
    """
    if samples is None or samples.size < _FEWEST or samples.min() <= 0:
        return None
    return FEW_TOO_NARROW**2 * float(np.var(np.log(samples), ddof=1)) / samples.size


def pooled(components: Sequence[Component]) -> Component:
    """Return the mean over at least one component, weighted by degrees of freedom."""
    degrees = sum(one.degrees for one in components)
    total = sum(one.variance * one.degrees for one in components)
    return Component(variance=total / degrees, degrees=degrees)


def geometric_mean(values: Sequence[float]) -> Interval:
    """Return the geometric mean of two or more exact values > 0, with a Student's t interval."""
    return Repeats(values=tuple(values)).interval


def around(value: float, log_half_width: float | None) -> Interval:
    """Return `value` with ends a factor away on both sides; no ends if the width is unknown."""
    if log_half_width is None:
        return Interval(value=value, low=None, high=None)
    factor = math.exp(min(log_half_width, 700.0))
    return Interval(value=value, low=value / factor, high=value * factor)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Time statistics over all processes that measured it.

    Attributes:
        summary: statistics of all samples; intervals cover variation between processes.
        medians: each process's median, in seconds per call.
        means: each process's mean, in seconds per call.
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
    """Combine the statistics from several processes.

    Percentiles pool all samples. Their intervals are at least as wide as the spread of the
    processes' percentiles requires, and they end at the median's interval. If times are 0, median
    and mean also pool all samples, with each process as a block.

    Args:
        summaries: each process's statistics, with the same percentiles.
        samples: each process's samples, warm-up excluded.
        time: prior for medians and percentiles.
        rate: prior for means.
    """
    first = summaries[0]
    effective = min(one.n / one.tau for one in summaries)
    of_median = [one.median for one in summaries]
    medians = Repeats.of(of_median, time, samples=samples, effective=effective)
    means = Repeats.of([one.mean for one in summaries], rate, samples=samples, effective=effective)
    together = np.concatenate(samples)
    tau = together.size / sum(one.n / one.tau for one in summaries)
    if medians.mean and means.mean:
        median, mean = medians.interval, means.interval
    else:
        median, mean = block_median(samples, tau), block_mean(samples, tau)
    percentiles = {}
    for number in first.percentiles:
        percentiles[number] = median
        if number != 50:
            figures = [one.percentiles[number] for one in summaries]
            of_each = Repeats.of(figures, time, effective=effective)
            pooled_interval = percentile_interval(together, number, tau)
            percentiles[number] = _percentile(pooled_interval, of_each, number, median)
    slow: list[int] = []
    start = 0
    for one in summaries:
        slow += [start + index for index in one.outliers]
        start += one.n
    drifts = [one.drift for one in summaries if one.drift]
    summary = replace(
        first,
        n=together.size,
        tau=tau,
        median=median,
        mean=mean,
        std=float(together.std(ddof=1)) if together.size > 1 else None,
        minimum=float(together.min()),
        maximum=float(together.max()),
        percentiles=percentiles,
        outliers=tuple(slow),
        drift=max(drifts, key=lambda drift: abs(drift.relative), default=None),
    )
    return Together(summary=summary, medians=medians, means=means)


def _percentile(
    together: Interval, processes: Repeats, number: float, median: Interval
) -> Interval:
    """Widen a pooled percentile's interval for variation between processes.

    The interval stops at the median's interval.
    """
    if together.low is None or together.high is None:
        return together
    factor = math.exp(min(processes.half_width or 0.0, 700.0))
    low = min(together.low, together.value / factor)
    high = max(together.high, together.value * factor)
    if number > 50:
        low = min(together.value, max(low, median.low or 0.0))
    elif median.high is not None:
        high = max(together.value, min(high, median.high))
    return Interval(value=together.value, low=low, high=high)


def detectable_ratio(component: Component, processes: int) -> float:
    """Return the smallest relative difference that a comparison of two times can detect.

    It assumes Welch's t-test, two-sided at 5 % with 80 % power. The formula on logarithms is
    (t₀.₉₇₅ + t₀.₈) · √(2 s² / P), where t has ν = 2 P (P - 1) / (P + 1). This ν is the expected
    value in Welch's formula for equal variances. For example, P = 5 detects 2.1 % if processes
    differ by 1 %. Source: Welch, "The generalization of Student's problem" (1947).

    Args:
        component: variance between processes.
        processes: P ≥ 3, how many processes measure each time.
    """
    degrees = 2 * processes * (processes - 1) / (processes + 1)
    quantiles = student95(degrees) + student(degrees, POWER)
    return math.expm1(quantiles * math.sqrt(2 * component.variance / processes))
