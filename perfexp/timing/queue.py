"""Queue: timed blocks on an asynchronous device, with or without a pre-filled launch queue."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from perfexp.devices import Device, Event
from perfexp.timing.collecting import Call, Samples

#: Hold time: a factor on the time that the last fill needed, a share of the fill time, and a
#: constant.
_HOLD_FACTOR, _HOLD_JITTER, _HOLD_EXTRA_SECONDS = 1.2, 0.05, 200e-6
#: Longest hold, as a multiple of the fastest fill.
_HOLD_MOST = 8.0
#: Attempts at a long enough hold before a starved block is accepted.
_HOLD_ATTEMPTS = 4


class Filled(NamedTuple):
    """Result of filling the device's queue once.

    Attributes:
        seconds: device seconds of each sample.
        host_seconds: time that the host needed to fill the queue.
        needed_seconds: time that the device should have waited to find every sample fully enqueued.
        starved: whether the device began a sample that was not fully enqueued.
    """

    seconds: Samples
    host_seconds: float
    needed_seconds: float
    starved: bool


class Lead:
    """Checks whether the host stays ahead: each sample must be fully enqueued before it begins.

    Args:
        start: event just recorded behind the wait.
    """

    def __init__(self, device: Device, start: Event) -> None:
        self._device, self._start, self._begun_ns = device, start, device.now_ns()
        self._done: list[tuple[Event, float]] = []
        self._starved = False

    def enqueued(self, begin: Event) -> None:
        """Record that a sample has been enqueued; it begins at this event."""
        self._starved = self._starved or self._device.passed(begin)
        self._done.append((begin, (self._device.now_ns() - self._begun_ns) * 1e-9))

    @property
    def host_seconds(self) -> float:
        """Return the host time to enqueue all samples so far."""
        return self._done[-1][1]

    def filled(self, seconds: Samples) -> Filled:
        """Return the result of the fill, once the device has finished it."""
        host_seconds = self.host_seconds
        behind = max(late - self._begins(begin) for begin, late in self._done)
        return Filled(
            seconds,
            host_seconds,
            host_seconds if self._starved else max(behind, 0.0),
            self._starved,
        )

    def _begins(self, event: Event) -> float:
        """Return when the device passed an event, in seconds after the start."""
        return 0.0 if event is self._start else self._device.elapsed_seconds(self._start, event)


@dataclass
class Hold:
    """Time to hold the device while its queue is filled, learned from fill to fill.

    A device slower than its host needs to wait for the first sample only; a faster device, for all
    of them. If the device makes the host wait (full queue, synchronizing call), no hold is long
    enough. The hold is therefore limited to a few times the fastest fill so far.

    Attributes:
        starved: number of fills with too short a wait.
    """

    starved: int = 0
    _margin: float = _HOLD_FACTOR
    _seconds: float = 0.0
    _samples: int = 0
    _fastest: float = math.inf

    def fill(self, chunk: Callable[[int, float], Filled], samples: int) -> Samples:
        """Fill the queue until the device waits long enough, in a few attempts.

        Args:
            chunk: fills the queue with a number of samples, behind a wait in seconds.
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
    """Times a pipelined loop with events around every k calls: its sustained wall time per call.

    A first call fills the pipeline before each block. Once the queue is full, the host waits for
    the device, which does not change the loop time.
    """

    call: Call
    device: Device
    calls_per_sample: int = 1
    _events: list[Event] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Return samples in seconds per call."""
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
        between = [
            device.elapsed_seconds(events[index], events[index + 1]) for index in range(samples)
        ]
        return np.asarray(between) / k


@dataclass
class Chain:
    """Times the device itself, with events around every k calls in a pre-filled queue.

    The queue ensures that the device never starves.

    Attributes:
        chunk: samples that fit the queue at once.
        calls_per_sample: k.
        flush: enqueued and untimed before each sample, which then has two events.
        draining: entered while the host waits for a filled queue, with the remaining hold seconds.
    """

    call: Call
    device: Device
    chunk: int
    calls_per_sample: int = 1
    flush: Call | None = None
    draining: Callable[[float], AbstractContextManager[object]] = nullcontext
    held: Hold = field(default_factory=Hold)
    _events: list[Event] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Return samples in device seconds per call."""
        taken: list[Samples] = []
        left = samples
        while left > 0:
            count = min(self.chunk, left)
            taken.append(self.held.fill(self._chunk, count))
            left -= count
        return np.concatenate(taken)

    def _chunk(self, samples: int, hold_seconds: float) -> Filled:
        device = self.device
        while len(self._events) < samples * (1 if self.flush is None else 2) + 1:
            self._events.append(device.new_event())
        events = self._events
        device.synchronize()
        if hold_seconds:
            device.hold(hold_seconds)
        device.record(events[0])
        lead = Lead(device, events[0])
        pairs = (
            self._joined(samples, lead)
            if self.flush is None
            else self._flushed(samples, self.flush, lead)
        )
        with self.draining(hold_seconds - lead.host_seconds):
            device.synchronize()
        between = [device.elapsed_seconds(events[first], events[last]) for first, last in pairs]
        return lead.filled(np.asarray(between) / self.calls_per_sample)

    def _joined(self, samples: int, lead: Lead) -> list[tuple[int, int]]:
        """Enqueue calls with an event between two samples; return the events around each sample."""
        call, k, events, record = self.call, self.calls_per_sample, self._events, self.device.record
        for index in range(1, samples + 1):
            for _ in range(k):
                call()
            record(events[index])
            lead.enqueued(events[index - 1])
        return [(index, index + 1) for index in range(samples)]

    def _flushed(self, samples: int, flush: Call, lead: Lead) -> list[tuple[int, int]]:
        """Enqueue calls with a flush before each sample; return the events around each sample."""
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
    """Times a call's named segments with events between them, in a separate pass.

    Attributes:
        chunk: calls per pre-filled queue. With 0 the queue is not pre-filled, so segments include
            waits for the host.
        taken: segment seconds so far, as arrays with the shape (calls, segments).
    """

    segments: tuple[tuple[str, Call], ...]
    device: Device
    chunk: int = 0
    held: Hold = field(default_factory=Hold)
    taken: list[Samples] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Make calls and return the sums of their segments, in seconds per call."""
        left, before = samples, len(self.taken)
        while left > 0:
            count = min(self.chunk or left, left)
            self.taken.append(
                self.held.fill(self._pass, count) if self.chunk else self._pass(count, 0.0).seconds
            )
            left -= count
        return np.concatenate([part.sum(axis=1) for part in self.taken[before:]])

    def once(self) -> None:
        """Enqueue a call with its events, to find how many fit the queue."""
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
        """Return segment seconds by name, over all calls so far."""
        everything = np.concatenate(self.taken)
        return {name: everything[:, column] for column, (name, _) in enumerate(self.segments)}
