"""Statistics for a series measured in blocks, alternating with other series.

A device's clock and temperature change between blocks more than within one. Intervals therefore
cover the spread between blocks, too. `summarise` computes a series' statistics for the record, and
stopping rules ask `half_width` during the measurement whether a series is precise enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from perfexp.statistics.distributions import Z95, student95
from perfexp.statistics.estimators import (
    Drift,
    Interval,
    Samples,
    autocorrelation_time,
    drift,
    mean_interval,
    median_interval,
    outliers,
    percentile_interval,
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics for the samples after the warm-up, in the samples' unit.

    Attributes:
        n: number of samples.
        tau: integrated autocorrelation time in samples, ≥ 1; n / tau is the number of effective
            samples.
        median: median with its interval over all blocks (`block_median`).
        mean: mean with its interval over all blocks (`block_mean`).
        std: standard deviation (n - 1); None for n = 1.
        percentiles: percentiles by number (50, 95, 99); `low` and `high` are None if n is too
            small.
        outliers: indices of outliers in the samples; outliers stay in every statistic.
        drift: None if the samples did not drift.
    """

    n: int
    tau: float
    median: Interval
    mean: Interval
    std: float | None
    minimum: float
    maximum: float
    percentiles: dict[float, Interval]
    outliers: tuple[int, ...]
    drift: Drift | None


def split(samples: ArrayLike, starts: Sequence[int], warmup: int = 0) -> list[Samples]:
    """Split samples into their blocks, without the warm-up; empty if all samples are warm-up.

    Args:
        samples: shape (n,), warm-up included.
        starts: index of each block's first sample; empty for a single block.
        warmup: number of warm-up samples; the warm-up may end within a block, which then begins
            there.
    """
    x = np.asarray(samples, dtype=np.float64)
    parts = np.split(x[warmup:], [start - warmup for start in starts if start > warmup])
    return [part for part in parts if part.size]


def block_median(blocks: Sequence[Samples], tau: float | None = None) -> Interval:
    """Return the median over all blocks, with an interval covering variation between blocks.

    The wider of two intervals is used. The first is `median_interval` over all samples. The second
    is ± t · s / √B, with s from the medians of B ≥ 3 blocks and ν = B - 1: a clock that changes
    between blocks shows only in these medians. Blocks are weighted by size, so that
    B = (Σ n)² / Σ n².

    Args:
        blocks: samples of each block, at least one block.
        tau: autocorrelation time of all samples; computed by default.
    """
    within = median_interval(np.concatenate(blocks), tau)
    return _widen_for_blocks(within, blocks, np.median)


def block_mean(blocks: Sequence[Samples], tau: float | None = None) -> Interval:
    """Return the mean (total time over calls), with an interval covering variation between blocks.

    The widest of three intervals is used:

    - `mean_interval` over all samples.
    - The batch-means interval ± t · s / √B, with each block as a batch (Law, "Simulation Modeling
      and Analysis", 2015, section 9.5.3).
    - An interval for rare slow calls. If k outlier groups take a share of the time, k is Poisson
      distributed and group length is roughly exponential. The relative uncertainty of the share is
      then ± 1.96 · √(2 / k).

    Args:
        blocks: samples of each block, at least one block.
        tau: autocorrelation time of all samples; computed by default.
    """
    x = np.concatenate(blocks)
    interval = _widen_for_blocks(mean_interval(x, tau), blocks, np.mean)
    return _widen_to(interval, _rare_half_width(x))


def _rare_half_width(x: Samples) -> float:
    """Return the mean's half-width that follows from rare slow calls, in the unit of `x`.

    Consecutive slow outliers count as one group. It is 0 without slow outliers.
    """
    median = float(np.median(x))
    slow = np.asarray([index for index in outliers(x) if x[index] > median])
    if not slow.size:
        return 0.0
    groups = 1 + int((np.diff(slow) > 1).sum())
    share = float((x[slow] - median).sum()) / x.size  # what the slow calls add to the mean
    return Z95 * math.sqrt(2 / groups) * share


def _widen_for_blocks(
    within: Interval, blocks: Sequence[Samples], center: Callable[..., Any]
) -> Interval:
    """Widen an interval to cover the spread between three or more blocks, weighted by their size.

    Args:
        within: interval that covers variation between samples only.
        center: `np.median` or `np.mean`, applied to each block.
    """
    if within.low is None or within.high is None or len(blocks) < 3:
        return within
    centers = _centers(blocks, center)
    sizes = np.array(list(map(len, blocks)))
    weights = sizes / sizes.sum()
    count = 1 / float((weights**2).sum())  # effective number of equal-sized blocks
    if count < 2:  # nearly all samples are in one block
        return within
    variance = float((weights**2 * (centers - weights @ centers) ** 2).sum()) * count / (count - 1)
    return _widen_to(within, student95(count - 1) * math.sqrt(variance))


def _centers(blocks: Sequence[Samples], center: Callable[..., Any]) -> Samples:
    """Return each block's median or mean, shape (blocks,).

    Equal-sized blocks share a single `center` call: between two timed blocks time is precious, and
    a call for each of many small blocks would take long.
    """
    sizes = np.array([block.size for block in blocks])
    centers = np.empty(len(blocks))
    for size in set(sizes.tolist()):
        has_size = sizes == size
        centers[has_size] = center(
            np.stack([block for block in blocks if block.size == size]), axis=1
        )
    return centers


def _widen_to(interval: Interval, half_width: float) -> Interval:
    """Return an interval that reaches at least `half_width` to both sides of its value.

    If that would include 0, the lower end mirrors the upper end by ratio instead, because times are
    positive. An interval without ends stays without.
    """
    if interval.low is None or interval.high is None:
        return interval
    value = interval.value
    low, high = min(interval.low, value - half_width), max(interval.high, value + half_width)
    if low <= 0 < value:
        low = value**2 / high
    return Interval(value=value, low=low, high=high)


def half_width(samples: ArrayLike, starts: Sequence[int], warmup: int) -> float | None:
    """Return the relative half-width of a running series' median, a fraction.

    None if there are too few samples for an interval. See `split` for the arguments.
    """
    blocks = split(samples, starts, warmup)
    if not blocks:
        return None
    return block_median(blocks).relative_half_width


def summarise(
    blocks: Sequence[ArrayLike], percentiles: Sequence[float] = (50.0, 95.0, 99.0)
) -> Summary:
    """Return all statistics for the samples after the warm-up, in their unit.

    Args:
        blocks: samples of each block in time order, as from `split`, n ≥ 1 in total.
        percentiles: numbers of the percentiles, between 0 and 100.

    Raises:
        ValueError: there are no samples.
    """
    parts = [np.asarray(block, dtype=np.float64) for block in blocks]
    if not parts or not any(part.size for part in parts):
        raise ValueError("no samples")
    x = np.concatenate(parts)
    tau = autocorrelation_time(x)
    return Summary(
        n=x.size,
        tau=tau,
        median=block_median(parts, tau),
        mean=block_mean(parts, tau),
        std=float(x.std(ddof=1)) if x.size > 1 else None,
        minimum=float(x.min()),
        maximum=float(x.max()),
        percentiles={float(p): percentile_interval(x, p, tau) for p in percentiles},
        outliers=outliers(x),
        drift=drift(x),
    )
