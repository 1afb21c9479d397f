"""A profiler's events as plain tuples."""

from __future__ import annotations

import re
from typing import NamedTuple

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
