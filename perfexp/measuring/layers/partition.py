"""Partition: divide the time of each call among its kernels and the gaps between them."""

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
    """A row's time in a call: kernel time, idle time before kernels, and runs and time by name."""

    busy_ns: int = 0
    gap_ns: int = 0
    kernels: dict[str, tuple[int, int]] = field(default_factory=dict)

    def ran(self, name: str, count: int, busy_ns: int) -> None:
        """Add runs and nanoseconds of a kernel."""
        before = self.kernels.get(name, (0, 0))
        self.kernels[name] = (before[0] + count, before[1] + busy_ns)
        self.busy_ns += busy_ns


@dataclass
class CallTimes:
    """Division of a call, from the end of previous work to the end of its last kernel.

    A call is starved if the device began it before the host had fully issued it.
    """

    number: int
    span_ns: int
    rows: dict[Key, Spent]
    unattributed: dict[str, Spent]
    starved: bool


def attributed(host: Host, events: Iterable[ProfilerEvent]) -> list[Attributed]:
    """Return a profile's kernels with their rows, in the order in which they began."""
    kernels = sorted(
        (event for event in events if event.is_kernel),
        key=lambda event: (event.start_ns, event.end_ns),
    )
    return [attribute(host, kernel) for kernel in kernels]


def divide(
    events: Iterable[ProfilerEvent],
    *,
    held: bool,
    rowed: Callable[[list[Attributed]], list[Attributed]] = lambda kernels: kernels,
) -> list[CallTimes]:
    """Return a profile's divided calls, in order.

    Args:
        events: kernels, operators, and the ranges of `perfexp.measuring.layers.events`.
        held: whether a spin kernel held the queue. If so, the first call begins at its end,
            otherwise with its first kernel.
        rowed: adds the rows of kernels that their launches do not identify.
    """
    everything = list(events)
    host = Host(everything)
    kernels = rowed(attributed(host, everything))
    return [
        _divided(number, window, kernels, host.call_ends_ns().get(number, 0))
        for number, window in _windows(kernels, held=held).items()
    ]


def _windows(kernels: Sequence[Attributed], *, held: bool) -> dict[int, tuple[int, int]]:
    """Return the beginning and end of each call; each begins at the end of the previous call."""
    of_call: dict[int, list[ProfilerEvent]] = defaultdict(list)
    for each in kernels:
        if each.call is not None:
            of_call[each.call].append(each.kernel)
    windows: dict[int, tuple[int, int]] = {}
    for number in sorted(of_call):
        begin = min(kernel.start_ns for kernel in of_call[number])
        if windows:
            begin = windows[max(windows)][1]
        elif held:
            others = (each.kernel for each in kernels if each.call is None)
            begin = max(
                (kernel.end_ns for kernel in others if kernel.start_ns <= begin), default=begin
            )
        windows[number] = (begin, max(begin, *(kernel.end_ns for kernel in of_call[number])))
    return windows


def _divided(
    number: int, window: tuple[int, int], kernels: Sequence[Attributed], issued_ns: int
) -> CallTimes:
    """Divide a call; kernels of other calls that run during it are unattributed."""
    begin, end = window
    inside = [
        each
        for each in kernels
        if each.call == number or (each.kernel.end_ns > begin and each.kernel.start_ns < end)
    ]
    own = [each for each in inside if each.call == number]
    times = CallTimes(
        number, end - begin, {}, {}, issued_ns > min(each.kernel.start_ns for each in own)
    )

    def spent(each: Attributed) -> Spent:
        if each.key is not None and each.call == number:
            return times.rows.setdefault(each.key, Spent())
        return times.unattributed.setdefault(each.kernel.name, Spent())

    for each in inside:
        spent(each).ran(each.kernel.name, 1, 0)
    edges = (
        edge
        for each in inside
        for edge in (each.kernel.start_ns, each.kernel.end_ns)
        if begin < edge < end
    )
    moments = sorted({begin, end, *edges})
    following = 0
    running: list[int] = []
    for start, stop in pairwise(moments):
        running = [index for index in running if inside[index].kernel.end_ns > start]
        while following < len(inside) and inside[following].kernel.start_ns <= start:
            if inside[following].kernel.end_ns > start:
                running.append(following)
            following += 1
        if not running:
            spent(inside[following]).gap_ns += stop - start
            continue
        share, rest = divmod(stop - start, len(running))
        for place, index in enumerate(running):
            spent(inside[index]).ran(
                inside[index].kernel.name, 0, share + (rest if place == 0 else 0)
            )
    return times
