"""Partition: divide the time of each call among its kernels and the gaps between them.

A call on a GPU lasts from the end of the previous work to the end of its last kernel. Every
nanosecond goes to the kernels that run in it, or, as a gap, to the kernel that begins next. Kernels
carry their row (`attribution`), so that the parts of a call add up to a time for each row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from perfexp.measuring.layers import Key
from perfexp.measuring.layers.attribution import Attributed, attribute
from perfexp.measuring.layers.events import Host, ProfilerEvent


@dataclass
class Spent:
    """A row's time in a call, in nanoseconds.

    Attributes:
        busy_ns: kernel time.
        gap_ns: idle time before its kernels.
        kernels: runs and kernel time by kernel name.
    """

    busy_ns: int = 0
    gap_ns: int = 0
    kernels: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add_kernel(self, name: str, count: int, busy_ns: int) -> None:
        """Add runs and nanoseconds of a kernel, by its name."""
        before = self.kernels.get(name, (0, 0))
        self.kernels[name] = (before[0] + count, before[1] + busy_ns)
        self.busy_ns += busy_ns


@dataclass
class CallTimes:
    """Division of a call, from the end of previous work to the end of its last kernel.

    Attributes:
        number: number of the call in its profile.
        span_ns: duration of the call, the sum of all parts.
        rows: time by row.
        unattributed: time of kernels without a row, by kernel name.
        starved: whether the device began the call before the host had fully issued it.
    """

    number: int
    span_ns: int
    rows: dict[Key, Spent]
    unattributed: dict[str, Spent]
    starved: bool


def attributed(host: Host, events: Iterable[ProfilerEvent]) -> list[Attributed]:
    """Return a profile's kernels with their calls and rows, by start on the device."""
    kernels = sorted(
        (event for event in events if event.is_kernel),
        key=lambda event: (event.start_ns, event.end_ns),
    )
    return [attribute(host, kernel) for kernel in kernels]


def divide(
    events: Iterable[ProfilerEvent],
    *,
    held: bool,
    identify: Callable[[list[Attributed]], list[Attributed]] = lambda kernels: kernels,
) -> list[CallTimes]:
    """Divide each call in a profile among its kernels; return the calls in order.

    Args:
        events: kernels, operators, and the ranges of `perfexp.measuring.layers.events`.
        held: whether a spin kernel held the queue. If so, the first call begins at its end,
            otherwise with its first kernel.
        identify: adds the rows of kernels that their launches do not identify, as in a graph.
    """
    everything = list(events)
    host = Host(everything)
    kernels = identify(attributed(host, everything))
    return [
        _divide_call(number, window, kernels, host.call_ends_ns().get(number, 0))
        for number, window in _windows(kernels, held=held).items()
    ]


def _windows(kernels: Sequence[Attributed], *, held: bool) -> dict[int, tuple[int, int]]:
    """Return the beginning and end of each call by number, in nanoseconds.

    Each call begins at the end of the previous call.
    """
    of_call: dict[int, list[ProfilerEvent]] = defaultdict(list)
    for attributed_kernel in kernels:
        if attributed_kernel.call is not None:
            of_call[attributed_kernel.call].append(attributed_kernel.kernel)
    windows: dict[int, tuple[int, int]] = {}
    for number in sorted(of_call):
        begin = min(kernel.start_ns for kernel in of_call[number])
        if windows:
            begin = windows[max(windows)][1]
        elif held:
            # kernels outside calls, among them the spin kernel
            others = (item.kernel for item in kernels if item.call is None)
            begin = max(
                (kernel.end_ns for kernel in others if kernel.start_ns <= begin), default=begin
            )
        windows[number] = (begin, max(begin, *(kernel.end_ns for kernel in of_call[number])))
    return windows


def _divide_call(
    number: int, window: tuple[int, int], kernels: Sequence[Attributed], issued_ns: int
) -> CallTimes:
    """Divide a call; kernels of other calls that run during it are unattributed.

    Args:
        window: beginning and end of the call, in nanoseconds.
        kernels: all kernels in the profile, by start.
        issued_ns: when the host had fully issued the call.
    """
    begin, end = window
    inside = [
        item
        for item in kernels
        if item.call == number or (item.kernel.end_ns > begin and item.kernel.start_ns < end)
    ]
    first_start_ns = min(item.kernel.start_ns for item in inside if item.call == number)
    times = CallTimes(number, end - begin, {}, {}, issued_ns > first_start_ns)

    def spent(item: Attributed) -> Spent:
        """Return where the time of a kernel is added."""
        if item.key is not None and item.call == number:
            return times.rows.setdefault(item.key, Spent())
        return times.unattributed.setdefault(item.kernel.name, Spent())

    for item in inside:
        spent(item).add_kernel(item.kernel.name, 1, 0)
    edges = (
        edge
        for item in inside
        for edge in (item.kernel.start_ns, item.kernel.end_ns)
        if begin < edge < end
    )
    # between two moments the same kernels run; `following` is the first that has not begun
    moments = sorted({begin, end, *edges})
    following = 0
    running: list[Attributed] = []
    for start, stop in pairwise(moments):
        running = [item for item in running if item.kernel.end_ns > start]
        while following < len(inside) and inside[following].kernel.start_ns <= start:
            if inside[following].kernel.end_ns > start:
                running.append(inside[following])
            following += 1
        if not running:
            spent(inside[following]).gap_ns += stop - start
            continue
        share, remainder = divmod(stop - start, len(running))
        for item in running:
            spent(item).add_kernel(item.kernel.name, 0, share + remainder)
            remainder = 0  # the kernel that began first gets the remainder
    return times
