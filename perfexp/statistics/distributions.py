"""Distribution quantiles for confidence intervals, computed by scipy."""

from __future__ import annotations

import math
from functools import lru_cache

#: Two-sided error probability of every interval.
ALPHA = 0.05
#: Probability that a recommended number of processes reaches a verdict.
POWER = 0.8
#: Two-sided 95 % point of the normal distribution, rounded to two decimals as usual.
Z95 = 1.96


@lru_cache(maxsize=1000)  # called for every block, mostly with the same few numbers
def student95(degrees: float) -> float:
    """Return the two-sided 95 % point of Student's t distribution.

    Args:
        degrees: degrees of freedom ν > 0, not necessarily an integer.
    """
    return student(degrees, 1 - ALPHA / 2)


def student(degrees: float, probability: float) -> float:
    """Return a quantile of Student's t distribution."""
    # imported here: it takes 0.2 s, which `perfexp --help` and a cold start do not need
    from scipy import special

    return float(special.stdtrit(degrees, probability))


def half_normal(probability: float) -> float:
    """Return a quantile of a standard normal variable's absolute value."""
    from scipy import special

    return float(special.ndtri((1 + probability) / 2))


def binomial_quantile(probability: float, trials: int, q: float) -> int:
    """Return the smallest k such that P(successes ≤ k) reaches `probability`.

    Args:
        probability: cumulative probability to reach, between 0 and 1.
        trials: number of independent trials.
        q: success probability of each trial, between 0 and 1, both excluded.
    """
    from scipy import special

    return max(0, math.ceil(float(special.bdtrik(probability, trials, q))))


def preload() -> None:
    """Import scipy now, so that its import never falls between two timed blocks."""
    from scipy import special  # noqa: F401
