"""The scripted meter does what its script says."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.devices.fake import FakeDevice
from perfexp.devices.meters import PowerKind
from tests.support.scripted_meter import FakeMeter, Polyline, steady

points = st.lists(
    st.tuples(st.floats(0.01, 5.0), st.floats(0.0, 1000.0)), min_size=1, max_size=6
)  # how long after the point before, and the watts


@given(points, st.floats(-2.0, 40.0), st.floats(0.0, 1.0))
def test_the_energy_of_a_curve_is_the_integral_of_its_power(steps, start, share):
    times, curve_points = 0.0, []
    for wait, watts in steps:
        times += wait
        curve_points.append((times, watts))
    curve = Polyline(curve_points)
    assert curve.joules(0.0) == pytest.approx(0.0, abs=1e-9)
    edges = sorted(
        {start, start + 3.0, *(at for at, _ in curve_points if start < at < start + 3.0)}
    )
    truth = sum((b - a) * (curve.watts(a) + curve.watts(b)) / 2 for a, b in pairwise(edges))
    assert curve.joules(start + 3.0) - curve.joules(start) == pytest.approx(
        truth, rel=1e-6, abs=1e-6
    )
    assert (
        min(w for _, w in curve_points)
        <= curve.watts(start + share)
        <= max(w for _, w in curve_points)
    )


def test_the_counter_stands_still_between_its_ticks():
    seconds = [0.0]
    meter = FakeMeter(lambda: seconds[0], steady(300.0), tick_seconds=0.1, phase_seconds=0.03)
    seen = []
    for seconds[0] in (1.02, 1.04, 1.12, 1.14):
        seen.append(meter.energy_joules().value)
    assert seen == pytest.approx([300.0 * 0.93, 300.0 * 1.03, 300.0 * 1.03, 300.0 * 1.13])


def test_a_query_takes_its_time_and_answers_for_its_middle():
    device = FakeDevice()
    meter = FakeMeter(
        lambda: device.now_ns() * 1e-9,
        Polyline([(0.0, 0.0), (1.0, 1000.0)]),
        spend=partial(device.launch, 0.0),
        query_seconds=4e-3,
    )
    assert meter.power_watts().value == pytest.approx(2.0)
    assert device.now_ns() == 4_000_000


def test_what_it_is_told_not_to_have_it_does_not_have():
    meter = FakeMeter(lambda: 0.0, steady(1.0), has_counter=False, power_kind=PowerKind.absent)
    assert (meter.energy_joules().value, meter.power_watts().value) == (None, None)
    assert meter.energy_joules().reason
    assert meter.power_watts().reason
