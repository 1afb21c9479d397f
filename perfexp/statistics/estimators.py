"""Estimators for raw samples: medians, means, percentiles, warm-up, drift and outliers.

Consecutive calls resemble each other, so n samples carry less information than n independent ones.
The autocorrelation time τ (tau) measures that: n / τ is the number of effective samples, and every
interval here is widened by √τ. Formulas and their sources are in the docstrings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfexp.statistics.distributions import ALPHA, Z95, binomial_quantile, student95

Samples = NDArray[np.float64]

#: Below FEW effective samples the autocorrelation time is unreliable, and the median's interval may
#: be too narrow by the factor FEW_TOO_NARROW (`validation/intervals.py`).
FEW, FEW_TOO_NARROW = 30.0, 3.0
#: Factor in the half-width formula of `median_interval`.
_HALF_Z95 = Z95 / 2
#: In logarithms, an interval reaches down to this share of its value at the lowest.
_LEAST_SHARE = 0.1
#: A normal distribution's standard deviation divided by its median absolute deviation (MAD).
MAD_TO_SIGMA = 1.4826
#: An outlier is further from the median than this many robust standard deviations.
_OUTLIER_SIGMAS = 6.0
#: An outlier is also at least this far away, as a fraction: a coarse clock tick can make the MAD 0.
_OUTLIER_FLOOR = 0.005
#: A drift changes the median by more than this fraction, and by more than this many standard
#: errors.
_DRIFT_FLOOR, _DRIFT_ERRORS = 0.002, 3.5
#: Effective samples that an interval for a mean needs.
_LEAST_FOR_MEAN = 10
#: Up to this length, a `device` sample takes more calls than the clock tick requires.
_LONG_SAMPLE_SECONDS = 10e-3
#: The sum in τ ends at the first autocorrelation below this value.
_RHO_FLOOR = 0.05


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Value with its two-sided 95 % confidence interval.

    Attributes:
        low: lower end; None if there are too few samples for an interval.
        high: upper end; None if there are too few samples for an interval.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def relative_half_width(self) -> float | None:
        """Return half the interval's width over the value; None without an interval."""
        if self.low is None or self.high is None or self.value == 0:
            return None
        return (self.high - self.low) / 2 / abs(self.value)

    @property
    def log_half_width(self) -> float | None:
        """Return half the width in logarithms; None without an interval or for values ≤ 0.

        For a narrow interval this equals the relative half-width. A lower end below 10 % of the
        value, even if negative, counts as 10 % of the value. Thus a wider interval always has a
        larger half-width.
        """
        if self.low is None or self.high is None or self.value <= 0:
            return None
        return math.log(self.high / max(self.low, _LEAST_SHARE * self.value)) / 2


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Change from the first third of the samples to the last third.

    Attributes:
        relative: change in the median, as a fraction of the first median.
        standard_errors: change in the median, in units of its standard error.
    """

    relative: float
    standard_errors: float


def autocorrelation_time(samples: ArrayLike) -> float:
    """Return the integrated autocorrelation time τ = 1 + 2 Σ ρ_k, in samples, from sample ranks.

    Ranks are used because a few outliers can hide a correlation between values. The sum ends at the
    first ρ_k < 0.05. Subtracting the sample mean makes each ρ_k too small by about τ / n; the
    result corrects for this. Formulas: Sokal, "Monte Carlo Methods in Statistical Mechanics"
    (1996), section 3; Kendall, "Note on bias in the estimation of autocorrelation" (1954). The
    cut-off is our own choice.

    Args:
        samples: shape (n,), any unit.

    Returns:
        τ ≥ 1; exactly 1 for fewer than 4 samples or for constant samples.
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
    spectrum = np.fft.rfft(ranks, 2 * n)  # padding keeps the sums from wrapping around
    rho = np.fft.irfft(spectrum * spectrum.conj())[1 : n // 2] / variance
    below = np.flatnonzero(rho < _RHO_FLOOR)
    lags = int(below[0]) if below.size else rho.size
    tau = 1.0 + 2.0 * float(rho[:lags].sum())
    return tau * (1.0 + 2.0 * lags / n)


def median_interval(samples: ArrayLike, tau: float | None = None) -> Interval:
    """Return the median with its 95 % confidence interval by order statistics.

    The half-width in ranks is 0.98 · √(τ n) · (1 + 2.5 / n_eff), with n_eff = n / τ. This is the
    usual distribution-free interval (David and Nagaraja, "Order Statistics", 2003, section 7.1),
    widened for autocorrelation and for small samples.

    Args:
        samples: shape (n,), n ≥ 1.
        tau: autocorrelation time; computed by default.

    Returns:
        an interval; `low` and `high` are None if n is too small.
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
    """Return the mean with its 95 % interval, ± t · s · √(τ / n), where t has ν = n/τ - 1.

    Args:
        samples: shape (n,), n ≥ 1.
        tau: autocorrelation time; computed by default.

    Returns:
        an interval; `low` and `high` are None if n/τ < 10, because so few samples have an
        unreliable spread.
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
    """Return the half-width of a weighted mean's 95 % interval.

    It is t(n - 1) · √(Σ wᵢ (xᵢ - x̄)² / (n - 1)), with Σ wᵢ = 1. Each value's variance is assumed
    to be inversely proportional to its weight. For example, the energy meters measure mean power in
    several windows and weight it by window length.

    Returns:
        the half-width in the values' unit; None for fewer than two values.
    """
    if len(values) < 2:
        return None
    x = np.asarray(values, dtype=np.float64)
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    variance = float((shares * (x - (shares * x).sum()) ** 2).sum()) / (x.size - 1)
    return student95(x.size - 1) * math.sqrt(variance)


def differ(value: Interval, reference: Interval, tolerance: float) -> bool:
    """Return whether two statistics differ by more than a tolerance plus their uncertainty.

    A statistic without an interval counts as exact, so a false warning is likelier.

    Args:
        reference: statistic that the difference is relative to.
        tolerance: relative difference to accept, as a fraction.
    """
    uncertainty = math.hypot(value.relative_half_width or 0.0, reference.relative_half_width or 0.0)
    difference = abs(value.value - reference.value)
    return difference > (tolerance + uncertainty) * abs(reference.value)


def samples_needed(percentile: float) -> int:
    """Return how many independent samples a percentile's two-sided 95 % interval needs.

    This is the smallest n with qⁿ ≤ 0.025, or (1-q)ⁿ ≤ 0.025 below the median. For example, 6 for
    p50, 36 for p90, 72 for p95 and 368 for p99.

    Args:
        percentile: between 0 and 100, both excluded.
    """
    q = max(percentile, 100 - percentile) / 100
    return math.ceil(math.log(ALPHA / 2) / math.log(q) - 1e-9)


def percentile_interval(
    samples: ArrayLike, percentile: float, tau: float | None = None
) -> Interval:
    """Return a percentile (linear interpolation) with its 95 % interval by order statistics.

    The number of samples below the percentile is binomial, and its quantiles give the ranks of the
    two ends. Autocorrelation widens the distance between these ranks and n·q by √τ, but not past
    the smallest and the largest sample: n/τ independent samples suffice for these.

    Args:
        samples: shape (n,), n ≥ 1.
        percentile: between 0 and 100, both excluded.
        tau: autocorrelation time; computed by default.

    Returns:
        an interval; `low` and `high` are None if n is too small (see `samples_needed`).
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
    """Return how many leading samples the MSER-5 rule counts as warm-up.

    MSER-5 is the marginal standard error rule, applied to batches (means over 5 samples). Among m
    batches it picks the cut d that minimizes s²(d) / (m - d); s² is the batch variance after the
    cut. The cut lies in the first half, as the source requires. Source: White, Cobb and Spratt, "A
    comparison of five steady-state truncation heuristics for simulation" (2000).

    Args:
        samples: shape (n,).

    Returns:
        a multiple of 5, up to n / 2; 0 if there are fewer than 4 batches.
    """
    x = np.asarray(samples, dtype=np.float64)
    batches = x.size // 5
    if batches < 4:
        return 0
    means = x[: batches * 5].reshape(batches, 5).mean(axis=1)
    means = means - means.mean()  # keeps the difference of squares exact for large offsets
    count = np.arange(batches, 0, -1, dtype=np.float64)
    total = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum((means**2)[::-1])[::-1]
    error = (squares - total**2 / count) / count**2
    return int(np.argmin(error[: batches // 2 + 1])) * 5


def transient_cut(samples: ArrayLike) -> int:
    """Return how many leading samples are a warm-up transient: the MSER-5 cut, or 0.

    It is the cut only if the medians before and after it differ by more than 3.5 standard errors,
    as for a drift. MSER-5 alone would also cut rare slow calls from a steady series and so make its
    mean too low.

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
    """Return how far medians must differ to show a transient, 3.5 standard errors.

    Args:
        sizes: numbers of leading samples, each ≥ 1; any shape.
        after: samples after the leading ones. Their scatter is used, since the leading samples may
            be too few to estimate it.

    Returns:
        limits in the unit of the samples, in the shape of `sizes`.
    """
    scatter = median_error(after, autocorrelation_time(after)) * math.sqrt(after.size)
    limits: Samples = _DRIFT_ERRORS * scatter * np.sqrt(1 / np.asarray(sizes) + 1 / after.size)
    return limits


def drift(samples: ArrayLike, floor: float = _DRIFT_FLOOR) -> Drift | None:
    """Return the median's drift from the first third of the samples to the last third.

    Args:
        samples: shape (n,), in time order.
        floor: relative change that does not yet count as a drift.

    Returns:
        the drift; None for changes up to the floor or up to 3.5 standard errors, and for fewer
        than 18 samples.
    """
    x = np.asarray(samples, dtype=np.float64)
    third = x.size // 3
    if third < 6:
        return None
    first, last = x[:third], x[-third:]
    # subtract each third's level: a drift is not a correlation
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
    """Return the indices of outliers, samples far from the median; empty for fewer than 5 samples.

    An outlier is more than 6 robust standard deviations and more than 0.5 % away from the median.
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
    """Return how many calls k each pair of events must span for an accurate time, at least 1.

    k is the smallest number with these properties:

    - The clock tick adds at most 0.1 % to the time: tick / (k·t) ≤ 0.1 %. For example, a tick of
      0.5 µs needs 25 calls of 20 µs.
    - Recording an event adds at most 0.2 % to the device time of k calls.
    - It adds at most 1 µs per call, unless k calls would take more than 10 ms: then it is less than
      a thousandth of the call.

    Args:
        call_seconds: rough time t of one call, > 0.
        tick_seconds: clock resolution.
        record_seconds: device time to record one event.
    """
    # 1e-9: a quotient that is an integer but for rounding is not rounded up
    for_tick = math.ceil(tick_seconds / (0.001 * call_seconds) - 1e-9)
    for_record = math.ceil(record_seconds / (0.002 * call_seconds) - 1e-9)
    for_microsecond = math.ceil(record_seconds / 1e-6 - 1e-9)
    most = math.floor(_LONG_SAMPLE_SECONDS / call_seconds)
    return max(1, for_tick, for_record, min(for_microsecond, most))


def _ranks(samples: Samples) -> Samples:
    """Return ranks from 0; ties share their mean rank, e.g. 1.5, 0, 1.5 for 3, 1, 3."""
    _, inverse, counts = np.unique(samples, return_inverse=True, return_counts=True)
    first = np.cumsum(counts) - counts
    mean_rank: Samples = (first + (counts - 1) / 2)[inverse.reshape(-1)]
    return mean_rank


def median_error(samples: Samples, tau: float) -> float:
    """Return a median's standard error, √(π/2)·σ·√(τ/n), as for normal samples, in their unit.

    σ follows from the median absolute deviation (MAD), so that outliers do not enlarge it.

    Args:
        tau: autocorrelation time τ of the samples.
    """
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(samples - np.median(samples))))
    return math.sqrt(math.pi / 2 * tau / samples.size) * sigma


def median_of_trials(reached: Sequence[float], trials: int) -> Interval | None:
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
    value = statistics.median(times)
    with np.errstate(invalid="ignore"):  # between infinite times
        interval = percentile_interval(times, 50, tau=1.0)
    if interval.high is None or interval.high == math.inf:
        return Interval(value=value, low=None, high=None)
    return Interval(value=value, low=interval.low, high=interval.high)


def share_interval(successes: int, trials: int) -> Interval:
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


def mean_of_shares(shares: Sequence[float]) -> Interval:
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
