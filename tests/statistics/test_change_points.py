"""Change points on simulated series with known truth; validation/change_points.py does it at length."""

import numpy as np

from perfexp.statistics.change_points import segments, shift

NOISE = 0.01


def found(logs):
    """The index of the first value of each segment but the first."""
    return list(np.cumsum([len(part) for part in segments(logs)])[:-1])


def test_steps_of_3_percent_are_found_within_two_values():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(60):
        at = int(rng.integers(10, 91))
        logs = NOISE * rng.standard_normal(100)
        logs[at:] += np.log(1.03)
        hits += any(abs(index - at) <= 2 for index in found(logs))
    assert hits >= 54


def test_series_without_a_change_rarely_have_one():
    rng = np.random.default_rng(1)
    assert sum(len(found(NOISE * rng.standard_normal(100))) for _ in range(60)) <= 2


def test_a_change_that_is_undone_is_two_changes():
    logs = NOISE * np.random.default_rng(2).standard_normal(90)
    logs[40:55] += np.log(1.03)
    assert np.abs(np.array(found(logs)) - [40, 55]).max() <= 2


def test_rounding_is_not_a_change_but_a_small_exact_step_is():
    assert len(segments(np.log(np.full(50, 1.23e9)))) == 1
    assert found(np.log([1.23e9] * 20 + [1.2301e9] * 4)) == [20]


def test_a_series_shorter_than_two_segments_has_no_change():
    for size in range(1, 6):
        assert len(segments(np.arange(size, dtype=float))) == 1


def test_a_shift_is_students_t_of_two_samples():
    before, after = np.array([0.0, 0.1, 0.2]), np.array([0.3, 0.5, 0.4, 0.6])
    one = shift(before, after)
    # pooled variance (2 · 0.01 + 3 · 1/60) / 5 = 0.014
    assert np.isclose(one.value, 0.35)
    assert np.isclose(one.error, np.sqrt(0.014 * (1 / 3 + 1 / 4)))
    assert one.degrees == 5
