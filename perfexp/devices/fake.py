"""A scripted device in simulated time, with known truth, without torch or waiting.

Tests and `gpu=fake` measure a scripted model on it and compare with what the script says.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from perfexp.devices import Conditions, Device, Event
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import PEAK_MEMORY
from perfexp.records.record import Metric

#: Temperature at the first work, and its rise until the steady state.
_COLD_CELSIUS, _WARMING_CELSIUS = 40.0, 30.0


class _Mark:
    """An event: the simulated time when the device passes it, and the clock reading then."""

    passed_seconds: float = math.inf
    seconds: float = math.inf


@dataclass(eq=False, kw_only=True)
class FakeDevice(Device):
    """A host that enqueues work and a device that processes its queue, both on simulated clocks.

    Each launch costs the host `enqueue_seconds` and the device the time that the caller passes.
    With `queue_depth` pending launches, the host waits until the oldest ends, as with a CUDA
    stream.

    Args:
        tick_seconds: resolution of the event clock.
        record_host_seconds: host time for recording an event.
        synchronize_seconds: host time for a synchronization beyond the wait itself.
        graph_gap_seconds: device time between two separately launched kernels; a captured graph
            saves it.
        clock_hertz: clock frequencies, alternating every `clock_seconds`; empty for no readings.
        clock_noise: relative standard deviation of a clock reading, with the seed `clock_seed`.
        throttled_share: throttled share of working time; None for no counters.
        memory_bytes: memory size; None for unlimited memory.
        warming_share: relative growth of work time while the device warms up by 30 °C; 0 for no
            thermometer.
        warming_seconds: time constant of the warming, in working time.

    Attributes:
        cold: whether the cache was flushed since the last call that used it.
        lost: whether a scripted fault made the device unusable.
    """

    kind = "fake"
    identifier = None
    cache_bytes = 0

    name: str = "scripted device"
    asynchronous: bool = True
    tick_seconds: InitVar[float] = 1e-9
    enqueue_seconds: float = 5e-6
    record_seconds: float = 0.0
    record_host_seconds: float = 0.0
    synchronize_seconds: float = 0.0
    queue_depth: int = 1000
    graph_gap_seconds: float = 0.0
    flush_seconds: float = 50e-6
    lock_name: str | None = None
    clock_hertz: Sequence[float] = ()
    clock_seconds: float = 0.1
    clock_noise: float = 0.0
    clock_seed: int = 0
    throttled_share: float | None = None
    memory_bytes: int | None = None
    warming_share: float = 0.0
    warming_seconds: float = 20.0

    def __post_init__(self, tick_seconds: float) -> None:
        """Set both clocks to zero, with nothing pending."""
        self.event_tick_seconds = tick_seconds
        self.queue_depth = self.queue_depth if self.asynchronous else 0
        self.cold = self.lost = False
        self._random = random.Random(self.clock_seed)
        self._worked_seconds = self._host_seconds = self._free_seconds = 0.0
        self._captured: list[float] | None = None
        self._synchronized = 0
        self._pending: deque[float] = deque()
        self._peak_bytes = 0

    def launch(self, work_seconds: float, host_seconds: float | None = None) -> float:
        """Enqueue work; return its completion time on the device, simulated seconds.

        The scripted model's calls consist of launches. While `capture` records, work is only added
        up. Raises `RuntimeError` if the device is lost.

        Args:
            work_seconds: device time of the work.
            host_seconds: host time for the launch; None for `enqueue_seconds`.
        """
        if self.lost:
            raise RuntimeError("scripted: the device is lost")
        if self._captured is not None:
            self._captured.append(work_seconds)
            return math.inf
        work_seconds *= 1 + self.warming_share * self._warmth()
        work_seconds += self.graph_gap_seconds
        self._worked_seconds += work_seconds
        self._host_seconds += self.enqueue_seconds if host_seconds is None else host_seconds
        while self._pending and self._pending[0] <= self._host_seconds:
            self._pending.popleft()
        if self.asynchronous and len(self._pending) >= self.queue_depth:
            self._host_seconds = self._pending.popleft()
        self._free_seconds = max(self._host_seconds, self._free_seconds) + work_seconds
        if self.asynchronous:
            self._pending.append(self._free_seconds)
        else:
            self._host_seconds = self._free_seconds
        return self._free_seconds

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a function that launches a call's work without gaps, like a CUDA graph.

        Raises `RuntimeError` if the call synchronizes.
        """
        self._captured = []
        try:
            call()
            work_seconds = sum(self._captured)
        finally:
            self._captured = None
        return lambda: self.launch(work_seconds)

    def now_ns(self) -> int:
        """Return the simulated host clock, nanoseconds."""
        return round(self._host_seconds * 1e9)

    def synchronize(self) -> None:
        """Advance the host's clock to the end of pending work.

        Raises `RuntimeError` if the device is lost, or inside a capture.
        """
        if self.lost or self._captured is not None:
            reason = "the device is lost" if self.lost else "a capture cannot wait"
            raise RuntimeError(f"scripted: {reason}")
        self._synchronized += 1
        self._host_seconds = max(self._host_seconds, self._free_seconds) + self.synchronize_seconds
        self._pending.clear()

    def new_event(self) -> Event:
        """Return an event that no launch has passed."""
        return _Mark()

    def record(self, event: Event) -> None:
        """Launch the event; its clock reading is rounded down to the tick."""
        assert isinstance(event, _Mark)
        event.passed_seconds = self.launch(self.record_seconds, self.record_host_seconds)
        # 1e-6 absorbs rounding errors
        ticks = math.floor(event.passed_seconds / self.event_tick_seconds + 1e-6)
        event.seconds = ticks * self.event_tick_seconds

    def passed(self, event: Event) -> bool:
        """Return whether the device has passed the event at the host's present time."""
        assert isinstance(event, _Mark)
        return event.passed_seconds <= self._host_seconds

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the difference between two clock readings, seconds."""
        assert isinstance(start, _Mark)
        assert isinstance(end, _Mark)
        return end.seconds - start.seconds

    def hold(self, seconds: float) -> None:
        """Launch work of exactly this length."""
        self.launch(seconds)

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """Run a call and return whether it synchronizes."""
        before = self._synchronized
        call()
        return self._synchronized > before

    def flush_cache(self) -> None:
        """Launch the flush; the next call finds a cold cache."""
        self.launch(self.flush_seconds)
        self.cold = True

    def is_lost(self) -> bool:
        """Return whether a scripted fault made the device unusable."""
        return self.lost

    def occupy(self, size_bytes: int) -> None:
        """Use memory briefly; raise MemoryError if the device has less."""
        if self.memory_bytes is not None and size_bytes > self.memory_bytes:
            raise MemoryError(f"scripted: {size_bytes} bytes are more than {self.memory_bytes}")
        self._peak_bytes = max(self._peak_bytes, size_bytes)

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Set the memory peak to zero."""
        self._peak_bytes = 0

    def memory(self) -> list[Metric]:
        """Return the memory peak; None with a reason for a device without a memory size."""
        if self.memory_bytes is not None:
            return [Metric.of(PEAK_MEMORY, self._peak_bytes)]
        reason = "a scripted device has no memory"
        return [Metric.of(PEAK_MEMORY, None, reason=reason)]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether `occupy` raised the exception, or the host ran out of memory."""
        return isinstance(error, MemoryError)

    def state(self) -> dict[str, Any]:
        """Return the simulated time and, if scripted, the current clock frequency."""
        state: dict[str, Any] = {"simulated_seconds": self._host_seconds}
        if (clock := self._clock_hertz()) is not None:
            state["canary_hertz"] = clock
        return state

    def conditions(self) -> Conditions:
        """Return scripted throttling and temperature; None for what is not scripted."""
        throttled_ns = temperature = None
        if self.throttled_share is not None:
            throttled_seconds = self.throttled_share * self._worked_seconds
            throttled_ns = {"power cap": round(throttled_seconds * 1e9)}
        if self.warming_share:
            temperature = _COLD_CELSIUS + _WARMING_CELSIUS * self._warmth()
        return Conditions(throttled_ns, temperature=temperature)

    def clock_readings(self) -> tuple[float, ...]:
        """Return two noisy readings of the scripted clock, hertz; empty without a clock."""
        clock = self._clock_hertz()
        if not clock:
            return ()
        return tuple(clock * (1 + self.clock_noise * self._random.gauss(0, 1)) for _ in range(2))

    def _clock_hertz(self) -> float | None:
        """Return the scripted clock frequency now; None without a script."""
        clocks = self.clock_hertz
        if not clocks:
            return None
        return clocks[int(self._host_seconds / self.clock_seconds) % len(clocks)]

    def _warmth(self) -> float:
        """Return how far the device has warmed up, from 0 to 1; it never cools."""
        return -math.expm1(-self._worked_seconds / self.warming_seconds)

    def facts(self) -> dict[str, Any]:
        """Return the scripted facts."""
        facts = {
            "kind": self.kind,
            "name": self.name,
            "event_tick_seconds": self.event_tick_seconds,
            "queue_depth": self.queue_depth,
        }
        if self.memory_bytes is not None:
            facts["memory_bytes"] = self.memory_bytes
        return facts

    def doubts(self) -> list[Diagnostic]:
        """Return the diagnostic that all times are simulated."""
        return [diagnostics.make("simulated")]


def open_device(*, script: dict[str, Any] | None = None, **_: Any) -> FakeDevice:
    """Return a scripted device with `FakeDevice` arguments, for gpu=fake."""
    return FakeDevice(**(script or {}))
