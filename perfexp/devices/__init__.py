"""Interface of a measured device; each kind has a module beside this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from perfexp.meters import Found, none_because
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric

#: The clock before any code of the user's was imported, which may replace the module's.
_CLOCK = time.perf_counter_ns


class Cache(StrEnum):
    """Contents of the device's caches before a call: those of the previous call, nothing, or other inputs."""

    warm = "warm"
    flush = "flush"
    rotate = "rotate"


class Pipeline(StrEnum):
    """How batches come to the device: prepared by worker processes, or from all images, which lie there."""

    loader = "loader"
    device = "device"


class Conditions(NamedTuple):
    """What slows a device down at one moment, as its driver reports it; None for what it does not report.

    Nanoseconds that it has been throttled so far by reason, or else the reasons of the moment; degrees Celsius.
    """

    throttled_ns: dict[str, int] | None = None
    reasons: list[str] | None = None
    temperature: float | None = None


class Event(Protocol):
    """A mark in the device's queue; its time is known once the device has passed it."""


class Device(Protocol):
    """A device that runs calls, and its clocks; the defaults are those of a synchronous device without a driver.

    On a synchronous device (a CPU) a call's work is done when the call returns, and the host's clock times it. An
    asynchronous device (a GPU) has a queue: calls return when their work is enqueued, and events mark positions in it.

    Attributes:
        name: product name from the driver or the operating system.
        identifier: torch's name (`cpu`, `cuda:0`), or None for a device unknown to torch.
        asynchronous: whether calls return before their work is done.
        lock_name: unique name on this machine for the lock against concurrent use; None for no lock.
        cache_bytes: size of the largest cache.
        event_tick_seconds: resolution of the event clock, or of the host's clock on a synchronous device.
        record_seconds: device time of recording an event.
        memory_bytes: size of its memory as the driver reports it; None if it is that of the host, or unlimited.
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
        """Before `start`, wait a few seconds at most for previous users of the device to disappear."""
        return

    def start(self) -> None:
        """Initialize the device (a GPU's context); no work precedes this."""
        return

    def now_ns(self) -> int:
        """The host's monotonic clock, nanoseconds."""
        return _CLOCK()

    def synchronize(self) -> None:
        """Wait until everything in the queue is done."""
        return

    def completing(self, call: Callable[[], object]) -> Callable[[], object]:
        """On a device that is not asynchronous: the call, which returns when its work is done."""
        return call

    def new_event(self) -> Event:
        """An event that has been recorded once, so that no lazy initialization remains."""

    def record(self, event: Event) -> None:
        """Put the event at the end of the queue."""

    def passed(self, event: Event) -> bool:
        """Whether the device has passed the event; does not wait."""
        return True

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Device time between two passed events."""

    def hold(self, seconds: float) -> None:
        """Put a wait of approximately this length into the queue, so that later work piles up behind it."""
        return

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """Run a call and return whether it synchronizes before it returns; False on a synchronous device."""
        return False

    def flush_cache(self) -> None:
        """Enqueue work that evicts everything else from the device's caches."""

    def is_lost(self) -> bool:
        """Whether this process can no longer use the device (after an error that outlives its call)."""
        return False

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Reset the peak of memory, where possible, by default after unused memory was returned to the system."""
        return

    def memory(self) -> list[Metric]:
        """`memory/peak_bytes` since the last reset, and further figures of the device; None with a reason otherwise.

        perfexp's own memory on the device (to flush a cache) is not counted.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception means that this device, or its host, ran out of memory."""

    def state(self) -> dict[str, Any]:
        """Variable state: clocks, temperature, load, as JSON values."""

    def conditions(self) -> Conditions:
        """Throttling and temperature; takes some milliseconds, so it belongs between timed blocks."""
        return Conditions()

    def clock_readings(self) -> tuple[float, ...]:
        """Two successive readings of the clock of a loaded device, in hertz, within a millisecond; none if unknown."""
        return ()

    def load_queries(self) -> Mapping[str, Callable[[], float | None]]:
        """Queries of the clock and the power of the loaded device for another thread, by fact; those that answer."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Constant facts: product, cores, driver, as JSON values."""

    def limits(self) -> dict[str, Any]:
        """The facts on which the speed of one product depends: driver, power limit, limits of the clocks."""
        return {}

    def meters(self) -> Found:
        """Meters of its energy, or the reason why there are none."""
        return none_because(f"a device of kind {self.kind} has none of its own")

    def doubts(self) -> list[Diagnostic]:
        """Diagnostics of the device before any measurement."""
        return []
