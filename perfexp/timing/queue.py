"""Blocks of calls on an asynchronous device, with or without a pre-filled launch queue.

A GPU works through a launch queue while the host fills it. `Chain` holds the device until its queue
is filled, so that it never waits for the host: this is the series `device`. `Loop` lets both run
together, as an application would: the series `throughput`. `Segments` times the phases of a call.
A timer is called with a number of samples and returns them in seconds per call.
"""

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
        seconds: device seconds of each sample, shape (samples,), or (samples, phases).
        host_seconds: time that the host needed to fill the queue.
        needed_seconds: time that the device should have waited to find every sample fully enqueued.
        starved: whether the device began a sample that was not fully enqueued.
    """

    seconds: Samples
    host_seconds: float
    needed_seconds: float
    starved: bool


class FillClock:
    """Notes when the host enqueues each sample of a fill, to see whether it stays ahead.

    It stays ahead if each sample is fully enqueued before the device begins it.

    Args:
        start: event just recorded behind the hold; the device passes it when the hold ends.
    """

    def __init__(self, device: Device, start: Event) -> None:
        self._device, self._start, self._begun_ns = device, start, device.now_ns()
        #: For each sample: the event at its begin, and host seconds until it was enqueued.
        self._enqueued: list[tuple[Event, float]] = []
        self._starved = False

    def enqueued(self, begin: Event) -> None:
        """Note that the host has just enqueued a sample; the device begins it at this event."""
        self._starved = self._starved or self._device.passed(begin)
        self._enqueued.append((begin, (self._device.now_ns() - self._begun_ns) * 1e-9))

    @property
    def host_seconds(self) -> float:
        """Return the host seconds to enqueue all samples so far."""
        return self._enqueued[-1][1]

    def filled(self, seconds: Samples) -> Filled:
        """Return the result of the fill, once the device has finished it.

        Args:
            seconds: device seconds of each sample.
        """
        needed_seconds = self.host_seconds
        if not self._starved:
            lags = [late - self._begin_seconds(begin) for begin, late in self._enqueued]
            needed_seconds = max(0.0, *lags)
        return Filled(seconds, self.host_seconds, needed_seconds, self._starved)

    def _begin_seconds(self, event: Event) -> float:
        """Return when the device passed an event, in seconds after the start."""
        return 0.0 if event is self._start else self._device.elapsed_seconds(self._start, event)


@dataclass
class Hold:
    """Time to hold the device while its queue is filled, learned from fill to fill.

    A device slower than its host needs to wait for the first sample only; a faster device, for all
    of them. If the device makes the host wait (full queue, synchronizing call), no hold is long
    enough. The hold is therefore limited to a few times the fastest fill so far.

    Attributes:
        starved: number of fills in which every attempt held the device too briefly.
    """

    starved: int = 0
    #: Factor on the time that the last fill needed; it doubles when a hold was too short.
    _margin: float = _HOLD_FACTOR
    #: Seconds to hold for a fill with `_samples` samples; 0 before the first fill.
    _seconds: float = 0.0
    _samples: int = 0
    #: Least host seconds per sample so far.
    _fastest: float = math.inf

    def fill(self, enqueue: Callable[[int, float], Filled], samples: int) -> Samples:
        """Fill the queue, again with a longer hold if the device starved, and return its seconds.

        After `_HOLD_ATTEMPTS` attempts a starved fill is accepted and counted in `starved`.

        Args:
            enqueue: holds the device for some seconds, fills its queue with a number of samples,
                and waits for them.
        """
        for _ in range(_HOLD_ATTEMPTS):
            hold_seconds = self._seconds * max(1.0, samples / max(self._samples, 1))
            most = _HOLD_MOST * self._fastest * samples + _HOLD_EXTRA_SECONDS
            filled = enqueue(samples, min(hold_seconds, most))
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
    """Times a loop of calls with events around every k calls: its sustained seconds per call.

    Host and device overlap, as in an application that never waits for a result. An untimed call
    before each block fills the pipeline. Once the queue is full, the host waits for the device,
    which does not change the loop time.

    Attributes:
        calls_per_sample: k.
    """

    call: Call
    device: Device
    calls_per_sample: int = 1
    _events: list[Event] = field(default_factory=list)

    def __call__(self, samples: int) -> Samples:
        """Run the loop for k calls per sample and return the samples in seconds per call."""
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
    """Times the device alone, with events around every k calls in a pre-filled queue.

    The device is held until its queue is filled, so that it never waits for the host.

    Attributes:
        chunk: samples that fit the queue at once, at least 1.
        calls_per_sample: k.
        flush: empties the caches, untimed, before each sample, which then has two events.
        draining: entered while the host waits for a filled queue, with the remaining hold seconds.
        held: hold time, and the number of fills in which the device did wait.
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
        """Fill the queue as often as needed and return the samples in device seconds per call."""
        fills: list[Samples] = []
        left = samples
        while left > 0:
            count = min(self.chunk, left)
            fills.append(self.held.fill(self._fill_once, count))
            left -= count
        return np.concatenate(fills)

    def _fill_once(self, samples: int, hold_seconds: float) -> Filled:
        """Hold the device, enqueue the samples, and wait until the device has finished them."""
        device = self.device
        while len(self._events) < samples * (1 if self.flush is None else 2) + 1:
            self._events.append(device.new_event())
        events = self._events
        device.synchronize()
        if hold_seconds:
            device.hold(hold_seconds)
        device.record(events[0])
        clock = FillClock(device, events[0])
        if self.flush is None:
            firsts = self._enqueue_joined(samples, clock)
        else:
            firsts = self._enqueue_flushed(samples, self.flush, clock)
        with self.draining(hold_seconds - clock.host_seconds):
            device.synchronize()
        between = [device.elapsed_seconds(events[first], events[first + 1]) for first in firsts]
        return clock.filled(np.asarray(between) / self.calls_per_sample)

    def _enqueue_joined(self, samples: int, clock: FillClock) -> range:
        """Enqueue samples back to back, each ending at the event that begins the next.

        Return the index of the event before each sample; the next event ends the sample.
        """
        call, k, events, record = self.call, self.calls_per_sample, self._events, self.device.record
        for index in range(samples):
            for _ in range(k):
                call()
            record(events[index + 1])
            clock.enqueued(events[index])
        return range(samples)

    def _enqueue_flushed(self, samples: int, flush: Call, clock: FillClock) -> range:
        """Enqueue samples with a flush before each, between the previous sample and its own event.

        Return the index of the event before each sample; the next event ends the sample.
        """
        call, k, events, record = self.call, self.calls_per_sample, self._events, self.device.record
        firsts = range(1, 2 * samples, 2)
        for first in firsts:
            flush()
            record(events[first])
            for _ in range(k):
                call()
            record(events[first + 1])
            clock.enqueued(events[first - 1])
        return firsts


@dataclass
class Segments:
    """Times a call's phases, such as forward and backward, with events between them.

    It is a pass of its own after the whole call has been timed, because events cost time.

    Attributes:
        segments: name and function of each phase, in the order of a call.
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
        """Make `samples` calls and return the sum over the segments of each, in seconds."""
        left, before = samples, len(self.taken)
        while left > 0:
            if self.chunk:
                count = min(self.chunk, left)
                self.taken.append(self.held.fill(self._fill_once, count))
            else:
                count = left
                self.taken.append(self._fill_once(count, 0.0).seconds)
            left -= count
        return np.concatenate([part.sum(axis=1) for part in self.taken[before:]])

    def once(self) -> None:
        """Enqueue a call with its events; `samples_in_queue` counts how often that fits."""
        mark = self.device.new_event()
        for _, part in self.segments:
            part()
            self.device.record(mark)

    def _fill_once(self, samples: int, hold_seconds: float) -> Filled:
        """Hold the device, enqueue `samples` calls, wait for them; seconds as in `taken`."""
        device, parts = self.device, [part for _, part in self.segments]
        events = [device.new_event() for _ in range(samples * len(parts) + 1)]
        record = device.record
        device.synchronize()
        if hold_seconds:
            device.hold(hold_seconds)
        record(events[0])
        clock = FillClock(device, events[0])
        num_recorded = 0
        for _ in range(samples):
            for part in parts:
                part()
                num_recorded += 1
                record(events[num_recorded])
            clock.enqueued(events[num_recorded - len(parts)])
        device.synchronize()
        between = [device.elapsed_seconds(events[i], events[i + 1]) for i in range(num_recorded)]
        return clock.filled(np.asarray(between).reshape(samples, len(parts)))

    def parts(self) -> dict[str, Samples]:
        """Return the seconds of each segment by name, shape (calls,), over all calls so far."""
        everything = np.concatenate(self.taken)
        return {name: everything[:, column] for column, (name, _) in enumerate(self.segments)}
