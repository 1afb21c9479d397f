"""Quantiles of the distributions that confidence intervals are built from, by scipy."""

from __future__ import annotations

import math
from functools import lru_cache

#: Two-sided error probability of every interval.
ALPHA = 0.05
#: Probability with which a number of processes that is named as sufficient decides.
POWER = 0.8
#: Two-sided 95 % point of the normal distribution, rounded to the usual two decimals.
Z95 = 1.96


@lru_cache(maxsize=1000)  # every block of every point needs it, mostly for the same few numbers
def student95(degrees: float) -> float:
    """Return the two-sided 95 % point of Student's t distribution.

    Args:
        degrees: degrees of freedom ν > 0, not necessarily an integer.
    """
    return student(degrees, 1 - ALPHA / 2)


def student(degrees: float, probability: float) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy import (
        special,
    )  # a fifth of a second that `perfexp --help` and a cold start do without

    return float(special.stdtrit(degrees, probability))


def half_normal(probability: float) -> float:
    """Return a quantile of the absolute value of a standard normal variable."""
    from scipy import special

    return float(special.ndtri((1 + probability) / 2))


def binomial_quantile(probability: float, trials: int, q: float) -> int:
    """Return the smallest k for which at most k successes have at least this probability.

    Args:
        probability: cumulative probability to reach, between 0 and 1.
        trials: number of independent trials.
        q: probability of success in each trial, between 0 and 1, both excluded.
    """
    from scipy import special

    return max(0, math.ceil(float(special.bdtrik(probability, trials, q))))


def preload() -> None:
    """Import scipy now, so that its import never falls between two timed blocks."""
    from scipy import special  # noqa: F401
