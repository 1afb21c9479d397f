"""Clock, throttling and temperature, observed between the blocks of a point's series on the scripted device."""

import numpy as np
import pytest

from perfexp.data.synthetic import Synthetic
from perfexp.devices import Conditions
from perfexp.devices.fake import FakeDevice
from perfexp.measure.procedure import Procedure
from perfexp.models import Execution, Precision
from perfexp.models.fake import FakeModel
from perfexp.modes.inference import Inference
from perfexp.modes.train import Train
from perfexp.probes.conditions import Observer
from perfexp.records.record import Key, Point, Status
from perfexp.stopping import Precision as PrecisionRule

KEY = Key(phase="inference", input_size=(100, 100), batch_size=1, precision="fp32")


def measure(stopping=None, *, noise=0.0, phase="inference", epochs=None, **script):
    device = FakeDevice(enqueue_seconds=1e-6, **script)
    session = FakeModel(base_seconds=1e-3, seconds_per_megapixel=0.0, noise=noise).open(
        device=device, precision=Precision(name="fp32"), execution=Execution(), num_classes=None, seed=0
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


def test_a_device_that_throttles_only_under_load_is_doubted_with_its_share():
    point = measure(throttled_share=0.3, noise=0.01)
    for name in ("device", "throughput", "latency"):
        assert point.facts["throttled_share"][name]["power cap"] == pytest.approx(0.3, rel=0.1)
    found = diagnostic(point, "throttled")
    assert "power cap" in found.message
    share = float(found.message.partition("for ")[2].partition("%")[0])
    assert share == pytest.approx(30, rel=0.1)


@pytest.mark.parametrize(("script", "share"), [({"throttled_share": 0.0}, {}), ({}, None)])
def test_without_throttling_there_is_no_doubt_and_without_counters_no_share(script, share):
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


def test_a_clock_that_changes_between_blocks_is_doubted_with_its_states():
    point = measure(clock_hertz=[1.98e9, 1.755e9], clock_noise=0.002)
    clocks = np.asarray(point.facts["clock_hertz"]["device"])
    slow = float(np.mean(clocks < 1.9e9))
    assert 0 < slow < 1
    found = diagnostic(point, "clock_moved")
    assert "11." in found.message.partition("%")[0]
    for share in (slow, 1 - slow):
        assert f"MHz after {share:.0%}" in found.message


def test_a_clock_that_drifts_names_its_largest_states_only():
    point = measure(clock_hertz=[2e9 * 0.98**step for step in range(8)], clock_seconds=0.13)
    assert diagnostic(point, "clock_moved").message.endswith("others after the rest")


def test_a_steady_clock_is_not_doubted():
    points = [measure(clock_hertz=[1.98e9], clock_noise=0.004, clock_seed=seed, noise=0.01) for seed in range(100)]
    assert all(len(point.facts["clock_hertz"]["device"]) >= 3 for point in points)
    assert sum(diagnostic(point, "clock_moved") is not None for point in points) <= 5


@pytest.mark.parametrize("clocks", [[2e9], [2e9, 1.9e9], []])
def test_cycles_are_those_of_the_clock_between_the_blocks(clocks):
    point = measure(clock_hertz=clocks, clock_noise=0.002)
    cycles = point.metric("device/cycles_per_call")
    if clocks:
        assert cycles.value == pytest.approx(1e-3 * np.median(point.facts["clock_hertz"]["device"]), rel=0.001)
        assert cycles.estimated
    else:
        assert cycles.value is None
        assert "clock" in cycles.reason


def test_a_synchronous_device_has_neither_clock_nor_cycles():
    point = measure(asynchronous=False, clock_hertz=[2e9])
    assert "clock_hertz" not in point.facts
    assert point.metric("device/cycles_per_call") is None


def test_the_temperature_is_that_before_and_after_each_series():
    point = measure(warming_share=0.03, warming_seconds=0.1)
    for first, last in point.facts["temperature_celsius"].values():
        assert 40 < first < last <= 70
