"""Timing: blocks of calls between two readings of a clock, with nothing else in them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from perfexp.devices import Device
from perfexp.records.record import Series
from perfexp.stopping import Monitor

Call = Callable[[], object]
#: Captures a call as one launch.
Capture = Callable[[], Call]
Samples = NDArray[np.float64]


@contextmanager
def undisturbed() -> Iterator[None]:
    """While entered, the garbage collector is off."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class Collector:
    """Takes one series block by block.

    Attributes:
        block: function that takes a number of samples and returns their seconds per call.
        begin: returns the series' monitor, for the seconds that the device has just worked on the same calls.
        calls_per_sample: k.
    """

    name: str
    block: Callable[[int], Samples]
    begin: Callable[[float], Monitor]
    calls_per_sample: int = 1
    samples: Samples = field(default_factory=lambda: np.empty(0))
    _monitor: Monitor | None = None
    _elapsed_ns: int = 0

    @property
    def busy_seconds(self) -> float:
        """Time that the device has worked on the calls of this series."""
        return float(self.samples.sum()) * self.calls_per_sample

    @property
    def elapsed_seconds(self) -> float:
        """Time spent in the blocks of this series, with what its samples do not contain."""
        return self._elapsed_ns * 1e-9

    def turn(self, now: Callable[[], int], busy_seconds: float) -> bool:
        """Take the next block, after the warm-up if it is the first; return whether the series goes on.

        `now` is the host's clock, nanoseconds; `busy_seconds` the time that the device just worked on the same calls.
        """
        monitor = self._monitor = self._monitor or self.begin(busy_seconds)
        blocks = len(monitor.starts)
        while len(monitor.starts) == blocks:
            count = monitor.more(self.samples, self.elapsed_seconds)
            if not count:
                return False
            begun_ns = now()
            taken = self.block(count)
            self._elapsed_ns += now() - begun_ns
            self.samples = np.concatenate([self.samples, taken])
        return True

    def series(self) -> Series:
        """Return the series so far."""
        monitor = self._monitor or self.begin(0.0)
        return Series(
            name=self.name,
            samples=self.samples.tolist(),
            warmup=monitor.warmup(self.samples),
            blocks=list(monitor.starts),
            calls_per_sample=self.calls_per_sample,
            stop=monitor.stop(self.samples),
        )


def collect(
    collectors: Sequence[Collector],
    now: Callable[[], int],
    busy_seconds: float = 0.0,
    ended: Callable[[str, float], None] = lambda *_: None,
) -> None:
    """Take several series in turns, block by block, so that what changes with time concerns all of them.

    Args:
        collectors: the series, in the order of their turns.
        now: the host's clock, nanoseconds.
        busy_seconds: time that the device has just worked on the same calls.
        ended: called after each block, with the name of its series and its seconds.
    """
    # each garbage collection between blocks pauses the host, and queues and data loaders catch up
    with undisturbed():
        going = list(collectors)
        while going:
            for collector in list(going):
                before = collector.elapsed_seconds
                if collector.turn(
                    now, busy_seconds + sum(other.busy_seconds for other in collectors)
                ):
                    ended(collector.name, collector.elapsed_seconds - before)
                else:
                    going.remove(collector)
                if (
                    gc.get_count()[0] > gc.get_threshold()[0]
                ):  # cycles of a model would fill the memory
                    gc.collect(0)  # what the last blocks have made


@dataclass
class HostChain:
    """Times calls of a synchronous device by the host's clock before the first call and after every call.

    `flush` runs before each call, outside of its time; None for back-to-back calls.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Take a number of samples, seconds per call."""
        call, now = self.device.completing(self.call), self.device.now_ns
        if self.flush is not None:
            return self._flushed(samples, call, self.flush)
        stamps = [0] * (samples + 1)
        stamps[0] = now()
        for index in range(1, samples + 1):
            call()
            stamps[index] = now()
        nanoseconds = np.asarray(stamps, dtype=np.int64)
        return (nanoseconds[1:] - nanoseconds[:-1]).astype(np.float64) * 1e-9

    def _flushed(self, samples: int, call: Call, flush: Call) -> Samples:
        now = self.device.now_ns
        seconds = np.empty(samples)
        for index in range(samples):
            flush()
            start = now()
            call()
            seconds[index] = (now() - start) * 1e-9
        return seconds


@dataclass
class Latency:
    """Times how long one caller waits, by the host's clock around a call and a synchronization, without events.

    `flush` is run and waited for before each call, outside of its time.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Take a number of samples, seconds."""
        call, now, synchronize = self.call, self.device.now_ns, self.device.synchronize
        seconds = np.empty(samples)
        synchronize()
        for index in range(samples):
            if self.flush is not None:
                self.flush()
                synchronize()
            start = now()
            call()
            synchronize()
            seconds[index] = (now() - start) * 1e-9
        return seconds


def whole_pass(call: Call, device: Device) -> tuple[Samples, float]:
    """Make calls until one raises StopIteration at the end of the data; return the seconds of each call, and of all."""
    events = [device.new_event()]
    device.synchronize()
    start = device.now_ns()
    device.record(events[0])
    while True:
        try:
            call()
        except StopIteration:
            break
        events.append(device.new_event())
        device.record(events[-1])
    device.synchronize()
    whole = (device.now_ns() - start) * 1e-9
    return np.asarray([device.elapsed_seconds(a, b) for a, b in pairwise(events)]), whole
