"""Queue: blocks of calls of an asynchronous device with its launch queue pre-filled, or left to itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from perfexp.devices import Device, Event
from perfexp.probes.timing import Call, Samples

#: Length of a hold: a factor on what the last fill needed, a share of the time to fill it, and a constant.
_HOLD_FACTOR, _HOLD_JITTER, _HOLD_EXTRA_SECONDS = 1.2, 0.05, 200e-6
#: Longest hold in units of the fastest fill.
_HOLD_MOST = 8.0
#: Attempts to hold the queue long enough before a starved block is taken.
_HOLD_ATTEMPTS = 4


class Filled(NamedTuple):
    """One fill of the device's queue.

    Attributes:
        host_seconds: time that the host needed to fill the queue.
        needed_seconds: time that the device should have waited to find every sample enqueued to its end.
        starved: whether the device began a sample that was not enqueued to its end.
    """

    seconds: Samples
    host_seconds: float
    needed_seconds: float
    starved: bool


class Lead:
    """Watches whether the host stays ahead: it has to enqueue each sample to its end before the device begins it.

    The event `start` has just been recorded behind the wait.
    """

    def __init__(self, device: Device, start: Event) -> None:
        self._device, self._start, self._begun_ns = device, start, device.now_ns()
        self._done: list[tuple[Event, float]] = []
        self._starved = False

    def enqueued(self, begin: Event) -> None:
        """Note that a sample has been enqueued, which begins at an event."""
        self._starved = self._starved or self._device.passed(begin)
        self._done.append((begin, (self._device.now_ns() - self._begun_ns) * 1e-9))

    @property
    def host_seconds(self) -> float:
        """Time that the host needed to enqueue all samples so far."""
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
    """Time for which the queue has to be held while it is filled, learned from one fill to the next.

    A device that is slower than its host needs to wait for the first sample only, a faster one for all of them. If the
    device makes the host wait (the queue is full, the call synchronizes), no hold is long enough: it is limited to a
    few times the fastest fill so far. Fills that the device did not wait long enough for are counted as `starved`.
    """

    starved: int = 0
    _margin: float = _HOLD_FACTOR
    _seconds: float = 0.0
    _samples: int = 0
    _fastest: float = math.inf

    def fill(self, chunk: Callable[[int, float], Filled], samples: int) -> Samples:
        """Fill the queue until the device waits long enough, in a few attempts.

        `chunk` fills it with a number of samples behind a wait of a number of seconds.
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
    """Times a pipelined loop by events around every k calls (`calls_per_sample`): its sustained wall time per call.

    A first call fills the pipeline before each block. Beyond the queue's depth the host waits for the device, which
    does not change the loop's time.
    """

    call: Call
    device: Device
    calls_per_sample: int = 1
    _events: list[Event] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Take a number of samples, seconds per call."""
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
    """Times the device itself by events around every k calls behind a pre-filled queue, so that it never starves.

    Attributes:
        chunk: samples that fit the queue at once.
        calls_per_sample: k.
        flush: enqueued before each sample, outside of its time; each sample then has two events of its own.
        draining: entered while the host waits for a filled queue, with the seconds for which it is still held.
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
        """Take a number of samples, device seconds per call."""
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
        """Enqueue calls with one event between two samples; return the events around each sample."""
        call, k, events, record = self.call, self.calls_per_sample, self._events, self.device.record
        for index in range(1, samples + 1):
            for _ in range(k):
                call()
            record(events[index])
            lead.enqueued(events[index - 1])
        return [(index, index + 1) for index in range(samples)]

    def _flushed(self, samples: int, flush: Call, lead: Lead) -> list[tuple[int, int]]:
        """Enqueue calls with a flush before each sample, which has events of its own; return these events."""
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
    """Times the named segments of a call by events between them, in a pass of its own.

    Attributes:
        chunk: calls per pre-filled queue; 0 without it, so that a segment includes the device's waits for the host.
        taken: seconds of each segment so far, arrays of shape (calls, segments).
    """

    segments: tuple[tuple[str, Call], ...]
    device: Device
    chunk: int = 0
    held: Hold = field(default_factory=Hold)
    taken: list[Samples] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Make a number of calls; return the sums of their segments, seconds per call."""
        left, before = samples, len(self.taken)
        while left > 0:
            count = min(self.chunk or left, left)
            self.taken.append(
                self.held.fill(self._pass, count) if self.chunk else self._pass(count, 0.0).seconds
            )
            left -= count
        return np.concatenate([part.sum(axis=1) for part in self.taken[before:]])

    def once(self) -> None:
        """Enqueue one call with its events, for finding out how many fit the queue."""
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
        """Return the seconds of each segment by name, over all calls so far."""
        everything = np.concatenate(self.taken)
        return {name: everything[:, column] for column, (name, _) in enumerate(self.segments)}
