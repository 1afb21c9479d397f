"""Feeding: keeps a device at work on a call while the host asks the meters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from perfexp.devices import Device, Event

#: Calls are enqueued in blocks of about so long, with an event after each.
_BLOCK_SECONDS = 0.002
_MOST_CALLS = 1000
#: The device has work for at least so long ahead while the meters are asked, as far as its queue takes it.
_LEAD_SECONDS = 0.02
#: … and for so many times what asking one takes.
_LEAD_QUERIES = 4
#: A rest that is shorter is none.
_SHORTEST_SECONDS = 1e-6
#: The host gains on the device where it enqueues a block within this fraction of the device's time.
_GAIN = 0.8


class Mark(NamedTuple):
    """A place in the stream of calls.

    Attributes:
        event: recorded there.
        calls: before it.
    """

    event: Event
    calls: int


class Feeder:
    """Keeps the device at work on a call while the host does something else (a `Between`).

    On an asynchronous device so many calls are enqueued that it does not run dry meanwhile; on a synchronous one calls
    are made until the time is over.

    Args:
        call: that it works on.
        device: that works.
        asking_seconds: tells what asking a meter takes.
        sleep: lets the host's time pass.

    Attributes:
        start: where the window began.
    """

    def __init__(
        self,
        call: Callable[[], object],
        device: Device,
        asking_seconds: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._call, self._device, self._asking_seconds, self._sleep = call, device, asking_seconds, sleep
        self._pending: deque[Mark] = deque()
        self._spare: list[Event] = []
        self._calls = 0
        device.synchronize()
        self._passed = self.start = Mark(device.new_event(), 0)
        device.record(self._passed.event)
        self._call_seconds = self._busy_until = 0.0
        self._enqueue(1)
        device.synchronize()
        self._collect()

    def let_pass(self, seconds: float) -> None:
        """See `Between`; a call that the queue does not take makes the host wait, which is well.

        Where the host gains on the device it may go on filling the queue for as long as asking a meter takes.
        """
        begun = self._now()
        while True:
            self._collect()
            now, asking_seconds = self._now(), self._asking_seconds()
            wanted_seconds = max(_LEAD_SECONDS, _LEAD_QUERIES * asking_seconds)
            if self._busy_until - now < wanted_seconds:
                work_seconds = self._enqueue(min(max(int(_BLOCK_SECONDS / self._call_seconds), 1), _MOST_CALLS))
                gains = self._now() - now < _GAIN * work_seconds
                if self._now() >= begun + (max(seconds, asking_seconds) if gains else seconds):
                    return
            elif (left := begun + seconds - now) > _SHORTEST_SECONDS:
                self._sleep(min(left, wanted_seconds / _LEAD_QUERIES))
            else:
                return

    def ran_dry(self) -> bool:
        """See `Between`; a synchronous device does nothing while its host asks."""
        return not self._device.asynchronous or not self._pending or self._device.passed(self._pending[-1].event)

    def begin(self) -> None:
        """The window begins about now."""
        self._collect()
        self.start = self._passed

    def end(self) -> tuple[int, float]:
        """The window ends about now; waits until the device is done.

        Returns:
            Calls that were completed in it, and what they took, seconds.
        """
        self._collect()
        if self._passed.calls == self.start.calls:  # a call is longer than the window
            self._device.synchronize()
            self._collect()
        taken = self._device.elapsed_seconds(self.start.event, self._passed.event)
        self._device.synchronize()
        return self._passed.calls - self.start.calls, taken

    def _now(self) -> float:
        return self._device.now_ns() * 1e-9

    def _enqueue(self, calls: int) -> float:
        """A block of calls and the event behind it; returns about how long the device works on it, seconds."""
        begun = self._now()
        for _ in range(calls):
            self._call()
        self._calls += calls
        event = self._spare.pop() if self._spare else self._device.new_event()
        self._device.record(event)
        self._pending.append(Mark(event, self._calls))
        work_seconds = calls * self._call_seconds
        self._busy_until = max(self._busy_until, begun) + work_seconds
        return work_seconds

    def _collect(self) -> None:
        """What the device has passed, what a call takes, and until when there is work at the most."""
        while self._pending and self._device.passed(self._pending[0].event):
            before, self._passed = self._passed, self._pending.popleft()
            seconds = self._device.elapsed_seconds(before.event, self._passed.event)
            self._call_seconds = max(seconds / (self._passed.calls - before.calls), 1e-9)
            if before is not self.start:
                self._spare.append(before.event)
        left = (self._calls - self._passed.calls) * self._call_seconds
        self._busy_until = min(self._busy_until, self._now() + left)
