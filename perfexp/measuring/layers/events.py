"""Events of a profile, the names of our ranges in it, and the tree of events on the host.

`marking` puts a range around each call, phase, module and operation; the range's name is a
`RangeMark`. `Host` nests ranges and operators by thread and time, and finds, for a kernel, the
launch and what was open at that moment. torch's profiler is read in `profiling`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple

#: Prefix of range names; no operator in the namespace `perfexp` has it.
_PREFIX = "perfexp/"
#: Names of driver and runtime calls, which have their own correlation numbers.
_RUNTIME = re.compile(r"(?:cuda|cu|hip)[A-Z]")
#: Prefix of the engine's event around all its work for a node, including the node's own event.
EVALUATE = "autograd::engine::evaluate_function: "


class ProfilerEvent(NamedTuple):
    """An event from torch's profiler.

    Attributes:
        start_ns: start in nanoseconds, on a clock that host and device share.
        place: device stream, or the operating system's thread number; 0 for the profiler's own
            work.
        correlation: number shared by a kernel and the runtime call that launched it; operators have
            their own.
        linked: correlation of the innermost operator around the launch of a kernel or runtime call;
            0 for none.
        sequence: autograd's number for the next node when an operator begins, or a node's own
            number; -1 for none.
        forward_thread: thread of a node's forward operator; 0 for other events.
        annotation: whether the event is a user annotation; copies of these on the device are not
            kernels.
    """

    name: str
    start_ns: int
    duration_ns: int
    on_device: bool
    place: int
    correlation: int
    linked: int
    sequence: int = -1
    forward_thread: int = 0
    thread: int = 1
    annotation: bool = False

    @property
    def end_ns(self) -> int:
        """Return the end in nanoseconds."""
        return self.start_ns + self.duration_ns

    @property
    def is_kernel(self) -> bool:
        """Return whether the event is device work: a kernel, memory copy or memory fill."""
        return self.on_device and not self.annotation

    @property
    def is_runtime(self) -> bool:
        """Return whether the event is a call to the driver or its runtime."""
        return not self.on_device and _RUNTIME.match(self.name) is not None


class Scope(StrEnum):
    """Subject of a range: what it is put around."""

    call = "call"
    phase = "phase"
    module = "module"
    operation = "operation"
    parameter = "parameter"


class RangeMark(NamedTuple):
    """A range, as a name that a profile can hold.

    Attributes:
        scope: what the range is put around.
        number: index of the call, of a module's call, or of an operation in it; 0 for other scopes.
        whole: whether a module is a single row if it calls no other module.
        kind: module class, or operation or phase name.
        path: path of a module, or of a parameter's module.
    """

    scope: Scope
    number: int = 0
    whole: bool = False
    kind: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        """Return the text for `parse`; the path is last because it may hold any character."""
        return f"{_PREFIX}{self.scope}:{self.number}:{int(self.whole)}:{self.kind}:{self.path}"


def parse(name: str) -> RangeMark | None:
    """Return the mark in an event name; None for other names."""
    if not name.startswith(_PREFIX):
        return None
    scope, number, whole, kind, path = name[len(_PREFIX) :].split(":", 4)
    return RangeMark(Scope(scope), int(number), whole == "1", kind, path)


class Host:
    """Operators and ranges of all host threads in a profile, each with its parent.

    Methods identify an operator or range by its index in `events`.

    Attributes:
        launches: runtime calls by correlation number.
        events: operators and ranges, sorted by start; at equal starts the longer comes first.
        marks: the mark in each event's name; None for operators.
        outer: indices of module ranges with another module's range inside.
        parameters: path of a parameter's module, by index of each event that was open while the
            parameter's gradient was accumulated.
    """

    def __init__(self, events: Iterable[ProfilerEvent]) -> None:
        ours = [event for event in events if not event.on_device and event.place]
        self.launches = {event.correlation: event for event in ours if event.is_runtime}
        self.events = sorted(
            (event for event in ours if not event.is_runtime),
            key=lambda event: (event.start_ns, -event.end_ns),
        )
        self.marks: list[RangeMark | None] = [parse(event.name) for event in self.events]
        self._parents = self._find_parents()
        self._of_correlation: dict[int, int] = {}
        for index, event in enumerate(self.events):
            self._of_correlation.setdefault(event.correlation, index)
        self.outer = {self._module_around(index) for index, _ in self._marked(Scope.module)}
        self._calls = self._periods(Scope.call)
        self._phases = self._periods(Scope.phase)
        self.parameters = {
            around: mark.path
            for index, mark in self._marked(Scope.parameter)
            for around in self.upwards(index)
        }
        self._forward = self._forward_operators()

    def upwards(self, index: int | None) -> Iterator[int]:
        """Yield the index of an event and of all its ancestors, from the inside outwards.

        For None yield nothing.
        """
        while index is not None:
            yield index
            index = self._parents[index]

    def operator_of(self, kernel: ProfilerEvent) -> int | None:
        """Return the innermost operator or range around a kernel's launch; None if unknown."""
        linked = self._of_correlation.get(kernel.linked) if kernel.linked else None
        launch = self.launches.get(kernel.correlation)
        if linked is not None or launch is None:
            return linked
        # the profiler has not linked them, so the time of the launch decides
        return self._open_at(launch.thread, launch.start_ns)

    def launched_ns(self, kernel: ProfilerEvent) -> int | None:
        """Return a kernel's launch time, or the start of its operator; None if unknown."""
        launch = self.launches.get(kernel.correlation)
        if launch is not None:
            return launch.start_ns
        operator = self.operator_of(kernel)
        if operator is None:
            return None
        return self.events[operator].start_ns

    def call_at(self, moment_ns: int) -> int | None:
        """Return the number of the call that was open at a moment, in any thread, or None."""
        mark = _mark_at(self._calls, moment_ns)
        return mark.number if mark else None

    def phase_at(self, moment_ns: int) -> str | None:
        """Return the name of the phase that was open at a moment, in any thread, or None."""
        mark = _mark_at(self._phases, moment_ns)
        return mark.kind if mark else None

    def call_ends_ns(self) -> dict[int, int]:
        """Return when the host had issued each call completely, by call number."""
        return {mark.number: end for _, end, mark in self._calls}

    def is_node(self, index: int) -> bool:
        """Return whether an event is an autograd node, or the engine's work around it."""
        event = self.events[index]
        return event.forward_thread > 0 or event.name.startswith(EVALUATE)

    def forward_of(self, node: int) -> int | None:
        """Return the forward operator that made a node: the last that began before the node.

        An operator may make several nodes and reports only the first number; for example, changing
        a view in place makes three. Numbers grow in each thread. So the last operator with a number
        not above the node's made it, or is part of the operator that did. The result is None if the
        node has no number, or its operator ran before the profile.
        """
        event = self.events[node]
        if event.sequence < 0:
            return None
        operators = self._forward.get(event.forward_thread, [])
        index = bisect_right(operators, event.sequence, key=itemgetter(0)) - 1
        return operators[index][1] if index >= 0 and operators[index][1] < node else None

    def _find_parents(self) -> list[int | None]:
        """Return the index of the innermost event around each event, in the same thread."""
        parents: list[int | None] = []
        open_of: dict[int, list[int]] = defaultdict(list)
        for index, event in enumerate(self.events):
            stack = open_of[event.thread]
            while stack and self.events[stack[-1]].end_ns <= event.start_ns:
                stack.pop()
            parents.append(stack[-1] if stack else None)
            stack.append(index)
        return parents

    def _open_at(self, thread: int, moment_ns: int) -> int | None:
        """Return the innermost event that was open in a thread at a moment, or None."""
        last = bisect_right(self.events, moment_ns, key=lambda event: event.start_ns) - 1
        while last >= 0 and self.events[last].thread != thread:
            last -= 1
        around = self.upwards(last if last >= 0 else None)
        return next((index for index in around if self.events[index].end_ns > moment_ns), None)

    def _marked(self, scope: Scope) -> Iterator[tuple[int, RangeMark]]:
        """Return the index and mark of each range with a scope."""
        return (
            (index, mark)
            for index, mark in enumerate(self.marks)
            if mark is not None and mark.scope is scope
        )

    def _module_around(self, index: int) -> int | None:
        """Return the innermost module range around an event, or None."""
        for outer in self.upwards(self._parents[index]):
            mark = self.marks[outer]
            if mark is not None and mark.scope is Scope.module:
                return outer
        return None

    def _periods(self, scope: Scope) -> list[tuple[int, int, RangeMark]]:
        """Return start, end and mark of each range with a scope, by start, in nanoseconds."""
        return [
            (self.events[index].start_ns, self.events[index].end_ns, mark)
            for index, mark in self._marked(scope)
        ]

    def _forward_operators(self) -> dict[int, list[tuple[int, int]]]:
        """Return, by thread, sequence number and index of operators that may have made nodes.

        Numbers increase, so that `forward_of` can bisect.
        """
        operators: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, event in enumerate(self.events):
            if event.sequence >= 0 and event.forward_thread == 0:
                before = operators[event.thread]
                before.append((max(event.sequence, before[-1][0] if before else 0), index))
        return operators


def _mark_at(periods: list[tuple[int, int, RangeMark]], moment_ns: int) -> RangeMark | None:
    """Return the mark with a period that contains a moment; periods do not overlap."""
    index = bisect_right(periods, moment_ns, key=itemgetter(0)) - 1
    return periods[index][2] if index >= 0 and moment_ns < periods[index][1] else None
