"""Profiling: the layers of a step on a GPU, by torch's profiler, with the calls piled up behind a held queue."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from perfexp.devices import Device
from perfexp.layers import LayerTimes, Method
from perfexp.layers.attribution import Attributed
from perfexp.layers.closure import close, unattributed_share
from perfexp.layers.events import Event
from perfexp.layers.marking import Marker, Ranges, marking, ranged
from perfexp.layers.outline import Opaque, outline_of
from perfexp.layers.partition import CallTimes, attributed, divide
from perfexp.layers.ranges import Scope
from perfexp.layers.replayed import Pattern
from perfexp.layers.results import times_of
from perfexp.layers.threads import Host
from perfexp.modes import Step
from perfexp.probes.depth import samples_in_queue
from perfexp.probes.timing import undisturbed

#: Calls of which every row has a time, unless told otherwise.
CALLS = 10
#: No more calls than so many are in one profile, whose events all have to be looked at.
_MOST_AT_ONCE = 5
#: The queue is held for so many times what issuing the calls took under the profiler, and a little more.
_HOLD_FACTOR, _HOLD_EXTRA_SECONDS = 1.5, 1e-3
#: … with this factor on top after a round that starved, …
_HOLD_GROWS = 2.0
#: … for so many rounds in which no call was issued in time; then the queue is left to itself.
_ROUNDS_IN_VAIN = 3
#: A graph of which more of the time than this is of other kernels than the call's, or lacks them, is another call.
_MOST_STRANGE = 0.01
#: What the start of a profile says that is no news: each has one cycle.
_NO_NEWS = ".*Profiler clears events"


class Profiler(Protocol):
    """What tells the events of a run; a scripted one in tests."""

    def __call__(self, run: Callable[[], object]) -> list[Event]:
        """Run something, wait for the device, and return what was seen.

        Args:
            run: enqueues work.
        """


def kineto(run: Callable[[], object]) -> list[Event]:
    """See `Profiler`; torch's own, of host and device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_NEWS)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
    assert profiler.profiler is not None
    return [event_of(event) for event in profiler.profiler.kineto_results.events()]


def event_of(event: Any) -> Event:
    """One of the profiler's events as a plain tuple.

    Args:
        event: torch's `_KinetoEvent`.
    """
    on_device = event.device_type() == DeviceType.CUDA
    return Event(
        name=event.name(),
        start_ns=event.start_ns(),
        duration_ns=event.duration_ns(),
        on_device=on_device,
        place=event.device_resource_id(),
        correlation=event.correlation_id(),
        linked=event.linked_correlation_id(),
        sequence=event.sequence_nr(),
        forward_thread=event.fwd_thread_id(),
        thread=event.start_thread_id(),
        annotation=on_device and event.is_user_annotation(),
    )


def profile_layers(
    step: Step,
    model: torch.nn.Module,
    device: Device,
    *,
    clean_seconds: float | None,
    calls: int = CALLS,
    first: bool = True,
    capture: Callable[[], Step | None] | None = None,
    profiler: Profiler = kineto,
) -> LayerTimes:
    """The time of every row of a step on an asynchronous device.

    To be called when the step is warm and all timing is done: profilers slow the process that they were used in.

    Args:
        step: whose parts are run.
        model: the module that it calls, on the device.
        device: that works.
        clean_seconds: `device` time of a call without a profiler, or None.
        calls: for which each row has a time.
        first: whether this is the first profile of the process.
        capture: makes the step one whose call is launched at once, or None where it can't; for a call that the device's
            queue does not take.
        profiler: that sees what happens.

    Returns:
        Times with rows, or with a reason why there are none.
    """
    try:
        with step.active():
            outline = outline_of(lambda: _parts(step), model)
            graph = capture() if capture else None
            device.synchronize()
            with undisturbed(), marking(model, outline, Ranges()) as marker:
                rounds = _Rounds(step, device, marker, profiler, first)
                times = rounds.replayed(graph, calls) if graph else rounds.take(calls)
                if capture and not graph:
                    times.no_graph = "it could not be captured this time"
                if marker.strayed:
                    raise Opaque(f"the model does not take the same way in each call: {marker.strayed}")
    except Opaque as why:
        return LayerTimes(reason=str(why))
    return close(times, clean_seconds)


def _parts(step: Step) -> None:
    for name, part in step.segments:
        with ranged(Scope.phase, kind=name):
            part()


@dataclass
class _Rounds:
    """Profiles of a few calls each.

    Attributes:
        step: whose parts are run.
        device: that works.
        marker: of the model's calls.
        profiler: that sees what happens.
        first: whether it has seen nothing in this process before.
        rowed: tells the rows of kernels whose launch does not.
        starved: calls thrown away.
    """

    step: Step
    device: Device
    marker: Marker
    profiler: Profiler
    first: bool
    rowed: Callable[[list[Attributed]], list[Attributed]] = lambda kernels: kernels
    starved: int = 0
    _kept: list[CallTimes] = field(default_factory=list)

    def take(self, calls: int) -> LayerTimes:
        """Rounds until so many calls are kept.

        Args:
            calls: that are wanted.

        Raises:
            Opaque: the profiler saw no kernels.
        """
        self._begin()
        issue = self._issue_seconds()
        at_once = min(samples_in_queue(self._call, self.device, most=_MOST_AT_ONCE, hold_seconds=4 * issue), calls)
        factor, in_vain = _HOLD_FACTOR, 0
        while len(self._kept) < calls and at_once and in_vain < _ROUNDS_IN_VAIN:
            count = min(at_once, calls - len(self._kept))
            found = self._round(count, factor * count * issue + _HOLD_EXTRA_SECONDS)
            kept = [each for each in found if not each.starved]
            self._kept += kept
            self.starved += count - len(kept)
            in_vain = 0 if kept else in_vain + 1
            if len(kept) < count:
                factor, at_once = factor * _HOLD_GROWS, max(1, len(kept))
        if self._kept:
            return times_of(self._kept, Method.queue, self.starved)
        return times_of(self._unheld(calls), Method.unheld, self.starved)

    def replayed(self, graph: Step, calls: int) -> LayerTimes:
        """The same of a call that is launched as one: its kernels have the rows of those of the call as it is.

        Args:
            graph: the same step, captured.
            calls: that are wanted.

        Raises:
            Opaque: the profiler saw no kernels.
        """
        self._begin()
        pattern = Pattern(self._kernels())
        rounds = _Rounds(graph, self.device, self.marker, self.profiler, first=False, rowed=pattern.rowed)
        try:
            times = rounds.take(calls)
            strange = max(unattributed_share(times), 1 - pattern.least_found) if pattern.replays else 1.0
        except Opaque:  # it saw nothing of a replay
            strange = 1.0
        if strange <= _MOST_STRANGE and times.held:
            times.method = Method.graph
            return times
        times = times_of(self._unheld(calls), Method.unheld)
        other = f"{strange:.0%} of its time is of other kernels, or of kernels that it lacks"
        times.no_graph = other if strange > _MOST_STRANGE else "nor could that"
        return times

    def _kernels(self) -> list[Attributed]:
        """Of a call, with their rows."""

        def run() -> None:
            self._call()
            self.device.synchronize()

        self.device.synchronize()
        events = self.profiler(run)
        return [each for each in attributed(Host(events), events) if each.call is not None]

    def _begin(self) -> None:
        """A process's first profile is late and slow."""
        if self.first:
            self._round(1, 0.0)
            self.first = False

    def _unheld(self, calls: int) -> Sequence[CallTimes]:
        kept: list[CallTimes] = []
        while len(kept) < calls:
            found = self._round(min(_MOST_AT_ONCE, calls - len(kept)), 0.0)
            if not found:
                raise Opaque("the profiler saw no kernels of a call")
            kept += found
        return kept

    def _round(self, count: int, hold_seconds: float) -> list[CallTimes]:
        """One profile of so many calls, behind a wait of so many seconds."""

        def run() -> None:
            if hold_seconds:
                self.device.hold(hold_seconds)
            for number in range(count):
                self._call(number)
            self.device.synchronize()

        self.device.synchronize()
        return divide(self.profiler(run), held=hold_seconds > 0, rowed=self.rowed)

    def _issue_seconds(self) -> float:
        """Host time of issuing a call under the profiler, while the device has nothing else to do."""
        taken: list[float] = []

        def run() -> None:
            start = self.device.now_ns()
            self._call()
            taken.append((self.device.now_ns() - start) * 1e-9)
            self.device.synchronize()

        self.device.synchronize()
        self.profiler(run)
        return taken[0]

    def _call(self, number: int = 0) -> None:
        self.marker.restart()
        with ranged(Scope.call, number):
            _parts(self.step)
