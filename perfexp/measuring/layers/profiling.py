"""Layer times: on a GPU with torch's profiler (`profile_layers`), on a CPU with stamps.

The profiler slows the host down. Calls are therefore queued behind a spin kernel that holds the
device, so that the device runs at its own pace. A call beyond the queue depth is profiled as a CUDA
graph; its kernels are matched with the kernels of the same uncaptured call. Stamps are consecutive
host clock readings around each module and operation. `measuring.layers_pass` calls both.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from perfexp.cost.tape import nodes_behind
from perfexp.devices import Device
from perfexp.measuring.layers import Key, LayerTimes, Pass, TimeSource
from perfexp.measuring.layers.attribution import Attributed, key_outside_modules
from perfexp.measuring.layers.events import Host, ProfilerEvent, RangeMark, Scope
from perfexp.measuring.layers.marking import Marker, Opaque, Ranges, marking, outline_of, ranged
from perfexp.measuring.layers.partition import CallTimes, Spent, attributed, divide
from perfexp.measuring.layers.table import close, times_of, unattributed_share
from perfexp.measuring.modes import Step
from perfexp.timing.collecting import undisturbed
from perfexp.timing.depth import samples_in_queue

#: Default number of calls with times for every row.
CALLS = 10
#: Maximum number of calls per profile, to limit its number of events.
_MOST_AT_ONCE = 5
#: A call with more events is profiled only a few times, because each event takes tens of
#: microseconds.
_MANY_EVENTS, _FEW_CALLS = 50_000, 3
#: With more kernels the profiler is too slow for its times to mean anything. cuDNN's `fft` launches
#: 75,663 for one call of resnet152, which takes 4 % longer under the profiler on an H200, and
#: 133,000 for vgg16, which takes 71 % longer even without gaps.
_MOST_KERNELS = 100_000
#: The queue is held for this multiple of the time to issue the calls under the profiler, plus the
#: extra.
_HOLD_FACTOR, _HOLD_EXTRA_SECONDS = 1.5, 1e-3
#: Growth of the factor after a round with a starved call.
_HOLD_GROWS = 2.0
#: Maximum number of rounds in a row without a call issued in time; then the queue is no longer
#: held. Nor is it for calls that take longer to issue: one that allocates waits for the device.
_MOST_FAILED_ROUNDS, _MOST_HOLD_SECONDS = 3, 2.0
#: Maximum share of unknown or missing kernel time in a graph; beyond it, the graph is another call.
_MOST_UNMATCHED = 0.01
#: Harmless warning at the start of each profile.
_NO_NEWS = ".*Profiler clears events"
#: Phase that launches a captured call, as named by `perfexp.measuring.modes.graphed`.
_GRAPH = "graph"
#: Runs a function, waits for the device, and returns the observed events; scripted in tests.
Profiler = Callable[[Callable[[], object]], list[ProfilerEvent]]


def kineto(run: Callable[[], object]) -> list[ProfilerEvent]:
    """Run a function under torch's own profiler and return host and device events; a `Profiler`."""
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
        model: the model that the step calls.
        clean_seconds: `device` time of a call without a profiler; None if it was not measured.
        calls: number of calls to profile; three if a call has many thousand kernels, and none if it
            has more than 100,000.
        first: whether this is the first profile in the process.
        capture: captures a step beyond the queue depth as a graph, or returns None if that is
            impossible; None for a step within the queue depth.
    """
    try:
        with step.active():
            outline = outline_of(lambda: _call_phases(step), model)
            graph = capture() if capture else None
            device.synchronize()
            with undisturbed(), marking(model, outline, Ranges()) as marker:
                rounds = _Rounds(step, device, marker, profiler, first)
                times = (
                    rounds.profile_replays(graph, calls) if graph else rounds.profile_calls(calls)
                )
                if capture and not graph:
                    times.no_graph = "it could not be captured this time"
                _refuse_strayed(marker)
    except Opaque as why:
        return LayerTimes(reason=str(why))
    return close(times, clean_seconds)


def _refuse_strayed(marker: Marker) -> None:
    """Raise `Opaque` if a call deviated from the outline."""
    if marker.strayed:
        raise Opaque(f"the model does not take the same way in each call: {marker.strayed}")


def _call_phases(step: Step) -> None:
    """Make a call with a profiler range around each phase."""
    for name, part in step.segments:
        with ranged(Scope.phase, kind=name):
            part()


@dataclass
class _Rounds:
    """Profiles a step in rounds of a few calls.

    Attributes:
        marker: marks the model's calls.
        first: whether the process has not profiled yet.
        identify: see `partition.divide`.
    """

    step: Step
    device: Device
    marker: Marker
    profiler: Profiler
    first: bool
    identify: Callable[[list[Attributed]], list[Attributed]] = lambda kernels: kernels

    def profile_calls(self, calls: int) -> LayerTimes:
        """Profile in rounds until enough calls are usable.

        A call is usable if the host issued all of it before the device began. If hardly any is, the
        queue is not held, and gaps between kernels are the host's.

        Raises:
            Opaque: the profiler sees no kernels, or more than can be profiled.
        """
        self._discard_first()
        issue_seconds, calls = self._try_call(calls)
        most_factor, at_once = _MOST_HOLD_SECONDS / issue_seconds, 0
        if most_factor > _HOLD_FACTOR:
            at_once = samples_in_queue(
                self._call,
                self.device,
                most=min(_MOST_AT_ONCE, calls),
                hold_seconds=min(4 * issue_seconds, _MOST_HOLD_SECONDS),
            )
        usable: list[CallTimes] = []
        factor, failed_rounds, starved = _HOLD_FACTOR, 0, 0
        while len(usable) < calls and at_once and failed_rounds < _MOST_FAILED_ROUNDS:
            count = min(at_once, calls - len(usable), max(1, int(most_factor / factor)))
            hold_seconds = factor * count * issue_seconds + _HOLD_EXTRA_SECONDS
            in_time = [call for call in self._round(count, hold_seconds) if not call.starved]
            usable += in_time
            starved += count - len(in_time)
            failed_rounds = 0 if in_time else failed_rounds + 1
            if len(in_time) < count:
                factor = min(factor * _HOLD_GROWS, most_factor)
                at_once = max(1, len(in_time))
        if usable:
            return times_of(usable, TimeSource.queue, starved)
        return times_of(self._profile_unheld(calls), TimeSource.unheld, starved)

    def profile_replays(self, graph: Step, calls: int) -> LayerTimes:
        """Profile a captured step; its kernels get the rows of the same uncaptured call.

        The uncaptured call is profiled instead if the graph's kernels differ from its own, or if
        the queue cannot be held. `no_graph` then has the reason.
        """
        self._discard_first()
        events = self._profiled(self._call)
        calls = _limited(calls, events)
        pattern = Pattern(
            kernel for kernel in attributed(Host(events), events) if kernel.call is not None
        )
        rounds = _Rounds(
            graph, self.device, self.marker, self.profiler, first=False, identify=pattern.identify
        )
        unmatched = 1.0
        with suppress(Opaque):  # the profiler saw nothing of a replay, or too much
            times = rounds.profile_calls(calls)
            if pattern.replays:
                unmatched = max(unattributed_share(times), 1 - pattern.least_found)
        if unmatched <= _MOST_UNMATCHED and times.held:
            times.method = TimeSource.graph
            return times
        times = times_of(self._profile_unheld(calls), TimeSource.unheld)
        other = f"{unmatched:.0%} of its time is of other kernels, or of kernels that it lacks"
        times.no_graph = other if unmatched > _MOST_UNMATCHED else "nor could that"
        return times

    def _discard_first(self) -> None:
        """Take and discard the process's first profile, which is late and slow.

        Raises:
            Opaque: the call has more kernels than can be profiled.
        """
        if self.first:
            self.first = False
            _limited(1, self._profiled(self._call))  # refuses a call of too many kernels

    def _profile_unheld(self, calls: int) -> Sequence[CallTimes]:
        """Profile calls without holding the queue; the device may wait for the host in between.

        Raises:
            Opaque: the profiler sees no kernels.
        """
        usable: list[CallTimes] = []
        while len(usable) < calls:
            divided = self._round(min(_MOST_AT_ONCE, calls - len(usable)), 0.0)
            if not divided:
                raise Opaque("the profiler saw no kernels of a call")
            usable += divided
        return usable

    def _round(self, count: int, hold_seconds: float) -> list[CallTimes]:
        """Profile `count` calls behind a spin kernel of `hold_seconds`; return their divisions."""

        def run() -> None:
            if hold_seconds:
                self.device.hold(hold_seconds)
            for number in range(count):
                self._call(number)

        return divide(self._profiled(run), held=hold_seconds > 0, identify=self.identify)

    def _try_call(self, calls: int) -> tuple[float, int]:
        """Profile a call on an idle device.

        Args:
            calls: most calls to profile.

        Returns:
            The host's seconds to issue the call, and how many calls to profile by its events.

        Raises:
            Opaque: the call has more kernels than can be profiled.
        """
        seconds: list[float] = []

        def run() -> None:
            start_ns = self.device.now_ns()
            self._call()
            seconds.append((self.device.now_ns() - start_ns) * 1e-9)

        events = self._profiled(run)
        return seconds[0], _limited(calls, events)

    def _profiled(self, run: Callable[[], object]) -> list[ProfilerEvent]:
        """Return the events of a run that begins and ends with an idle device."""

        def complete() -> None:
            run()
            self.device.synchronize()

        self.device.synchronize()
        return self.profiler(complete)

    def _call(self, number: int = 0) -> None:
        """Make a marked call with a range that holds its number in the profile."""
        self.marker.restart()
        with ranged(Scope.call, number):
            _call_phases(self.step)


def _limited(calls: int, events: Sequence[ProfilerEvent]) -> int:
    """Return the number of calls to profile, given the events of one call.

    Raises:
        Opaque: the call has more kernels than can be profiled.
    """
    if (kernels := sum(event.is_kernel for event in events)) > _MOST_KERNELS:
        raise Opaque(
            f"a call launches {kernels:,} kernels and copies; with more than {_MOST_KERNELS:,} the "
            "profiler's own work distorts their times"
        )
    return calls if len(events) <= _MANY_EVENTS else min(calls, _FEW_CALLS)


class Pattern:
    """Kernels of an uncaptured call with their rows, to identify the kernels of its CUDA graph.

    A graph of the call has the same kernel names in the same order, except for data kernels.

    Attributes:
        replays: number of replays that were matched.
        least_found: smallest share of the pattern's time that was matched in a replay.

    Args:
        kernels: kernels of one call, ordered by start on the device.
    """

    def __init__(self, kernels: Iterable[Attributed]) -> None:
        self._kernels = [
            kernel for kernel in kernels if kernel.key is None or kernel.key.which is not Pass.data
        ]
        self._names = [kernel.kernel.name for kernel in self._kernels]
        self.replays, self.least_found = 0, 1.0

    def identify(self, kernels: Sequence[Attributed]) -> list[Attributed]:
        """Return a profile's kernels; kernels from a graph get the pattern's rows.

        A kernel that the pattern lacks, or has elsewhere, has no row.

        Args:
            kernels: kernels of all calls, ordered by start.
        """
        places: dict[int, list[int]] = defaultdict(list)
        for index, kernel in enumerate(kernels):
            key = kernel.key
            is_of_graph = key is not None and key.path is None and key.kind == _GRAPH
            if kernel.call is not None and is_of_graph:
                places[kernel.call].append(index)
        identified = list(kernels)
        for of_call in places.values():
            matches = self._match([kernels[index].kernel.name for index in of_call])
            for number, index in enumerate(of_call):
                key = self._kernels[matches[number]].key if number in matches else None
                identified[index] = kernels[index]._replace(key=key)
            self.replays += 1
            total_ns = sum(kernel.kernel.duration_ns for kernel in self._kernels)
            matched = sum(self._kernels[index].kernel.duration_ns for index in matches.values())
            self.least_found = min(self.least_found, matched / total_ns if total_ns else 0.0)
        return identified

    def _match(self, names: list[str]) -> Mapping[int, int]:
        """Match a replay's kernel names, in order, with the pattern's.

        Return positions in the pattern by position in the replay, for those that match.
        """
        if names == self._names:
            return {index: index for index in range(len(names))}
        blocks = SequenceMatcher(None, names, self._names, autojunk=False).get_matching_blocks()
        return {block.a + index: block.b + index for block in blocks for index in range(block.size)}


class Stamps:
    """Credits the time between two clock readings to the current row; a `CallObserver`.

    The marker's own work lies between two readings and is counted separately. The backward pass is
    followed from node to node in autograd's graph. A node belongs to the row that was current when
    the node was made. Its time ends when the next node begins, so it includes autograd's overhead.

    Attributes:
        spent: nanoseconds in the present call, by row.
        own_ns: nanoseconds of the marker's own work in the present call.

    Args:
        now_ns: the host's clock.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.spent: dict[Key, int] = {}
        self.own_ns = 0
        self._now = now_ns
        #: The last clock reading.
        self._last = 0
        #: The rows that are open, the current row last.
        self._rows: list[Key] = []
        #: Autograd's number for the next node when a row became current, and the row, in order.
        self._made_in: list[tuple[int, Key]] = []

    def start(self) -> None:
        """Begin a call; time before it is the marker's own work."""
        self.spent, self.own_ns, self._rows, self._made_in = {}, 0, [], []
        self._last = self._now()

    def begin_overhead(self) -> None:
        """Credit the time since the last reading to the current row."""
        now, row = self._now(), self._row
        self.spent[row] = self.spent.get(row, 0) + now - self._last
        self._last = now

    def end_overhead(self) -> None:
        """Credit the time since the last reading to the marker's own work."""
        now = self._now()
        self.own_ns += now - self._last
        self._last = now

    @contextmanager
    def around(self, mark: RangeMark | None) -> Iterator[None]:
        """See `CallObserver`; while entered, the mark's row is current. Entering ends overhead."""
        self._rows.append(self._key(mark) if mark else self._row)
        self._note_row()
        self.end_overhead()
        try:
            yield
        finally:
            self.begin_overhead()
            self._rows.pop()
            self._note_row()

    @contextmanager
    def following(self, loss: torch.Tensor) -> Iterator[None]:
        """Follow the backward pass from a loss while entered."""
        with ExitStack() as stack:
            for node in nodes_behind(loss):
                stack.callback(node.register_prehook(self._before(node)).remove)
            yield

    @property
    def _row(self) -> Key:
        """Return the current row."""
        return self._rows[-1] if self._rows else key_outside_modules(None)

    def _key(self, mark: RangeMark) -> Key:
        """Return the row for a mark inside the current row."""
        if mark.scope is Scope.phase:
            return key_outside_modules(mark.kind)
        outer = self._row
        pass_type = Pass.backward if outer.which is Pass.backward else Pass.forward
        if mark.scope is Scope.operation:
            return Key(
                path=outer.path,
                call=outer.call,
                operation=mark.number,
                kind=mark.kind,
                which=pass_type,
            )
        return Key(
            path=mark.path, call=mark.number, operation=None, kind=mark.kind, which=pass_type
        )

    def _note_row(self) -> None:
        """Remember that autograd nodes made from now on belong to the current row."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._made_in.append((number, self._row))

    def _before(self, node: torch.autograd.graph.Node) -> Callable[[object], None]:
        """Return the hook that autograd calls before a node: its row becomes the current row."""
        index = bisect_right(self._made_in, node._sequence_nr(), key=itemgetter(0)) - 1
        row = self._made_in[index][1] if index >= 0 else key_outside_modules(None)
        key = msgspec.structs.replace(row, which=Pass.backward)

        def hook(_: object) -> None:
            self.begin_overhead()
            self._rows[-1] = key
            self.end_overhead()

        return hook


def stamp_layers(
    step: Step,
    model: torch.nn.Module,
    device: Device,
    *,
    clean_seconds: float | None,
    calls: int = CALLS,
) -> LayerTimes:
    """Return the time of every row of a step on a synchronous device, or why there are none.

    Args:
        model: the model that the step calls.
        clean_seconds: `latency` of a call without stamps; None if it was not measured.
        calls: number of calls with times.
    """
    stamps = Stamps(device.now_ns)
    times_of_calls: list[CallTimes] = []
    own_ns: list[int] = []
    try:
        with step.active():
            outline = outline_of(lambda: [part() for _, part in step.segments], model)
            with undisturbed(), marking(model, outline, stamps) as marker:
                for number in range(calls + 1):
                    why_no_backward = _make_stamped_call(step, marker, stamps)
                    rows = {key: Spent(busy_ns=ns) for key, ns in stamps.spent.items()}
                    span_ns = sum(stamps.spent.values())
                    times_of_calls.append(CallTimes(number, span_ns, rows, {}, starved=False))
                    own_ns.append(stamps.own_ns)
                _refuse_strayed(marker)
    except Opaque as why:
        return LayerTimes(reason=str(why))
    # the first call still fills the marker's own caches
    times = times_of(times_of_calls[1:], TimeSource.stamps)
    times.own_seconds = float(np.median(own_ns[1:])) * 1e-9
    times.no_backward = why_no_backward  # the same in every call
    return close(times, clean_seconds)


def _make_stamped_call(step: Step, marker: Marker, stamps: Stamps) -> str | None:
    """Make a call with stamps; its times are in `stamps` afterward.

    Returns:
        Why its backward pass was not followed; None if it was followed or there is none.
    """
    marker.restart()
    stamps.start()
    why_no_backward = None
    for name, part in step.segments:
        with ExitStack() as stack:
            if name == "backward":
                loss = step.state.loss
                if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
                    stack.enter_context(stamps.following(loss))
                else:
                    why_no_backward = "the step does not store a loss with a graph"
            with stamps.around(RangeMark(Scope.phase, kind=name)):
                part()
    return why_no_backward
