"""Timing: blocks of calls between two readings of a clock; nothing else runs in them."""

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
#: Makes one launch of a call.
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
        block: takes so many samples and returns their seconds per call.
        monitor: of a stopping rule.
        now: the host's clock, nanoseconds.

    Returns:
        All samples, how many of the first are warm-up, and why it ended.
    """
    samples, elapsed_ns = np.empty(0), 0
    # collecting garbage between blocks would let queues and data loaders catch up: the garbage stays until the end
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
    """`collect` as a record's series.

    Args:
        name: of the series.
        block: takes so many samples.
        monitor: of a stopping rule.
        calls_per_sample: k of the block.
        now: the host's clock, nanoseconds.
    """
    samples, warmup, stop = collect(block, monitor, now)
    return Series(name=name, samples=samples.tolist(), warmup=warmup, calls_per_sample=calls_per_sample, stop=stop)


@dataclass
class HostChain:
    """The host's clock before the first call and after every call: for synchronous devices.

    Attributes:
        call: what is timed.
        device: whose host clock is read.
        flush: run before each call, outside of its time; None for calls that follow one another directly.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Take so many samples, seconds per call."""
        call, now = self.call, self.device.now_ns
        if self.flush is not None:
            return self._apart(samples, self.flush)
        stamps = [0] * (samples + 1)
        stamps[0] = now()
        for index in range(1, samples + 1):
            call()
            stamps[index] = now()
        nanoseconds = np.asarray(stamps, dtype=np.int64)
        return (nanoseconds[1:] - nanoseconds[:-1]).astype(np.float64) * 1e-9

    def _apart(self, samples: int, flush: Call) -> Samples:
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
    """What one caller waits: the host's clock around a call and a synchronise, no events inside.

    Attributes:
        call: what is timed.
        device: that works.
        flush: run and waited for before each call, outside of its time; None for nothing.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Take so many samples, seconds."""
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
    """Calls until the data of one pass is at its end: the call raises StopIteration when there is no more.

    Args:
        call: what is timed.
        device: that works.

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
