"""Distributions: the points and probabilities that intervals are made of."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: Two-sided error probability of every interval.
ALPHA = 0.05
#: The normal distribution's two-sided 95 % point, rounded as it is used.
Z95 = 1.96


def student95(degrees: float) -> float:
    """The two-sided 95 % point of Student's distribution, to about ten digits.

    Newton's method on P(|T| > t) = I_x(ν/2, 1/2) with x = ν / (ν + t²): in the tail this falls and bends upwards, so
    that the iteration from below, which the normal distribution's point is, never leaps past the solution.
    Source: Abramowitz and Stegun, 26.5.27 and 26.7.1.

    Args:
        degrees: of freedom ν > 0, a whole number or not.
    """
    t = Z95
    log_factor = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    for _ in range(100):
        beyond = _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t), t * t / (degrees + t * t))
        density = math.exp(log_factor - (degrees + 1) / 2 * math.log1p(t * t / degrees))
        step = (beyond - ALPHA) / (2 * density)
        t += step
        if abs(step) <= 1e-10 * t:
            break
    return t


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function I_x(a, b); `rest` is 1 - x, which would lose its digits if subtracted.

    By the continued fraction of Abramowitz and Stegun, 26.5.8, evaluated by Lentz's method (Numerical Recipes, 6.4).
    """
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, rest, x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            d = 1.0 / (1.0 + coefficient * d)
            c = 1.0 + coefficient / c
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return math.exp(front) * fraction / a


def binomial_pmf(n: int, q: float) -> NDArray[np.float64]:
    """Probabilities of 0 … n successes in n trials, shape (n + 1,).

    Args:
        n: trials.
        q: probability of a success in one, between 0 and 1, both excluded.
    """
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    k = np.arange(n + 1)
    pmf: NDArray[np.float64] = np.exp(logs[n] - logs[k] - logs[n - k] + k * math.log(q) + (n - k) * math.log1p(-q))
    return pmf
