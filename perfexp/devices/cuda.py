"""CUDA devices: NVIDIA GPUs and, through the same torch interface, AMD GPUs.

Driver facts come from NVML, times from CUDA events. Clock frequencies come from a calibration
kernel, which spins for a given number of cycles.
"""

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
from perfexp.devices.meters import DeviceMeters
from perfexp.devices.meters.boards import find_amd, find_nvidia
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
_CALIBRATION_CYCLES = 20_000_000
#: Cycles of a clock reading between timed blocks: 0.2 ms at 2 GHz.
_READING_CYCLES = 400_000
#: Comparisons between a reading and the long kernel, to derive the reading's constant offset.
_OFFSET_ROUNDS = 3
#: Maximum wait for previous users of the device, and the interval between checks.
_SETTLING_SECONDS, _CHECK_SECONDS = 5.0, 0.1

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
        """Wait up to 5 s until previous users of the GPU are gone.

        After a process ends, its memory stays in use until the driver has cleaned up. The driver's
        utilization lags by up to a second (nvml.h, `nvmlUtilization_t`).
        """
        deadline = time.monotonic() + _SETTLING_SECONDS
        while self._board and is_used(self._board.state()) and time.monotonic() < deadline:
            time.sleep(_CHECK_SECONDS)

    def start(self) -> None:
        """Create this process's CUDA context, after noting the board's earlier memory use."""
        if self._board:  # before this process has a context, all visible users are others
            self._used_before_bytes = self._board.used_bytes()
            self._state_before = self._board.state()
        torch.cuda.set_device(self._index)
        torch.cuda.synchronize()

    def synchronize(self) -> None:
        """Wait until all work in this process's queue is done."""
        torch.cuda.synchronize()

    def new_event(self) -> Event:
        """Return an event that was recorded once, because torch creates it only then."""
        event: Event = torch.cuda.Event(enable_timing=True)
        self.record(event)
        return event

    def record(self, event: Event) -> None:
        """Append the event to the current stream."""
        event.record()  # type: ignore[attr-defined]

    def passed(self, event: Event) -> bool:
        """Return whether the device has passed the event, without waiting."""
        return bool(event.query())  # type: ignore[attr-defined]

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the device time between two events.

        Torch returns milliseconds in single precision.
        """
        return float(start.elapsed_time(end)) * 1e-3  # type: ignore[attr-defined]

    def hold(self, seconds: float) -> None:
        """Enqueue a spin of roughly this length."""
        _spin(int(seconds * self._cycles_per_second))

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """Run a call and return whether it synchronizes; torch raises an error where it would.

        A call that synchronizes cannot be captured or queued ahead.
        """
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
        """Enqueue writes to twice the second-level cache's size."""
        if self._flushed is None:
            self._flushed = torch.empty(
                _FLUSH_FACTOR * self.cache_bytes, dtype=torch.uint8, device=self.identifier
            )
        self._flushed.zero_()

    def is_lost(self) -> bool:
        """Return whether CUDA calls fail in this process, as all do after an illegal access.

        The worker checks this after an error; a lost device needs a new process.
        """
        try:
            torch.cuda.synchronize()
            torch.ones(1, device=self.identifier).add_(1).item()
        except RuntimeError as error:  # a full device still works
            return not isinstance(error, torch.OutOfMemoryError)
        return False

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Reset torch's memory peaks, after the queue is empty.

        Each point starts with it.

        Args:
            give_back: whether to return unused memory to the driver first.
        """
        torch.cuda.synchronize()
        if give_back:
            self._flushed = None
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS retains one per stream
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> list[Metric]:
        """Return torch's allocator peaks, and the board's memory growth, in bytes.

        The growth since before the context includes libraries that bypass torch's allocator.
        """
        # the array that flushes the cache is not the model's
        flush_bytes = self._flushed.nbytes if self._flushed is not None else 0
        device, reason = self._added_board_bytes()
        device = None if device is None else device - flush_bytes
        return [
            Metric.of(PEAK_MEMORY, torch.cuda.max_memory_allocated() - flush_bytes),
            Metric.of(RESERVED_MEMORY, torch.cuda.max_memory_reserved() - flush_bytes),
            Metric.of(DEVICE_MEMORY, device, reason=reason),
        ]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that the GPU or the host ran out of memory."""
        if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)):
            return True
        return is_out_of_host_memory(error)

    def state(self) -> dict[str, Any]:
        """Return the driver's state and the clock frequency measured by the calibration kernel."""
        board = self._board.state() if self._board else {}
        return {"canary_hertz": self._measure_spin(), **board}

    def conditions(self) -> Conditions:
        """Return throttling and temperature from the driver; all None without NVML."""
        return self._board.conditions() if self._board else Conditions()

    def clock_readings(self) -> tuple[float, ...]:
        """Return two clock readings, hertz, each from a spin of 0.2 ms."""
        spins = self._time_spins(_READING_CYCLES, _READING_CYCLES)
        return tuple(
            _READING_CYCLES / (seconds - self._reading_offset_seconds) for seconds in spins
        )

    def load_queries(self) -> Mapping[str, Callable[[], float | None]]:
        """Return the driver's clock and power queries by fact; empty without NVML."""
        return self._board.load_queries() if self._board else {}

    def facts(self) -> dict[str, Any]:
        """Return constant facts as JSON values, with the driver's facts if NVML answers."""
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
        """Return the driver's facts that determine the speed; empty without NVML."""
        return self._board.limits() if self._board else {}

    def meters(self) -> DeviceMeters:
        """Return the board's energy meter, found by UUID (NVIDIA) or bus id (AMD).

        Indices do not work, since torch and the driver number devices differently.
        """
        if torch.version.hip is None:
            return find_nvidia(str(self._properties.uuid))
        domain, bus, slot = (
            getattr(self._properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")
        )
        if min(domain, bus, slot) < 0:
            return find_amd(None)
        return find_amd(f"{domain:04x}:{bus:02x}:{slot:02x}.0")

    def doubts(self) -> list[Diagnostic]:
        """Return a diagnostic if others used the GPU before the first measurement.

        `start` has noted the board's state.
        """
        if not is_used(self._state_before):
            return []
        others = ", ".join(neighbours(self._state_before))
        evidence = f"{self.name} before the first measurement: {others}"
        return [diagnostics.make("shared_device", evidence=evidence)]

    def _added_board_bytes(self) -> tuple[int | None, str | None]:
        """Return the increase in board memory since before this process's context, in bytes.

        None and a reason if it is unknown. It includes libraries that bypass torch's allocator.
        """
        used = self._board.used_bytes() if self._board else None
        if used is None or self._used_before_bytes is None:
            return None, self._no_board or "the driver does not report the memory in use"
        more = used - self._used_before_bytes
        if more < torch.cuda.memory_reserved():
            reason = "another process freed memory of the board during the measurement"
            return None, f"{reason}, which hides the increase"
        return more, None

    def _measure_spin(self) -> float:
        """Return the spin kernel's cycles per second: the multiprocessor clock under light load."""
        return _CALIBRATION_CYCLES / self._time_spins(_CALIBRATION_CYCLES)[0]

    _cycles_per_second = cached_property(_measure_spin)

    def _time_spins(self, *cycles: int) -> list[float]:
        """Return the device seconds of one spin for each number of cycles, one after the other.

        A leading spin wakes the device and gives the host time to enqueue the others.
        """
        marks = self._spin_events[: len(cycles) + 1]
        _spin(cycles[0])
        self.record(marks[0])
        for count, mark in zip(cycles, marks[1:], strict=True):
            _spin(count)
            self.record(mark)
        self.synchronize()
        return [self.elapsed_seconds(*pair) for pair in pairwise(marks)]

    @cached_property
    def _spin_events(self) -> list[Event]:
        """Return the spins' events, created once because the device cools during creation."""
        return [self.new_event() for _ in range(3)]

    @cached_property
    def _reading_offset_seconds(self) -> float:
        """Return the part of a short spin's time that is not proportional to its cycles.

        It comes from launching the kernel and reading the clock. The difference between a long and
        a short spin is free of it.
        """
        pairs = [
            self._time_spins(_CALIBRATION_CYCLES, _READING_CYCLES) for _ in range(_OFFSET_ROUNDS)
        ]
        share = _READING_CYCLES / (_CALIBRATION_CYCLES - _READING_CYCLES)
        return statistics.median(short - share * (long - short) for long, short in pairs)

    @cached_property
    def record_seconds(self) -> float:  # type: ignore[override]
        """Return the device time for recording an event, the median of five comparisons.

        Spins with an event after each take longer than spins without.
        """
        repeats, held_seconds = 100, 0.005
        events = [self.new_event() for _ in range(repeats)]
        start, end = self.new_event(), self.new_event()

        def time_spins(marks: list[Event]) -> float:
            """Return the device seconds of all spins, with an event after each given `marks`."""
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

        pairs = [(time_spins(events), time_spins([])) for _ in range(5)]
        return max(0.0, statistics.median((marked - bare) / repeats for marked, bare in pairs))

    @cached_property
    def event_tick_seconds(self) -> float:  # type: ignore[override]
        """Return the smallest observed difference between two event clock times, in seconds.

        Spins of slightly different lengths make all differences likely.
        """
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
    """Return the device described by a file in the gpu group, such as `conf/gpu/h100.yaml`.

    Args:
        name: option in the gpu group, for messages.
        match: regular expression for the driver's product name; None accepts every CUDA device.
        index: torch's number of the device.
        facts: the file's data sheet; `product` names the device in messages.

    Raises:
        DeviceMismatch: the machine does not have the device.
    """
    device_name = torch.cuda.get_device_name(index) if is_available(index) else ""
    if not (device_name and re.search(match or "", device_name, re.IGNORECASE)):
        device_text = (
            device_name or f"{processor_name()}, with {torch.cuda.device_count()} CUDA devices"
        )
        product = (facts or {}).get("product") or "a CUDA device"
        raise DeviceMismatch(
            f"gpu={name} gpu.index={index} asks for {product}; this job runs on: {device_text}. "
            "Choose gpu=auto, another gpu.index, or the machine that has it."
        )
    return CudaDevice(index=index)


def is_available(index: int = 0) -> bool:
    """Return whether torch can use the device with this index."""
    # counting devices queries NVML, which takes 0.1 s
    return torch.cuda.is_available() and (index == 0 or 0 < index < torch.cuda.device_count())
