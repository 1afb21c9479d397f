"""Clock, throttling and temperature between the blocks of a point's series, and the wait until they are steady."""

import numpy as np
import pytest

from perfexp.data.synthetic import Synthetic
from perfexp.devices import Conditions
from perfexp.devices.fake import FakeDevice
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.modes.train import Train
from perfexp.measuring.procedure import Procedure
from perfexp.models import Execution, Precision
from perfexp.models.fake import FakeModel
from perfexp.records.record import Key, Point, Status
from perfexp.records.summary import row
from perfexp.timing.collecting import Collector, settle
from perfexp.timing.conditions import Observer
from perfexp.timing.stopping import Precision as PrecisionRule
from perfexp.timing.stopping import Steady

KEY = Key(phase="inference", input_size=(100, 100), batch_size=1, precision="fp32")


def measure(stopping=None, *, noise=0.0, phase="inference", epochs=None, **script):
    device = FakeDevice(enqueue_seconds=1e-6, **script)
    session = FakeModel(base_seconds=1e-3, seconds_per_megapixel=0.0, noise=noise).open(
        device=device,
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )
    point = Procedure(
        session=session,
        device=device,
        data=Synthetic(num_samples=200) if epochs else Synthetic(),
        modes={"inference": Inference(), "train": Train(optimizer={})},
        stopping=stopping or PrecisionRule(min_seconds=0.2, max_seconds=0.4, warmup_seconds=0.05),
        percentiles=(50.0,),
        epochs=epochs,
    ).measure(Key(phase=phase, input_size=(100, 100), batch_size=1, precision="fp32"))
    assert point.status is Status.OK
    return point


def diagnostic(point, code):
    return next((item for item in point.doubts if item.code == code), None)


def test_throttling_under_load_is_reported_with_its_share():
    point = measure(throttled_share=0.3, noise=0.01)
    for name in ("device", "throughput", "latency"):
        assert point.facts["throttled_share"][name]["power cap"] == pytest.approx(0.3, rel=0.1)
    found = diagnostic(point, "throttled")
    assert "power cap" in found.message
    share = float(found.message.partition("for ")[2].partition("%")[0])
    assert share == pytest.approx(30, rel=0.1)


@pytest.mark.parametrize(("script", "share"), [({"throttled_share": 0.0}, {}), ({}, None)])
def test_no_throttling_gives_no_warning_and_no_counters_no_share(script, share):
    point = measure(**script)
    assert point.facts.get("throttled_share", {}).get("device") == share
    assert diagnostic(point, "throttled") is None


def test_epochs_are_observed_as_series_are():
    point = measure(phase="train", epochs=2, throttled_share=0.5)
    assert point.facts["throttled_share"]["epoch"]["power cap"] == pytest.approx(0.5, rel=0.1)


def test_a_driver_without_counters_is_sampled_after_each_block():
    device = FakeDevice()
    answers = [[], ["power cap"], [], ["power cap", "hardware thermal"]]
    device.conditions = lambda: Conditions(reasons=answers.pop(0), temperature=50.0 + len(answers))
    observer = Observer(device)
    for seconds in (1.0, 2.0, 2.0):
        observer.block_ended("latency", seconds)
    point = Point(key=KEY, status=Status.OK)
    observer.add_to(point)
    assert point.facts["throttled_share"]["latency"] == {"power cap": 0.6, "hardware thermal": 0.4}
    assert point.facts["temperature_celsius"]["latency"] == [53.0, 50.0]


def test_clock_change_between_blocks_is_reported_with_its_states():
    point = measure(clock_hertz=[1.98e9, 1.755e9], clock_noise=0.002)
    clocks = np.asarray(point.facts["clock_hertz"]["device"])
    slow = float(np.mean(clocks < 1.9e9))
    assert 0 < slow < 1
    found = diagnostic(point, "clock_moved")
    assert "11." in found.message.partition("%")[0]
    for share in (slow, 1 - slow):
        assert f"MHz after {share * len(clocks):.0f}" in found.message
    assert found.message.endswith(f"of {len(clocks)} blocks")


def test_a_clock_that_drifts_names_its_largest_states_only():
    point = measure(clock_hertz=[2e9 * 0.98**step for step in range(8)], clock_seconds=0.13)
    assert diagnostic(point, "clock_moved").message.endswith("others after the rest")


@pytest.mark.slow
def test_a_steady_clock_is_not_doubted():
    points = [
        measure(clock_hertz=[1.98e9], clock_noise=0.004, clock_seed=seed, noise=0.01)
        for seed in range(100)
    ]
    assert all(len(point.facts["clock_hertz"]["device"]) >= 3 for point in points)
    assert sum(diagnostic(point, "clock_moved") is not None for point in points) <= 5


def test_cycles_are_not_those_of_the_clock_between_the_blocks():
    cycles = measure(clock_hertz=[2e9]).metric("device/cycles_per_call")
    assert cycles.value is None
    assert "the clock could not be read during the calls" in cycles.reason


def test_a_synchronous_device_has_neither_clock_nor_cycles():
    point = measure(asynchronous=False, clock_hertz=[2e9])
    assert "clock_hertz" not in point.facts
    assert point.metric("device/cycles_per_call") is None


def test_the_temperature_is_that_before_and_after_each_series():
    point = measure(warming_share=0.03, warming_seconds=0.1)
    for first, last in point.facts["temperature_celsius"].values():
        assert 40 < first < last <= 70


#: Time of a call by a scripted device that has warmed up.
WARM_SECONDS = 1e-3 * 1.03


def settled(warming_seconds, *, noise=0.005, clock_noise=0.0, **settings):
    rule = PrecisionRule(
        **{"steady": Steady.thermal, "min_seconds": 5.0, "max_seconds": 10.0, **settings}
    )
    warming = {"warming_share": 0.03, "warming_seconds": warming_seconds}
    point = measure(rule, noise=noise, clock_hertz=[2e9], clock_noise=clock_noise, **warming)
    figures = row([point])
    device = figures.times["device"]
    return point, device.median.value / WARM_SECONDS - 1, {item.code for item in figures.doubts}


def test_a_device_that_warms_up_slowly_is_waited_for():
    point, bias, _ = settled(20.0)
    assert abs(bias) <= 0.003
    assert 30 <= point.facts["settling_seconds"] < 120
    first, last = point.facts["temperature_celsius"]["device"]
    assert last - first <= 1


@pytest.mark.parametrize("clock_noise", [0.0, 0.05])
def test_steady_device_is_not_waited_for_longer_than_needed(clock_noise):
    point, bias, codes = settled(0.01, clock_noise=clock_noise)
    assert point.facts["settling_seconds"] == pytest.approx(30, abs=3)
    assert abs(bias) <= 0.003
    assert "drift" not in codes


def test_a_device_that_takes_too_long_to_warm_up_is_doubted():
    point, _, codes = settled(60.0, steady_seconds=40.0)
    assert point.facts["settling_seconds"] == pytest.approx(40, abs=3)
    assert "drift" in codes
    assert "the time of a call by +" in diagnostic(point, "drift").message
    assert "the temperature by" in diagnostic(point, "drift").message


def test_without_the_wait_a_slow_warming_is_a_bias():
    _, bias, _ = settled(20.0, steady=None)
    assert bias < -0.003


def test_falling_clock_delays_the_start_despite_steady_times():
    device, seen = FakeDevice(enqueue_seconds=1e-6), []

    def block(samples):
        device.hold(samples * 1e-3)
        device.synchronize()
        return np.full(samples, 1e-3)

    def clock_readings():
        return (2e9 * (1 - 0.0005 * device.now_ns() * 1e-9),) * 2

    device.clock_readings = clock_readings
    collector = Collector("device", block, begin=lambda _: None)
    seconds, [change] = settle([collector], device, 40.0, seen.append)
    assert seconds == pytest.approx(40, abs=1)
    assert change.startswith("the clock by -0.")
    assert seen
