"""Windows from tick to tick, on a clock that the test drives: what is aligned is exact, what is not is off."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfexp.meters.track import Track
from perfexp.meters.watch import Rules, Watch
from tests.meters.clock import Clock
from tests.support.scripted_meter import FakeMeter, Polyline, steady


def watched(curve, *, rules=None, tick_seconds=None, **script):
    """One window at rest, and the track that it was taken from."""
    clock = Clock()
    track = Track(FakeMeter(clock.now, curve, spend=clock.go_on, **script), clock.now, tick_seconds)
    [window] = Watch([track], clock.now, rules or Rules()).run(clock.go_on)
    return window, track


#: Between two readings where a tick is expected; each end of the window is known to half of it.
STEP = 0.0005
IN_STEP = Rules(tight_seconds=STEP)


@pytest.mark.parametrize("phase_seconds", [0.0, 0.025, 0.05])
def test_a_window_that_is_aligned_to_the_ticks_is_exact(phase_seconds):
    window, _ = watched(steady(300.0), rules=IN_STEP, phase_seconds=phase_seconds, tick_seconds=0.1)
    assert window.counter_watts.value == pytest.approx(300.0, rel=STEP)
    assert window.seconds == pytest.approx(1.0, rel=STEP)


def test_a_window_that_is_not_aligned_is_off_by_up_to_a_tick():
    """What two readings around 250 ms make of the same meter, whose counter changes every 100 ms."""
    clock = Clock()
    meter = FakeMeter(clock.now, steady(300.0))
    errors = []
    for start in np.arange(1.0, 1.1, 0.01):
        clock.seconds = start
        before = meter.energy_joules().value
        clock.seconds = start + 0.25
        errors.append((meter.energy_joules().value - before) / 0.25 / 300.0 - 1)
    assert max(errors) == pytest.approx(0.2)  # three ticks fell into 250 ms
    assert min(errors) == pytest.approx(-0.2)  # or two
    aligned, _ = watched(steady(300.0), rules=IN_STEP, tick_seconds=0.1)
    assert abs(aligned.counter_watts.value / 300.0 - 1) < STEP < min(map(abs, errors))


def test_on_a_ramp_the_mean_is_that_of_the_window():
    """From 100 W upwards by 50 W a second: the mean is the power in the middle of the window."""
    window, _ = watched(Polyline([(0.0, 100.0), (20.0, 1100.0)]), rules=IN_STEP, tick_seconds=0.1)
    middle = window.edges[0] + window.seconds / 2
    assert window.counter_watts.value == pytest.approx(100.0 + 50.0 * middle, rel=1e-3)
    assert window.integral_watts.value == pytest.approx(100.0 + 50.0 * middle, rel=1e-6)
    assert abs(window.difference) < 1e-3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tick_seconds=st.floats(1e-3, 0.3),
    phase_seconds=st.floats(0.0, 0.3),
    query_seconds=st.floats(0.0, 4e-3),
    knows=st.booleans(),
)
def test_error_is_within_the_uncertainty_for_any_counter_period(
    tick_seconds, phase_seconds, query_seconds, knows
):
    script = {"phase_seconds": phase_seconds, "query_seconds": query_seconds, "tells_tick": knows}
    clock = Clock()
    meter = FakeMeter(
        clock.now, steady(300.0), spend=clock.go_on, tick_seconds=tick_seconds, **script
    )
    track = Track(meter, clock.now)
    [window] = Watch([track], clock.now, Rules()).run(clock.go_on)
    assert abs(window.counter_watts.value / 300.0 - 1) <= 6**0.5 * window.uncertainty + 1e-9
    assert window.uncertainty <= Rules().uncertainty
    assert window.seconds >= 1.0 - 0.01


def test_the_period_of_the_counter_is_found():
    _, track = watched(steady(300.0), tick_seconds=None, query_seconds=1e-3)
    assert track.meter.tick_seconds is None, "the meter does not tell it"
    assert track.tick_seconds == pytest.approx(0.1, rel=0.01)


def test_window_reads_counter_at_ticks_and_power_ten_times():
    """Each question takes some of the host's time, of which calls may need every bit."""
    window, track = watched(steady(300.0), tick_seconds=0.1, query_seconds=1e-3)
    end = window.edges[-1]
    readings = np.array(
        [seconds for seconds, _ in track.readings if window.edges[0] + 0.01 < seconds < end + 0.01]
    )
    ahead = (
        np.array(window.edges)[np.searchsorted(np.array(window.edges) + 0.001, readings)] - readings
    )
    assert -0.001 <= ahead.min() < ahead.max() < 0.02
    assert sum(np.diff(readings) > 0.002) == 2, (
        "a pause in each window but the first, which began before"
    )
    powers = [seconds for seconds, _ in track.powers if window.edges[0] < seconds < end]
    assert 8 <= len(powers) <= 11
    assert window.integral_watts.value == pytest.approx(300.0)


@pytest.mark.parametrize("tells_tick", [True, False])
def test_slow_counter_gets_enough_time_if_it_reports_its_tick(tells_tick):
    """Two seconds from tick to tick; the rules take a second without one for standing still."""
    clock = Clock()
    meter = FakeMeter(
        clock.now, steady(300.0), tick_seconds=2.0, phase_seconds=0.7, tells_tick=tells_tick
    )
    track = Track(meter, clock.now)
    [window] = Watch([track], clock.now).run(clock.go_on)
    if tells_tick:
        assert window.counter_watts.value == pytest.approx(300.0, rel=0.003)
    else:
        assert [doubt.code for doubt in track.doubts] == ["meter_fault"]
        assert window.counter_watts.value is None
        assert window.integral_watts.value == pytest.approx(300.0)


@pytest.mark.parametrize("slow_seconds", [0.3, 0.6])
def test_one_slow_answer_does_not_spoil_the_window(slow_seconds):
    """Neither is the counter read tightly from then on, nor is the power forgotten."""
    clock, left = Clock(), iter([slow_seconds])

    class Once(FakeMeter):
        def energy_joules(self):
            if clock.seconds > 0.5:
                clock.go_on(next(left, 0.0))
            return super().energy_joules()

    track = Track(
        Once(clock.now, steady(300.0), spend=clock.go_on, query_seconds=1e-3), clock.now, 0.1
    )
    [window] = Watch([track], clock.now).run(clock.go_on)
    assert window.counter_watts.value == pytest.approx(300.0, rel=0.01)
    assert window.integral_watts.value == pytest.approx(300.0)
    inside = [seconds for seconds, _ in track.readings if seconds > window.edges[0]]
    assert len(inside) < 300
