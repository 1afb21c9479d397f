"""Series of samples: taken in blocks of calls, several series in turns, after the device is steady.

A call is a forward pass or a training step. A sample is the time of k calls divided by k, in
seconds, and a block is a number of samples taken without a pause. `measuring.times` builds a
`Collector` for each time of a point (throughput, latency, device time) and passes them to
`collect`. Before that, `settle` warms the device up if the stopping rule asks for it.
"""

from __future__ import annotations

import gc
import math
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
#: Largest share of a pass in calls that found the device idle, if the device limits the pass.
_IDLE_SHARE = 0.05
#: Captures a call as a CUDA graph, which is a single launch, and returns the call that replays it.
Capture = Callable[[], Call]
#: Seconds per call, shape (n,).
Samples = NDArray[np.float64]

#: Seconds per block, and minimum seconds in total: slow changes show a slope by then.
_BLOCK_SECONDS, _LEAST_SECONDS = 0.5, 30.0
#: Largest relative difference between the middle and the last third of a steady quantity.
_SLOPE = 0.002
#: Largest change of a steady temperature in degrees Celsius, and the seconds that it must hold.
_CELSIUS, _TEMPERATURE_SECONDS = 1.0, 10.0


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collect garbage, then turn the garbage collector off while entered.

    A collection would pause the host in the middle of a timed block.
    """
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
    """Takes a series block by block, until the monitor of its stopping rule has enough samples.

    Attributes:
        name: series name, for example `latency` or `device`.
        block: makes calls and returns the given number of samples, in seconds per call.
        begin: returns the series' monitor; called before the first block. Its argument is the
            seconds that the device has just worked on the same calls: these shorten the warm-up.
        calls_per_sample: k, number of calls in a sample.
        samples: all samples so far in seconds per call, warm-up included, shape (n,).
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
        """Return the seconds that the calls in this series have taken so far."""
        return float(self.samples.sum()) * self.calls_per_sample

    @property
    def elapsed_seconds(self) -> float:
        """Return the host seconds spent in the blocks so far.

        They include untimed work inside a block, such as filling the launch queue.
        """
        return self._elapsed_ns * 1e-9

    @property
    def is_measured(self) -> bool:
        """Return whether the series has a sample after its warm-up."""
        monitor = self._monitor
        return monitor is not None and monitor.warmup(self.samples) < self.samples.size

    def take_block(self, now: Callable[[], int], busy_seconds: float) -> bool:
        """Take the next block; the first time, take the warm-up before it.

        Args:
            now: the host's clock, in nanoseconds.
            busy_seconds: time that the device has just worked on the same calls.

        Returns:
            False, without a block, if the monitor has enough samples.
        """
        monitor = self._monitor = self._monitor or self.begin(busy_seconds)
        blocks = len(monitor.starts)
        # the monitor adds a start with each block; warm-up parts add none
        while len(monitor.starts) == blocks:
            count = monitor.more(self.samples, self.elapsed_seconds)
            if not count:
                return False
            begun_ns = now()
            block_samples = self.block(count)
            self._elapsed_ns += now() - begun_ns
            self.samples = np.concatenate([self.samples, block_samples])
        return True

    def series(self) -> Series:
        """Return the series so far as it goes into the record, with the reason for its end."""
        monitor = self._monitor or self.begin(0.0)
        return Series(
            name=self.name,
            samples=self.samples.tolist(),
            warmup=monitor.warmup(self.samples),
            # a block that an error ended has a start, but no samples
            blocks=[start for start in monitor.starts if start < self.samples.size],
            calls_per_sample=self.calls_per_sample,
            stop=monitor.stop(self.samples),
        )


def collect(
    collectors: Sequence[Collector],
    now: Callable[[], int],
    busy_seconds: float = 0.0,
    block_ended: Callable[[str, float], None] = lambda *_: None,
) -> None:
    """Take several series in turns, block by block, so that drifts affect all of them alike.

    A series leaves the rotation when its monitor has enough samples. The samples are in the
    collectors afterward.

    Args:
        collectors: the series, in the order of their turns.
        now: the host's clock, in nanoseconds.
        busy_seconds: time that the device has worked on the same calls just before.
        block_ended: called after each block, with the series name and the block's host seconds.
    """
    # garbage collection between blocks would pause the host, and queues and loaders would catch up
    with undisturbed():
        unfinished = list(collectors)
        while unfinished:
            for collector in list(unfinished):
                before = collector.elapsed_seconds
                # one series' calls warm the device up for the others, which make the same calls
                warm_seconds = busy_seconds + sum(other.busy_seconds for other in collectors)
                if collector.take_block(now, warm_seconds):
                    block_ended(collector.name, collector.elapsed_seconds - before)
                else:
                    unfinished.remove(collector)
                # while it is off, reference cycles from the calls would fill the memory
                if gc.get_count()[0] > gc.get_threshold()[0]:
                    gc.collect(0)


@dataclass
class HostChain:
    """Block of back-to-back calls on a synchronous device: a host clock reading after every call.

    Attributes:
        flush: empties the caches, untimed, before each call; None for back-to-back calls.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Make `samples` calls and return the seconds of each."""
        call, now = self.device.completing(self.call), self.device.now_ns
        if self.flush is not None:
            return self._flushed(samples, call, self.flush)
        stamps = [0] * (samples + 1)  # allocated before the first reading
        stamps[0] = now()
        for index in range(1, samples + 1):
            call()
            stamps[index] = now()
        nanoseconds = np.asarray(stamps, dtype=np.int64)
        return (nanoseconds[1:] - nanoseconds[:-1]).astype(np.float64) * 1e-9

    def _flushed(self, samples: int, call: Call, flush: Call) -> Samples:
        """Make `samples` calls, each after a flush, and return the seconds of the calls alone."""
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
    """Block of isolated calls: how long a caller waits for each, by the host clock.

    The device is idle when a call begins, and the clock is read again once it has finished.

    Attributes:
        flush: empties the caches and completes before each call, untimed; None for warm caches.
    """

    call: Call
    device: Device
    flush: Call | None = None

    def __call__(self, samples: int) -> Samples:
        """Make `samples` calls, each followed by a synchronization, and return their seconds."""
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


def whole_pass(call: Call, device: Device) -> tuple[Samples, float, bool]:
    """Make calls until the data ends (StopIteration): one epoch of training.

    Returns:
        Device seconds from the end of each call to the end of the next, shape (calls,). Host
        seconds from the start until the device has finished. Whether the device limits the calls:
        those that found it idle took a small share of the time.
    """
    events, found_idle = [device.new_event()], list[bool]()
    device.synchronize()
    start = device.now_ns()
    device.record(events[0])
    while True:
        try:
            call()
        except StopIteration:
            break
        found_idle.append(len(events) > 1 and device.passed(events[-1]))
        events.append(device.new_event())
        device.record(events[-1])
    device.synchronize()
    total_seconds = (device.now_ns() - start) * 1e-9
    seconds = np.asarray([device.elapsed_seconds(*pair) for pair in pairwise(events)])
    is_limiting = bool(seconds[found_idle].sum() <= _IDLE_SHARE * seconds.sum())
    return seconds, total_seconds, is_limiting


@dataclass
class _SteadinessTrace:
    """What `settle` has seen of the device: an entry for each round of blocks.

    Attributes:
        ends: seconds from the start to the end of each round.
        times: median call time of each round, in seconds.
        clocks: mean clock of each round in Hz; empty if the device cannot report it.
        temperatures: degrees Celsius after each round; empty without a sensor.
    """

    ends: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    def changes(self) -> list[str]:
        """Describe what still changes, for example `the clock by -1.20%`; empty if steady."""
        # the clock jitters under a power limit, and a reading takes less than a millisecond
        clock_tolerance = max(_SLOPE, 2 * _slope_error(self.clocks))
        changes = []
        for name, values, tolerance in (
            ("the time of a call", self.times, _SLOPE),
            ("the clock", self.clocks, clock_tolerance),
        ):
            if abs(slope := _slope(values)) >= tolerance:
                changes.append(f"{name} by {slope:+.2%}")
        recent = [
            celsius
            for end, celsius in zip(self.ends, self.temperatures, strict=False)
            if end >= self.ends[-1] - _TEMPERATURE_SECONDS
        ]
        if recent and (change := max(recent) - min(recent)) > _CELSIUS:
            changes.append(f"the temperature by {change:.0f} °C in {_TEMPERATURE_SECONDS:.0f} s")
        return changes


def settle(
    collectors: Sequence[Collector],
    device: Device,
    most_seconds: float,
    progress: Callable[[str], None],
) -> tuple[float, list[str]]:
    """Take blocks of several series in turns, as in the measurement, until the device is steady.

    Steady means that call time, clock and temperature no longer change. The call time is taken
    from the `device` series, if there is one, otherwise from the first series. Samples are thrown
    away. Called before a point's series with `stopping.steady=thermal`.

    Args:
        most_seconds: time after which to stop even if the device is not steady.
        progress: called with a status line between blocks.

    Returns:
        The seconds spent, and descriptions of what still changed at the end; none if steady.
    """
    judged = next(
        (collector for collector in collectors if collector.name == "device"), collectors[0]
    )
    # samples in each series' next block: a single one, then as many as fill _BLOCK_SECONDS
    counts = dict.fromkeys((collector.name for collector in collectors), 1)
    trace, start_ns = _SteadinessTrace(), device.now_ns()
    with undisturbed():
        while True:
            for collector in collectors:
                samples = collector.block(counts[collector.name])
                sample_seconds = max(float(np.median(samples)) * collector.calls_per_sample, 1e-9)
                counts[collector.name] = math.ceil(_BLOCK_SECONDS / sample_seconds)
                if collector is judged:
                    trace.times.append(float(np.median(samples)))
                    if clocks := device.clock_readings():
                        trace.clocks.append(float(np.mean(clocks)))
            celsius = device.conditions().temperature
            if celsius is not None:
                trace.temperatures.append(celsius)
            seconds = (device.now_ns() - start_ns) * 1e-9
            trace.ends.append(seconds)
            changes = trace.changes() if seconds >= min(_LEAST_SECONDS, most_seconds) else []
            if seconds >= most_seconds or (seconds >= _LEAST_SECONDS and not changes):
                return seconds, changes
            progress(f"warming up, {seconds:.0f} s")


def _slope(values: Sequence[float]) -> float:
    """Return the relative change in the median from the middle third to the last third.

    It is 0 for fewer than three values. The first third is left out: the device still warms up.
    """
    third = len(values) // 3
    if not third:
        return 0.0
    return float(np.median(values[-third:]) / np.median(values[-2 * third : -third])) - 1


def _slope_error(values: Sequence[float]) -> float:
    """Return the standard error of `_slope`, √(π/2)·σ·√(2/n) for thirds of n values.

    The relative standard deviation σ follows from the median difference between neighbors, which
    a slow trend hardly changes; for normal values it is 0.954 σ. The error is 0 for fewer than
    three values.
    """
    third = len(values) // 3
    if not third:
        return 0.0
    compared = values[-2 * third :]
    sigma = float(np.median(np.abs(np.diff(compared))) / np.median(compared)) / 0.954
    return math.sqrt(math.pi / third) * sigma
