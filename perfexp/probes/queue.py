"""Queue: blocks of calls with an asynchronous device's queue held full, or left to itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from perfexp.devices import Device, Event
from perfexp.probes.timing import Call, Samples

#: The queue is held for so many times what the last fill needed, a part of the time to fill it, and a little more.
_HOLD_FACTOR, _HOLD_JITTER, _HOLD_EXTRA_SECONDS = 1.2, 0.05, 200e-6
#: … but never for longer than so many times the fastest fill.
_HOLD_MOST = 8.0
#: Attempts to hold a queue long enough before the block is taken as it is.
_HOLD_ATTEMPTS = 4


class Filled(NamedTuple):
    """One fill of the device's queue.

    Attributes:
        seconds: what was timed.
        host_seconds: that the host needed to fill it.
        needed_seconds: for which the device should have waited, so that it begins nothing that is not there to its end.
        starved: whether it did begin such.
    """

    seconds: Samples
    host_seconds: float
    needed_seconds: float
    starved: bool


class Lead:
    """Whether the host stays ahead of the device: each sample is enqueued to its end before the device begins it.

    Args:
        device: that works.
        start: event that has just been recorded behind the wait.
    """

    def __init__(self, device: Device, start: Event) -> None:
        self._device, self._start, self._begun_ns = device, start, device.now_ns()
        self._done: list[tuple[Event, float]] = []
        self._starved = False

    def enqueued(self, begin: Event) -> None:
        """A sample has been enqueued.

        Args:
            begin: event before it.
        """
        self._starved = self._starved or self._device.passed(begin)
        self._done.append((begin, (self._device.now_ns() - self._begun_ns) * 1e-9))

    def filled(self, seconds: Samples) -> Filled:
        """What came of it, when the device has done it all.

        Args:
            seconds: what was timed.
        """
        host_seconds = self._done[-1][1]
        behind = max(late - self._begins(begin) for begin, late in self._done)
        return Filled(seconds, host_seconds, host_seconds if self._starved else max(behind, 0.0), self._starved)

    def _begins(self, event: Event) -> float:
        """When the device passed an event, in seconds after the start."""
        return 0.0 if event is self._start else self._device.elapsed_seconds(self._start, event)


@dataclass
class Hold:
    """How long the device's queue has to be held while it is filled; learnt from one fill to the next.

    A device that is slower than its host needs to wait for the first sample only, another one for all of them. A host
    that the device itself makes to wait (the queue is full, the call synchronises) can't be waited for: the hold is at
    most a few times what the fastest fill so far took the host.

    Attributes:
        starved: fills that were taken although the device did not wait long enough.
    """

    starved: int = 0
    _margin: float = _HOLD_FACTOR
    _seconds: float = 0.0
    _samples: int = 0
    _fastest: float = math.inf

    def fill(self, chunk: Callable[[int, float], Filled], samples: int) -> Samples:
        """Fill the queue until the device waits long enough, or a few times in vain.

        Args:
            chunk: fills it with so many samples behind a wait of so many seconds.
            samples: that are wanted.
        """
        for _ in range(_HOLD_ATTEMPTS):
            wanted = self._seconds * max(1.0, samples / max(self._samples, 1))
            most = _HOLD_MOST * self._fastest * samples + _HOLD_EXTRA_SECONDS
            held = min(wanted, most)
            filled = chunk(samples, held)
            self._fastest = min(self._fastest, filled.host_seconds / samples)
            if filled.starved and self._seconds:
                self._margin = min(2 * self._margin, _HOLD_MOST)
            elif not filled.starved:
                self._margin = max(_HOLD_FACTOR, self._margin / 2)
            spare = _HOLD_JITTER * filled.host_seconds + _HOLD_EXTRA_SECONDS
            self._seconds, self._samples = self._margin * filled.needed_seconds + spare, samples
            if not filled.starved:
                return filled.seconds
        self.starved += 1
        return filled.seconds


@dataclass
class Loop:
    """Events around every k calls of a pipelined loop that never waits: the wall time per call that it keeps up.

    A first call fills the pipeline before each block. Beyond the queue's depth the host is made to wait for the device,
    which changes nothing in the loop's time.

    Attributes:
        call: what is timed.
        device: that works.
        calls_per_sample: k.
    """

    call: Call
    device: Device
    calls_per_sample: int = 1
    _events: list[Event] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Take so many samples, seconds per call."""
        call, k, device, events = self.call, self.calls_per_sample, self.device, self._events
        while len(events) < samples + 1:
            events.append(device.new_event())
        record = device.record
        device.synchronize()
        call()
        record(events[0])
        for index in range(1, samples + 1):
            for _ in range(k):
                call()
            record(events[index])
        device.synchronize()
        between = [device.elapsed_seconds(events[index], events[index + 1]) for index in range(samples)]
        return np.asarray(between) / k


@dataclass
class Chain:
    """Events around every k calls whose queue is filled behind a wait, so that the device never starves: its own time.

    Attributes:
        call: what is timed.
        device: that works.
        chunk: samples that fit into the queue at once.
        calls_per_sample: k.
        flush: enqueued before each sample, outside of its time: then each sample has two events of its own.
        held: how the queue is held.
    """

    call: Call
    device: Device
    chunk: int
    calls_per_sample: int = 1
    flush: Call | None = None
    held: Hold = field(default_factory=Hold)
    _events: list[Event] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Take so many samples, device seconds per call."""
        taken: list[Samples] = []
        left = samples
        while left > 0:
            count = min(self.chunk, left)
            taken.append(self.held.fill(self._chunk, count))
            left -= count
        return np.concatenate(taken)

    def _chunk(self, samples: int, hold_seconds: float) -> Filled:
        """One fill of the queue."""
        device = self.device
        while len(self._events) < samples * (1 if self.flush is None else 2) + 1:
            self._events.append(device.new_event())
        events = self._events
        device.synchronize()
        if hold_seconds:
            device.hold(hold_seconds)
        device.record(events[0])
        lead = Lead(device, events[0])
        pairs = self._joined(samples, lead) if self.flush is None else self._apart(samples, self.flush, lead)
        device.synchronize()
        between = [device.elapsed_seconds(events[first], events[last]) for first, last in pairs]
        return lead.filled(np.asarray(between) / self.calls_per_sample)

    def _joined(self, samples: int, lead: Lead) -> list[tuple[int, int]]:
        """Calls with one event between two samples; returns which events are around each sample."""
        call, k, events, record = self.call, self.calls_per_sample, self._events, self.device.record
        for index in range(1, samples + 1):
            for _ in range(k):
                call()
            record(events[index])
            lead.enqueued(events[index - 1])
        return [(index, index + 1) for index in range(samples)]

    def _apart(self, samples: int, flush: Call, lead: Lead) -> list[tuple[int, int]]:
        """As `_joined`, each sample with events of its own."""
        call, k, events, record = self.call, self.calls_per_sample, self._events, self.device.record
        for index in range(1, 2 * samples, 2):
            flush()
            record(events[index])
            for _ in range(k):
                call()
            record(events[index + 1])
            lead.enqueued(events[index - 1])
        return [(index, index + 1) for index in range(1, 2 * samples, 2)]


@dataclass
class Segments:
    """A call taken apart: events between its named parts, in a pass of its own.

    Attributes:
        segments: names and parts, in order.
        device: that works.
        chunk: calls for which the device's queue is held while it is filled; 0 where it is not held, so that a part
            also has the time in which the device waits for the host.
        held: how it is held.
        taken: seconds of each part so far, shape (calls, parts).
    """

    segments: tuple[tuple[str, Call], ...]
    device: Device
    chunk: int = 0
    held: Hold = field(default_factory=Hold)
    taken: list[Samples] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Run so many calls; returns their sums, seconds per call."""
        left, before = samples, len(self.taken)
        while left > 0:
            count = min(self.chunk or left, left)
            self.taken.append(self.held.fill(self._pass, count) if self.chunk else self._pass(count, 0.0).seconds)
            left -= count
        return np.concatenate([part.sum(axis=1) for part in self.taken[before:]])

    def once(self) -> None:
        """One call with its events, whose times nobody reads: for finding out how many the queue takes."""
        mark = self.device.new_event()
        for _, part in self.segments:
            part()
            self.device.record(mark)

    def _pass(self, samples: int, hold_seconds: float) -> Filled:
        device, parts = self.device, [part for _, part in self.segments]
        events = [device.new_event() for _ in range(samples * len(parts) + 1)]
        record = device.record
        device.synchronize()
        if hold_seconds:
            device.hold(hold_seconds)
        record(events[0])
        lead = Lead(device, events[0])
        place = 0
        for _ in range(samples):
            for part in parts:
                part()
                place += 1
                record(events[place])
            lead.enqueued(events[place - len(parts)])
        device.synchronize()
        between = [device.elapsed_seconds(events[i], events[i + 1]) for i in range(place)]
        return lead.filled(np.asarray(between).reshape(samples, len(parts)))

    def parts(self) -> dict[str, Samples]:
        """Seconds of each part by name, all calls so far."""
        everything = np.concatenate(self.taken)
        return {name: everything[:, column] for column, (name, _) in enumerate(self.segments)}
