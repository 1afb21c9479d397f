"""Trials: times, shares and means against formulas that the tests compute themselves."""

import math
import statistics

import numpy as np
import pytest

from perfexp.statistics import estimators

ACCURACIES = [0.9391, 0.9402, 0.9388, 0.9410, 0.9405, 0.9413, 0.9399, 0.9407]


def student_cdf(t, degrees):
    """Student's distribution, by Simpson's rule from 0 with the density's formula."""
    x = np.linspace(0, t, 20_001)
    gammas = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    density = math.exp(gammas) / math.sqrt(degrees * math.pi)
    y = density * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    return 0.5 + (y[0] + 4 * y[1::2].sum() + 2 * y[2:-1:2].sum() + y[-1]) * (x[1] - x[0]) / 3


def at_most(successes, number, share):
    """Binomial probability of at most so many successes."""
    terms = (
        math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(successes + 1)
    )
    return sum(terms)


def test_mean_and_p_value_follow_students_distribution():
    found, number = estimators.mean_of_shares(ACCURACIES), len(ACCURACIES)
    error = statistics.stdev(ACCURACIES) / math.sqrt(number)
    assert found.value == pytest.approx(statistics.fmean(ACCURACIES))
    for end in (found.low, found.high):
        assert student_cdf(abs(end - found.value) / error, number - 1) == pytest.approx(0.975)
    for target in (0.94, 0.939, 0.9415):
        t = (found.value - target) / error
        assert estimators.p_above(ACCURACIES, target) == pytest.approx(
            1 - student_cdf(t, number - 1)
        )


def test_p_value_is_uniform_when_the_target_is_the_mean():
    rng = np.random.default_rng(0)
    draws = 0.94 + 0.0014 * rng.standard_normal((2000, 20))
    p_values = [estimators.p_above(list(map(float, values)), 0.94) for values in draws]
    assert np.mean(np.array(p_values) < 0.01) == pytest.approx(0.01, abs=0.006)
    assert np.mean(np.array(p_values) < 0.5) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("values", [[0.94], [0.1, 0.1, 0.1]])
def test_values_that_do_not_vary_have_no_p_value(values):
    assert estimators.p_above(values, 0.05) is None
    assert estimators.mean_of_shares(values).value == pytest.approx(values[0])


@pytest.mark.parametrize(("successes", "number"), [(0, 20), (13, 20), (20, 20), (1, 2), (0, 1)])
def test_share_has_the_exact_binomial_interval(successes, number):
    found = estimators.share_interval(successes, number)
    assert found.value == successes / number
    if successes:
        assert 1 - at_most(successes - 1, number, found.low) == pytest.approx(0.025)
    else:
        assert found.low == 0.0
    if successes < number:
        assert at_most(successes, number, found.high) == pytest.approx(0.025)
    else:
        assert found.high == 1.0


def test_median_time_has_the_ends_of_order_statistics():
    found = estimators.median_of_trials([float(number) for number in range(20, 0, -1)], 20)
    assert (found.value, found.low, found.high) == (10.5, 6.0, 15.0)
    assert 1 - 2 * at_most(5, 20, 0.5) >= 0.95 > 1 - 2 * at_most(6, 20, 0.5)


@pytest.mark.parametrize(
    ("reached", "number", "expected"),
    [
        (15, 20, (10.5, 6.0, 15.0)),
        (14, 20, (10.5, None, None)),
        (10, 20, None),
        (0, 3, None),
        (2, 3, (2.0, None, None)),
        (4, 7, (4.0, None, None)),
        (5, 5, (3.0, None, None)),
        (6, 6, (3.5, 1.0, 6.0)),
    ],
)
def test_trials_that_fail_count_as_infinitely_long(reached, number, expected):
    found = estimators.median_of_trials([float(place) for place in range(1, reached + 1)], number)
    assert (found and (found.value, found.low, found.high)) == expected


def test_median_interval_covers_the_truth_with_failures():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        times = rng.lognormal(size=20)
        found = estimators.median_of_trials(times[times < 2.5].tolist(), 20)
        covered += found is None or found.low is None or found.low <= 1.0 <= found.high
    assert 0.95 <= covered / 2000 <= 0.975


def test_intervals_of_shares_end_at_0_and_1():
    few = estimators.mean_of_shares([0.8, 0.95, 1.0])
    assert few.low < few.value < few.high == 1.0
    assert estimators.mean_of_shares([0.0, 0.2]).low == 0.0
    damaged = estimators.mean_of_shares([-0.5, -0.3])
    assert damaged.low <= damaged.value <= damaged.high
