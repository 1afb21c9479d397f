"""Timing: blocks of calls between two clock readings, with nothing else in them."""

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
from perfexp.timing.stopping import Monitor

Call = Callable[[], object]
#: Captures a call as a single launch.
Capture = Callable[[], Call]
Samples = NDArray[np.float64]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Turn the garbage collector off while entered."""
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
    """Takes a series block by block.

    Attributes:
        block: returns a number of samples in seconds per call.
        begin: returns the series' monitor, given the seconds that the device has just worked on the
            same calls.
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
        """Return the time that the device has worked on the calls in this series."""
        return float(self.samples.sum()) * self.calls_per_sample

    @property
    def elapsed_seconds(self) -> float:
        """Return the time spent in the blocks of this series, overhead outside samples included."""
        return self._elapsed_ns * 1e-9

    def turn(self, now: Callable[[], int], busy_seconds: float) -> bool:
        """Take the next block, after the warm-up if it is the first.

        Args:
            now: the host's clock, in nanoseconds.
            busy_seconds: time that the device has just worked on the same calls.

        Returns:
            Whether the series goes on.
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
    """Take several series in turns, block by block, so that drifts affect all of them alike.

    Args:
        collectors: the series, in the order of their turns.
        now: the host's clock, in nanoseconds.
        busy_seconds: time that the device has just worked on the same calls.
        ended: called after each block, with the series name and the block's seconds.
    """
    # garbage collection between blocks would pause the host, and queues and loaders would catch up
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
                if gc.get_count()[0] > gc.get_threshold()[0]:  # cycles would fill the memory
                    gc.collect(0)  # garbage from the last blocks


@dataclass
class HostChain:
    """Times calls on a synchronous device, with a host clock reading after every call.

    `flush` runs untimed before each call; None for back-to-back calls.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Return samples in seconds per call."""
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
    """Times how long a caller waits, by host clock around a call and a synchronization.

    `flush` runs and completes before each call, untimed.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Return samples in seconds."""
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
    """Make calls until StopIteration at the end of the data.

    Returns:
        The seconds per call, and in total.
    """
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
