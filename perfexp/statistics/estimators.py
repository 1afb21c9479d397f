"""Statistics of raw samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfexp.statistics.distributions import ALPHA, Z95, binomial_quantile, student95

Samples = NDArray[np.float64]

#: Effective samples below which the autocorrelation time is unreliable, and the factor by which the median's interval
#: may then be too narrow (`validation/intervals.py`).
FEW, FEW_TOO_NARROW = 30.0, 3.0
#: Half of the normal distribution's two-sided 95 % point, as in the rank interval's formula.
_HALF_Z95 = Z95 / 2
#: Share of a value down to which the lower end of an interval counts in logarithms.
_LEAST_SHARE = 0.1
#: Standard deviation of a normal distribution in units of its median absolute deviation.
MAD_TO_SIGMA = 1.4826
#: Distance from the median, in robust standard deviations, beyond which a sample is an outlier.
_OUTLIER_SIGMAS = 6.0
#: Least relative distance of an outlier; samples of a clock with a coarse tick have a MAD of 0.
_OUTLIER_FLOOR = 0.005
#: Least relative change of the median that counts as a drift, and its standard errors.
_DRIFT_FLOOR, _DRIFT_ERRORS = 0.002, 3.5
#: Effective samples below which a mean has no interval.
_LEAST_FOR_MEAN = 10
#: Length up to which a sample of `device` takes more calls than the clock needs.
_LONG_SAMPLE_SECONDS = 10e-3
#: Autocorrelation below which the sum of τ ends.
_RHO_FLOOR = 0.05


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A statistic with its two-sided 95 % confidence interval.

    Attributes:
        low: lower end; None where n is too small for an interval.
        high: upper end; None where n is too small for an interval.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def relative_half_width(self) -> float | None:
        """Half the interval's width over the value; None without an interval."""
        if self.low is None or self.high is None or self.value == 0:
            return None
        return (self.high - self.low) / 2 / abs(self.value)

    @property
    def log_half_width(self) -> float | None:
        """Half the interval's width in logarithms; None without an interval, and if the value is not positive.

        Of a narrow interval it is the relative half-width. One that reaches far down, or to 0 and below, counts as
        reaching down to a share of the value: the width grows with the interval.
        """
        if self.low is None or self.high is None or self.value <= 0:
            return None
        return math.log(self.high / max(self.low, _LEAST_SHARE * self.value)) / 2


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Change from the first to the last third of the samples.

    Attributes:
        relative: change of the median, as a fraction of the first.
        standard_errors: change of the median in units of its standard error.
    """

    relative: float
    standard_errors: float


def autocorrelation_time(samples: ArrayLike) -> float:
    """Integrated autocorrelation time τ = 1 + 2 Σ ρ_k of the samples' ranks, in samples.

    Ranks instead of values, so that a few outliers do not hide a correlation; the sum ends at the first ρ_k < 0.05.
    Subtracting the samples' own mean makes each ρ_k too small by about τ / n; what that takes from the sum is given
    back. Formulas: Sokal, "Monte Carlo Methods in Statistical Mechanics" (1996), section 3; Kendall, "Note on bias in
    the estimation of autocorrelation" (1954); the cut-off is ours.

    Args:
        samples: shape (n,), any unit.

    Returns:
        τ ≥ 1; 1 for fewer than 4 samples or for constant ones.
    """
    x = np.asarray(samples, dtype=np.float64)
    n = x.size
    if n < 4:
        return 1.0
    ranks = _ranks(x)
    ranks -= ranks.mean()
    variance = float(ranks @ ranks)
    if variance == 0.0:
        return 1.0
    spectrum = np.fft.rfft(ranks, 2 * n)  # padded: the sums must not wrap around
    rho = np.fft.irfft(spectrum * spectrum.conj())[1 : n // 2] / variance
    below = np.flatnonzero(rho < _RHO_FLOOR)
    lags = int(below[0]) if below.size else rho.size
    tau = 1.0 + 2.0 * float(rho[:lags].sum())
    return tau * (1.0 + 2.0 * lags / n)


def median_interval(samples: ArrayLike, tau: float | None = None) -> Interval:
    """The median with its 95 % confidence interval by order statistics.

    The half-width in ranks is 0.98 · √(τ n) · (1 + 2.5 / n_eff), n_eff = n / τ: the usual distribution-free interval
    (David and Nagaraja, "Order Statistics", 2003, section 7.1), widened for autocorrelation and for few samples.

    Args:
        samples: shape (n,), n ≥ 1.
        tau: autocorrelation time; computed if not given.

    Returns:
        `low` and `high` are None where n is too small for such an interval to exist.
    """
    x = np.sort(np.asarray(samples, dtype=np.float64))
    n = x.size
    value = float(np.median(x))
    if tau is None:
        tau = autocorrelation_time(samples)
    half = _HALF_Z95 * math.sqrt(tau * n) * (1.0 + 2.5 * tau / n)
    low, high = math.floor((n - 1) / 2 - half), math.ceil((n - 1) / 2 + half)
    if low < 0 or high > n - 1:
        return Interval(value=value, low=None, high=None)
    return Interval(value=value, low=float(x[low]), high=float(x[high]))


def mean_interval(samples: ArrayLike, tau: float | None = None) -> Interval:
    """Return the mean with its 95 % interval, mean ± t · s · √(τ / n), with t of n/τ - 1 degrees of freedom.

    Args:
        samples: shape (n,), n ≥ 1.
        tau: autocorrelation time; computed if not given.

    Returns:
        `low` and `high` are None where n/τ < 10: the spread of fewer samples is unreliable.
    """
    x = np.asarray(samples, dtype=np.float64)
    value = float(x.mean())
    if tau is None:
        tau = autocorrelation_time(x)
    if x.size / tau < _LEAST_FOR_MEAN:
        return Interval(value=value, low=None, high=None)
    half = student95(x.size / tau - 1) * float(x.std(ddof=1)) * math.sqrt(tau / x.size)
    return Interval(value=value, low=value - half, high=value + half)


def windows_half_width(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the half-width of the 95 % interval of a weighted mean, t(n - 1) · √(Σ wᵢ (xᵢ - x̄)² / (n - 1)), Σ wᵢ = 1.

    A value's variance is taken as inversely proportional to its weight, as that of a mean power to its window's length.

    Returns:
        None for fewer than two values.
    """
    x, shares = (
        np.asarray(values, dtype=np.float64),
        np.asarray(weights, dtype=np.float64) / sum(weights or (1.0,)),
    )
    if x.size < 2:
        return None
    variance = float((shares * (x - (shares * x).sum()) ** 2).sum()) / (x.size - 1)
    return student95(x.size - 1) * math.sqrt(variance)


def differ(one: Interval, other: Interval, tolerance: float) -> bool:
    """Return whether two statistics differ by more than a tolerance and their uncertainty.

    Args:
        one: a statistic; without an interval it counts as exact, which rather warns once too often.
        other: the statistic that it is compared with.
        tolerance: relative difference.
    """
    uncertain = math.hypot(one.relative_half_width or 0.0, other.relative_half_width or 0.0)
    return abs(one.value - other.value) > (tolerance + uncertain) * abs(other.value)


def samples_needed(percentile: float) -> int:
    """Return how many independent samples a two-sided 95 % interval of a percentile needs to exist.

    The smallest n with qⁿ ≤ 0.025 (or (1-q)ⁿ below the median): 6 for p50, 36 for p90, 72 for p95, 368 for p99.

    Args:
        percentile: between 0 and 100, both excluded.
    """
    q = max(percentile, 100 - percentile) / 100
    return math.ceil(math.log(ALPHA / 2) / math.log(q) - 1e-9)


def percentile_interval(
    samples: ArrayLike, percentile: float, tau: float | None = None
) -> Interval:
    """Return a percentile (linear interpolation) with its 95 % interval by order statistics.

    The ranks are quantiles of the binomial number of samples below the percentile. Their distance from n·q is widened
    by √τ, at most to the smallest and the largest sample: n/τ independent samples suffice for these ends.

    Args:
        samples: shape (n,), n ≥ 1.
        percentile: between 0 and 100, both excluded.
        tau: autocorrelation time; computed if not given.

    Returns:
        `low` and `high` are None where n is too small (`samples_needed`).
    """
    x = np.sort(np.asarray(samples, dtype=np.float64))
    n, q = x.size, percentile / 100
    value = float(np.percentile(x, percentile))
    if tau is None:
        tau = autocorrelation_time(samples)
    if n < samples_needed(percentile) * tau:
        return Interval(value=value, low=None, high=None)
    lower = binomial_quantile(ALPHA / 2, n, q)
    upper = binomial_quantile(1 - ALPHA / 2, n, q) + 1
    spread = math.sqrt(tau)
    low = max(math.floor(n * q - (n * q - lower) * spread), 1)
    high = min(math.ceil(n * q + (upper - n * q) * spread), n)
    return Interval(value=value, low=float(x[low - 1]), high=float(x[high - 1]))


def mser5_cut(samples: ArrayLike) -> int:
    """How many of the first samples the rule MSER-5 counts as warm-up.

    The marginal standard error rule on means of 5 samples: the cut d that minimises s²(d) / (m - d), where s² is the
    variance of the batch means after d of m batches. Source: White, Cobb and Spratt, "A comparison of five
    steady-state truncation heuristics for simulation" (2000). The cut lies in the first half, as they demand.

    Args:
        samples: shape (n,).

    Returns:
        A multiple of 5, at most n / 2; 0 where there are fewer than 4 batches.
    """
    x = np.asarray(samples, dtype=np.float64)
    batches = x.size // 5
    if batches < 4:
        return 0
    means = x[: batches * 5].reshape(batches, 5).mean(axis=1)
    means = means - means.mean()  # keeps the difference of squares below exact for large offsets
    count = np.arange(batches, 0, -1, dtype=np.float64)
    total = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum((means**2)[::-1])[::-1]
    error = (squares - total**2 / count) / count**2
    return int(np.argmin(error[: batches // 2 + 1])) * 5


def transient_cut(samples: ArrayLike) -> int:
    """How many of the first samples are a transient: MSER-5's cut, if the median before it differs from that after.

    A difference above 3.5 standard errors counts, as for a drift. On its own, MSER-5 also cuts off the rare slow calls
    of a steady series, whose mean is then too low.

    Args:
        samples: shape (n,).
    """
    x = np.asarray(samples, dtype=np.float64)
    cut = mser5_cut(x)
    if not cut:
        return 0
    before, after = x[:cut], x[cut:]
    limit = float(transient_limits(cut, after))
    return cut if abs(float(np.median(before) - np.median(after))) > limit else 0


def transient_limits(sizes: ArrayLike, after: Samples) -> Samples:
    """Return the least differences of medians that show a transient, 3.5 standard errors.

    Args:
        sizes: numbers of first samples, each ≥ 1.
        after: samples after them, which show the scatter: the first ones may be too few for one of their own.
    """
    scatter = median_error(after, autocorrelation_time(after)) * math.sqrt(after.size)
    limits: Samples = _DRIFT_ERRORS * scatter * np.sqrt(1 / np.asarray(sizes) + 1 / after.size)
    return limits


def drift(samples: ArrayLike, floor: float = _DRIFT_FLOOR) -> Drift | None:
    """Return the change of the median from the first to the last third of the samples, if there is one.

    Args:
        samples: shape (n,), in the order of time.
        floor: relative change below which it does not count.

    Returns:
        None for a change of at most the floor or at most 3.5 standard errors.
    """
    x = np.asarray(samples, dtype=np.float64)
    third = x.size // 3
    if third < 6:
        return None
    first, last = x[:third], x[-third:]
    # without the levels of the thirds: a drift is not a correlation
    residual = np.concatenate([first - np.median(first), last - np.median(last)])
    tau = autocorrelation_time(residual)
    start, end = float(np.median(first)), float(np.median(last))
    if start == 0.0:
        return None
    error = math.hypot(median_error(first, tau), median_error(last, tau))
    relative = end / start - 1
    if abs(relative) <= floor:
        return None
    errors = abs(end - start) / error if error > 0 else math.inf
    return Drift(relative=relative, standard_errors=errors) if errors > _DRIFT_ERRORS else None


def outliers(samples: ArrayLike) -> tuple[int, ...]:
    """Return the indices of samples further from the median than 6 robust standard deviations and 0.5 % of it.

    The robust standard deviation is 1.4826 times the median absolute deviation.

    Args:
        samples: shape (n,).
    """
    x = np.asarray(samples, dtype=np.float64)
    if x.size < 5:
        return ()
    median = float(np.median(x))
    distance = np.abs(x - median)
    limit = max(
        _OUTLIER_SIGMAS * MAD_TO_SIGMA * float(np.median(distance)), _OUTLIER_FLOOR * abs(median)
    )
    return tuple(int(index) for index in np.flatnonzero(distance > limit))


def calls_per_sample(call_seconds: float, tick_seconds: float, record_seconds: float = 0.0) -> int:
    """Return how many calls k one pair of events has to span so that neither tick nor record falsifies the time.

    tick / (k·t) ≤ 0.1 %, and the device time of a record is at most 0.2 % of the k calls. It is also at most 1 µs per
    call while the k calls take no more than 10 ms, beyond which it is less than a thousandth of the call anyway.

    Args:
        call_seconds: rough time t of one call, > 0.
        tick_seconds: resolution of the clock.
        record_seconds: device time of recording one event.
    """
    for_a_microsecond = min(
        math.ceil(record_seconds / 1e-6 - 1e-9), math.floor(_LONG_SAMPLE_SECONDS / call_seconds)
    )
    return max(
        1,
        math.ceil(tick_seconds / (0.001 * call_seconds) - 1e-9),
        math.ceil(record_seconds / (0.002 * call_seconds) - 1e-9),
        for_a_microsecond,
    )


def _ranks(x: Samples) -> Samples:
    """Ranks from 0, ties sharing their mean rank."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    first = np.cumsum(counts) - counts
    mean_rank: Samples = (first + (counts - 1) / 2)[inverse.reshape(-1)]
    return mean_rank


def median_error(x: Samples, tau: float) -> float:
    """Return the standard error of a median: that of a normal sample's, √(π/2)·σ·√(τ/n), with σ from the MAD."""
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(x - np.median(x))))
    return math.sqrt(math.pi / 2 * tau / x.size) * sigma
