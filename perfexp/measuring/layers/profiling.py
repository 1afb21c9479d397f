"""Profiling: layer times on a GPU with torch's profiler, with calls queued behind a spin kernel."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from perfexp.devices import Device
from perfexp.measuring.layers import LayerTimes, Pass, TimeSource
from perfexp.measuring.layers.attribution import Attributed
from perfexp.measuring.layers.closure import close, unattributed_share
from perfexp.measuring.layers.events import Host, ProfilerEvent, Scope
from perfexp.measuring.layers.marking import Marker, Opaque, Ranges, marking, outline_of, ranged
from perfexp.measuring.layers.partition import CallTimes, attributed, divide
from perfexp.measuring.layers.table import times_of
from perfexp.measuring.modes import Step
from perfexp.timing.collecting import undisturbed
from perfexp.timing.depth import samples_in_queue

#: Default number of calls with times for every row.
CALLS = 10
#: Maximum number of calls per profile, to limit its number of events.
_MOST_AT_ONCE = 5
#: The queue is held for this multiple of the time to issue the calls under the profiler, plus the
#: extra.
_HOLD_FACTOR, _HOLD_EXTRA_SECONDS = 1.5, 1e-3
#: Growth of the factor after a round with a starved call.
_HOLD_GROWS = 2.0
#: Maximum number of rounds without a call issued in time; then the queue is no longer held.
_ROUNDS_IN_VAIN = 3
#: Maximum share of unknown or missing kernel time in a graph; beyond it, the graph is another call.
_MOST_STRANGE = 0.01
#: Harmless warning at the start of each profile.
_NO_NEWS = ".*Profiler clears events"
#: Phase that launches a captured call, as named by `perfexp.measuring.modes.graphed`.
_GRAPH = "graph"
#: Runs a function, waits for the device, and returns the observed events; scripted in tests.
Profiler = Callable[[Callable[[], object]], list[ProfilerEvent]]


def kineto(run: Callable[[], object]) -> list[ProfilerEvent]:
    """Return host and device events from torch's own profiler; a `Profiler`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_NEWS)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
    assert profiler.profiler is not None
    return [event_of(event) for event in profiler.profiler.kineto_results.events()]


def event_of(event: Any) -> ProfilerEvent:
    """Return a profiler event (torch's `_KinetoEvent`) as a plain tuple."""
    on_device = event.device_type() == DeviceType.CUDA
    return ProfilerEvent(
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
    """Return the time of every row of a step on an asynchronous device, or why there are none.

    Call it when the step is warm and all timing is done, because profilers slow their process
    permanently.

    Args:
        clean_seconds: `device` time of a call without a profiler, or None.
        first: whether this is the first profile in the process.
        capture: captures a step beyond the queue depth as a graph, or returns None if that is
            impossible.
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
                    raise Opaque(
                        f"the model does not take the same way in each call: {marker.strayed}"
                    )
    except Opaque as why:
        return LayerTimes(reason=str(why))
    return close(times, clean_seconds)


def _parts(step: Step) -> None:
    for name, part in step.segments:
        with ranged(Scope.phase, kind=name):
            part()


@dataclass
class _Rounds:
    step: Step
    device: Device
    marker: Marker
    profiler: Profiler
    first: bool
    rowed: Callable[[list[Attributed]], list[Attributed]] = lambda kernels: kernels

    def take(self, calls: int) -> LayerTimes:
        """Profile in rounds until enough calls are usable.

        Raises:
            Opaque: the profiler sees no kernels.
        """
        self._begin()
        issue = self._issue_seconds()
        at_once = min(
            samples_in_queue(self._call, self.device, most=_MOST_AT_ONCE, hold_seconds=4 * issue),
            calls,
        )
        usable: list[CallTimes] = []
        factor, in_vain, starved = _HOLD_FACTOR, 0, 0
        while len(usable) < calls and at_once and in_vain < _ROUNDS_IN_VAIN:
            count = min(at_once, calls - len(usable))
            divided = self._round(count, factor * count * issue + _HOLD_EXTRA_SECONDS)
            in_time = [call for call in divided if not call.starved]
            usable += in_time
            starved += count - len(in_time)
            in_vain = 0 if in_time else in_vain + 1
            if len(in_time) < count:
                factor, at_once = factor * _HOLD_GROWS, max(1, len(in_time))
        if usable:
            return times_of(usable, TimeSource.queue, starved)
        return times_of(self._unheld(calls), TimeSource.unheld, starved)

    def replayed(self, graph: Step, calls: int) -> LayerTimes:
        """Profile a captured step; its kernels get the rows of the same uncaptured call."""
        self._begin()
        events = self._profiled(self._call)
        pattern = Pattern(
            kernel for kernel in attributed(Host(events), events) if kernel.call is not None
        )
        rounds = _Rounds(
            graph, self.device, self.marker, self.profiler, first=False, rowed=pattern.rowed
        )
        try:
            times = rounds.take(calls)
            strange = (
                max(unattributed_share(times), 1 - pattern.least_found) if pattern.replays else 1.0
            )
        except Opaque:  # the profiler saw nothing of a replay
            strange = 1.0
        if strange <= _MOST_STRANGE and times.held:
            times.method = TimeSource.graph
            return times
        times = times_of(self._unheld(calls), TimeSource.unheld)
        other = f"{strange:.0%} of its time is of other kernels, or of kernels that it lacks"
        times.no_graph = other if strange > _MOST_STRANGE else "nor could that"
        return times

    def _begin(self) -> None:
        """Discard a process's first profile, which is late and slow."""
        if self.first:
            self._round(1, 0.0)
            self.first = False

    def _unheld(self, calls: int) -> Sequence[CallTimes]:
        usable: list[CallTimes] = []
        while len(usable) < calls:
            divided = self._round(min(_MOST_AT_ONCE, calls - len(usable)), 0.0)
            if not divided:
                raise Opaque("the profiler saw no kernels of a call")
            usable += divided
        return usable

    def _round(self, count: int, hold_seconds: float) -> list[CallTimes]:
        """Profile `count` calls behind a spin of `hold_seconds`."""

        def run() -> None:
            if hold_seconds:
                self.device.hold(hold_seconds)
            for number in range(count):
                self._call(number)

        return divide(self._profiled(run), held=hold_seconds > 0, rowed=self.rowed)

    def _issue_seconds(self) -> float:
        """Return the host time to issue a call under the profiler on an idle device."""
        taken: list[float] = []

        def run() -> None:
            start = self.device.now_ns()
            self._call()
            taken.append((self.device.now_ns() - start) * 1e-9)

        self._profiled(run)
        return taken[0]

    def _profiled(self, run: Callable[[], object]) -> list[ProfilerEvent]:
        """Return the events of a run that begins and ends with an idle device."""

        def complete() -> None:
            run()
            self.device.synchronize()

        self.device.synchronize()
        return self.profiler(complete)

    def _call(self, number: int = 0) -> None:
        self.marker.restart()
        with ranged(Scope.call, number):
            _parts(self.step)


class Pattern:
    """Kernels of a call made kernel by kernel, ordered by start on the device.

    A graph of the call has the same kernel names in the same order, except for data kernels.
    `least_found` is the smallest share of its time that was matched in a replay.
    """

    def __init__(self, kernels: Iterable[Attributed]) -> None:
        self._kernels = [
            kernel for kernel in kernels if kernel.key is None or kernel.key.which is not Pass.data
        ]
        self._names = [kernel.kernel.name for kernel in self._kernels]
        self.replays, self.least_found = 0, 1.0

    def rowed(self, kernels: Sequence[Attributed]) -> list[Attributed]:
        """Return a profile's kernels ordered by start; kernels from a graph get the pattern's rows.

        A kernel that the pattern lacks, or has elsewhere, has no row.
        """
        places: dict[int, list[int]] = defaultdict(list)
        for place, kernel in enumerate(kernels):
            if (
                kernel.call is not None
                and kernel.key
                and kernel.key.path is None
                and kernel.key.kind == _GRAPH
            ):
                places[kernel.call].append(place)
        rowed = list(kernels)
        for of_call in places.values():
            matches = self._matched([kernels[place].kernel.name for place in of_call])
            for number, place in enumerate(of_call):
                key = self._kernels[matches[number]].key if number in matches else None
                rowed[place] = kernels[place]._replace(key=key)
            self.replays += 1
            whole = sum(kernel.kernel.duration_ns for kernel in self._kernels)
            matched = sum(self._kernels[place].kernel.duration_ns for place in matches.values())
            self.least_found = min(self.least_found, matched / whole if whole else 0.0)
        return rowed

    def _matched(self, names: list[str]) -> Mapping[int, int]:
        """Return positions in the pattern by position in a replay."""
        if names == self._names:
            return {place: place for place in range(len(names))}
        blocks = SequenceMatcher(None, names, self._names, autojunk=False).get_matching_blocks()
        return {block.a + place: block.b + place for block in blocks for place in range(block.size)}
