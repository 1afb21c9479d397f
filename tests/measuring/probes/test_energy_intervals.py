"""Intervals of the energy: planted powers whose noise, drift and pace are known, on scripted meters."""

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from perfexp.devices.fake import FakeDevice
from perfexp.devices.meters import Reading
from perfexp.devices.meters.energy_metrics import Power, above, midway, product, total
from perfexp.devices.meters.track import Track
from perfexp.devices.meters.watch import Rules, Watch
from perfexp.statistics.estimators import windows_half_width
from tests.devices.meters.clock import Clock
from tests.measuring.probes.test_energy import (
    Load,
    Logged,
    codes,
    launching,
    meter_of,
    now_of,
    procedure,
    values,
)
from tests.support.scripted_meter import FakeMeter, Polyline, steady

SIMULATIONS = 300


def noisy(seed, watts, sigma, *, step_seconds=0.02, seconds=16.0):
    """A power that takes a new, normally distributed value every few milliseconds."""
    powers = np.random.default_rng(seed).normal(watts, sigma, int(seconds / step_seconds))
    return Polyline([(step_seconds * index, float(each)) for index, each in enumerate(powers)])


def power_of(curve, *, rules=None, **script):
    """The power that is found at rest, and its windows."""
    clock = Clock()
    track = Track(FakeMeter(clock.now, curve, spend=clock.go_on, **script), clock.now)
    power = Power(Watch([track], clock.now, rules or Rules()).run(clock.go_on), [track])
    return power, power.windows[0]


def metric(energy, name):
    return next(each for each in energy.metrics if each.name == f"energy/{name}")


def holds(metric, truth):
    return metric.low <= truth <= metric.high


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tick_seconds", [0.02, 0.05, 0.1, 0.11])
def test_three_windows_of_three_ticks_take_no_longer_than_one(tick_seconds):
    _, windows = power_of(steady(300.0), tick_seconds=tick_seconds, query_seconds=1e-3)
    assert len(windows.watts) == 3
    assert min(np.diff(windows.edges)) >= 2.9 * tick_seconds
    assert 1.0 - 0.01 <= windows.seconds <= 1.0 + tick_seconds + 0.01


def test_a_slow_counter_takes_the_ticks_that_it_needs():
    _, windows = power_of(steady(300.0), tick_seconds=0.3, tells_tick=True)
    assert np.diff(windows.edges) == pytest.approx([0.9] * 3, abs=0.01)


def test_slow_counter_has_one_tick_in_each_window():
    _, windows = power_of(steady(300.0), tick_seconds=2.0, tells_tick=True)
    assert np.diff(windows.edges) == pytest.approx([2.0] * 3, abs=0.01)


def test_without_a_counter_windows_are_integrals_of_the_power():
    power, windows = power_of(noisy(1, 300.0, 15.0), has_counter=False)
    assert len(windows.watts) == 3
    assert np.diff(windows.edges) == pytest.approx([1 / 3] * 3, abs=0.05)
    assert power.mean_watts.half_width > 0
    assert np.average(windows.watts, weights=np.diff(windows.edges)) == pytest.approx(
        power.mean_watts.value, rel=1e-9
    )


def test_the_interval_is_that_of_student_where_windows_are_equal():
    values = [301.0, 296.0, 305.0, 299.0]
    interval = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert windows_half_width(values, [0.3] * 4) == pytest.approx((interval[1] - interval[0]) / 2)
    assert windows_half_width(values[:1], [0.3]) is None


def test_interval_includes_the_uncertainty_of_the_window_ends():
    """A steady power, and ticks that all are seen equally late: only the ends are uncertain."""
    power, windows = power_of(steady(300.0), query_seconds=1e-3)
    assert (
        power.mean_watts.half_width >= 1.96 * windows.uncertainty * power.mean_watts.value * 0.999
    )


# --- coverage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [6.0, 60.0])
@pytest.mark.parametrize(
    "script", [{"query_seconds": 1e-3, "tells_tick": True}, {"has_counter": False}]
)
@pytest.mark.slow
def test_the_interval_of_the_power_holds_the_truth(sigma, script):
    held = []
    for seed in range(SIMULATIONS):
        watts = power_of(noisy(seed, 300.0, sigma), **script)[0].mean_watts
        held.append(abs(watts.value - 300.0) <= watts.half_width)
    assert sum(held) >= 0.9 * SIMULATIONS


def small(seed, *, rules=None):
    """A small model on a host whose pace fluctuates, measured with a noisy power."""
    device, rng = FakeDevice(enqueue_seconds=0.0), np.random.default_rng(seed)
    pauses = iter(rng.gamma(4.0, 1e-3, 100_000))  # 4 ms on average, by ± 50 %

    def call():
        device.launch(1e-3, host_seconds=next(pauses))

    meter = meter_of(device, noisy(seed, 150.0, 20.0), query_seconds=1e-3, tells_tick=True)
    measuring = procedure(device, meter, rules=rules)
    return measuring.measure(call, images_per_call=1)


@pytest.mark.slow
def test_energy_interval_covers_fluctuating_power_and_pace():
    energies = [small(seed, rules=Rules(plateau_seconds=0.1)) for seed in range(SIMULATIONS)]
    for name, truth in (
        ("per_call_joules", 0.6),
        ("call_seconds", 4e-3),
        ("power_mean_watts", 150.0),
    ):
        held = sum(holds(metric(energy, name), truth) for energy in energies)
        assert held >= 0.9 * SIMULATIONS, name


def test_five_repetitions_agree_within_their_intervals():
    found = [metric(small(seed), "per_call_joules") for seed in range(5)]
    assert max(each.low for each in found) <= min(each.high for each in found)


# --- longer where needed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rules", "is_checked"), [(None, True), (Rules(most_seconds=0.0), False)])
def test_varying_power_is_watched_until_it_checks_the_counter(rules, is_checked):
    device = FakeDevice(enqueue_seconds=10e-6)
    measuring = procedure(
        device, meter_of(device, noisy(3, 150.0, 25.0, seconds=30.0)), rules=rules
    )
    measuring.idle()
    energy = measuring.measure(launching(device, 1e-3), images_per_call=1)
    assert (codes(energy) == []) is is_checked
    assert ("meter_limited" in codes(energy)) is not is_checked
    assert (1.2 < values(energy)["window_seconds"] < 10.0) is is_checked
    assert (len(energy.facts["meters"][0]["window_watts"]) > 3) is is_checked


def test_counter_that_never_agrees_is_abandoned_after_two_limits():
    device = FakeDevice(enqueue_seconds=10e-6)
    measuring = procedure(device, meter_of(device, steady(300.0), gain=1.2))
    energies = [measuring.measure(launching(device, 1e-3), images_per_call=1) for _ in range(3)]
    windows = [values(energy)["window_seconds"] for energy in energies]
    assert windows == [
        pytest.approx(10.0, abs=0.5),
        pytest.approx(10.0, abs=0.5),
        pytest.approx(1.0, abs=0.05),
    ]
    for energy in energies:
        assert values(energy)["per_call_joules"] is None
        assert codes(energy) == ["meter_fault"]


# --- idle power ----------------------------------------------------------------------------------------------------


def test_rising_idle_power_is_covered_before_and_after():
    device = Logged(enqueue_seconds=10e-6)
    load = Load(device, 700.0, 100.0)
    heat = Polyline([(0.0, 0.0), (3.0, 0.0), (4.0, 20.0)])

    class Heated:
        def joules(self, seconds):
            return load.joules(seconds) + heat.joules(seconds)

        def watts(self, seconds):
            return load.watts(seconds) + heat.watts(seconds)

    measuring = procedure(device, meter_of(device, Heated(), query_seconds=1e-3))
    measuring.idle()
    plateau = measuring.plateau(launching(device, 1e-3))
    measuring.rest()
    energy = measuring.report(plateau, {"call": Reading(1.0, half_width=0.0)})
    idle = metric(energy, "idle_power_watts")
    assert idle.value == pytest.approx(110.0, rel=0.01)
    assert idle.low < 100.0 < 120.0 < idle.high
    net = metric(energy, "net_per_call_joules")
    assert net.low < 0.6 < 0.62 < net.high
    assert set(energy.facts) == {"meters", "idle", "idle_last"}


def test_a_rest_takes_two_seconds():
    device = Logged(enqueue_seconds=10e-6)
    measuring = procedure(device, meter_of(device, steady(100.0)), rules=Rules(window_seconds=5.0))
    measuring.idle()
    begun = now_of(device)()
    measuring.rest()
    assert now_of(device)() - begun == pytest.approx(2.05, abs=0.1)


def test_an_idle_power_after_calls_serves_for_two_minutes():
    device = Logged(enqueue_seconds=10e-6)
    measuring = procedure(device, meter_of(device, steady(100.0)))
    measuring.idle()
    measuring.rest()
    begun = now_of(device)()
    measuring.rest()
    assert now_of(device)() == pytest.approx(begun, abs=0.01)
    measuring.sleep(121.0)
    begun = now_of(device)()
    measuring.rest()
    assert now_of(device)() - begun > 1.0


def test_intervals_add_up_by_the_rules_of_their_docstrings():
    one, other = Reading(10.0, half_width=0.3), Reading(20.0, half_width=0.8)
    assert product(one, other) == Reading(
        200.0, half_width=pytest.approx(200 * math.hypot(0.03, 0.04))
    )
    assert product(one, Reading(2.0, half_width=0.0)) == Reading(
        20.0, half_width=pytest.approx(0.6)
    )
    assert product(one, Reading(2.0)).half_width is None
    assert above(other, one) == Reading(10.0, half_width=pytest.approx(math.hypot(0.3, 0.8)))
    assert total([one, other]) == Reading(30.0, half_width=pytest.approx(1.1))
    assert total([one, Reading(1.0)]).half_width is None
    assert midway(one, Reading(10.2, half_width=0.4)) == Reading(
        10.1, half_width=pytest.approx(0.25)
    )
    assert midway(one, other) == Reading(15.0, half_width=pytest.approx(5.8))
    assert midway(one, Reading(None, "no")) == one


# --- two paces -----------------------------------------------------------------------------------------------------


def test_both_paces_are_given_as_a_pair():
    device = Logged(enqueue_seconds=3e-3)
    measuring = procedure(device, meter_of(device, Load(device, 700.0, 120.0), query_seconds=1e-3))
    measuring.idle()
    loop = measuring.plateau(launching(device, 1e-3))
    queued = measuring.plateau(partial(device.launch, 1e-3, host_seconds=1e-5))
    energy = measuring.report(loop, {"call": Reading(1.0, half_width=0.0)}, queued=queued)
    found = values(energy)
    assert found["per_call_joules"] == pytest.approx(0.7 + 0.24, rel=0.02)
    assert found["queued_per_call_joules"] == pytest.approx(0.7, rel=0.01)
    assert found["queued_call_seconds"] == pytest.approx(1e-3, rel=1e-3)
    assert holds(metric(energy, "queued_per_call_joules"), 0.7)
    names = [each.name for each in energy.metrics]
    assert names.index("energy/queued_per_call_joules") == names.index("energy/per_call_joules") + 1
    [note] = [doubt for doubt in energy.doubts if doubt.code == "energy_pace"]
    assert note.is_note
    assert "J at 3 ms per call in the loop" in note.message
    assert "J at 1 ms per call as a CUDA graph, which keeps the device busy" in note.message


def test_a_pace_that_was_not_measured_has_a_reason():
    device = FakeDevice(enqueue_seconds=3e-3)
    measuring = procedure(device, meter_of(device, steady(300.0)))
    loop = measuring.plateau(launching(device, 1e-3))
    energy = measuring.report(
        loop, {"call": Reading(1.0, half_width=0.0)}, queued=Reading(None, "calls of several ranks")
    )
    assert metric(energy, "queued_per_call_joules").reason == "calls of several ranks"
    missing = "not measured as a CUDA graph, which keeps the device busy (calls of several ranks)"
    assert missing in energy.doubts[0].message
