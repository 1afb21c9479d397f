"""Devices: interface of a measured device; each kind has its own module.

A `gpu` node in the configuration opens a `Device`: `cuda`, `cpu`, `mps` or `fake`. It runs calls,
supplies the clock that times them, and describes itself for the record. A call is a forward pass or
a training step.

May import: host, records, statistics. Used by: commands, convolution, data, doctor, measuring,
models, plan, run, timing, worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from perfexp.devices.meters import DeviceMeters, none_because
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric

#: The clock as of import, before user code can replace it in the module.
_CLOCK = time.perf_counter_ns


class Cache(StrEnum):
    """Cache contents before a call: the previous call's data, nothing, or other inputs."""

    warm = "warm"
    flush = "flush"
    rotate = "rotate"


class Pipeline(StrEnum):
    """Batch source: worker processes, or all images stored on the device."""

    loader = "loader"
    device = "device"


class Conditions(NamedTuple):
    """Slow-downs at one moment, as the driver reports them; None if it does not.

    Attributes:
        throttled_ns: throttled time so far by reason, nanoseconds.
        reasons: current throttle reasons, for drivers without such counters.
        temperature: degrees Celsius.
    """

    throttled_ns: dict[str, int] | None = None
    reasons: list[str] | None = None
    temperature: float | None = None


class Event(Protocol):
    """A mark in the device's queue. Its time is known once the device has passed it."""


class Device(Protocol):
    """A device that runs calls, and its clocks.

    On a synchronous device (a CPU) a call returns when its work is done, and the host's clock times
    it. An asynchronous device (a GPU) has a queue: calls return once their work is enqueued, and
    events mark positions in the queue. The defaults are for a synchronous device without a driver.

    Attributes:
        kind: `cuda`, `cpu`, `mps` or `fake`.
        name: product name from the driver or the operating system.
        identifier: torch's name, for example `cpu` or `cuda:0`; None for a device unknown to torch.
        asynchronous: whether calls return before their work is done.
        lock_name: machine-wide unique name for the lock against concurrent use; None for no lock.
        cache_bytes: size of the largest cache.
        event_tick_seconds: resolution of the event clock, or of the host's clock on a synchronous
            device.
        record_seconds: device time for recording an event.
        memory_bytes: memory size from the driver; None for host memory or unlimited memory.
    """

    kind: str
    name: str
    identifier: str | None
    asynchronous: bool
    lock_name: str | None
    cache_bytes: int
    event_tick_seconds: float
    record_seconds: float
    memory_bytes: int | None = None

    def settle(self) -> None:
        """Wait a few seconds at most, before `start`, until previous users are gone."""
        return

    def start(self) -> None:
        """Initialize the device, for example a GPU's context. No work precedes this."""
        return

    def now_ns(self) -> int:
        """Return the host's monotonic clock, nanoseconds."""
        return _CLOCK()

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        return

    def completing(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a version of `call` that returns when its work is done, for the host's clock.

        An asynchronous device uses events instead.
        """
        return call

    def new_event(self) -> Event:
        """Return an event that was recorded once, so that no lazy initialization remains."""

    def record(self, event: Event) -> None:
        """Append the event to the queue."""

    def passed(self, event: Event) -> bool:
        """Return whether the device has passed the event, without waiting."""
        return True

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the device time from `start` to `end`, two events that the device has passed."""

    def hold(self, seconds: float) -> None:
        """Enqueue a wait of roughly this length, so that later work piles up behind it.

        The launch queue uses it so that gaps between launches are not measured.
        """
        return

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """Run a call and return whether it synchronizes inside; False on a synchronous device."""
        return False

    def flush_cache(self) -> None:
        """Enqueue work that evicts everything else from the device's caches."""

    def is_lost(self) -> bool:
        """Return whether an error has left the device unusable for this process."""
        return False

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Reset the memory peak, if possible.

        Args:
            give_back: whether to return unused memory to the system first.
        """
        return

    def memory_limited(self) -> AbstractContextManager[None]:
        """Return a context in which calls that exhaust the memory raise an error."""
        return nullcontext()

    def memory(self) -> list[Metric]:
        """Return `memory/peak_bytes` since the last reset, and other memory metrics.

        Unknown values are None with a reason. perfexp's own memory on the device, used for flushing
        a cache, is not counted.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that this device or its host ran out of memory."""

    def state(self) -> dict[str, Any]:
        """Return variable state as JSON values, for example clocks, temperature and load."""

    def conditions(self) -> Conditions:
        """Return throttling and temperature.

        This takes some milliseconds, so it belongs between timed blocks.
        """
        return Conditions()

    def clock_readings(self) -> tuple[float, ...]:
        """Return two clock readings under load, hertz, less than a millisecond apart.

        Empty if unknown.
        """
        return ()

    def load_queries(self) -> Mapping[str, Callable[[], float | None]]:
        """Return the clock (hertz) and power (watts) queries that answer, by name of the fact.

        Another thread calls them while the device is under load.
        """
        return {}

    def facts(self) -> dict[str, Any]:
        """Return constant facts as JSON values, for example the driver version."""

    def limits(self) -> dict[str, Any]:
        """Return the facts that determine a product's speed: driver, power limit, clock limits.

        Two runs on equal GPUs are comparable only if these are equal.
        """
        return {}

    def meters(self) -> DeviceMeters:
        """Return the device's energy meters, or the reason for having none."""
        return none_because(f"a device of kind {self.kind} has none of its own")

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics about the device before any measurement."""
        return []
