"""The profiled pass on a scripted device whose kernels are known."""

import dataclasses
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from perfexp.devices.fake import FakeDevice
from perfexp.measuring.layers import TimeSource, profiling
from perfexp.measuring.layers import marking as marking_module
from perfexp.measuring.layers.events import ProfilerEvent
from perfexp.measuring.layers.profiling import profile_layers
from perfexp.measuring.modes import State, Step

#: Device seconds of the busy waits.
WORK = {"first": 300e-6, "second": 100e-6, "add": 50e-6, "loss": 20e-6}
CALL_SECONDS = sum(WORK.values())


class Busy(nn.Module):
    def __init__(self, machine, name):
        super().__init__()
        self.machine, self.name = machine, name

    def forward(self, x):
        self.machine.work(self.name)
        return x.clone()


class Net(nn.Module):
    """A sequence of known busy waits, and a functional one."""

    def __init__(self, machine):
        super().__init__()
        self.layers = nn.Sequential(Busy(machine, "first"), Busy(machine, "second"))
        self.machine = machine

    def forward(self, x):
        x = self.layers(x)
        return torch.add(x, Launching(self.machine))


class Launching:
    """What launches work when torch is called with it."""

    def __init__(self, machine):
        self.machine = machine

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args[1].machine.work("add")
        return func(args[0], 1.0)


class Machine(FakeDevice):
    """A scripted device with a scripted profiler, under which its host is slower."""

    def __init__(self, *, slower=3.0, launches=1, **script):
        super().__init__(**script)
        self.slower, self.launches = slower, launches
        self.open, self.events, self.watching, self.rounds = [], [], False, []

    def work(self, name):
        for _ in range(self.launches):
            self.one(name, WORK[name] / self.launches)

    def one(self, name, seconds):
        number = 10_000 + len(self.events)
        begun = self.now_ns()
        self.launch(
            0.0, self.enqueue_seconds * (self.slower if self.watching else 1)
        )  # what launching costs the host
        end = round(self.launch(seconds, 0.0) * 1e9)
        self.events.append(
            ProfilerEvent("cudaLaunchKernel", begun, self.now_ns() - begun, False, 1, number, 0)
        )
        start = end - round(seconds * 1e9)
        self.events.append(
            ProfilerEvent(
                name, start, end - start, True, 7, number, self.open[-1] if self.open else 0
            )
        )

    def hold(self, seconds):
        self.rounds.append(seconds)
        self.one("spin", seconds)

    def graph(self, names):
        """Launches all kernels of a call at once."""
        number, begun = 10_000 + len(self.events), self.now_ns()
        self.launch(0.0, self.enqueue_seconds)
        parts = [
            (name, WORK["first" if name not in WORK else name] / self.launches) for name in names
        ]
        moment = self.launch(sum(seconds for _, seconds in parts), 0.0) - sum(
            seconds for _, seconds in parts
        )
        self.events.append(
            ProfilerEvent("cudaGraphLaunch", begun, self.now_ns() - begun, False, 1, number, 0)
        )
        for name, seconds in parts:
            start, moment = round(moment * 1e9), moment + seconds
            self.events.append(
                ProfilerEvent(
                    name, start, round(moment * 1e9) - start, True, 7, number, self.open[-1]
                )
            )

    def profiler(self, run):
        self.events.clear()
        self.watching = True
        try:
            run()
        finally:
            self.watching = False
        return list(self.events)

    @contextmanager
    def range(self, name):
        self._host_seconds += 10e-9
        number, begun = 1 + len(self.events), self.now_ns()
        self.events.append(None)
        self.open.append(number)
        try:
            yield
        finally:
            self.open.pop()
            self._host_seconds += 10e-9
            self.events[number - 1] = ProfilerEvent(
                name, begun, self.now_ns() - begun, False, 1, number, 0
            )


def profiled(monkeypatch, machine, clean=CALL_SECONDS, calls=10, model=None, **settings):
    model = model or Net(machine)
    monkeypatch.setattr(marking_module, "_Range", machine.range)
    step = step_of(model, machine)
    return profile_layers(
        step,
        model,
        machine,
        clean_seconds=clean,
        calls=calls,
        **({"profiler": machine.profiler} | settings),
    )


def step_of(model, machine):
    def forward():
        model(torch.zeros(1))

    def loss():
        machine.work("loss")

    segments = (("forward", forward), ("loss", loss))
    return Step(
        call=forward, segments=segments, active=nullcontext, batch_size=1, state=State(source=list)
    )


def seconds(times):
    return {(row.key.path, row.key.operation, row.key.kind): row.seconds[0] for row in times.rows}


def test_known_busy_waits_are_found_and_add_up_to_the_clean_time(monkeypatch):
    times = profiled(monkeypatch, Machine())
    assert times.method is TimeSource.queue
    assert times.reason is None
    assert seconds(times) == pytest.approx({
        ("layers.0", None, "Busy"): WORK["first"],
        ("layers.1", None, "Busy"): WORK["second"],
        ("", 0, "add"): WORK["add"],
        (None, None, "loss"): WORK["loss"],
    })  # fmt: skip
    assert times.calls == 10
    assert not times.unattributed
    assert times.closure.relative == pytest.approx(0, abs=1e-6)
    assert times.closure.gap_share == pytest.approx(0, abs=1e-6)
    assert times.doubts == []


def test_the_queue_is_held_for_longer_than_the_slower_host_needs(monkeypatch):
    machine = Machine(slower=50.0)
    times = profiled(monkeypatch, machine)
    assert times.starved == 0
    assert times.closure.gap_share == pytest.approx(0, abs=1e-6)
    needed = 4 * machine.slower * machine.enqueue_seconds
    assert all(
        hold > needed for hold in machine.rounds[1:]
    )  # the first is held without the profiler


def test_calls_that_overflow_the_queue_are_held_one_by_one(monkeypatch):
    times = profiled(monkeypatch, Machine(queue_depth=60, launches=6))
    assert times.method is TimeSource.queue
    assert times.calls == 10
    assert times.closure.relative == pytest.approx(0, abs=1e-6)


def test_a_call_that_never_fits_is_taken_unheld_and_says_so(monkeypatch):
    times = profiled(
        monkeypatch, Machine(queue_depth=4, launches=6, slower=40.0, enqueue_seconds=20e-6)
    )
    assert times.method is TimeSource.unheld
    assert not times.held
    assert times.calls == 10
    assert [doubt.code for doubt in times.doubts] == ["layers_inexact"]
    assert seconds(times)["layers.0", None, "Busy"] == pytest.approx(WORK["first"])
    assert sum(sum(row.gap_seconds) for row in times.rows) > 0


def test_a_call_that_takes_seconds_to_issue_is_not_held(monkeypatch):
    machine = Machine(slower=1.0, enqueue_seconds=0.5)  # four launches
    times = profiled(monkeypatch, machine)
    assert times.method is TimeSource.unheld
    assert times.calls == 10
    assert machine.rounds == []


def test_all_calls_of_a_round_are_held_for_two_seconds_at_most(monkeypatch):
    machine = Machine(slower=1.0, enqueue_seconds=0.1)
    times = profiled(monkeypatch, machine)
    assert times.method is TimeSource.queue
    assert times.calls == 10
    assert 1 < max(machine.rounds) < 2.01


@pytest.mark.parametrize("queue_depth", [1000, 4])
@pytest.mark.parametrize(("more", "calls"), [(0, 10), (-1, 3)])
def test_calls_of_many_kernels_are_profiled_less_often(monkeypatch, queue_depth, more, calls):
    machine = Machine(queue_depth=queue_depth, launches=6, slower=40.0, enqueue_seconds=20e-6)
    profiles = []

    def profiler(run):
        profiles.append(len(machine.profiler(run)))
        return list(machine.events)

    profiled(monkeypatch, machine, profiler=profiler)
    monkeypatch.setattr(profiling, "_MANY_EVENTS", profiles[1] + more)  # of a single call
    assert profiled(monkeypatch, machine).calls == calls


@pytest.mark.parametrize("queue_depth", [1000, 4])
@pytest.mark.parametrize("as_graph", [True, False])
def test_a_call_of_too_many_kernels_has_a_reason_and_no_layers(monkeypatch, queue_depth, as_graph):
    machine = Machine(queue_depth=queue_depth, launches=6, slower=40.0, enqueue_seconds=20e-6)
    capture = captured(machine, WORK) if as_graph else None
    monkeypatch.setattr(profiling, "_MOST_KERNELS", 6 * len(WORK))
    assert profiled(monkeypatch, machine, capture=capture).calls > 0
    monkeypatch.setattr(profiling, "_MOST_KERNELS", 6 * len(WORK) - 1)
    times = profiled(monkeypatch, machine, capture=capture)
    assert (times.calls, times.doubts) == (0, [])
    assert f"a call launches {6 * len(WORK)} kernels" in times.reason


def captured(machine, names, *, data=True):
    """Makes the step one whose call launches these kernels at once, and maybe copies its data before."""

    def replay():
        machine.graph([name for name in names for _ in range(machine.launches)])

    segments = [("data", lambda: machine.one("copy", 1e-6))] if data else []
    return lambda: dataclasses.replace(
        step_of(None, machine), segments=(*segments, ("graph", replay))
    )


#: Of which a call takes more launches than the queue has place for, though not as a graph.
DEEP = {"queue_depth": 40, "launches": 60, "slower": 40.0, "enqueue_seconds": 20e-6}


def test_captured_call_has_the_rows_of_the_same_kernels(monkeypatch):
    machine = Machine(**DEEP)
    times = profiled(monkeypatch, machine, CALL_SECONDS + 1e-6, capture=captured(machine, WORK))
    assert times.method is TimeSource.graph
    assert times.held
    assert times.calls == 10
    assert seconds(times) == pytest.approx({
        ("layers.0", None, "Busy"): WORK["first"],
        ("layers.1", None, "Busy"): WORK["second"],
        ("", 0, "add"): WORK["add"],
        (None, None, "loss"): WORK["loss"],
        (None, None, "data"): 1e-6,
    }, rel=1e-3)  # fmt: skip
    assert times.closure.relative == pytest.approx(0, abs=1e-3)
    assert times.closure.gap_share == pytest.approx(0, abs=1e-3)
    assert times.doubts == []


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("names", [["first", "another"], ["another"], ["first"], []])
def test_a_graph_that_is_another_call_says_nothing_of_the_layers(monkeypatch, names, data):
    machine = Machine(**DEEP)
    times = profiled(monkeypatch, machine, capture=captured(machine, names, data=data))
    assert times.method is TimeSource.unheld
    assert not times.unattributed
    assert seconds(times)["layers.0", None, "Busy"] == pytest.approx(WORK["first"])
    [doubt] = times.doubts
    assert "% of its time is of other kernels, or of kernels that it lacks" in doubt.message


def test_call_that_cannot_be_captured_is_profiled_uncaptured(monkeypatch):
    held, deep = (
        profiled(monkeypatch, machine, capture=lambda: None)
        for machine in (Machine(), Machine(**DEEP))
    )
    assert (held.method, held.doubts) == (TimeSource.queue, [])
    assert "it could not be captured this time" in deep.doubts[0].message


def test_profile_that_disagrees_with_the_clock_is_flagged(monkeypatch):
    times = profiled(monkeypatch, Machine(), clean=CALL_SECONDS * 0.9)
    assert [doubt.code for doubt in times.doubts] == ["layers_disagree"]


def test_a_model_that_is_compiled_has_a_reason(monkeypatch):
    machine = Machine()
    model = Net(machine)
    model.layers.compile(backend="eager")
    times = profiled(monkeypatch, machine, model=model)
    assert "compiled" in times.reason
    assert times.rows == []


def test_a_profiler_that_sees_nothing_of_the_device_is_a_reason(monkeypatch):
    machine = Machine()
    see = machine.profiler
    machine.profiler = lambda run: [event for event in see(run) if not event.on_device]
    assert "no kernels" in profiled(monkeypatch, machine).reason
