"""CUDA devices: NVIDIA GPUs and, through the same torch interface, AMD GPUs."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from perfexp.devices import Conditions, Device, Event
from perfexp.devices.cpu import processor_name
from perfexp.devices.meters import DeviceMeters, amdsmi, nvml
from perfexp.devices.nvml import find_board, is_used, neighbours
from perfexp.errors import DeviceMismatch, is_out_of_host_memory
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import DEVICE_MEMORY, PEAK_MEMORY, RESERVED_MEMORY
from perfexp.records.record import Metric

#: Out-of-memory errors from libraries that bypass torch's allocator.
_OUT_OF_MEMORY = re.compile(
    r"CUDA error: out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|HIP out of memory"
    r"|Cuda failure[^']*'out of memory'",  # NCCL
    re.I,
)
#: Bytes to write to evict everything else, relative to the second-level cache.
_FLUSH_FACTOR = 2
#: Cycles of the calibration kernel, enough to make its time proportional to them.
_CANARY_CYCLES = 20_000_000
#: Cycles of a clock reading between timed blocks: 0.2 ms at 2 GHz.
_READING_CYCLES = 400_000
#: Comparisons between a reading and the long kernel, to derive the reading's constant offset.
_OFFSET_ROUNDS = 3
#: Maximum wait for previous users of the device, and the interval between checks.
_SETTLING_SECONDS, _LOOK_SECONDS = 5.0, 0.1

#: A kernel that spins for a given number of cycles.
_spin: Callable[[int], None] = torch.cuda._sleep


class CudaDevice(Device):
    """A GPU with torch's name `cuda:INDEX`.

    Its clock is measured on demand, never during the cold start.
    """

    kind = "cuda"
    asynchronous = True

    def __init__(self, *, index: int = 0) -> None:
        self.identifier: str | None = f"cuda:{index}"
        self._index = index
        self._properties = torch.cuda.get_device_properties(index)
        self.name = self._properties.name
        self.lock_name: str | None = str(self._properties.uuid)
        self._board, self._no_board = find_board(self.lock_name)
        self._used_before_bytes: int | None = None
        self._state_before: dict[str, Any] = {}
        self.cache_bytes = int(self._properties.L2_cache_size)
        self.memory_bytes: int | None = int(self._properties.total_memory)
        self._flushed: torch.Tensor | None = None

    def settle(self) -> None:
        """See `Device`.

        After a process ends, its memory stays in use until the driver has cleaned up. The driver's
        utilization lags by up to a second (nvml.h, `nvmlUtilization_t`).
        """
        deadline = time.monotonic() + _SETTLING_SECONDS
        while self._board and is_used(self._board.state()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def start(self) -> None:
        if self._board:  # before this process has a context, all visible users are others
            self._used_before_bytes = self._board.used_bytes()
            self._state_before = self._board.state()
        torch.cuda.set_device(self._index)
        torch.cuda.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def new_event(self) -> Event:
        """See `Device`; torch creates an event at its first recording."""
        event: Event = torch.cuda.Event(enable_timing=True)
        self.record(event)
        return event

    def record(self, event: Event) -> None:
        event.record()  # type: ignore[attr-defined]

    def passed(self, event: Event) -> bool:
        return bool(event.query())  # type: ignore[attr-defined]

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """See `Device`; torch returns milliseconds in single precision."""
        return float(start.elapsed_time(end)) * 1e-3  # type: ignore[attr-defined]

    def hold(self, seconds: float) -> None:
        _spin(int(seconds * self._cycles_per_second))

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """See `Device`; torch raises an error if an operation would synchronize."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        return False

    def flush_cache(self) -> None:
        if self._flushed is None:
            self._flushed = torch.empty(
                _FLUSH_FACTOR * self.cache_bytes, dtype=torch.uint8, device=self.identifier
            )
        self._flushed.zero_()

    def is_lost(self) -> bool:
        """See `Device`; after an illegal access every CUDA call fails."""
        try:
            torch.cuda.synchronize()
            torch.ones(1, device=self.identifier).add_(1).item()
        except RuntimeError as error:  # a full device still works
            return not isinstance(error, torch.OutOfMemoryError)
        return False

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        torch.cuda.synchronize()
        if give_back:
            self._flushed = None
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS retains one per stream
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> list[Metric]:
        """Return torch's allocator peaks and board memory growth since before the context."""
        own = self._flushed.nbytes if self._flushed is not None else 0
        device, reason = self._more_in_use()
        device = None if device is None else device - own
        return [
            Metric.of(PEAK_MEMORY, torch.cuda.max_memory_allocated() - own),
            Metric.of(RESERVED_MEMORY, torch.cuda.max_memory_reserved() - own),
            Metric.of(DEVICE_MEMORY, device, reason=reason),
        ]

    def is_out_of_memory(self, error: BaseException) -> bool:
        of_device = isinstance(error, torch.OutOfMemoryError) or bool(
            _OUT_OF_MEMORY.search(str(error))
        )
        return of_device or is_out_of_host_memory(error)

    def state(self) -> dict[str, Any]:
        """Return the driver's state and the clock frequency measured by the calibration kernel."""
        return {
            "canary_hertz": self._measure_spin(),
            **(self._board.state() if self._board else {}),
        }

    def conditions(self) -> Conditions:
        if self._board:
            return self._board.conditions()
        return Conditions()

    def clock_readings(self) -> tuple[float, ...]:
        spins = self._time_spins(_READING_CYCLES, _READING_CYCLES)
        return tuple(
            _READING_CYCLES / (seconds - self._reading_offset_seconds) for seconds in spins
        )

    def load_queries(self) -> Mapping[str, Callable[[], float | None]]:
        if not self._board:
            return {}
        return self._board.load_queries()

    def facts(self) -> dict[str, Any]:
        properties = self._properties
        return {
            "kind": self.kind,
            "name": self.name,
            "index": torch.cuda.current_device(),
            "uuid": str(properties.uuid),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": self.memory_bytes,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "event_tick_seconds": self.event_tick_seconds,
            "record_seconds": self.record_seconds,
            "reading_offset_seconds": self._reading_offset_seconds,
            **(self._board.facts() if self._board else {"nvml": self._no_board}),
        }

    def limits(self) -> dict[str, Any]:
        if not self._board:
            return {}
        return self._board.limits()

    def meters(self) -> DeviceMeters:
        """See `Device`. Meters are found by UUID (NVIDIA) or bus id (AMD).

        Indices do not work, since torch and the driver number devices differently.
        """
        if torch.version.hip is None:
            return nvml.find(str(self._properties.uuid))
        domain, bus, slot = (
            getattr(self._properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")
        )
        return amdsmi.find(
            f"{domain:04x}:{bus:02x}:{slot:02x}.0" if min(domain, bus, slot) >= 0 else None
        )

    def doubts(self) -> list[Diagnostic]:
        if not is_used(self._state_before):
            return []
        evidence = (
            f"{self.name} before the first measurement: {', '.join(neighbours(self._state_before))}"
        )
        return [diagnostics.make("shared_device", evidence=evidence)]

    def _more_in_use(self) -> tuple[int | None, str | None]:
        """Return the increase in board memory since before the context, in bytes.

        None and a reason if it is unknown.
        """
        used = self._board.used_bytes() if self._board else None
        if used is None or self._used_before_bytes is None:
            return None, self._no_board or "the driver does not report the memory in use"
        more = used - self._used_before_bytes
        if more < torch.cuda.memory_reserved():
            return (
                None,
                "another process freed memory of the board during the measurement, which hides the "
                "increase",
            )
        return more, None

    def _measure_spin(self) -> float:
        """Return the spin kernel's cycles per second: the multiprocessor clock under light load."""
        return _CANARY_CYCLES / self._time_spins(_CANARY_CYCLES)[0]

    _cycles_per_second = cached_property(_measure_spin)

    def _time_spins(self, *cycles: int) -> list[float]:
        """Return the seconds of successive spins.

        A leading spin wakes the device and gives the host time to enqueue the others.
        """
        marks = self._marks[: len(cycles) + 1]
        _spin(cycles[0])
        self.record(marks[0])
        for count, mark in zip(cycles, marks[1:], strict=True):
            _spin(count)
            self.record(mark)
        self.synchronize()
        return [self.elapsed_seconds(*pair) for pair in pairwise(marks)]

    @cached_property
    def _marks(self) -> list[Event]:
        """Return the spins' events, created once because the device cools during creation."""
        return [self.new_event() for _ in range(3)]

    @cached_property
    def _reading_offset_seconds(self) -> float:
        """Return the part of a short spin's time that is not proportional to its cycles.

        It comes from launching the kernel and reading the clock.
        """
        pairs = [self._time_spins(_CANARY_CYCLES, _READING_CYCLES) for _ in range(_OFFSET_ROUNDS)]
        share = _READING_CYCLES / (_CANARY_CYCLES - _READING_CYCLES)
        return statistics.median(short - share * (long - short) for long, short in pairs)

    @cached_property
    def record_seconds(self) -> float:  # type: ignore[override]
        """See `Device`; compares spins with an event after each and spins without events."""
        repeats, held_seconds = 100, 0.005
        events = [self.new_event() for _ in range(repeats)]
        start, end = self.new_event(), self.new_event()

        def spins(marks: list[Event]) -> float:
            torch.cuda.synchronize()
            self.hold(held_seconds)
            self.record(start)
            for index in range(repeats):
                _spin(20_000)
                if marks:
                    self.record(marks[index])
            self.record(end)
            torch.cuda.synchronize()
            return self.elapsed_seconds(start, end)

        pairs = [(spins(events), spins([])) for _ in range(5)]
        return max(0.0, statistics.median((marked - bare) / repeats for marked, bare in pairs))

    @cached_property
    def event_tick_seconds(self) -> float:  # type: ignore[override]
        """See `Device`; the smallest observed difference between two event clock times."""
        repeats = 300
        events = [self.new_event() for _ in range(repeats + 1)]
        torch.cuda.synchronize()
        self.hold(0.02)
        self.record(events[0])
        for index in range(repeats):
            _spin(1000 + 37 * index)
            self.record(events[index + 1])
        torch.cuda.synchronize()
        times = sorted({self.elapsed_seconds(*pair) for pair in pairwise(events)})
        steps = [b - a for a, b in pairwise(times) if b - a > 2e-9]  # less is rounding
        return min(steps, default=1e-6)


def open_device(
    *,
    name: str = "cuda",
    match: str | None = None,
    index: int = 0,
    facts: dict[str, Any] | None = None,
    **_: Any,
) -> CudaDevice:
    """Return the device described by a file in the gpu group.

    Args:
        match: regular expression for the driver's product name.

    Raises:
        DeviceMismatch: the machine does not have the device.
    """
    device_name = torch.cuda.get_device_name(index) if is_available(index) else None
    if device_name is None or (
        match is not None and not re.search(match, device_name, re.IGNORECASE)
    ):
        here = device_name or f"{processor_name()}, with {torch.cuda.device_count()} CUDA devices"
        wanted = (facts or {}).get("product") or "a CUDA device"
        raise DeviceMismatch(
            f"gpu={name} gpu.index={index} asks for {wanted}; this job runs on: {here}. "
            "Choose gpu=auto, another gpu.index, or the machine that has it."
        )
    return CudaDevice(index=index)


def is_available(index: int = 0) -> bool:
    """Return whether torch can use the device with this index."""
    # counting devices queries NVML, which takes 0.1 s
    return torch.cuda.is_available() and (index == 0 or 0 < index < torch.cuda.device_count())
