"""Timing: blocks of calls between two readings of a clock, with nothing else in them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from perfexp.devices import Device
from perfexp.records.record import Series, Stop
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


def collect(block: Callable[[int], Samples], monitor: Monitor, now: Callable[[], int]) -> tuple[Samples, int, Stop]:
    """Take blocks of samples until the monitor has enough.

    Args:
        block: function that takes a number of samples and returns their seconds per call.
        now: the host's clock, nanoseconds.

    Returns:
        All samples, how many of the first are warm-up, and why the series ended.
    """
    samples, elapsed_ns = np.empty(0), 0
    # a garbage collection between blocks would pause the host, and queues and data loaders would catch up
    with undisturbed():
        while count := monitor.more(samples, elapsed_ns * 1e-9):
            begun_ns = now()
            taken = block(count)
            elapsed_ns += now() - begun_ns
            samples = np.concatenate([samples, taken])
    return samples, monitor.warmup(samples), monitor.stop(samples)


def series(
    name: str,
    block: Callable[[int], Samples],
    monitor: Monitor,
    calls_per_sample: int = 1,
    *,
    now: Callable[[], int],
) -> Series:
    """Return the result of `collect` as a series of a record."""
    samples, warmup, stop = collect(block, monitor, now)
    return Series(name=name, samples=samples.tolist(), warmup=warmup, calls_per_sample=calls_per_sample, stop=stop)


@dataclass
class HostChain:
    """Times calls of a synchronous device by the host's clock before the first call and after every call.

    Attributes:
        flush: run before each call, outside of its time; None for back-to-back calls.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Take a number of samples, seconds per call."""
        call, now = self.call, self.device.now_ns
        if self.flush is not None:
            return self._flushed(samples, self.flush)
        stamps = [0] * (samples + 1)
        stamps[0] = now()
        for index in range(1, samples + 1):
            call()
            stamps[index] = now()
        nanoseconds = np.asarray(stamps, dtype=np.int64)
        return (nanoseconds[1:] - nanoseconds[:-1]).astype(np.float64) * 1e-9

    def _flushed(self, samples: int, flush: Call) -> Samples:
        call, now = self.call, self.device.now_ns
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

    Attributes:
        flush: run and waited for before each call, outside of its time; None for nothing.
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
    """Make calls until one raises StopIteration at the end of the data.

    Returns:
        Seconds of every call, and of the whole pass.
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
