"""Events: what a profiler saw, as plain tuples."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Calls of the driver and its runtime, which have numbers of their own.
_RUNTIME = re.compile(r"(?:cuda|cu|hip)[A-Z]")


class Event(NamedTuple):
    """One event, with what torch's profiler tells about it.

    Attributes:
        name: in full.
        start_ns: on a clock that host and device share, nanoseconds.
        duration_ns: nanoseconds.
        on_device: whether it is the device's.
        place: stream of the device, or the operating system's number of the thread; 0 for the profiler's own work.
        correlation: of a kernel and the runtime's call that launched it, the same number; another one of an operator.
        linked: of a kernel or runtime's call, the correlation of the innermost operator that was open; 0 for none.
        sequence: autograd's number of the next node when an operator begins, of itself for a node; -1 for none.
        forward_thread: of a node, the thread of its forward operator; else 0.
        thread: of the host, as autograd counts them.
        annotation: whether it is the user's; the device's copies of those are no kernels.
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
        """When it ended, nanoseconds."""
        return self.start_ns + self.duration_ns

    @property
    def is_kernel(self) -> bool:
        """Whether the device worked on it: kernels, copies and fills of memory."""
        return self.on_device and not self.annotation

    @property
    def is_runtime(self) -> bool:
        """Whether it is a call of the driver or of its runtime."""
        return not self.on_device and _RUNTIME.match(self.name) is not None
