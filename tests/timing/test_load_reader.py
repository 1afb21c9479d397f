"""Clock and power of a loaded device: read while the host waits for a drain, and at no other time."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from perfexp.data.synthetic import Synthetic
from perfexp.devices.fake import FakeDevice
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.procedure import Procedure
from perfexp.models import Execution, Precision
from perfexp.models.fake import FakeModel
from perfexp.records.record import Key, Point, Status
from perfexp.timing import conditions, queue
from perfexp.timing.conditions import LoadReader
from perfexp.timing.stopping import Fixed

KEY = Key(phase="inference", input_size=(100, 100), batch_size=1, precision="fp32")
CLOCK = "loaded_sm_clock_hertz"
#: Longest wait of a test for the thread; it fails after that.
PATIENCE_SECONDS = 30


class Clock:
    """A clock that only passes by waiting for it, which returns at once."""

    seconds = 0.0

    def now(self):
        return self.seconds

    def wait(self, changed, seconds):
        if seconds is None:
            changed.wait()
        else:
            changed.wait(0)  # others may take the lock
            self.seconds += seconds


def point():
    return Point(key=KEY, status=Status.OK)


def reader_of(query, clock=None):
    clock = clock or Clock()
    return LoadReader({CLOCK: query}, now=clock.now, wait=clock.wait)


def wait_for_two(read):
    """Two readings begin, so that the first of them is complete."""
    for _ in range(2):
        assert read.wait(PATIENCE_SECONDS)
        read.clear()


def has_thread():
    return any(thread.name == "load reader" for thread in threading.enumerate())


def test_it_reads_only_during_drains():
    during, states, read = False, [], threading.Event()

    def query():
        states.append(during)
        read.set()
        return 1e9

    reader, measured = reader_of(query), point()
    with reader.observing(measured, "device"):
        for _ in range(3):
            assert not read.is_set()
            during = True
            with reader.draining(0.0):
                wait_for_two(read)
            during = False
            read.clear()
    with reader.draining(0.0):  # as while the device settles: there is no thread
        assert not has_thread()
    assert len(states) >= 3
    assert all(states)
    assert set(measured.facts[CLOCK]["device"]) == {1e9}


def test_device_is_read_at_most_every_100_ms_after_its_release():
    clock, begun, ended, enough = Clock(), [], [], threading.Event()

    def query():
        begun.append(clock.seconds)
        clock.seconds += 0.03
        ended.append(clock.seconds)
        if len(begun) >= 20:
            enough.set()
        return 1e9

    reader = reader_of(query, clock)
    with reader.observing(point(), "device"), reader.draining(0.25):
        assert enough.wait(PATIENCE_SECONDS)
    assert begun[0] == pytest.approx(0.25)
    assert np.subtract(begun[1:], ended[:-1]).min() >= 0.1 - 1e-9


def test_the_interval_lasts_from_one_drain_to_the_next():
    clock, begun, read = Clock(), [], threading.Event()

    def query():
        begun.append(clock.seconds)
        read.set()
        return 1e9

    reader = reader_of(query, clock)
    with reader.observing(point(), "device"):
        for _ in range(5):
            with reader.draining(0.0):
                assert read.wait(PATIENCE_SECONDS)
            read.clear()
    assert begun[0] >= 0.1  # a block that is shorter has no reading
    assert np.diff(begun).min() >= 0.1 - 1e-9


def test_drain_waits_for_a_late_reading_and_discards_it():
    asked, answered = threading.Event(), []

    def query():
        asked.set()
        while reader._is_draining:
            pass
        answered.append(1e9)
        return 1e9

    reader, measured = reader_of(query), point()
    with reader.observing(measured, "device"):
        with reader.draining(0.0):
            assert asked.wait(PATIENCE_SECONDS)
        assert answered
    assert measured.facts == {}


def test_a_driver_that_refuses_leaves_no_fact():
    refused, measured = threading.Event(), point()
    reader = reader_of(refused.set)
    with reader.observing(measured, "device"), reader.draining(0.0):
        assert refused.wait(PATIENCE_SECONDS)
    assert measured.facts == {}


def test_reader_thread_ends_with_a_failed_block_and_keeps_facts():
    read, measured = threading.Event(), point()

    def query():
        read.set()
        return 1e9

    reader = reader_of(query)
    with pytest.raises(RuntimeError, match="lost"), reader.observing(measured, "device"):
        assert has_thread()
        with reader.draining(0.0):
            wait_for_two(read)
            raise RuntimeError("the device is lost")
    assert not has_thread()
    assert measured.facts[CLOCK]["device"]


@pytest.mark.parametrize(("queries", "series"), [({}, "device"), ({CLOCK: lambda: 1e9}, None)])
def test_no_reader_thread_without_queries_or_a_device_time(queries, series):
    with LoadReader(queries).observing(point(), series):
        assert not has_thread()


def test_chain_announces_its_device_wait_and_the_remaining_hold():
    device, drains = FakeDevice(enqueue_seconds=20e-6), []

    @contextmanager
    def draining(seconds):
        begun = device.now_ns()
        yield
        drains.append((seconds, (device.now_ns() - begun) * 1e-9))

    queue.Chain(lambda: device.launch(5e-6), device, 100, draining=draining)(400)
    assert len(drains) >= 4
    for held_seconds, waited_seconds in drains[-3:]:  # the hold is learned by then
        # the fake device launches in no time when the hold is over: the rest of the wait is its work
        assert waited_seconds == pytest.approx(held_seconds + 100 * 5e-6, rel=0.05)


@pytest.fixture
def patient(monkeypatch):
    """A device whose drains last until the thread has read, and the holds of the drains in which it did."""
    read, drains = threading.Event(), []
    device = FakeDevice(enqueue_seconds=1e-6)

    def query():
        read.set()
        return 1.5e9

    device.load_queries = lambda: {CLOCK: query, "loaded_power_watts": lambda: 300.0}
    original = LoadReader.draining

    @contextmanager
    def draining(self, held_seconds):
        with original(self, held_seconds):
            yield
            if has_thread():
                read.clear()
                wait_for_two(read)
                drains.append(held_seconds)

    monkeypatch.setattr(LoadReader, "draining", draining)
    monkeypatch.setattr(conditions, "_INTERVAL_SECONDS", 0.0)
    return device, drains


def measured_on(device, **settings):
    session = FakeModel(base_seconds=1e-3, seconds_per_megapixel=0.0).open(
        device=device,
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )
    return Procedure(
        session=session,
        device=device,
        data=Synthetic(),
        modes={"inference": Inference()},
        stopping=Fixed(warmup=1, measure=5),
        percentiles=(50.0,),
        **settings,
    ).measure(KEY)


def test_point_has_load_readings_only_for_its_device_times(patient):
    device, drains = patient
    measured = measured_on(device)
    assert measured.status is Status.OK
    assert drains
    assert {"latency", "throughput", "device"} <= {series.name for series in measured.series}
    for fact, value in ((CLOCK, 1.5e9), ("loaded_power_watts", 300.0)):
        assert set(measured.facts[fact]) <= {"device", "device/graph"}
        assert set(measured.facts[fact]["device"]) == {value}
    assert measured.metric("device/cycles_per_call").value == pytest.approx(1.5e6, rel=0.01)
    assert not has_thread()


def test_the_readings_can_be_switched_off(patient):
    device, drains = patient
    measured = measured_on(device, reads_load=False)
    assert not drains
    assert CLOCK not in measured.facts
    cycles = measured.metric("device/cycles_per_call")
    assert cycles.value is None
    assert "probes.loaded_clock=true" in cycles.reason
