"""Moderated variance: how much a figure varies between processes, from few processes and a prior.

A figure is a number that each process measures, such as a median time. A few processes say little
about their variance: Student's t for two processes is 12.7. Other measurements show that most
figures of the same kind vary by similar amounts. The variance from few processes is therefore
shrunk toward the typical variance, a `Prior`. All are variances of a logarithm, so that they hold
for short and long times alike. `Repeats` is the model of one figure, and everything that shows
or compares results takes its intervals from it. Source: Smyth, "Linear models and empirical Bayes
methods for assessing differential expression in microarray experiments" (2004).
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
from perfexp.statistics.prior import Component, Prior

#: Degrees of freedom that count as infinite: Student's distribution is then normal.
MOST_DEGREES = 1e6
#: Number of samples from which their spread replaces a missing interval.
_LEAST_SAMPLES = 6
#: If sample scatter explains the variance between processes, the prior's degrees rise up to this
#: number. Autocorrelations are estimates, too.
_MOST_OF_SAMPLES = 5.0


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Figure measured by one or more processes, with an interval for variation between them.

    Attributes:
        values: each process's figure, in the figure's unit; a mean with an interval needs
            values > 0.
        within: log variance that the scatter of a process's own samples explains; None if there
            are too few samples.
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
            effective: effective samples (n / τ) of a single process; the interval is widened if
                there are few.
        """
        variances = []
        for figure, of_process in zip_longest(figures, samples[: len(figures)]):
            half_width = figure.log_half_width
            if half_width is None:
                variances.append(_variance_of_few(of_process))
                continue
            variance = (half_width / Z95) ** 2
            if len(figures) == 1 and effective < FEW:
                variance *= FEW_TOO_NARROW**2
            variances.append(variance)
        usable = [variance for variance in variances if variance is not None]
        # the mean over processes; if one process cannot estimate its scatter, it is unknown
        within = sum(usable) / len(usable) if len(usable) == len(variances) else None
        return cls(values=tuple(figure.value for figure in figures), within=within, prior=prior)

    def without_server(self) -> Repeats:
        """Return the same figure without the variance between fork servers.

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
        """Return the variance between these processes alone, without the prior.

        None for a single process or a figure of 0.
        """
        if len(self.values) < 2 or min(self.values) <= 0:
            return None
        return Component(
            variance=float(np.var(np.log(self.values), ddof=1)), degrees=len(self.values) - 1
        )

    @property
    def component(self) -> Component | None:
        """Return the variance between processes, prior and measured combined.

        None if neither is known, that is, for a single process without a prior.
        """
        this_group = self.own
        if self.prior is None or self.within is None:
            return this_group
        # the prior already includes sample scatter at the usual number of samples
        variance, degrees = self.prior.variance, self.prior.degrees
        if self.within > variance:  # more scatter than the prior expects: its size is known better
            degrees = min(degrees * (self.within / variance) ** 2, max(degrees, _MOST_OF_SAMPLES))
            variance = self.within
        typical = Component(variance=variance, degrees=degrees)
        return pooled([typical, this_group] if this_group else [typical])

    @property
    def error(self) -> Component | None:
        """Return the log mean's variance, variance between servers included; None if unknown."""
        return self.error_of(len(self.values))

    def error_of(self, processes: int) -> Component | None:
        """Return `error` for a mean over another number of similar processes.

        A comparison asks for it to recommend how many processes to add.
        """
        between = self.component
        if between is None or min(self.values) <= 0:
            return None
        degrees = between.degrees + processes - len(self.values)
        variance = max(between.variance, self.within or 0.0) / processes
        server = self.prior.server if self.prior else 0.0
        if server and variance:  # the server variance counts as exact
            degrees = min(degrees * ((variance + server) / variance) ** 2, MOST_DEGREES)
        return Component(variance=variance + server, degrees=degrees)

    @property
    def is_of_servers(self) -> bool:
        """Return whether variance between servers is more than half the mean's variance.

        Processes forked from one server cannot show it, so a note below the figures explains why
        the interval is wider than their spread.
        """
        error = self.error
        return (
            error is not None and self.prior is not None and 2 * self.prior.server > error.variance
        )

    @property
    def half_width(self) -> float | None:
        """Return the interval's half-width in logarithms, t · √variance, about a fraction.

        None if the variance is unknown.
        """
        error = self.error
        if error is None:
            return None
        return student95(error.degrees) * math.sqrt(error.variance)

    @property
    def interval(self) -> Interval:
        """Return the mean with its 95 % interval; without ends if the variance is unknown."""
        return around(self.mean, self.half_width)


def _variance_of_few(samples: Samples | None) -> float | None:
    """Return the log variance of a figure that has too few samples for an interval.

    It is widened, because so few samples do not show their correlation. None for fewer than 6
    samples, for samples of 0, and if the samples are unknown.
    """
    if samples is None or samples.size < _LEAST_SAMPLES or samples.min() <= 0:
        return None
    return FEW_TOO_NARROW**2 * float(np.var(np.log(samples), ddof=1)) / samples.size


def pooled(components: Sequence[Component]) -> Component:
    """Return the mean of one or more variances, weighted by their degrees of freedom."""
    degrees = sum(component.degrees for component in components)
    total = sum(component.variance * component.degrees for component in components)
    return Component(variance=total / degrees, degrees=degrees)


def spread_interval(component: Component) -> Interval:
    """Return the component's `spread` with its 95 % interval, by the chi-square distribution."""
    from scipy import special

    ends = []
    for tail in (ALPHA / 2, 1 - ALPHA / 2):
        quantile = float(special.chdtri(component.degrees, tail))
        ends.append(math.expm1(math.sqrt(component.variance * component.degrees / quantile)))
    return Interval(value=component.spread, low=ends[0], high=ends[1])


def geometric_mean(values: Sequence[float]) -> Interval:
    """Return the geometric mean of two or more exact values > 0, with a Student's t interval."""
    return Repeats(values=tuple(values)).interval


def around(value: float, log_half_width: float | None) -> Interval:
    """Return `value` with ends a factor exp(`log_half_width`) away on both sides.

    An unknown half-width (None) gives no ends.
    """
    if log_half_width is None:
        return Interval(value=value, low=None, high=None)
    factor = _factor(log_half_width)
    return Interval(value=value, low=value / factor, high=value * factor)


def _factor(log_half_width: float) -> float:
    """Return exp of a half-width, which is limited so that a float can hold the result."""
    return math.exp(min(log_half_width, 700.0))


@dataclass(frozen=True, kw_only=True)
class Together:
    """Statistics of a time over all processes that measured it.

    Attributes:
        summary: statistics of all samples; intervals cover variation between processes.
        medians: the median as a figure of the processes, in seconds per call.
        means: the mean as a figure of the processes, in seconds per call.
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
    """Combine the statistics of one time from several processes, for the record's analysis.

    Percentiles pool all samples. Their intervals are at least as wide as the spread of the
    processes' percentiles requires, and they end at the median's interval. If times are 0, median
    and mean also pool all samples, with each process as a block. The drift is the largest drift in
    any process.

    Args:
        summaries: each process's statistics, with the same percentiles.
        samples: each process's samples in seconds per call, warm-up excluded.
        time: prior for medians and percentiles.
        rate: prior for means.
    """
    first = summaries[0]
    effective = min(summary.n / summary.tau for summary in summaries)
    of_median = [summary.median for summary in summaries]
    medians = Repeats.of(of_median, time, samples=samples, effective=effective)
    of_mean = [summary.mean for summary in summaries]
    means = Repeats.of(of_mean, rate, samples=samples, effective=effective)
    together = np.concatenate(samples)
    tau = together.size / sum(summary.n / summary.tau for summary in summaries)
    if medians.mean and means.mean:
        median, mean = medians.interval, means.interval
    else:
        median, mean = block_median(samples, tau), block_mean(samples, tau)
    percentiles = {}
    for number in first.percentiles:
        percentiles[number] = median
        if number != 50:
            figures = [summary.percentiles[number] for summary in summaries]
            of_each = Repeats.of(figures, time, effective=effective)
            pooled_interval = percentile_interval(together, number, tau)
            percentiles[number] = _widen_percentile(pooled_interval, of_each, number, median)
    outlier_indices: list[int] = []
    start = 0  # index of the process's first sample in `together`
    for summary in summaries:
        outlier_indices += [start + index for index in summary.outliers]
        start += summary.n
    drifts = [summary.drift for summary in summaries if summary.drift]
    combined_summary = replace(
        first,
        n=together.size,
        tau=tau,
        median=median,
        mean=mean,
        std=float(together.std(ddof=1)) if together.size > 1 else None,
        minimum=float(together.min()),
        maximum=float(together.max()),
        percentiles=percentiles,
        outliers=tuple(outlier_indices),
        drift=max(drifts, key=lambda drift: abs(drift.relative), default=None),
    )
    return Together(summary=combined_summary, medians=medians, means=means)


def _widen_percentile(
    together: Interval, processes: Repeats, number: float, median: Interval
) -> Interval:
    """Widen a pooled percentile's interval for variation between processes.

    The interval stops at the median's interval, because a p95 is not below the median.

    Args:
        together: percentile of all samples.
        processes: the percentile as a figure of the processes.
        number: the percentile's number, not 50.
        median: median with its interval.
    """
    if together.low is None or together.high is None:
        return together
    factor = _factor(processes.half_width or 0.0)
    low = min(together.low, together.value / factor)
    high = max(together.high, together.value * factor)
    if number > 50:
        low = min(together.value, max(low, median.low or 0.0))
    elif median.high is not None:
        high = max(together.value, min(high, median.high))
    return Interval(value=together.value, low=low, high=high)


def detectable_ratio(component: Component, processes: int) -> float:
    """Return the smallest relative difference that a comparison of two times can detect.

    It is a fraction, reported by the selfcheck for this machine. It assumes Welch's t-test,
    two-sided at 5 % with 80 % power. The formula on logarithms is (t₀.₉₇₅ + t₀.₈) · √(2 s² / P),
    where t has ν = 2 P (P - 1) / (P + 1). This ν is the expected value in Welch's formula for equal
    variances. For example, P = 5 detects 2.1 % if processes differ by 1 %. Source: Welch, "The
    generalization of Student's problem" (1947).

    Args:
        component: variance between processes.
        processes: P ≥ 3, how many processes measure each time.
    """
    degrees = 2 * processes * (processes - 1) / (processes + 1)
    quantiles = student95(degrees) + student(degrees, POWER)
    return math.expm1(quantiles * math.sqrt(2 * component.variance / processes))
