"""Fits over sizes against curves of known truth; seeds are fixed, so that every run sees the same numbers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfexp.statistics import scaling


def megapixels(count=10, smallest=224, largest=512):
    return np.round(np.linspace(smallest, largest, count)) ** 2 / 1e6


def law(x, a=0.3, c=1.0):
    """1 at the largest size."""
    return a + (1 - a) * (x / x.max()) ** c


def corner(x, share):
    """Constant, then proportional: the device's work overtakes the host's at this share of the range of sizes."""
    return np.maximum(1.0, x / (x.min() * (x.max() / x.min()) ** share))


def fit(x, y, error=0.005):
    return scaling.fit_scaling(x, y, np.full(x.size, error))


@pytest.mark.parametrize("c", [0.5, 1.0, 1.03, 2.0])
@pytest.mark.parametrize("a", [0.0, 0.001])
def test_an_exact_law_is_found(a, c):
    x = megapixels()
    found = fit(x, a + 0.0141 * x**c)
    assert found.exponent.value == pytest.approx(c, abs=1e-6)
    assert found.exponent.low <= c <= found.exponent.high
    assert found.exponent.high - found.exponent.low <= 0.02
    assert (found.a, found.b) == (pytest.approx(a, abs=1e-8), pytest.approx(0.0141))
    assert found.at(1.0) == pytest.approx(a + 0.0141)
    assert not found.overlapped
    assert not found.far


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "largest", "a", "c", "noise"),
    [
        (4, 512, 0.3, 1, 0.01),
        (6, 512, 0.3, 1, 0.01),
        (10, 512, 0, 1, 0.02),
        (10, 1024, 0.3, 0.8, 0.02),
    ],
)
def test_the_interval_of_the_exponent_covers_the_truth(count, largest, a, c, noise):
    rng, x, covered = (
        np.random.default_rng(19),
        megapixels(count, 224 if largest == 512 else 64, largest),
        0,
    )
    for _ in range(200):
        found = fit(x, law(x, a, c) * np.exp(noise * rng.standard_normal(count)))
        covered += found.exponent is None or found.exponent.low <= c <= found.exponent.high
        assert not found.far
    assert covered / 200 >= 0.90


def test_a_size_that_is_known_exactly_does_not_decide_alone():
    """Times scatter around the law by 12 %; one of ten is known to 1 %, the others to 8 %."""
    random = np.random.default_rng(1)
    sizes, errors = np.linspace(0.1, 0.5, 10) ** 2, np.full(10, 0.08)
    errors[4] = 0.011
    laws = (3 + 70 * sizes**1.2) * np.exp(0.12 * random.standard_normal((100, 10)))
    found = [
        fit.exponent
        for times in laws
        if (fit := scaling.fit_scaling(sizes, times, errors)).exponent
    ]
    assert np.mean([each.low <= 1.2 <= each.high for each in found]) > 0.9
    assert np.mean([each.high - each.low > 2.9 for each in found]) < 0.5, (
        "the whole range says nothing"
    )


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_flat_curve_has_no_exponent(noise):
    rng, x = np.random.default_rng(20), megapixels()
    for _ in range(20):
        found = fit(x, 0.001 * np.exp(noise * rng.standard_normal(x.size)))
        assert found.exponent is None
        assert (found.b, found.far) == (0.0, ())
        assert found.at(x[0]) == found.a == pytest.approx(0.001, rel=0.02)


def test_a_staircase_of_tiles_is_no_reason_for_doubt():
    rng = np.random.default_rng(21)
    for count in (6, 8, 10, 20):
        x = megapixels(count)
        found = [fit(x, law(x) * (1 + rng.uniform(-0.05, 0.05, count))) for _ in range(50)]
        assert sum(bool(each.far) for each in found) <= 1
        if count >= 10:
            assert np.median([each.exponent.value for each in found]) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("count", [8, 10, 30])
@pytest.mark.parametrize("smallest", [64, 224])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_time_flat_until_the_device_is_busy_is_not_flagged(count, smallest, share):
    rng, x = (
        np.random.default_rng(22),
        megapixels(count, smallest, 512 if smallest == 224 else 1024),
    )
    found = [
        fit(x, corner(x, share) * np.exp(0.01 * rng.standard_normal(count))) for _ in range(20)
    ]
    assert sum(bool(each.far) for each in found) <= 2
    assert smallest == 224 or all(each.overlapped for each in found)


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("factor", [1.5, 0.6])
def test_one_point_off_the_curve_is_far_and_no_other(index, factor):
    x = megapixels()
    y = law(x) * np.exp(0.01 * np.random.default_rng(index).standard_normal(10))
    y[index] *= factor
    found = fit(x, y)
    assert found.far == (index,)
    assert found.deviations[index] == pytest.approx(factor - 1, abs=0.12)
    assert found.exponent.low <= 1 <= found.exponent.high


def test_point_within_its_own_wide_interval_is_not_far():
    x = megapixels()
    y = law(x)
    y[4] *= 1.3
    error = np.full(10, 0.005)
    assert scaling.fit_scaling(x, y, error).far == (4,)
    error[4] = 0.2
    assert scaling.fit_scaling(x, y, error).far == ()


def test_two_points_off_the_curve_are_far_and_no_other():
    x = megapixels(12)
    y = law(x) * np.exp(0.01 * np.random.default_rng(0).standard_normal(12))
    y[[3, 8]] *= (1.5, 1.4)
    assert fit(x, y).far == (3, 8)


def test_outliers_need_six_sizes_and_fits_need_four():
    x = megapixels(5)
    assert fit(x, law(x)).tolerance == math.inf
    with pytest.raises(ValueError, match="3 sizes are too few"):
        fit(np.array([1.0, 2.0, 3.0, 3.0]), np.ones(4))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e2)),
        min_size=4,
        max_size=30,
        unique_by=lambda p: p[0],
    )
)
def test_every_fit_over_sizes_is_finite_and_within_its_bounds(points):
    x, y = np.array([side**2 / 1e6 for side, _ in points]), np.array([time for _, time in points])
    found = fit(x, y)
    assert found.a >= 0
    assert found.b >= 0
    assert all(0 < found.at(each) < math.inf for each in x)
    if found.exponent:
        assert 0 <= found.exponent.low <= found.exponent.value <= found.exponent.high <= 3
    for each, time, deviation in zip(x, y, found.deviations, strict=True):
        assert found.at(each) * (1 + deviation) == pytest.approx(time)
