"""A profiler's events, the ranges that mark calls, phases, modules and operations, and the host's threads as trees."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple

#: Prefix of the names, which no operator of the namespace `perfexp` has.
_PREFIX = "perfexp/"
#: Calls of the driver and its runtime, which have their own correlation numbers.
_RUNTIME = re.compile(r"(?:cuda|cu|hip)[A-Z]")
#: Prefix of the engine's event around all its work for a node, the node's own event included.
EVALUATE = "autograd::engine::evaluate_function: "


class Event(NamedTuple):
    """One event of torch's profiler.

    Attributes:
        start_ns: start on a clock that host and device share, nanoseconds.
        place: stream of the device, or the operating system's thread number; 0 for the profiler's own work.
        correlation: number that a kernel shares with the runtime call that launched it; operators have their own.
        linked: correlation of the innermost operator around a kernel's or runtime call's launch; 0 for none.
        sequence: autograd's number of the next node when an operator begins, or a node's own number; -1 for none.
        forward_thread: thread of a node's forward operator; 0 for other events.
        annotation: whether it is a user annotation; their copies on the device are not kernels.
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
        """End, nanoseconds."""
        return self.start_ns + self.duration_ns

    @property
    def is_kernel(self) -> bool:
        """Whether it is work of the device: a kernel, memory copy or memory fill."""
        return self.on_device and not self.annotation

    @property
    def is_runtime(self) -> bool:
        """Whether it is a call of the driver or its runtime."""
        return not self.on_device and _RUNTIME.match(self.name) is not None


class Scope(StrEnum):
    """Subject of a range."""

    call = "call"
    phase = "phase"
    module = "module"
    operation = "operation"
    parameter = "parameter"


class Mark(NamedTuple):
    """A range.

    Attributes:
        number: index of the call, of a module's call, or of an operation in it; 0 for other scopes.
        whole: whether a module is one row if no other module is called in it.
        kind: class of a module, or name of an operation or phase.
        path: path of a module, or of a parameter's module.
    """

    scope: Scope
    number: int = 0
    whole: bool = False
    kind: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        """The text that `parse` reads; the path is last since it may hold any character."""
        return f"{_PREFIX}{self.scope}:{self.number}:{int(self.whole)}:{self.kind}:{self.path}"


def parse(name: str) -> Mark | None:
    """The mark of an event name; None for other names."""
    if not name.startswith(_PREFIX):
        return None
    scope, number, whole, kind, path = name[len(_PREFIX) :].split(":", 4)
    return Mark(Scope(scope), int(number), whole == "1", kind, path)


class Host:
    """The operators and ranges of all host threads in a profile, each with its parent."""

    def __init__(self, events: Iterable[Event]) -> None:
        ours = [event for event in events if not event.on_device and event.place]
        self.launches = {event.correlation: event for event in ours if event.is_runtime}
        self.events = sorted(
            (event for event in ours if not event.is_runtime),
            key=lambda event: (event.start_ns, -event.end_ns),
        )
        self.marks: list[Mark | None] = [parse(event.name) for event in self.events]
        self._parents = self._nested()
        self._of_correlation: dict[int, int] = {}
        for index, event in enumerate(self.events):
            self._of_correlation.setdefault(event.correlation, index)
        # modules with a call of another module inside
        self.outer = {self._module_around(index) for index, _ in self._marked(Scope.module)} - {
            None
        }
        self._calls = self._periods(Scope.call)
        self._phases = self._periods(Scope.phase)
        # path of a parameter's module, by every event that is open when the gradient is accumulated
        self.parameters = {
            around: mark.path
            for index, mark in self._marked(Scope.parameter)
            for around in self.upwards(index)
        }
        self._forward = self._forward_operators()

    def upwards(self, index: int | None) -> Iterator[int]:
        """An operator or range and all its ancestors, from the inside outwards."""
        while index is not None:
            yield index
            index = self._parents[index]

    def operator_of(self, kernel: Event) -> int | None:
        """The innermost operator or range around a kernel's launch."""
        linked = self._of_correlation.get(kernel.linked) if kernel.linked else None
        launch = self.launches.get(kernel.correlation)
        if linked is not None or launch is None:
            return linked
        return self._open_at(launch.thread, launch.start_ns)

    def launched_ns(self, kernel: Event) -> int | None:
        """The launch time of a kernel, or the start of the operator that launched it; None if unknown."""
        launch = self.launches.get(kernel.correlation)
        if launch is not None:
            return launch.start_ns
        operator = self.operator_of(kernel)
        return None if operator is None else self.events[operator].start_ns

    def call_at(self, moment_ns: int) -> int | None:
        """Index of the call at a moment in the whole process, or None."""
        mark = _mark_at(self._calls, moment_ns)
        return mark.number if mark else None

    def phase_at(self, moment_ns: int) -> str | None:
        """Name of the phase at a moment in the whole process, or None."""
        mark = _mark_at(self._phases, moment_ns)
        return mark.kind if mark else None

    def call_ends_ns(self) -> dict[int, int]:
        """End of the host's issue of each call, by index."""
        return {mark.number: end for _, end, mark in self._calls}

    def is_node(self, index: int) -> bool:
        """Whether an event is an autograd node, or the engine's work around one."""
        event = self.events[index]
        return event.forward_thread > 0 or event.name.startswith(EVALUATE)

    def forward_of(self, node: int) -> int | None:
        """The operator that made a node: the last one that began before the node was made.

        An operator may make several nodes (one that changes a view in place makes three) and reports only the first
        number. Numbers grow in each thread, so the last operator with a number not beyond the node's made it, or is
        part of the one that did. None if the node has no number, or its operator ran before the profile.
        """
        event = self.events[node]
        if event.sequence < 0:
            return None
        operators = self._forward.get(event.forward_thread, [])
        place = bisect_right(operators, event.sequence, key=itemgetter(0)) - 1
        return operators[place][1] if place >= 0 and operators[place][1] < node else None

    def _nested(self) -> list[int | None]:
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
        last = bisect_right(self.events, moment_ns, key=lambda event: event.start_ns) - 1
        while last >= 0 and self.events[last].thread != thread:
            last -= 1
        around = self.upwards(last if last >= 0 else None)
        return next((index for index in around if self.events[index].end_ns > moment_ns), None)

    def _marked(self, scope: Scope) -> Iterator[tuple[int, Mark]]:
        return (
            (index, mark)
            for index, mark in enumerate(self.marks)
            if mark is not None and mark.scope is scope
        )

    def _module_around(self, index: int) -> int | None:
        for outer in self.upwards(self._parents[index]):
            mark = self.marks[outer]
            if mark is not None and mark.scope is Scope.module:
                return outer
        return None

    def _periods(self, scope: Scope) -> list[tuple[int, int, Mark]]:
        return [
            (self.events[index].start_ns, self.events[index].end_ns, mark)
            for index, mark in self._marked(scope)
        ]

    def _forward_operators(self) -> dict[int, list[tuple[int, int]]]:
        """Numbers and indices of the operators that may have made nodes, by thread, in the order of both."""
        operators: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, event in enumerate(self.events):
            if event.sequence >= 0 and event.forward_thread == 0:
                before = operators[event.thread]
                before.append((max(event.sequence, before[-1][0] if before else 0), index))
        return operators


def _mark_at(periods: list[tuple[int, int, Mark]], moment_ns: int) -> Mark | None:
    """The mark whose period contains a moment; periods do not overlap."""
    place = bisect_right(periods, moment_ns, key=itemgetter(0)) - 1
    return periods[place][2] if place >= 0 and moment_ns < periods[place][1] else None
