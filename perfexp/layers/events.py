"""A profiler's events as plain tuples, and the names of the ranges that mark calls, phases, modules and operations."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

#: Prefix of the names, which no operator of the namespace `perfexp` has.
_PREFIX = "perfexp/"
#: Calls of the driver and its runtime, which have their own correlation numbers.
_RUNTIME = re.compile(r"(?:cuda|cu|hip)[A-Z]")


class Event(NamedTuple):
    """One event of torch's profiler.

    Attributes:
        start_ns: start on a clock that host and device share, nanoseconds.
        place: stream of the device, or the operating system's thread number; 0 for the profiler's own work.
        correlation: number that a kernel shares with the runtime call that launched it; operators have their own
            numbers.
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
