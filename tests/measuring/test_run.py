"""The measuring procedure of one point, on the scripted device: which times there are and what is doubted."""

import itertools
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from perfexp.cost import Work, WorkRow
from perfexp.data.synthetic import Rotating, Synthetic
from perfexp.devices import Cache
from perfexp.devices.fake import FakeDevice
from perfexp.devices.meters import DeviceMeters, none_because
from perfexp.doctor import environment
from perfexp.errors import Unsupported
from perfexp.measuring import training
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.modes.train import Train
from perfexp.measuring.probes.energy import EnergyProcedure
from perfexp.measuring.procedure import Procedure
from perfexp.models import Execution, Precision
from perfexp.models.fake import FakeModel, FakeSession
from perfexp.records import metrics
from perfexp.records.growth import scalings
from perfexp.records.point_times import DEVICE_TIMES, first_series
from perfexp.records.record import Key, Metric, Point, Status
from perfexp.records.summary import row
from perfexp.timing.stopping import Fixed
from perfexp.timing.stopping import Precision as PrecisionRule
from tests.support.scripted_meter import FakeMeter, Turns, steady

KEY = Key(phase="inference", input_size=(100, 100), batch_size=1, precision="fp32")


def measure(device=None, key=KEY, stopping=None, model=None, **settings):
    return procedure(device, stopping, model, **settings).measure(key)


def procedure(device=None, stopping=None, model=None, **settings):
    device = device or FakeDevice(enqueue_seconds=1e-6)
    script = {"base_seconds": 1e-3, "seconds_per_megapixel": 0.0, "noise": 0.0} | (model or {})
    session = FakeModel(**script).open(
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
        modes={"inference": Inference(), "train": Train(optimizer={})},
        stopping=stopping or Fixed(warmup=2, measure=20),
        percentiles=(50.0,),
        **settings,
    )


def median(point, name=None):
    series = point.find_series(name) if name else first_series(point, *DEVICE_TIMES)
    return float(np.median(series.measured))


def codes(point):
    """Codes of the point's doubts; that of a busy machine comes from the real one that the tests run on."""
    return [doubt.code for doubt in point.doubts if doubt.code != "busy_host"]


def test_async_device_has_three_times_and_sync_device_one():
    assert [series.name for series in measure().series] == ["throughput", "latency", "device"]
    assert [series.name for series in measure(FakeDevice(asynchronous=False)).series] == ["latency"]


@pytest.mark.parametrize(("asynchronous", "names"), [(True, ["throughput"]), (False, ["latency"])])
def test_the_rate_alone_is_the_loop_of_calls(asynchronous, names):
    key = msgspec.structs.replace(KEY, phase="train")
    device = FakeDevice(enqueue_seconds=1e-6, asynchronous=asynchronous)
    point = measure(device, key, takes_call_times=False)
    assert [series.name for series in point.series] == names
    assert row([point]).samples_per_second is not None
    assert codes(point) == []


def test_without_a_loop_the_rate_alone_is_that_of_flushed_calls():
    point = measure(takes_call_times=False, cache=Cache.flush)
    assert [series.name for series in point.series] == ["latency"]


@pytest.mark.parametrize(("queue_depth", "least", "most"), [(20, 50, 100), (1000, 1, 49)])
def test_what_the_calls_before_have_warmed_up_is_warm(queue_depth, least, most):
    device = FakeDevice(
        enqueue_seconds=1e-6, queue_depth=queue_depth
    )  # calls of 1 ms, fills of the queue before
    point = measure(device, stopping=PrecisionRule(warmup_seconds=0.1), model={"noise": 0.01})
    first, *others = (series.warmup * series.calls_per_sample for series in point.series)
    assert least <= first <= most
    assert min(others) < 100  # a cut by MSER-5 may be anywhere in noise


@pytest.mark.parametrize(
    ("other", "warm"), [({"input_size": (32, 32)}, True), ({"batch_size": 2}, False)]
)
def test_device_is_warm_after_a_similar_recent_point(other, warm):
    device = FakeDevice(enqueue_seconds=1e-6, queue_depth=20)
    measuring = procedure(device, PrecisionRule(warmup_seconds=0.5), {"noise": 0.01})
    points = [measuring.measure(key) for key in (KEY, msgspec.structs.replace(KEY, **other))]
    first, second = (point.find_series("throughput") for point in points)
    assert first.warmup * first.calls_per_sample >= 250
    assert (second.warmup * second.calls_per_sample < 250) is warm


def test_call_beyond_the_launch_queue_is_measured_as_a_graph():
    device = FakeDevice(enqueue_seconds=1e-6, graph_gap_seconds=1e-6, queue_depth=1000)
    point = measure(device, model={"launches": 1500})
    assert point.facts["device_method"] == "graph"
    assert median(point) == pytest.approx(
        1e-3 + 1e-6, rel=0.01
    )  # the gaps between 1500 kernels are gone
    assert median(point, "throughput") == pytest.approx(2.5e-3, rel=0.01)
    assert (
        "bound_by" not in point.facts
    )  # how long the host needs can't be told where it has to wait for room
    assert point.metric("loop/host_seconds").value is None
    assert codes(point) == ["device_of_graph"]


def test_point_of_several_processes_has_queue_and_graph_times():
    device = FakeDevice(enqueue_seconds=1e-6, graph_gap_seconds=2e-6)
    stopping = Fixed(warmup=2, measure=20, processes=5)
    measuring = procedure(
        device, stopping, {"launches": 10}, anchors=[(KEY.input_size, KEY.batch_size)]
    )
    for replicate in range(2):
        point = measuring.measure(msgspec.structs.replace(KEY, replicate=replicate))
        assert point.facts["device_method"] == "queue"
        assert median(point, "device/graph") < 0.995 * median(point, "device")
    assert (
        measuring.measure(msgspec.structs.replace(KEY, batch_size=2)).find_series("device/graph")
        is None
    )


def test_call_that_cannot_be_captured_has_a_reason():
    device = FakeDevice(enqueue_seconds=1e-6)

    def refuses(work):
        raise Unsupported("it reads its numbers")

    device.capture = refuses
    measuring = procedure(device, Fixed(warmup=2, measure=20, processes=5))
    point = measuring.measure(KEY)
    assert (point.status, median(point)) == (Status.OK, pytest.approx(1e-3, rel=0.01))
    assert point.metric("device/graph_seconds").reason == "it reads its numbers"


def test_graph_and_queue_times_are_never_pooled():
    device = FakeDevice(enqueue_seconds=1e-6, graph_gap_seconds=1e-6, queue_depth=1000)
    by_graph = row([procedure(device, model={"launches": 1500}).measure(KEY)])
    by_queue = row([procedure(device).measure(msgspec.structs.replace(KEY, input_size=(50, 50)))])
    assert (by_graph.time_kind, by_queue.time_kind) == ("device/graph", "device")
    assert scalings([by_graph, by_queue]) == []


def test_call_that_synchronizes_has_no_device_time_but_a_reason():
    device, tried = FakeDevice(enqueue_seconds=1e-6), []
    measuring = procedure(device, model={"waits": True})
    device.capture = tried.append
    point = measuring.measure(KEY)
    assert point.find_series("device") is None
    assert tried == [], "a capture that fails leaves something behind"
    assert point.facts["device_method"] == "none"
    assert "device_missing" in codes(point)
    assert point.status is Status.OK


@pytest.mark.parametrize(("launches", "method"), [(1, "queue"), (1500, "graph")])
def test_nosync_call_has_its_device_time_and_a_note(launches, method):
    device = FakeDevice(enqueue_seconds=1e-6, queue_depth=1000)
    measuring = procedure(device, model={"waits": True, "launches": launches})
    model = measuring.session._model

    @contextmanager
    def without_waits():
        model.waits = False
        yield "it counts otherwise"
        model.waits = True

    measuring.session.without_waits = without_waits
    point = measuring.measure(KEY)
    assert point.facts["device_method"] == method
    assert median(point) == pytest.approx(1e-3, rel=0.01)
    [doubt] = [doubt for doubt in point.doubts if doubt.code == "device_leaves_out"]
    assert "it counts otherwise" in doubt.message
    assert ("device_of_graph" in codes(point)) is (method == "graph")
    assert "device_missing" not in codes(point)
    assert model.waits, "everything else is of the call as it is"


def test_late_device_time_failure_keeps_measured_times():
    measuring = procedure(FakeDevice(enqueue_seconds=1e-6), model={"waits": True})

    def without_waits():
        raise RuntimeError("a head of another kind")

    measuring.session.without_waits = without_waits
    point = measuring.measure(KEY)
    assert point.status is Status.OK
    assert {"throughput", "latency"} == {series.name for series in point.series}
    [doubt] = [doubt for doubt in point.doubts if doubt.code == "device_missing"]
    assert "a head of another kind" in doubt.message
    assert "device_leaves_out" not in codes(point), "there is no `device` time"


def test_unqueueable_nosync_call_has_one_doubt_no_device_time():
    device = FakeDevice(enqueue_seconds=1e-6, queue_depth=1000)
    measuring = procedure(device, model={"waits": True, "launches": 1500})

    @contextmanager
    def without_waits():
        measuring.session._model.waits = False
        yield "it counts otherwise"
        measuring.session._model.waits = True

    def capture(call):
        raise Unsupported("no graph of this")

    measuring.session.without_waits, measuring.session.capture = without_waits, capture
    point = measuring.measure(KEY)
    assert point.find_series("device") is None
    assert [code for code in codes(point) if code in ("device_leaves_out", "device_missing")] == [
        "device_missing"
    ]


def loaded(measuring, wait_seconds):
    """The same procedure with data that the host waits for."""
    opening, device, waits = measuring.data.open, measuring.device, itertools.cycle(wait_seconds)

    class Waiting:
        constant, per_epoch = False, None

        def __init__(self, batches):
            self.batches = batches

        def next(self):
            device.launch(next(waits))
            device.synchronize()
            return self.batches.next()

    @contextmanager
    def opened(**settings):
        with opening(**settings) as batches:
            yield Waiting(batches)

    measuring.data.open = opened
    return measuring


@pytest.mark.parametrize(("launches", "method"), [(1, "queue"), (1500, "graph")])
@pytest.mark.parametrize("phase", ["inference", "train"])
def test_waiting_for_data_does_not_prevent_a_device_time(launches, method, phase):
    device = FakeDevice(enqueue_seconds=1e-6, queue_depth=1000)
    measuring = loaded(procedure(device, model={"launches": launches}), [5e-3])
    point = measuring.measure(msgspec.structs.replace(KEY, phase=phase))
    assert point.facts["device_method"] == method
    assert {*codes(point)} - {"busy_host"} == {
        "device_leaves_out",
        *(["device_of_graph"] if method == "graph" else []),
    }
    assert median(point) < 5e-3 < median(point, "throughput"), "the loop has the fetching"


def test_batches_that_come_in_bursts_are_judged_by_means():
    """Four batches are there at once and the fifth takes 45 ms: 10 ms a call, whatever its median says."""
    device = FakeDevice(enqueue_seconds=1e-6)
    energy = energy_of(
        device,
        FakeMeter(lambda: device.now_ns() * 1e-9, steady(300.0), spend=partial(device.launch, 0.0)),
    )
    measuring = loaded(
        procedure(device, Fixed(warmup=5, measure=50), energy=energy), [0.0, 0.0, 0.0, 0.0, 45e-3]
    )
    point = measuring.measure(KEY)
    assert median(point, "throughput") == pytest.approx(1e-3, rel=0.05)
    assert row([point]).samples_per_second.value == pytest.approx(100.0, rel=0.02)
    assert point.metric("energy/call_seconds").value == pytest.approx(10e-3, rel=0.03)
    assert point.metric("phases_over_whole").value == pytest.approx(1.0, abs=0.02)
    assert codes(point) == ["device_leaves_out", "energy_pace"]
    assert point.metric("energy/queued_call_seconds").value == pytest.approx(1e-3, rel=0.01)
    assert point.metric("energy/queued_per_call_joules").value == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize(
    ("launches", "bound"), [(1, "gpu"), (80, "gpu"), (400, "gpu"), (800, "gpu")]
)
def test_a_device_that_is_always_at_work_is_what_limits(launches, bound):
    point = measure(
        FakeDevice(enqueue_seconds=1e-6, queue_depth=1000), model={"launches": launches}
    )
    assert point.facts["device_method"] == "queue"
    assert point.facts["bound_by"] == bound
    assert median(point, "throughput") == pytest.approx(1e-3, rel=0.01)


def test_a_graph_saves_the_gaps_between_kernels():
    gaps = {"graph_gap_seconds": 10e-6, "enqueue_seconds": 1e-6}
    eager = measure(FakeDevice(**gaps), model={"launches": 50})
    graph = measure(FakeDevice(**gaps), model={"launches": 50}, graph=True)
    assert median(eager) == pytest.approx(1e-3 + 50 * 10e-6, rel=0.01)
    assert median(graph) == pytest.approx(1e-3 + 10e-6, rel=0.01)


def test_a_training_step_as_a_graph_has_its_data_apart():
    key = Key(phase="train", input_size=(100, 100), batch_size=1, precision="fp32")
    point = measure(key=key, graph=True)
    assert [series.name for series in point.series if series.name.startswith("phase/")] == [
        "phase/data",
        "phase/graph",
    ]
    assert median(point) == pytest.approx(1e-3 * (1 + 0.01 + 2 + 0.1), rel=0.01)


@pytest.mark.parametrize("enqueue_seconds", [100e-6, 20e-3])
def test_phases_behind_a_held_queue_are_the_devices_own_times(enqueue_seconds):
    key = Key(phase="train", input_size=(100, 100), batch_size=1, precision="fp32")
    device = FakeDevice(enqueue_seconds=enqueue_seconds)  # for four launches in a step of 31 µs
    point = measure(device, key=key, model={"base_seconds": 10e-6})
    assert median(point, "phase/backward") == pytest.approx(20e-6, rel=0.01)
    assert point.metric("phases_over_whole").value == pytest.approx(1.0, abs=0.01)
    assert point.facts["bound_by"] == "launch"


def test_phases_beyond_the_queue_are_checked_by_device_time(monkeypatch):
    monkeypatch.setattr(
        "perfexp.timing.queue.Segments.once", lambda self: self.device.synchronize()
    )
    key = Key(phase="train", input_size=(100, 100), batch_size=1, precision="fp32")
    device = FakeDevice(enqueue_seconds=100e-6)  # the host takes 400 µs for a step of 31 µs
    point = measure(device, key=key, model={"base_seconds": 10e-6})
    assert point.find_series("device") is not None
    assert point.metric("phases_over_whole").value > 2
    [doubt] = [doubt for doubt in point.doubts if doubt.code == "phases_disagree"]
    assert "of its `device`: they do not fit the launch queue" in doubt.message


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_flushed_cache_shows_in_every_call(asynchronous):
    script = {"asynchronous": asynchronous, "enqueue_seconds": 1e-6}
    name = "device" if asynchronous else "latency"
    warm = measure(FakeDevice(**script), model={"cold_seconds": 0.5e-3})
    cold = measure(FakeDevice(**script), model={"cold_seconds": 0.5e-3}, cache=Cache.flush)
    assert median(warm, name) == pytest.approx(1e-3, rel=0.01)
    assert median(cold, name) == pytest.approx(1.5e-3, rel=0.01)  # without the flush itself
    assert cold.find_series("throughput") is None
    assert "bound_by" not in cold.facts


def test_flushed_call_too_short_to_time_alone_is_flagged():
    device = FakeDevice(enqueue_seconds=1e-6, tick_seconds=1e-6, record_seconds=2e-6)
    point = measure(device, model={"base_seconds": 20e-6}, cache=Cache.flush)
    assert point.find_series("device").calls_per_sample == 1
    assert "below_resolution" in codes(point)


def test_rotating_inputs_take_turns_and_are_more_than_the_cache():
    class Batch:
        def __init__(self):
            self.inputs, self.targets = np.ones(100), None

    class Batches:
        constant, per_epoch = True, 7

        def next(self):
            return Batch()

    class Session:
        def copy(self, batch, into=None):
            return Batch()

    rotating = Rotating(Batches(), Session(), cache_bytes=4000)
    seen = [id(rotating.next().inputs) for _ in range(3 * rotating.copies)]
    assert rotating.copies * 800 > 2 * 4000
    assert len(set(seen)) == rotating.copies
    assert seen[: rotating.copies] == seen[rotating.copies : 2 * rotating.copies]
    assert not rotating.constant
    assert len(list(rotating.epoch())) == 7


@pytest.mark.parametrize("finite", [True, False])
def test_non_finite_outputs_are_flagged_once_after_the_timing(monkeypatch, finite):
    checks = []
    monkeypatch.setattr(
        FakeSession, "is_finite", lambda session, outputs: checks.append(outputs) or finite
    )
    point = measure()
    assert codes(point).count("not_finite") == (not finite)
    assert checks == [10_000]  # the pixels that the scripted model returns
    measure(key=msgspec.structs.replace(KEY, phase="train"))
    measure(key=msgspec.structs.replace(KEY, replicate=1))
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("losses", "which"),
    [
        ((1.0, 2.0), None),
        ((1.0, np.inf), "last"),
        ((np.nan, 1.0), "first"),
        ((None, np.nan), "last"),
    ],
)
def test_every_loss_that_was_read_back_has_to_be_finite(losses, which):
    point = Point(key=KEY, status=Status.OK)
    training.add_figures(point, first_loss=losses[0], last_loss=losses[1], steps_per_epoch=None)
    assert [doubt.message.split(" is ")[0] for doubt in point.doubts] == (
        [f"the {which} loss"] if which else []
    )


def test_a_lost_device_is_asked_for_nothing_more():
    device = FakeDevice(enqueue_seconds=1e-6)
    point = measure(device, model={"faults": {"lost": 100}})
    assert point.status is Status.FAILED
    assert device.is_lost()
    assert "device_after" not in point.facts


def test_custom_metrics_survive_a_failed_point(monkeypatch):
    def forward(self, inputs):
        metrics.metric("own", 3.0)
        raise ValueError("broken")

    monkeypatch.setattr("perfexp.models.fake.FakeSession.forward", forward)
    point = measure()
    assert point.status is Status.FAILED
    assert point.metric("custom/own").value == 3.0


def test_warm_phases_are_not_compared_with_a_flushed_call():
    key = Key(phase="train", input_size=(100, 100), batch_size=1, precision="fp32")
    point = measure(key=key, model={"cold_seconds": 0.5e-3}, cache=Cache.flush)
    assert point.find_series("phase/forward") is not None
    assert point.metric("phases_over_whole") is None
    assert "phases_disagree" not in codes(point)


def test_a_graph_does_not_take_the_place_of_rotating_inputs():
    point = measure(model={"launches": 1500}, cache=Cache.rotate)
    assert point.find_series("device") is None
    [doubt] = [doubt for doubt in point.doubts if doubt.code == "device_missing"]
    assert "cache=rotate" in doubt.message


def test_the_peak_of_the_first_calls_stands_apart():
    class Remembering(FakeDevice):
        peak = 0

        def reset_peak_memory(self, *, give_back=True):
            self.peak = 100

        def memory(self):
            return [Metric(name="memory/peak_bytes", value=self.peak, unit="bytes")]

        def launch(self, work_seconds, host_seconds=None):
            calls, self.calls = getattr(self, "calls", 0), getattr(self, "calls", 0) + 1
            self.peak = max(self.peak, 900 if calls < 2 else 300)
            return super().launch(work_seconds, host_seconds)

    point = measure(Remembering(enqueue_seconds=1e-6))
    assert point.metric("memory/warmup_peak_bytes").value == 900
    assert point.metric("memory/peak_bytes").value == 300
    assert len([metric for metric in point.metrics if metric.name == "memory/peak_bytes"]) == 1


def test_broken_capture_keeps_the_other_measurements(monkeypatch):
    def broken(self, call):
        raise ValueError("broken")

    monkeypatch.setattr("perfexp.models.fake.FakeSession.capture", broken)
    point = measure(model={"launches": 1500})
    assert point.status is Status.OK
    assert median(point, "throughput") > 0
    [doubt] = [doubt for doubt in point.doubts if doubt.code == "device_missing"]
    assert "ValueError: broken" in doubt.message


def energy_of(device, meter):
    found = DeviceMeters(meters=(meter,)) if meter else none_because("nothing counts")
    return EnergyProcedure(
        device=device, detected=found, sleep=partial(device.launch, 0.0), beside=Turns(device)
    )


def values(point, prefix):
    return {metric.name: metric.value for metric in point.metrics if metric.name.startswith(prefix)}


def test_the_energy_of_a_call_is_the_power_times_its_time():
    device = FakeDevice(enqueue_seconds=1e-6)
    meter = FakeMeter(
        lambda: device.now_ns() * 1e-9, steady(300), spend=partial(device.launch, 0.0)
    )
    point = measure(
        device, energy=energy_of(device, meter), key=msgspec.structs.replace(KEY, batch_size=4)
    )
    seconds = point.metric("energy/call_seconds").value
    assert seconds == pytest.approx(median(point), rel=1e-2)
    assert point.metric("energy/per_call_joules").value == pytest.approx(300 * seconds, rel=1e-3)
    assert point.metric("energy/per_image_joules").value == pytest.approx(75 * seconds, rel=1e-3)


def test_energy_report_receives_the_time_of_the_timed_calls():
    device = FakeDevice(enqueue_seconds=1e-6)
    energy, told = energy_of(device, None), {}
    report = energy.report
    energy.report = lambda *figures, **settings: (
        told.update(settings) or report(*figures, **settings)
    )
    point = measure(device, energy=energy)
    assert told["clean"].value == pytest.approx(np.mean(point.find_series("throughput").measured))


@pytest.mark.parametrize(
    ("meter", "cache", "reason"),
    [
        (None, Cache.warm, "no meter: nothing counts"),
        ("fails", Cache.warm, "broken"),
        (None, Cache.flush, "cache=flush"),
    ],
)
def test_energy_that_cannot_be_measured_is_null_with_a_reason(meter, cache, reason):
    device = FakeDevice(enqueue_seconds=1e-6)
    energy = energy_of(device, None)
    if meter:

        def breaks(*_, **__):
            raise RuntimeError("broken")

        energy.plateau = energy.idle = breaks
    measuring = procedure(device, energy=energy, cache=cache)
    measuring.begin()
    point = measuring.measure(KEY)
    assert point.status is Status.OK
    assert point.metric("energy/per_call_joules").value is None
    assert reason in point.metric("energy/per_call_joules").reason
    assert median(point) > 0


@pytest.mark.parametrize(("idle_seconds", "worked"), [(0.0, True), (2.0, False)])
def test_energy_is_told_what_the_device_has_worked_until_now(monkeypatch, idle_seconds, worked):
    device, told = FakeDevice(enqueue_seconds=1e-6), []
    energy = energy_of(device, None)
    energy.plateau = lambda call, worked_seconds: told.append(worked_seconds)
    measuring = procedure(device, energy=energy)
    whole, clock, rested = measuring.times.whole, itertools.count(1, 1000), []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock) + sum(rested))

    def timed(point, call, **settings):
        whole(point, call, **settings)
        rested.append(int(idle_seconds * 1e9))

    measuring.times.whole = timed
    point = measuring.measure(KEY)
    series = [each for each in point.series if not each.name.startswith("phase")]
    busy = sum(len(each.samples) * each.calls_per_sample for each in series) * median(point)
    assert told == [pytest.approx(busy if worked else 0.0, rel=0.05)]


def test_idle_power_is_measured_before_the_first_point():
    device = FakeDevice(enqueue_seconds=1e-6)
    meter = FakeMeter(lambda: device.now_ns() * 1e-9, steady(70), spend=partial(device.launch, 0.0))
    measuring = procedure(device, energy=energy_of(device, meter))
    measuring.begin()
    began = device.now_ns()
    assert measuring.energy.idle().mean_watts.value == pytest.approx(70, rel=1e-3)
    assert device.now_ns() == began


def host_bound(**settings):
    """A call of 100 launches, 2 ms of the host's time and 1 ms of the device's, of 300 W."""
    device = FakeDevice(enqueue_seconds=20e-6)
    meter = FakeMeter(
        lambda: device.now_ns() * 1e-9, steady(300.0), spend=partial(device.launch, 0.0)
    )
    measuring = procedure(
        device, model={"launches": 100}, energy=energy_of(device, meter), **settings
    )
    measuring.begin()
    return measuring


class Fastest:
    """An algorithm with a baseline, whose report is empty."""

    name, group, is_forced = "fastest", "algorithm", True

    def begin_point(self):
        pass

    begin_call = discard_choices = begin_point

    def report(self):
        return SimpleNamespace(layers=(), metrics=list, facts=dict, doubts=list)

    def baselines(self):
        return ("default",)

    def run_baseline(self, _, work):
        return work()

    def run_eager(self, work):
        return work()


def test_each_process_compares_an_algorithm_with_its_baselines():
    measuring = procedure(algorithm=Fastest())
    for replicate in range(2):
        point = measuring.measure(msgspec.structs.replace(KEY, replicate=replicate))
        assert point.metric("algorithm/speedup_over_default").value == pytest.approx(1, abs=1e-3)


def test_host_bound_loop_has_its_energy_at_both_paces():
    point = host_bound().measure(KEY)
    assert point.metric("energy/per_call_joules").value == pytest.approx(0.6, rel=0.02)
    assert point.metric("energy/queued_per_call_joules").value == pytest.approx(0.3, rel=0.02)
    assert point.metric("energy/queued_call_seconds").value == pytest.approx(
        median(point), rel=0.01
    )
    assert "energy_pace" in codes(point)
    assert point.facts["energy"]["idle_last"]


def test_where_the_device_limits_the_loop_there_is_one_energy():
    device = FakeDevice(enqueue_seconds=1e-6)
    meter = FakeMeter(
        lambda: device.now_ns() * 1e-9, steady(300.0), spend=partial(device.launch, 0.0)
    )
    point = measure(device, energy=energy_of(device, meter))
    assert point.metric("energy/queued_per_call_joules") is None
    assert "energy_pace" not in codes(point)


def test_device_pace_and_idle_power_are_measured_at_anchors():
    measuring = host_bound(anchors=[((50, 50), 1)])
    point = measuring.measure(KEY)
    assert point.metric("energy/queued_per_call_joules") is None
    assert "idle_last" not in point.facts["energy"]
    measuring.anchors = [(KEY.input_size, KEY.batch_size)]
    point = measuring.measure(KEY)
    assert point.metric("energy/queued_per_call_joules").value == pytest.approx(0.3, rel=0.02)
    assert "idle_last" in point.facts["energy"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"graph": True}, "a graph already"),
        ({"cache": Cache.rotate}, "cache=rotate"),
        ({}, "ValueError: broken"),
    ],
)
def test_missing_energy_at_the_device_pace_has_a_reason(monkeypatch, settings, reason):
    measuring = host_bound(**settings)
    if not settings:

        def broken(self, call):
            raise ValueError("broken")

        monkeypatch.setattr("perfexp.models.fake.FakeSession.capture", broken)
    elif "graph" in settings:
        measuring.device.enqueue_seconds = 2e-3  # a graph is one launch
    point = measuring.measure(KEY)
    assert point.status is Status.OK
    queued = point.metric("energy/queued_per_call_joules")
    assert queued.value is None
    assert reason in queued.reason
    assert point.metric("energy/per_call_joules").value == pytest.approx(0.6, rel=0.02)


ROW = WorkRow(
    path="conv", call=0, operation=None, kind="Conv2d", macs=1000, flops=2000, input_gradient_flops=2000,
    weight_gradient_flops=2000, bytes_min=500, activation_bytes=200, parameters=10, inputs=((1,),), outputs=((1,),),
)  # fmt: skip


@pytest.mark.parametrize(("phase", "flops"), [("inference", 2000), ("train", 6000)])
def test_work_becomes_a_rate_and_a_part_of_the_peak(phase, flops):
    measuring = procedure(counts_work=True, peaks={"fp32": 1e9})
    measuring.session.work = lambda inputs, training: Work(
        rows=(ROW,), parameters=10, backward=training, uncounted=()
    )
    point = measuring.measure(msgspec.structs.replace(KEY, phase=phase))
    assert values(point, "work/") == {
        "work/forward_macs": 1000,
        "work/flops": flops,
        "work/bytes_min": 500,
        "work/activation_bytes": 200,
        "work/parameters": 10,
        "work/flops_per_second": pytest.approx(flops / median(point)),
    }
    assert point.metric("mfu").value == pytest.approx(flops / median(point, "throughput") / 1e9)
    assert "work_uncounted" not in codes(point)


def test_a_device_without_a_data_sheet_has_no_mfu():
    measuring = procedure(counts_work=True, peaks=None)
    measuring.session.work = lambda inputs, training: Work(
        rows=(ROW,), parameters=10, backward=False, uncounted=()
    )
    assert not [
        metric for metric in measuring.measure(KEY).metrics if metric.name.startswith("mfu")
    ]


def test_work_that_is_not_known_is_said():
    measuring = procedure(counts_work=True)
    counted = Work(
        rows=(ROW,), parameters=10, backward=False, uncounted=("my::op",), is_random=True
    )
    measuring.session.work = lambda inputs, training: counted
    point = measuring.measure(KEY)
    assert codes(point).count("work_uncounted") == 2
    assert "no file of conf/gpu has this device's peak in fp32" in point.metric("mfu").reason

    def refuses(inputs, training):
        raise Unsupported("it reads its numbers")

    measuring.session.work = refuses
    point = measuring.measure(KEY)
    assert (point.status, point.metric("work/flops").reason) == (Status.OK, "it reads its numbers")


def test_the_rate_is_that_of_the_devices_own_time_by_graph_too():
    device = FakeDevice(enqueue_seconds=1e-6, graph_gap_seconds=1e-6, queue_depth=1000)
    measuring = procedure(device, model={"launches": 1500}, counts_work=True)
    measuring.session.work = lambda inputs, training: Work(
        rows=(ROW,), parameters=1, backward=False, uncounted=()
    )
    point = measuring.measure(KEY)
    assert point.facts["device_method"] == "graph"
    assert point.metric("work/flops_per_second").value == pytest.approx(2000 / median(point))


@pytest.mark.parametrize(
    ("asynchronous", "workers", "threads", "doubted"),
    [(False, 2, 3, True), (False, 1, 3, False), (False, 0, 9, False), (True, 2, 3, False)],
)
def test_a_loader_that_takes_cores_from_the_model_is_a_doubt(
    monkeypatch, asynchronous, workers, threads, doubted
):
    measuring = procedure(FakeDevice(asynchronous=asynchronous, enqueue_seconds=1e-6))
    monkeypatch.setattr(environment, "cores", lambda: 4)
    measuring.data.workers = workers
    facts = measuring.session.facts
    monkeypatch.setattr(measuring.session, "facts", lambda: {**facts(), "threads": threads})
    point = measuring.measure(KEY)
    assert ("loader_competes" in codes(point)) is doubted


def test_a_smaller_batch_is_searched_for_within_the_free_memory(monkeypatch):
    """A batch that fails otherwise does not end the search."""
    limits = []

    @contextmanager
    def limited(device):
        limits.append("begun")
        try:
            yield
        finally:
            limits.append("ended")

    monkeypatch.setattr(FakeDevice, "memory_limited", limited)
    key = msgspec.structs.replace(KEY, batch_size=8)
    point = measure(key=key, model={"faults": {"oom": 30_000, "fail": 15_000}})
    assert point.metric("batch_that_fits").value == 1
    assert point.error.endswith(". A batch of 1 fits.")
    assert limits == ["begun", "ended"] * 3
