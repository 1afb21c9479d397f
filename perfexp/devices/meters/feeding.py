"""Feeding a device with calls while another thread queries the meters.

The energy probe keeps the device as busy as during timing, so that the power belongs to the timed
calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfexp.devices.meters.watch import Watch
from perfexp.statistics.estimators import windows_half_width

if TYPE_CHECKING:
    from perfexp.devices import Device, Event

#: Approximate duration of a block of calls; each block ends with an event.
_BLOCK_SECONDS = 0.002
_MOST_CALLS = 1000
#: Pending work that the device should have if its queue is deep enough.
_LEAD_SECONDS = 0.02


class StreamPosition(NamedTuple):
    """A position in the stream of calls: an event, and the number of calls before it."""

    event: Event
    calls: int


class Feeder:
    """Keeps a device busy with a call, and counts completed calls by events.

    Calls are enqueued about 20 ms ahead on an asynchronous device. On a synchronous device they
    simply run. The first call runs at once, to estimate the call time.

    Args:
        sleep: function that waits for some seconds; tests advance simulated time instead.
    """

    def __init__(
        self, call: Callable[[], object], device: Device, sleep: Callable[[float], None]
    ) -> None:
        self._call, self._device, self._sleep = call, device, sleep
        self._pending: deque[StreamPosition] = deque()
        self._spare: list[Event] = []
        self._calls, self._device_seconds = 0, 0.0
        #: Host time, calls and device time when a block end was seen.
        self._log: list[tuple[float, int, float]] = []
        device.synchronize()
        self._passed = self.start = StreamPosition(device.new_event(), 0)
        device.record(self._passed.event)
        self._call_seconds = self._busy_until = 0.0
        # first estimate of the call time
        self._enqueue(1)
        device.synchronize()
        self._collect()

    def feed(self, rest_seconds: float = _BLOCK_SECONDS) -> None:
        """Enqueue a block of calls, or rest if the device has enough pending work.

        `threaded` calls it in a loop, so events are checked at least once in `rest_seconds`.

        Args:
            rest_seconds: maximum rest.
        """
        self._collect()
        ahead = self._busy_until - self._now() - _LEAD_SECONDS
        if ahead > 0:
            self._sleep(min(ahead, rest_seconds))
        else:
            self._enqueue(min(max(int(_BLOCK_SECONDS / self._call_seconds), 1), _MOST_CALLS))

    def begin(self) -> None:
        """Begin the window about now, at the last event that the device has passed."""
        self._collect()
        self.start = self._passed

    def end(self) -> tuple[int, float]:
        """End the window about now; return its number of calls and their duration in seconds."""
        self._collect()
        if self._passed.calls == self.start.calls:  # a call is longer than the window
            self._device.synchronize()
            self._collect()
        seconds = self._device.elapsed_seconds(self.start.event, self._passed.event)
        self._device.synchronize()
        return self._passed.calls - self.start.calls, seconds

    def half_width(self, edges: Sequence[float]) -> float | None:
        """Return the half-width of the mean call time's 95 % interval in seconds, over windows.

        None for too few calls.

        Args:
            edges: window ends by the host's clock, seconds.
        """
        times, calls, seconds = map(np.asarray, zip(*self._log, strict=True))
        at = np.searchsorted(times, edges)
        at = at[at < len(times)]  # the last edge may be later than every block end
        counts, lengths = np.diff(calls[at]), np.diff(seconds[at])
        if len(counts) < 2 or not counts.all():
            return None
        return windows_half_width((lengths / counts).tolist(), counts.tolist())

    def _now(self) -> float:
        """Return the host's clock in seconds."""
        return self._device.now_ns() * 1e-9

    def _enqueue(self, calls: int) -> None:
        """Enqueue a block of calls, and an event that marks its end.

        The expected end of all pending work moves on by the block's duration.
        """
        begun = self._now()
        for _ in range(calls):
            self._call()
        self._calls += calls
        event = self._spare.pop() if self._spare else self._device.new_event()
        self._device.record(event)
        self._pending.append(StreamPosition(event, self._calls))
        self._busy_until = max(self._busy_until, begun) + calls * self._call_seconds

    def _collect(self) -> None:
        """Update the passed position, the call time, and the latest end of pending work.

        It handles all events that the device has passed since the last time.
        """
        while self._pending and self._device.passed(self._pending[0].event):
            before, self._passed = self._passed, self._pending.popleft()
            seconds = self._device.elapsed_seconds(before.event, self._passed.event)
            self._call_seconds = max(seconds / (self._passed.calls - before.calls), 1e-9)
            self._device_seconds += seconds
            self._log.append((self._now(), self._passed.calls, self._device_seconds))
            # the window's first event is needed until its end
            if before is not self.start:
                self._spare.append(before.event)
        left = (self._calls - self._passed.calls) * self._call_seconds
        self._busy_until = min(self._busy_until, self._now() + left)


#: Feeds until a watch is over; returns the number of calls completed in the window and their
#: seconds. An example is `threaded`; tests take turns instead.
Beside = Callable[[Watch, Feeder], tuple[int, float]]


def threaded(watch: Watch, feeder: Feeder) -> tuple[int, float]:
    """Feed until the watch is over; return the window's calls and seconds. See `Beside`.

    This thread feeds; another thread queries and releases the GIL in the driver.
    """
    abandoned = threading.Event()

    def ask() -> None:
        for pause in watch.steps():
            if abandoned.wait(pause):
                return

    with ThreadPoolExecutor(1, thread_name_prefix="meters") as pool:
        asking = pool.submit(ask)
        try:
            begun = False
            while not asking.done():
                if watch.begun and not begun:
                    begun = True
                    feeder.begin()
                feeder.feed()
            asking.result()
            return feeder.end()
        finally:
            abandoned.set()
