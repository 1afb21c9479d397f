"""Quantiles of distributions, against published tables and sums."""

import itertools
import math

import numpy as np
import pytest

from perfexp.statistics.distributions import binomial_quantile, student95


@pytest.mark.parametrize(
    ("degrees", "student"),
    [
        (1, 12.706205),
        (2, 4.302653),
        (3, 3.182446),
        (4, 2.776445),
        (5, 2.570582),
        (6, 2.446912),
        (7, 2.364624),
        (8, 2.306004),
        (9, 2.262157),
        (30, 2.042272),
        (120, 1.979930),
        (1e6, 1.959966),
    ],
)
def test_students_95_percent_point_is_that_of_the_tables(degrees, student):
    assert student95(degrees) == pytest.approx(student, rel=5e-7)


def integral(function, low, high, steps=200_000):
    edges = np.linspace(low, high, steps + 1)
    return function((edges[1:] + edges[:-1]) / 2).sum() * (high - low) / steps


@pytest.mark.parametrize("degrees", [1, 1.5, 2.7, 9.37, 100.5])
def test_student_quantile_leaves_5_percent_for_any_degrees(
    degrees,
):
    def density(angle):  # of arctan(T / √ν), up to a factor
        return np.cos(angle) ** (degrees - 1)

    beyond = integral(density, np.arctan(student95(degrees) / np.sqrt(degrees)), np.pi / 2)
    assert beyond / integral(density, 0, np.pi / 2) == pytest.approx(0.05, rel=1e-5)


@pytest.mark.parametrize(("n", "q"), [(2, 0.5), (20, 0.5), (72, 0.95), (73, 0.05), (1000, 0.99)])
@pytest.mark.parametrize("probability", [0.025, 0.5, 0.975])
def test_binomial_quantiles_are_those_of_counting(n, q, probability):
    counted = itertools.accumulate(
        math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)
    )
    assert binomial_quantile(probability, n, q) == sum(
        cumulative < probability for cumulative in counted
    )


@pytest.mark.parametrize(("n", "critical"), [(6, 0), (20, 5), (30, 9), (50, 17), (100, 39)])
def test_binomial_quantiles_match_sign_test_tables(n, critical):
    """Tables print the largest number of signs that rejects at a two-sided level of 5 %."""
    low, high = (binomial_quantile(probability, n, 0.5) for probability in (0.025, 0.975))
    assert (low, high) == (critical + 1, n - critical - 1)
