"""Distribution quantiles for confidence intervals, computed by scipy.

scipy is imported where it is used: that takes 0.2 s, which `perfexp --help` and a cold start do not
need.
"""

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
    """Return the value that a Student's t variable stays below with this probability.

    Args:
        degrees: degrees of freedom ν > 0.
        probability: between 0 and 1, for example 0.975 for a two-sided 95 % interval.
    """
    from scipy import special

    return float(special.stdtrit(degrees, probability))


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
    """Import scipy now: the worker must not do that between two timed blocks."""
    from scipy import special  # noqa: F401
