"""Device: what the measuring code asks of the thing that it measures; one module for each kind beside this one."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

from perfexp.meters import Found
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric


class Cache(StrEnum):
    """What a call finds in the device's caches: what the one before it left, nothing, or other inputs than its own."""

    warm = "warm"
    flush = "flush"
    rotate = "rotate"


class Event(Protocol):
    """A mark in the device's queue; its time is known once the device has passed it."""


class Device(Protocol):
    """A device that runs calls, and its clocks.

    On a synchronous device (a CPU) a call's work is done when the call returns, and the host's clock tells all. An
    asynchronous one (a GPU) has a queue: calls return when their work is enqueued, and events mark places in it.

    Attributes:
        kind: `cpu`, `cuda`, `mps` or `fake`.
        name: what the driver or the operating system calls it.
        identifier: what torch calls it (`cpu`, `cuda:0`), or None where torch does not know it.
        asynchronous: whether calls return before their work is done.
        lock_name: identifies it on this machine, for the lock that keeps others off; None where it needs none.
        event_tick_seconds: resolution of the event clock; of the host's clock on a synchronous device.
        record_seconds: device time that recording an event costs.
    """

    kind: str
    name: str
    identifier: str | None
    asynchronous: bool
    lock_name: str | None

    @property
    def cache_bytes(self) -> int:
        """Size of its largest cache."""

    @property
    def event_tick_seconds(self) -> float: ...  # noqa: D102

    @property
    def record_seconds(self) -> float: ...  # noqa: D102

    def settle(self) -> None:
        """Before `start`: wait until whoever worked on it before is gone from it; for a few seconds at the most."""

    def start(self) -> None:
        """Make it ready to work (a GPU's context); before that, nothing has been done on it."""

    def now_ns(self) -> int:
        """The host's monotonic clock, nanoseconds."""

    def synchronize(self) -> None:
        """Wait until everything in the queue is done."""

    def new_event(self) -> Event:
        """An event that has been recorded once, so that nothing is left to be made lazily."""

    def record(self, event: Event) -> None:
        """Put the event into the queue, after what is already in it."""

    def passed(self, event: Event) -> bool:
        """Whether the device has passed the event; does not wait."""

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Device time between two events that were passed."""

    def hold(self, seconds: float) -> None:
        """Put a wait of about so long into the queue, so that what follows piles up behind it."""

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """Run a call and tell whether it waits for the device before it returns; False on a synchronous device."""

    def flush_cache(self) -> None:
        """Put work into the queue that drives everything else out of the device's caches."""

    def is_lost(self) -> bool:
        """Whether nothing can be done on it any more by this process (after an error that outlives its call)."""

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Forget the peak of memory so far, where that can be done.

        Args:
            give_back: whether memory that is held without need is given back to the system before.
        """

    def memory(self) -> list[Metric]:
        """`memory/peak_bytes` since the last reset, and what else the device knows; None with a reason otherwise.

        What perfexp itself holds there (to flush a cache) is not counted.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception says that this device, or its host, ran out of memory."""

    def state(self) -> dict[str, Any]:
        """What changes while measuring: clocks, temperature, load. JSON values."""

    def facts(self) -> dict[str, Any]:
        """What does not change: product, cores, driver. JSON values."""

    def meters(self) -> Found:
        """What counts its energy, or why nothing does."""

    def doubts(self) -> list[Diagnostic]:
        """What is wrong with this device from the start."""
