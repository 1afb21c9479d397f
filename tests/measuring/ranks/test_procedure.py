"""The measuring procedure with other ranks: what they are told, and what their loss does to a point."""

import dataclasses
from functools import partial

import pytest

from perfexp.devices.fake import FakeDevice
from perfexp.devices.meters import DeviceMeters
from perfexp.errors import OutOfMemory, RankLost, Unsupported
from perfexp.measuring.probes.energy import EnergyProcedure
from perfexp.measuring.ranks import Burst
from perfexp.models import Sharing
from perfexp.records.record import Key, Status
from perfexp.timing import depth
from tests.measuring.test_run import procedure
from tests.support.scripted_meter import FakeMeter, Turns, steady

pytestmark = pytest.mark.usefixtures("quick_commands")

TRAIN = Key(phase="train", input_size=(100, 100), batch_size=4, precision="fp32")


@dataclasses.dataclass
class ProcessGroup:
    """Three ranks, two of which write down what they are told."""

    size: int = 3
    told: list = dataclasses.field(default_factory=list)
    is_lost: bool = False
    calls: int = 0

    def open(self, key):
        self.told.append(("open", key))

    def close(self):
        self.told.append("close")

    def first(self):
        self.told.append("first")

    def joined(self, step):
        def call():
            self.calls += 1
            step.call()

        return dataclasses.replace(step, call=call)

    def burst(self, step, calls, sharing):
        seconds = {
            Sharing.all: 0.010,
            Sharing.no_gradients: 0.009,
            Sharing.nothing: 0.0085,
            Sharing.alone: 0.008,
        }[sharing]
        self.told.append(sharing)
        return [Burst(start_ns=0, end_ns=round(calls * seconds * 1e9))] * self.size

    def lost(self):
        return self.is_lost


def value(point, name):
    return next(metric.value for metric in point.metrics if metric.name == name)


def test_all_ranks_open_a_point_make_every_call_and_close_it():
    group = ProcessGroup()
    point = procedure(group=group).measure(TRAIN)
    assert point.status is Status.OK
    assert group.told[:2] == [("open", TRAIN), "first"]
    assert group.told[-1] == "close"
    assert group.told.count(Sharing.all) == group.told.count(Sharing.no_gradients) == 22
    assert Sharing.alone not in group.told
    measured = sum(
        len(series.samples) * series.calls_per_sample
        for series in point.series
        if "/" not in series.name
    )
    assert group.calls >= measured
    assert point.facts["world_size"] == 3
    assert value(point, "ranks/samples_per_second") == pytest.approx(3 * 4 / 0.010)


@pytest.mark.parametrize(("group", "key"), [(True, "train"), (True, "inference"), (False, "train")])
def test_shared_training_makes_ten_calls_before_it_is_timed(monkeypatch, group, key):
    """DistributedDataParallel waits for the device in its first ten iterations: no queue could be filled."""
    device = FakeDevice(enqueue_seconds=1e-6)
    measuring = procedure(device, **({"group": ProcessGroup()} if group else {}))
    before, usual = [], depth.group_calls

    def group_calls(*arguments):
        before.append(measuring.group.calls if group else 0)
        return usual(*arguments)

    monkeypatch.setattr(depth, "group_calls", group_calls)
    measuring.measure(TRAIN if key == "train" else inference_key(batch_size=4))
    assert (before[0] >= 10) is (group and key == "train")


def test_one_card_is_compared_where_that_is_asked_for():
    group = ProcessGroup()
    point = procedure(group=group, compares_alone=True).measure(TRAIN)
    assert group.told.count(Sharing.alone) == 22
    assert value(point, "ranks/scaling_efficiency") == pytest.approx(0.8)
    assert value(point, "ranks/communication_share") == pytest.approx(0.1)


def test_call_energy_covers_all_ranks_and_all_their_images():
    device = FakeDevice(enqueue_seconds=1e-6)
    spend = partial(device.launch, 0.0)
    turns = Turns(device)
    meter = FakeMeter(lambda: device.now_ns() * 1e-9, steady(300.0), spend=turns.spend)
    energy = EnergyProcedure(
        device=device, detected=DeviceMeters(meters=(meter,)), sleep=spend, beside=turns
    )
    point = procedure(device, group=ProcessGroup(), energy=energy).measure(
        inference_key(batch_size=4)
    )
    joules = value(point, "energy/per_call_joules")
    assert joules == pytest.approx(300.0 * value(point, "energy/call_seconds"), rel=0.01)
    assert value(point, "energy/per_image_joules") == pytest.approx(joules / 12)
    assert value(point, "energy/idle_power_watts") == pytest.approx(300.0, rel=0.01)


def inference_key(*, batch_size):
    return Key(phase="inference", input_size=(100, 100), batch_size=batch_size, precision="fp32")


def test_an_epoch_is_as_many_times_shorter_as_there_are_ranks():
    from perfexp.data.synthetic import Synthetic

    alone, three = (
        procedure(group=group) if group else procedure() for group in (None, ProcessGroup())
    )
    for each in (alone, three):
        each.data = Synthetic(num_samples=240)
    seconds = [value(each.measure(TRAIN), "epoch_seconds") for each in (alone, three)]
    assert seconds[1] == pytest.approx(seconds[0] / 3, rel=0.05)


def test_an_error_while_another_rank_is_gone_is_not_the_points():
    """The launcher knows which rank it was; what this one saw of it would mislead."""
    measuring = procedure(group=ProcessGroup(is_lost=True), model={"faults": {"fail": 1}})
    with pytest.raises(RankLost):
        measuring.measure(TRAIN)


def test_an_error_that_this_rank_met_is_the_points():
    point = procedure(group=ProcessGroup(), model={"faults": {"fail": 1}}).measure(TRAIN)
    assert point.status is Status.FAILED


def test_no_smaller_batch_is_tried_by_ranks_that_are_out_of_step():
    group = ProcessGroup()
    point = procedure(group=group, model={"faults": {"oom": 1}}).measure(TRAIN)
    assert point.status is Status.OOM
    assert [told for told in group.told if told != "first"] == [("open", TRAIN)], (
        "nothing was opened again"
    )
    fits = next(metric for metric in point.metrics if metric.name == "batch_that_fits")
    assert fits.value is None
    assert "several ranks" in fits.reason


def test_a_call_that_the_queue_does_not_take_is_not_captured():
    """Others could not follow a replay, nor a call that is broken off to see whether it waits."""
    group = ProcessGroup()
    device = FakeDevice(enqueue_seconds=1e-6, queue_depth=3)
    measuring = procedure(device, group=group, model={"launches": 50})
    counted = []
    measuring.session.capture = lambda call: counted.append(call)
    device.waits_inside = lambda call: counted.append(call)
    point = measuring.measure(TRAIN)
    assert point.status is Status.OK
    assert point.facts["device_method"] == "none"
    assert counted == []
    assert "device_missing" in [doubt.code for doubt in point.doubts]


def test_what_only_the_first_rank_computes_costs_its_figure_only():
    measuring = procedure(group=ProcessGroup(), counts_work=True)

    def fails(inputs, *, training):
        raise RuntimeError("no numbers here")

    measuring.session.work = fails
    point = measuring.measure(TRAIN)
    assert point.status is Status.OK
    [work] = (metric for metric in point.metrics if metric.name == "work/flops")
    assert "no numbers here" in work.reason


@pytest.mark.parametrize(
    ("error", "status"), [(Unsupported("not here"), Status.OK), (OutOfMemory("no"), Status.OOM)]
)
def test_rank_failure_after_timing_fails_the_point(monkeypatch, error, status):
    """After a call that one rank did not end, the others wait for it: no figure beside the times is worth that."""
    measuring = procedure(group=ProcessGroup())

    def fails(*_, **__):
        raise error

    monkeypatch.setattr("perfexp.measuring.ranks.joint.measure", fails)
    point = measuring.measure(TRAIN)
    assert point.status is status
    assert point.series, "the times stay"
