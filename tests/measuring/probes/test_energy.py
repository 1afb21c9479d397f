"""The energy of calls on a scripted device with scripted meters: power, ticks and cost of queries are known."""

import threading
from bisect import bisect_right
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfexp.devices.cpu import CpuDevice
from perfexp.devices.fake import FakeDevice
from perfexp.devices.meters import DeviceMeters, PowerKind, Reading, combine, none_because
from perfexp.devices.meters.watch import Rules
from perfexp.errors import UserError
from perfexp.measuring.probes import energy as energy_probe
from perfexp.measuring.probes.energy import EnergyProcedure, rules_for
from perfexp.records.record import Key, Point, Status
from perfexp.statistics.estimators import Interval
from tests.support.scripted_meter import FakeMeter, Polyline, Turns, steady


class Logged(FakeDevice):
    """Remembers when it worked."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.began, self.ended, self.worked = [], [], [0.0]

    def launch(self, work_seconds, host_seconds=None):
        end = super().launch(work_seconds, host_seconds)
        if work_seconds:
            self.began.append(end - work_seconds)
            self.ended.append(end)
            self.worked.append(self.worked[-1] + work_seconds)
        return end

    def worked_seconds(self, seconds):
        """For how long it had worked at a time."""
        done = bisect_right(self.ended, seconds)
        under_way = seconds - self.began[done] if done < len(self.began) else 0.0
        return self.worked[done] + max(under_way, 0.0)


class Load:
    """A power that depends on whether the device works."""

    def __init__(self, device, busy_watts, idle_watts):
        self._device, self._busy, self._idle = device, busy_watts, idle_watts

    def joules(self, seconds):
        return self._idle * seconds + (self._busy - self._idle) * self._device.worked_seconds(
            seconds
        )

    def watts(self, seconds):
        """The mean over 25 ms, as a board's sensor tells it."""
        since = max(seconds - 0.025, 0.0)
        return (
            (self.joules(seconds) - self.joules(since)) / (seconds - since)
            if seconds
            else self._idle
        )


def now_of(device):
    return lambda: device.now_ns() * 1e-9


def turns_of(device):
    """What lets this device's time go on, always the same."""
    return vars(device).setdefault("turns", Turns(device))


def meter_of(device, curve, **script):
    return FakeMeter(now_of(device), curve, spend=turns_of(device).spend, **script)


def procedure(device, *meters, rules=None, cache=None, **found):
    found = found.get("found") or DeviceMeters(meters=meters)
    return EnergyProcedure(
        device=device,
        detected=found,
        cache=cache,
        rules=rules or Rules(),
        sleep=partial(device.launch, 0.0),
        beside=turns_of(device),
    )


def launching(device, work_seconds):
    return lambda: device.launch(work_seconds)


def values(energy):
    return {metric.name.removeprefix("energy/"): metric.value for metric in energy.metrics}


def reasons(energy):
    return {
        metric.name.removeprefix("energy/"): metric.reason
        for metric in energy.metrics
        if metric.value is None
    }


def codes(energy):
    return [doubt.code for doubt in energy.doubts]


# --- the power of a plateau ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_seconds", [0.0, 0.5e-3, 4e-3])
@pytest.mark.parametrize("phase_seconds", [0.0, 0.037, 0.0991])
def test_steady_power_is_within_half_a_percent_after_1_second(query_seconds, phase_seconds):
    """The rule's own row: 300 W, a counter that ticks every 100 ms, at most 0.5 % off."""
    device = FakeDevice(enqueue_seconds=10e-6)
    meter = meter_of(
        device, steady(300.0), phase_seconds=phase_seconds, query_seconds=query_seconds
    )
    energy = procedure(device, meter).measure(launching(device, 100e-6), images_per_call=8)
    found = values(energy)
    assert found["power_mean_watts"] == pytest.approx(300.0, rel=0.005)
    assert found["integral_power_watts"] == pytest.approx(300.0, rel=1e-9)
    assert found["integral_difference"] == pytest.approx(
        300.0 / found["power_mean_watts"] - 1, abs=1e-9
    )
    # a tick that is seen late, since calls and slow queries take turns here, makes the windows longer
    assert 0.99 < found["window_seconds"] < (1.01 if query_seconds < 4e-3 else 1.45)
    assert found["call_seconds"] == pytest.approx(100e-6, rel=1e-6)
    assert found["per_call_joules"] == pytest.approx(found["power_mean_watts"] * 100e-6, rel=1e-6)
    assert found["per_image_joules"] == pytest.approx(found["per_call_joules"] / 8, rel=1e-12)
    assert codes(energy) == []


@pytest.mark.slow
@pytest.mark.always("README: energy")
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    watts=st.floats(10.0, 2000.0),
    tick_seconds=st.floats(0.02, 0.12),
    phase_seconds=st.floats(0.0, 0.12),
    query_seconds=st.floats(0.0, 4e-3),
    work_seconds=st.floats(50e-6, 20e-3),
)
def test_the_error_stays_within_what_the_record_says_of_it(
    watts, tick_seconds, phase_seconds, query_seconds, work_seconds
):
    device = FakeDevice(enqueue_seconds=10e-6)
    script = {
        "tick_seconds": tick_seconds,
        "phase_seconds": phase_seconds,
        "query_seconds": query_seconds,
    }
    meter = meter_of(device, steady(watts), **script)
    energy = procedure(device, meter).measure(launching(device, work_seconds), images_per_call=1)
    error = abs(values(energy)["counter_power_watts"] / watts - 1)
    # each end lies within its width: at most √3 standard uncertainties of it, both together at most √6
    assert error <= 6**0.5 * energy.facts["meters"][0]["window_uncertainty"] + 1e-9


@pytest.mark.slow
def test_five_windows_of_a_second_repeat_to_one_percent():
    device = Logged(enqueue_seconds=10e-6)
    meter = meter_of(device, Load(device, 700.0, 120.0), query_seconds=4e-3)
    measuring = procedure(device, meter)
    found = [
        values(measuring.measure(launching(device, 130e-6), images_per_call=1))["per_call_joules"]
        for _ in range(5)
    ]
    assert max(found) / min(found) - 1 < 0.01
    assert found == pytest.approx([700.0 * 130e-6] * 5, rel=0.0075)


def test_stopping_finely_takes_five_seconds():
    device = FakeDevice(enqueue_seconds=10e-6)
    rules = rules_for(target=0.005)
    energy = procedure(device, meter_of(device, steady(300.0)), rules=rules).measure(
        launching(device, 1e-3), images_per_call=1
    )
    assert values(energy)["window_seconds"] == pytest.approx(5.0, abs=0.01)
    assert rules_for(target=0.01).window_seconds == 1.0
    assert rules_for(target=0.005, window_seconds=2.0).window_seconds == 2.0


def test_the_warm_plateau_before_the_window_is_not_in_it():
    """A power that rises for a second after the calls begin, and is steady then."""
    device = FakeDevice(enqueue_seconds=10e-6)
    measuring = procedure(
        device, meter_of(device, Polyline([(0.0, 100.0), (3.0, 100.0), (4.0, 600.0)]))
    )
    measuring.idle()
    partial(device.launch, 0.0)(3.0 - now_of(device)())
    energy = measuring.measure(launching(device, 1e-3), images_per_call=1)
    assert values(energy)["power_mean_watts"] == pytest.approx(600.0, rel=0.003)
    assert values(energy)["idle_power_watts"] == pytest.approx(100.0, rel=0.005)
    assert values(energy)["net_per_call_joules"] == pytest.approx(0.5, rel=0.005)


@pytest.mark.parametrize(
    ("worked_seconds", "plateau_seconds"), [(0.0, 1.2), (0.4, 0.8), (30.0, 0.6)]
)
def test_recent_work_counts_at_most_half_of_the_plateau(worked_seconds, plateau_seconds):
    device = Logged(enqueue_seconds=10e-6)
    measuring = procedure(device, meter_of(device, steady(300.0)))
    measuring.idle()
    measuring.measure(launching(device, 1e-3), images_per_call=1, worked_seconds=worked_seconds)
    taken = device.ended[-1] - device.began[0]
    assert plateau_seconds + 1.0 < taken < plateau_seconds + 1.2  # the window begins at a tick


def test_after_a_rest_for_the_idle_power_the_plateau_is_whole():
    device = Logged(enqueue_seconds=10e-6)
    measuring = procedure(device, meter_of(device, steady(300.0)))
    measuring.measure(launching(device, 1e-3), images_per_call=1, worked_seconds=30.0)
    assert device.ended[-1] - device.began[0] > 2.2


# --- the device meanwhile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enqueue_seconds", "work_seconds"), [(10e-6, 100e-6), (1e-3, 8e-3), (2e-3, 5e-3)]
)
def test_slow_meter_query_does_not_let_the_device_idle(enqueue_seconds, work_seconds):
    device = Logged(enqueue_seconds=enqueue_seconds)
    meter = meter_of(device, Load(device, 700.0, 120.0), query_seconds=4e-3)
    energy = procedure(device, meter).measure(launching(device, work_seconds), images_per_call=1)
    end = device.ended[-1]
    begin = end - 1.0  # within the window, whatever came after it
    assert device.worked_seconds(end) - device.worked_seconds(begin) == pytest.approx(1.0, rel=1e-9)
    assert values(energy)["power_mean_watts"] == pytest.approx(700.0, rel=0.0075)
    assert values(energy)["call_seconds"] == pytest.approx(work_seconds, rel=1e-6)


@pytest.mark.parametrize("query_seconds", [20e-6, 4e-3, 15e-3])
def test_slow_meter_query_does_not_slow_a_host_bound_call(
    query_seconds,
):
    device = Logged(enqueue_seconds=20e-6)
    meter = meter_of(device, Load(device, 700.0, 120.0), query_seconds=query_seconds)
    energy = procedure(device, meter).measure(
        launching(device, 5e-6), images_per_call=1, clean=exactly(20e-6)
    )
    found = values(energy)
    assert found["call_seconds"] == pytest.approx(20e-6, rel=1e-3)
    assert found["per_call_joules"] == pytest.approx(
        (120.0 + (700.0 - 120.0) * 5 / 20) * 20e-6, rel=0.01
    )
    assert found["net_per_call_joules"] == pytest.approx((700.0 - 120.0) * 5e-6, rel=0.02)
    assert "energy_pace" not in codes(energy)


def exactly(seconds, half_width=0.0):
    return Interval(value=seconds, low=seconds * (1 - half_width), high=seconds * (1 + half_width))


@pytest.mark.parametrize(
    ("clean", "told"),
    [
        (exactly(1e-3), False),
        (exactly(1.02e-3), False),
        (exactly(0.9e-3), True),
        (exactly(1.1e-3), True),
        (exactly(0.9e-3, half_width=0.1), False),
        (exactly(0.7e-3, half_width=0.1), True),
        (Interval(value=0.9e-3, low=None, high=None), True),
    ],
)
def test_call_time_unlike_the_clean_time_is_reported(clean, told):
    device = FakeDevice(enqueue_seconds=10e-6)
    measuring = procedure(device, meter_of(device, steady(300.0)))
    energy = measuring.measure(launching(device, 1e-3), images_per_call=1, clean=clean)
    assert ("energy_pace" in codes(energy)) == told


QUICK = Rules(plateau_seconds=0.05, window_seconds=0.1, uncertainty=0.1)


def test_calls_go_on_while_a_meter_is_asked():
    """In threads: each question waits for the next call, and would get no answer if calls waited for it."""
    device, called, answers = CpuDevice(), threading.Event(), []

    class Waiting(FakeMeter):
        def energy_joules(self):
            called.clear()
            answers.append(called.wait(20))
            return super().energy_joules()

    resting, waiting = (
        kind(now_of(device), steady(300.0), tick_seconds=0.01) for kind in (FakeMeter, Waiting)
    )
    measuring = EnergyProcedure(
        device=device, detected=DeviceMeters(meters=(resting,)), rules=QUICK
    )
    measuring.idle()
    measuring.detected = DeviceMeters(meters=(waiting,))
    energy = measuring.measure(called.set, images_per_call=1)
    assert answers
    assert all(answers)
    assert values(energy)["calls"] > 0


def test_a_call_that_fails_ends_the_asking_too():
    device = CpuDevice()
    meter = FakeMeter(now_of(device), steady(300.0), tick_seconds=0.01)
    measuring = EnergyProcedure(device=device, detected=DeviceMeters(meters=(meter,)), rules=QUICK)
    measuring.idle()
    left = iter(range(3))
    with pytest.raises(StopIteration):
        measuring.measure(lambda: next(left), images_per_call=1)
    asked = meter.queries
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("meters")]
    assert meter.queries == asked


def test_a_meter_that_breaks_the_asking_is_not_waited_for():
    """Whatever goes wrong in the other thread is raised in this one, which would feed forever."""
    device = CpuDevice()
    meter = FakeMeter(now_of(device), steady(300.0), tick_seconds=0.01)
    measuring = EnergyProcedure(device=device, detected=DeviceMeters(meters=(meter,)), rules=QUICK)
    measuring.idle()
    meter.energy_joules = lambda: "no reading"
    with pytest.raises(AttributeError):
        measuring.measure(lambda: None, images_per_call=1)


def test_a_later_process_takes_an_idle_power_of_two_minutes(tmp_path, monkeypatch):
    device = Logged(enqueue_seconds=10e-6)

    def idle_watts(watts, name="board", rules=None, **script):
        """As a new process, with the idle power that its meter shows."""
        meter = meter_of(device, Load(device, 300.0, watts), name=name, **script)
        measuring = procedure(device, meter, rules=rules, cache=tmp_path)
        begun = device.now_ns()
        power = measuring.idle()
        taken = (device.now_ns() - begun) * 1e-9
        if script:
            return None
        found = measuring.measure(launching(device, 1e-3), images_per_call=1)
        assert found.facts["idle"] == power.facts()
        assert ("age_seconds" in found.facts["idle"][0]) is (taken < 1)
        net = values(found)["net_per_call_joules"]
        assert net == pytest.approx(0.3 - 1e-3 * power.mean_watts.value, rel=0.01)
        return power.mean_watts.value, taken

    watts, taken = idle_watts(100.0)
    assert watts == pytest.approx(100.0, rel=0.01)
    assert taken > 1
    idle_watts(70.0, gain=1.3)  # no answer, which is not stored
    assert idle_watts(90.0) == (watts, pytest.approx(0, abs=1e-3))
    monkeypatch.setattr(energy_probe, "_BOOT", tmp_path / "boot")
    for _ in range(2):  # without an identity of the host's start
        assert idle_watts(90.0)[0] == pytest.approx(90.0, rel=0.01)
    (tmp_path / "boot").write_text("another start")
    assert idle_watts(95.0)[0] == pytest.approx(95.0, rel=0.01)
    longer = Rules(window_seconds=5.0)
    assert idle_watts(94.0, rules=longer)[0] == pytest.approx(94.0, rel=0.01)
    assert idle_watts(90.0, rules=longer)[0] == pytest.approx(94.0, rel=0.01)
    assert idle_watts(90.0, "another board")[0] == pytest.approx(90.0, rel=0.01)
    device.launch(0.0, 121.0)
    assert idle_watts(90.0)[0] == pytest.approx(90.0, rel=0.01)
    for file in tmp_path.glob("*.json"):
        file.write_text('{"findings": {"idle": {"time": 0}}}')
    assert idle_watts(80.0)[0] == pytest.approx(80.0, rel=0.01)


class Resting:
    """A new process of those that share a folder; `idle` as the first call, then `rest`."""

    def __init__(self, device, folder, watts):
        meter = meter_of(device, Load(device, 300.0, watts))
        self.device, self.measuring = device, procedure(device, meter, cache=folder)
        self.measuring.idle()

    def rest(self):
        """The seconds of its rest, after calls."""
        self.plateau = self.measuring.plateau(launching(self.device, 1e-3))
        begun = self.device.now_ns()
        self.measuring.rest()
        return (self.device.now_ns() - begun) * 1e-9

    def energy(self):
        return self.measuring.report(self.plateau, {"call": Reading(1.0)})


def test_a_rest_after_calls_serves_a_next_process_two_minutes(tmp_path):
    device = Logged(enqueue_seconds=10e-6)
    first, second = Resting(device, tmp_path, 100.0), Resting(device, tmp_path, 95.0)
    assert min(first.rest(), second.rest()) > 2, "what was measured before followed no calls"
    third = Resting(device, tmp_path, 90.0)
    assert third.rest() == 0
    before, after = second.energy().facts, third.energy().facts
    assert "idle_last" not in after
    assert after["idle"][0]["counter_watts"] == before["idle_last"][0]["counter_watts"]
    assert after["meters"][0]["tick_seconds"] == before["idle_last"][0]["tick_seconds"], (
        "it is not sought again"
    )
    [power] = [
        metric for metric in third.energy().metrics if metric.name.endswith("idle_power_watts")
    ]
    assert 95.0 * 0.012 < (power.high - power.low) / 2 < 95.0 * 0.015, "it may have drifted"
    device.launch(0.0, 100.0)
    fourth = Resting(device, tmp_path, 90.0)
    device.launch(0.0, 30.0)
    assert fourth.rest() > 2, "its age counts from its measurement"
    device.launch(0.0, 121.0)
    assert Resting(device, tmp_path, 90.0).rest() > 2


def test_a_rest_that_failed_is_tried_again(tmp_path, monkeypatch):
    process = Resting(Logged(enqueue_seconds=10e-6), tmp_path, 100.0)
    with monkeypatch.context() as broken:
        broken.setattr(energy_probe, "Watch", None)
        with pytest.raises(TypeError):
            process.measuring.rest()
    assert process.rest() > 2


def test_a_cpu_rests_after_its_own_calls(tmp_path):
    meter = {"tick_seconds": 0.01}
    for _ in range(2):
        device = CpuDevice()
        board = FakeMeter(now_of(device), steady(300.0), **meter)
        measuring = EnergyProcedure(
            device=device, detected=DeviceMeters(meters=(board,)), rules=QUICK, cache=tmp_path
        )
        measuring.idle()
        asked = board.queries
        measuring.rest()
        assert board.queries > asked


@pytest.mark.parametrize("launches", [1, 300, 900, 3000])
def test_a_call_of_many_launches_fills_the_queue_and_no_more(launches):
    device = Logged(enqueue_seconds=4e-6, queue_depth=1000)

    def call():
        for _ in range(launches):
            device.launch(10e-6)

    meter = meter_of(device, Load(device, 700.0, 120.0), query_seconds=4e-3)
    energy = procedure(device, meter, rules=Rules(plateau_seconds=0.4)).measure(
        call, images_per_call=1
    )
    assert values(energy)["call_seconds"] == pytest.approx(launches * 10e-6, rel=1e-3)
    assert values(energy)["power_mean_watts"] == pytest.approx(700.0, rel=0.01)


def test_a_call_longer_than_the_window_has_an_energy_too():
    device = Logged(enqueue_seconds=1e-3)
    meter = meter_of(device, Load(device, 700.0, 120.0), query_seconds=1e-3)
    energy = procedure(device, meter).measure(launching(device, 3.0), images_per_call=1)
    assert values(energy)["per_call_joules"] == pytest.approx(2100.0, rel=0.01)


def test_synchronous_device_has_its_meters_read_between_calls():
    device = Logged(enqueue_seconds=0.0, asynchronous=False)
    script = {
        "tick_seconds": 1e-3,
        "tells_tick": True,
        "query_seconds": 30e-6,
        "power_kind": PowerKind.absent,
    }
    meter = meter_of(device, Load(device, 200.0, 50.0), **script)
    energy = procedure(device, meter).measure(launching(device, 7e-3), images_per_call=2)
    found = values(energy)
    assert found["per_call_joules"] == pytest.approx(200.0 * 7e-3, rel=0.005)
    assert found["net_per_image_joules"] == pytest.approx(150.0 * 7e-3 / 2, rel=0.005)
    assert found["integral_power_watts"] is None
    assert "no power sensor" in reasons(energy)["integral_power_watts"]
    assert codes(energy) == []


def test_late_ticks_lengthen_the_window_and_bound_the_error():
    """Calls of 0.4 s between which the counter can be asked, and its period of 0.1 s is not known before."""
    device = FakeDevice(enqueue_seconds=0.0, asynchronous=False)
    energy = procedure(device, meter_of(device, steady(300.0))).measure(
        launching(device, 0.4), images_per_call=1
    )
    assert values(energy)["window_seconds"] > 1.5
    error = abs(values(energy)["power_mean_watts"] / 300.0 - 1)
    assert error <= 6**0.5 * energy.facts["meters"][0]["window_uncertainty"] + 1e-9


# --- meters that are not as they should be -------------------------------------------------------------------------


def measured(device, *meters, **found):
    return procedure(device, *meters, **found).measure(launching(device, 1e-3), images_per_call=4)


def test_a_counter_that_begins_anew_is_followed():
    device = FakeDevice(enqueue_seconds=10e-6)
    meter = meter_of(device, steady(300.0), wrap_joules=350.0, start_joules=200.0)
    energy = measured(device, meter)
    assert values(energy)["power_mean_watts"] == pytest.approx(300.0, rel=0.005)
    assert energy.facts["meters"][0]["wraps"] >= 1
    assert codes(energy) == []


def test_counter_that_wraps_at_an_unknown_value_gives_no_energy():
    device = FakeDevice(enqueue_seconds=10e-6)
    meter = meter_of(device, steady(300.0), wrap_joules=1200.0, tells_wrap=False)
    energy = measured(device, meter)
    assert values(energy)["per_call_joules"] is None
    assert "its range is not known" in reasons(energy)["per_call_joules"]
    assert "meter_fault" in codes(energy)
    assert values(energy)["integral_power_watts"] == pytest.approx(300.0, rel=1e-9)


@pytest.mark.parametrize("stuck_seconds", [0.0, 2.5, 4.2])
def test_a_counter_that_stands_still_gives_no_energy_and_a_doubt(stuck_seconds):
    """From the start, before the window, within it."""
    device = FakeDevice(enqueue_seconds=10e-6)
    energy = measured(device, meter_of(device, steady(300.0), stuck_seconds=stuck_seconds))
    assert values(energy)["per_call_joules"] is None
    assert "stood still" in reasons(energy)["per_call_joules"]
    assert "meter_fault" in codes(energy)
    assert values(energy)["integral_power_watts"] == pytest.approx(300.0, rel=1e-9)
    assert values(energy)["call_seconds"] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("gain", "believed"), [(1.02, True), (0.98, True), (1.05, False), (0.9, False)]
)
def test_counter_and_integral_have_to_agree(gain, believed):
    device = FakeDevice(enqueue_seconds=10e-6)
    energy = measured(device, meter_of(device, steady(300.0), gain=gain))
    found = values(energy)
    assert found["integral_difference"] == pytest.approx(gain - 1, abs=0.003)
    assert found["counter_power_watts"] == pytest.approx(300.0, rel=0.003)
    assert found["integral_power_watts"] == pytest.approx(300.0 * gain, rel=1e-9)
    assert (found["per_call_joules"] is not None) == believed
    assert ("meter_fault" in codes(energy)) != believed


def jumping(seed, mean_watts, spread_watts):
    """A power that takes a new value every 10 ms, of which a reading every 100 ms sees a sample."""
    watts = np.random.default_rng(seed).uniform(
        mean_watts - spread_watts, mean_watts + spread_watts, 800
    )
    return Polyline([(0.01 * index, float(each)) for index, each in enumerate(watts)])


@pytest.mark.slow
def test_few_power_readings_do_not_contradict_the_counter():
    apart, believed = [], []
    for seed in range(40):
        device = FakeDevice(enqueue_seconds=10e-6)
        energy = measured(
            device, meter_of(device, jumping(seed, 300.0, 75.0)), rules=Rules(most_seconds=0.0)
        )
        apart.append(abs(values(energy)["integral_difference"]))
        believed.append("meter_fault" not in codes(energy))
        assert values(energy)["counter_power_watts"] == pytest.approx(300.0, rel=0.05)
        found = [doubt for doubt in energy.doubts if doubt.code == "meter_limited"]
        unchecked = [doubt for doubt in found if "idle" not in doubt.message]
        assert bool(unchecked) == (
            believed[-1] and 4 * values(energy)["integral_uncertainty"] > 0.1
        )
        assert values(energy)["integral_uncertainty"] == pytest.approx(
            75 / 3**0.5 / 300 / 11**0.5, rel=0.7
        )
    assert sum(difference > 0.03 for difference in apart) >= 10, "far apart often enough"
    assert sum(believed) >= 38, "but for what few readings happen to agree on"


def test_wrong_counter_is_reported_despite_jumping_power():
    device = FakeDevice(enqueue_seconds=10e-6)
    energy = measured(device, meter_of(device, jumping(0, 300.0, 75.0), gain=1.4))
    assert values(energy)["per_call_joules"] is None
    assert "meter_fault" in codes(energy)


@pytest.mark.parametrize("fails_seconds", [0.0, 3.0, 4.2])
def test_a_meter_that_fails_leaves_everything_else_of_the_point(fails_seconds):
    """From the start, on the plateau, within the window."""
    device = FakeDevice(enqueue_seconds=10e-6)
    energy = measured(device, meter_of(device, steady(300.0), fails_seconds=fails_seconds))
    for name in ("power_mean_watts", "per_call_joules", "per_image_joules", "net_per_call_joules"):
        assert values(energy)[name] is None
        assert "it has failed" in reasons(energy)[name]
    idle = None if fails_seconds == 0.0 else pytest.approx(300.0, rel=0.005)
    assert values(energy)["idle_power_watts"] == idle


def test_a_library_that_raises_is_a_meter_that_fails():
    device = FakeDevice(enqueue_seconds=10e-6)
    meter = meter_of(device, steady(300.0))

    def raise_always():
        raise OSError("the driver is gone")

    meter.energy_joules = raise_always
    meter.power_watts = raise_always
    assert "OSError: the driver is gone" in reasons(measured(device, meter))["per_call_joules"]


def test_a_call_that_fails_is_not_hidden():
    device = FakeDevice(enqueue_seconds=10e-6)
    meter = meter_of(device, steady(300.0))

    def call():
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        procedure(device, meter).measure(call, images_per_call=1)


def test_a_board_without_a_counter_has_an_estimate():
    device = FakeDevice(enqueue_seconds=10e-6)
    energy = measured(device, meter_of(device, steady(300.0), has_counter=False))
    [power] = [metric for metric in energy.metrics if metric.name == "energy/power_mean_watts"]
    assert power.value == pytest.approx(300.0, rel=1e-9)
    assert power.estimated
    assert codes(energy) == ["meter_limited"]


def test_without_a_meter_everything_is_null_and_says_why():
    device = FakeDevice()
    energy = measured(device, found=none_because("MIG is on"))
    assert set(values(energy).values()) == {None}
    assert set(reasons(energy).values()) == {"no meter: MIG is on"}
    assert codes(energy) == ["meter_missing"]
    assert str(energy.doubts[0].severity) == "warning"
    assert energy.doubts[0].message == "no energy was measured, no meter: MIG is on"
    assert device.now_ns() == 0, "nothing was run for it"


def test_idle_power_above_the_calls_power_gives_no_net_energy():
    device = FakeDevice(enqueue_seconds=10e-6)
    measuring = procedure(
        device, meter_of(device, Polyline([(0.0, 300.0), (2.8, 300.0), (2.9, 200.0)]))
    )
    energy = measuring.measure(launching(device, 1e-3), images_per_call=1)
    assert values(energy)["per_call_joules"] == pytest.approx(0.2, rel=0.005)
    assert "not above the idle power" in reasons(energy)["net_per_call_joules"]


def test_the_power_at_rest_is_measured_once():
    device = Logged(enqueue_seconds=10e-6)
    meter = meter_of(device, Load(device, 700.0, 120.0))
    measuring = procedure(device, meter)
    first = measuring.idle()
    assert first.mean_watts.value == pytest.approx(120.0, rel=0.005)
    assert not device.began, "nothing ran"
    measuring.measure(launching(device, 1e-3), images_per_call=1)
    assert measuring.idle() is first


# --- several meters ------------------------------------------------------------------------------------------------


def test_two_boards_are_summed_and_listed_apart():
    device = FakeDevice(enqueue_seconds=10e-6)
    meters = (
        meter_of(device, steady(300.0), name="a", phase_seconds=0.01, query_seconds=2e-3),
        meter_of(device, steady(500.0), name="b", phase_seconds=0.07, query_seconds=2e-3),
    )
    energy = measured(device, *meters)
    found = values(energy)
    assert found["power_mean_watts"] == pytest.approx(800.0, rel=0.005)
    assert found["per_call_joules"] == pytest.approx(0.8, rel=0.005)
    assert found["meter_0/power_mean_watts"] == pytest.approx(300.0, rel=0.005)
    assert found["meter_1/per_call_joules"] == pytest.approx(0.5, rel=0.005)
    assert [meter["name"] for meter in energy.facts["meters"]] == ["a", "b"]


@pytest.mark.parametrize(("accuracies", "known"), [((0.05, 0.02), 0.05), ((0.05, None), None)])
def test_the_accuracy_is_that_of_the_worst_meter_if_all_have_one(accuracies, known):
    device = FakeDevice(enqueue_seconds=10e-6)
    meters = [
        meter_of(device, steady(300.0), name=name, accuracy=accuracy)
        for name, accuracy in zip("ab", accuracies, strict=True)
    ]
    assert values(measured(device, *meters)).get("meter_accuracy") == known


def test_where_one_of_two_boards_has_no_figure_the_sum_has_none():
    device = FakeDevice(enqueue_seconds=10e-6)
    meters = (
        meter_of(device, steady(300.0), name="a"),
        meter_of(device, steady(500.0), name="b", stuck_seconds=0.0),
    )
    energy = measured(device, *meters)
    found = values(energy)
    assert found["per_call_joules"] is None
    assert "b stood still" in reasons(energy)["per_call_joules"]
    assert found["meter_0/power_mean_watts"] == pytest.approx(300.0, rel=0.005)


def test_devices_are_put_together_only_if_all_have_meters():
    device = FakeDevice()
    one, other = (
        DeviceMeters(meters=(meter_of(device, steady(1.0), name=name),)) for name in ("a", "b")
    )
    assert [meter.name for meter in combine([one, other, one]).meters] == ["a", "b"]
    assert combine([one, none_because("hidden")]) == none_because("hidden")
    assert not combine([]).meters


# --- the record ----------------------------------------------------------------------------------------------------


def test_epoch_energy_needs_training_data_with_an_end():
    device = FakeDevice(enqueue_seconds=10e-6)
    measuring = procedure(device, meter_of(device, steady(300.0)))
    with_end = measuring.measure(
        launching(device, 1e-3), images_per_call=4, trains=True, calls_per_epoch=50
    )
    assert values(with_end)["per_epoch_joules"] == pytest.approx(
        50 * values(with_end)["per_call_joules"]
    )
    endless = measuring.measure(launching(device, 1e-3), images_per_call=4, trains=True)
    assert reasons(endless)["per_epoch_joules"] == "the data has no end; set data.num_samples"
    inference = measuring.measure(launching(device, 1e-3), images_per_call=4)
    assert "per_epoch_joules" not in values(inference)


def test_the_raw_answers_are_kept_and_give_the_same_figure_again():
    device = FakeDevice(enqueue_seconds=10e-6)
    energy = measured(device, meter_of(device, steady(300.0), query_seconds=1e-3))
    key = Key(phase="inference", input_size=(8, 8), batch_size=4, precision="fp32")
    point = Point(key=key, status=Status.OK)
    energy.add_to(point)
    [meter] = point.facts["energy"]["meters"]
    assert len(meter["counter"]["seconds"]) == len(meter["counter"]["joules"])
    readings = list(zip(meter["counter"]["seconds"], meter["counter"]["joules"], strict=True))
    first = next(
        joules for seconds, joules in readings if seconds > 0
    )  # the first one after the tick shows it
    last = next(joules for seconds, joules in readings if seconds > meter["window_seconds"])
    assert (last - first) / meter["window_seconds"] == pytest.approx(
        meter["counter_watts"], rel=1e-5
    )
    assert set(meter["power"]["watts"]) == {300.0}
    assert point.metric("energy/per_call_joules").unit == "joules"
    assert all(metric.name.endswith(metric.unit) or metric.unit == "1" for metric in point.metrics)


@pytest.mark.parametrize(
    "wrong", [{"window_seconds": 0.0}, {"plateau_seconds": -1.0}, {"most_seconds": -1.0}]
)
def test_rules_that_can_not_be_followed_are_refused(wrong):
    with pytest.raises(UserError, match="energy"):
        Rules(**wrong)
