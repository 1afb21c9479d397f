"""What a meter said, as a track remembers it: ticks, wraps, and the integral of the power."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.devices.meters import PowerKind, Reading
from perfexp.devices.meters.track import Tick, Track, uncertainty, windows_between
from tests.support.scripted_meter import FakeMeter, Polyline, steady


class Told:
    """A meter that gives answers one after the other; the clock goes on by a second with each."""

    name, covers, power_kind, tick_seconds = "told", "nothing", PowerKind.instantaneous, None

    def __init__(self, joules=(), watts=(), wrap_joules=None):
        self._joules, self._watts, self.wrap_joules = list(joules), list(watts), wrap_joules
        self.seconds = -1.0

    def now(self):
        return self.seconds

    def energy_joules(self):
        self.seconds += 1.0
        return Reading(self._joules.pop(0))

    def power_watts(self):
        self.seconds += 1.0
        return Reading(self._watts.pop(0))

    def doubts(self):
        return []


@given(st.lists(st.integers(0, 99), min_size=2, max_size=60))
def test_a_counter_that_wraps_is_followed_whatever_it_counts(steps):
    """Joules that are added, modulo a range that is larger than any single step."""
    truth = np.cumsum([0, *steps])
    meter = Told(joules=[float(joules % 100) for joules in truth], wrap_joules=100.0)
    track = Track(meter, meter.now)
    for _ in truth:
        track.read_energy()
    assert [joules for _, joules in track.readings] == pytest.approx(list(truth))
    assert track.wraps == truth[-1] // 100
    assert track.doubts == []


def test_counter_that_falls_without_a_range_is_not_read_again():
    meter = Told(joules=[5.0, 7.0, 1.0, 2.0])
    track = Track(meter, meter.now)
    assert [track.read_energy() for _ in range(4)] == [False, True, False, False]
    assert [doubt.code for doubt in track.doubts] == ["meter_fault"]
    assert "from 7 back to 1 J" in track.doubts[0].message


def test_change_lies_between_the_readings_around_it():
    meter = Told(joules=[5.0, 5.0, 7.0])
    track = Track(meter, meter.now)
    for _ in range(3):
        track.read_energy()
    [tick] = track.ticks
    assert tick == Tick(
        seconds=1.0, width_seconds=1.0, joules=7.0
    )  # asked from 0 to 1 and from 1 to 2


def test_a_change_is_no_older_than_a_period():
    meter = Told(joules=[5.0, 7.0])
    track = Track(meter, meter.now, tick_seconds=0.2)
    for _ in range(2):
        track.read_energy()
    assert track.ticks == [pytest.approx((0.4, 0.2, 7.0))]


@pytest.mark.parametrize(
    ("period", "times", "widths"),
    [
        (0.1, [0, 0.1, 0.2, 0.3, 0.4, 0.5], [1e-3, 0.05, 0.05, 0.06, 0.05, 1e-3]),
        (0.1, [0, 0.0966, 0.1967, 0.4269, 0.6986], [0.0053, 0.0043, 0.0036, 0.3676, 0.0039]),
        (0.1, [0, 0.2577, 0.4999, 0.5999, 0.6999], [5e-4, 0.3499, 5e-4, 5e-4, 5e-4]),
        (
            0.02,
            [0, 0.02, 0.1746, 0.3402, 0.3602, 0.5918],
            [5e-4] * 2 + [0.2947, 5e-4, 5e-4, 0.4477],
        ),
    ],
)
def test_ticks_seen_late_or_not_at_all_leave_the_period_as_it_is(period, times, widths):
    track = Track(Told(), lambda: 0.0)
    track.ticks = [
        Tick(at, width, float(number))
        for number, (at, width) in enumerate(zip(times, widths, strict=True))
    ]
    assert track.tick_seconds == pytest.approx(period, rel=0.01)


@given(st.lists(st.floats(1.0, 1000.0), min_size=7, max_size=40))
def test_the_integral_is_the_trapezoid_rule(watts):
    meter = Told(watts=watts)
    track = Track(meter, meter.now)
    for _ in watts:
        track.read_power()
    truth = sum((a + b) / 2 for a, b in pairwise(watts))
    end = len(watts) - 1.5
    assert track.integral_joules(-0.5, end).value == pytest.approx(truth)


def test_power_integral_spans_the_window_along_straight_lines():
    clock = [0.0]
    curve = Polyline([(0.0, 100.0), (10.0, 300.0)])
    track = Track(FakeMeter(lambda: clock[0], curve), lambda: clock[0])
    for seconds in np.arange(0.0, 4.0, 0.3):
        clock[0] = seconds
        track.read_power()
    assert track.integral_joules(0.55, 3.01).value == pytest.approx(
        curve.joules(3.01) - curve.joules(0.55), rel=1e-9
    )


def test_few_readings_of_the_power_give_no_integral():
    meter = Told(watts=[100.0] * 4)
    track = Track(meter, meter.now)
    for _ in range(4):
        track.read_power()
    assert track.integral_joules(-1.0, 5.0) == Reading(
        None, "4 readings of the power are too few for an integral"
    )


def test_the_uncertainty_is_that_of_two_uniform_distributions():
    ends = Tick(1.0, 0.03, 0.0), Tick(2.0, 0.04, 5.0)
    rng = np.random.default_rng(7)
    lengths = (2.0 + rng.uniform(-0.02, 0.02, 200_000)) - (
        1.0 + rng.uniform(-0.015, 0.015, 200_000)
    )
    assert uncertainty(*ends) == pytest.approx(lengths.std(), rel=0.01)


def test_a_window_without_an_end_says_why():
    track = Track(FakeMeter(lambda: 0.0, steady(1.0)), lambda: 0.0)
    found = windows_between(track, [Tick(0.0, 0.0, 0.0)])
    assert found.counter_watts.value is None
    assert "not watched to the end" in found.counter_watts.reason
    assert found.difference is None
