"""Variance components: statistics of several processes together, and how calls, blocks and processes differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfexp.statistics.blockwise import Summary, block_mean, block_median
from perfexp.statistics.distributions import POWER, student, student95
from perfexp.statistics.estimators import Interval, Samples, percentile_interval
from perfexp.statistics.moderated import Component, Repeats, around
from perfexp.statistics.prior import Prior


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
    summaries: Sequence[Summary], samples: Sequence[Samples], *, time: Prior | None = None, rate: Prior | None = None
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
    medians = Repeats.of([one.median for one in summaries], time, samples=samples, effective=effective)
    means = Repeats.of([one.mean for one in summaries], rate, samples=samples, effective=effective)
    of_numbers = {
        number: Repeats.of([one.percentiles[number] for one in summaries], time, effective=effective)
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
            int(start) + index for start, one in zip(starts, summaries, strict=False) for index in one.outliers
        ),
        drift=max((one.drift for one in summaries if one.drift), key=lambda drift: abs(drift.relative), default=None),
    )
    return Together(summary=summary, medians=medians, means=means)


def _percentile(together: Interval, processes: Repeats, number: float, median: Interval) -> Interval:
    """Widen the percentile of all samples to the one over processes, up to the interval of the median."""
    if together.low is None or together.high is None:
        return together
    wide = around(together.value, processes.half_width or 0.0)
    low, high = min(together.low, wide.low or 0.0), max(together.high, wide.high or 0.0)
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
