"""CUDA devices, NVIDIA's and, through the same interface of torch, AMD's."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from perfexp.devices import Event
from perfexp.devices.cpu import processor_name
from perfexp.devices.nvml import find_board, is_used, neighbours
from perfexp.errors import DeviceMismatch, is_out_of_host_memory
from perfexp.meters import Found
from perfexp.meters.finding import find_meters
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric

#: What libraries say that do not get their memory from torch's allocator.
_OUT_OF_MEMORY = re.compile(
    r"CUDA error: out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|HIP out of memory"
    r"|Cuda failure[^']*'out of memory'",  # as NCCL says it
    re.I,
)
#: So many times the size of the second-level cache is written to drive everything else out of it.
_FLUSH_FACTOR = 2
#: Cycles of the spin by which its rate is found; from here on its time is proportional to them.
_CANARY_CYCLES = 20_000_000
#: Whoever had the device before is waited for at the most so long, and looked for so often.
_SETTLING_SECONDS, _LOOK_SECONDS = 5.0, 0.1

#: A kernel that spins for so many cycles.
_spin: Callable[[int], None] = torch.cuda._sleep


class CudaDevice:
    """A GPU that torch calls `cuda:INDEX`.

    The tick of its event clock, what recording an event costs, and how fast it spins are measured when they are asked
    for: not while the time to first prediction is taken.

    Args:
        index: number of the device.
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
        self._flushed: torch.Tensor | None = None

    def settle(self) -> None:
        """See `Device`.

        A process that ends keeps memory of the device until the driver has cleared up after it, and how busy the device
        was the driver tells of up to a second (nvml.h, `nvmlUtilization_t`).
        """
        deadline = time.monotonic() + _SETTLING_SECONDS
        while self._board and is_used(self._board.state()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def start(self) -> None:
        """See `Device`."""
        if self._board:  # before this process has a context there: whoever is seen is another one
            self._used_before_bytes = self._board.used_bytes()
            self._state_before = self._board.state()
        torch.cuda.set_device(self._index)
        torch.cuda.synchronize()

    @cached_property
    def event_tick_seconds(self) -> float:
        """See `Device`."""
        return self._measure_tick()

    @cached_property
    def record_seconds(self) -> float:
        """See `Device`."""
        return self._measure_record()

    @cached_property
    def _cycles_per_second(self) -> float:
        return self._spin_rate()

    def now_ns(self) -> int:
        """See `Device`."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize()

    def new_event(self) -> Event:
        """See `Device`; torch makes an event when it is first recorded."""
        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.record(event)
        return event

    def record(self, event: Event) -> None:
        """See `Device`."""
        event.record()  # type: ignore[attr-defined]

    def passed(self, event: Event) -> bool:
        """See `Device`."""
        return bool(event.query())  # type: ignore[attr-defined]

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """See `Device`; torch gives milliseconds in single precision."""
        return float(start.elapsed_time(end)) * 1e-3  # type: ignore[attr-defined]

    def hold(self, seconds: float) -> None:
        """See `Device`; a kernel that spins."""
        _spin(int(seconds * self._cycles_per_second))

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """See `Device`; torch raises where an operation would synchronise."""
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
        """See `Device`: twice the size of the second-level cache is written."""
        if self._flushed is None:
            size = _FLUSH_FACTOR * self.cache_bytes
            self._flushed = torch.empty(size, dtype=torch.uint8, device=self.identifier)
        self._flushed.zero_()

    def is_lost(self) -> bool:
        """See `Device`; after an illegal access every call of CUDA fails."""
        try:
            torch.cuda.synchronize()
            torch.ones(1, device=self.identifier).add_(1).item()
        except torch.OutOfMemoryError:
            return False
        except RuntimeError:
            return True
        return False

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """See `Device`."""
        torch.cuda.synchronize()
        if give_back:
            self._flushed = None
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each stream that it ever worked on
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> list[Metric]:
        """Peaks of torch's allocator, and what the board has more in use than before the context was made."""
        own = self._flushed.nbytes if self._flushed is not None else 0
        device, reason = self._more_in_use()
        return [
            Metric(name="memory/peak_bytes", value=torch.cuda.max_memory_allocated() - own, unit="bytes"),
            Metric(name="memory/reserved_peak_bytes", value=torch.cuda.max_memory_reserved() - own, unit="bytes"),
            Metric(
                name="memory/device_bytes",
                value=None if device is None else device - own,
                unit="bytes",
                reason=reason,
            ),
        ]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See `Device`."""
        of_device = isinstance(error, torch.OutOfMemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))
        return of_device or is_out_of_host_memory(error)

    def state(self) -> dict[str, Any]:
        """What the driver says, and the clock that the spin of known cycles shows."""
        return {"canary_hertz": self._spin_rate(), **(self._board.state() if self._board else {})}

    def facts(self) -> dict[str, Any]:
        """See `Device`."""
        properties = self._properties
        return {
            "kind": self.kind,
            "name": self.name,
            "index": torch.cuda.current_device(),
            "uuid": str(properties.uuid),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "event_tick_seconds": self.event_tick_seconds,
            "record_seconds": self.record_seconds,
            **(self._board.facts() if self._board else {"nvml": self._no_board}),
        }

    def meters(self) -> Found:
        """See `Device`; those of the board with this UUID (NVIDIA) or place on the bus (AMD)."""
        place = [getattr(self._properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        domain, bus, slot = (-1 if part is None else int(part) for part in place)
        bus_id = f"{domain:04x}:{bus:02x}:{slot:02x}.0" if min(domain, bus, slot) >= 0 else None
        return find_meters(self.kind, uuid=self.lock_name, pci_bus_id=bus_id, rocm=torch.version.hip is not None)

    def doubts(self) -> list[Diagnostic]:
        """See `Device`."""
        if not is_used(self._state_before):
            return []
        evidence = f"{self.name} before the first measurement: {', '.join(neighbours(self._state_before))}"
        return [diagnostics.make("shared_device", evidence=evidence)]

    def _more_in_use(self) -> tuple[int | None, str | None]:
        """Bytes that the board has more in use than before the context was made; or None, and why."""
        used = self._board.used_bytes() if self._board else None
        if used is None or self._used_before_bytes is None:
            return None, self._no_board or "the driver does not tell the memory in use"
        more = used - self._used_before_bytes
        if more < torch.cuda.memory_reserved():
            return None, "less than torch's own: another process must have given memory back meanwhile"
        return more, None

    def _spin_rate(self) -> float:
        """Cycles per second of the spin kernel: the clock of the multiprocessors under a light load.

        The first of two spins wakes a device that has been idle and counts for nothing.
        """
        start, end = self.new_event(), self.new_event()
        _spin(_CANARY_CYCLES)
        self.record(start)
        _spin(_CANARY_CYCLES)
        self.record(end)
        self.synchronize()
        return _CANARY_CYCLES / self.elapsed_seconds(start, end)

    def _measure_record(self, repeats: int = 200) -> float:
        """Device time that one more event costs: spins with an event after each, against the same spins without."""
        events = [self.new_event() for _ in range(repeats)]
        start, end = self.new_event(), self.new_event()

        def spins(marks: list[Event]) -> float:
            torch.cuda.synchronize()
            self.hold(0.02)
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

    def _measure_tick(self, repeats: int = 300) -> float:
        """The smallest difference between two times that the event clock was seen to show."""
        events = [self.new_event() for _ in range(repeats + 1)]
        torch.cuda.synchronize()
        self.hold(0.02)
        self.record(events[0])
        for index in range(repeats):
            _spin(1000 + 37 * index)
            self.record(events[index + 1])
        torch.cuda.synchronize()
        times = sorted({self.elapsed_seconds(events[i], events[i + 1]) for i in range(repeats)})
        steps = [b - a for a, b in pairwise(times) if b - a > 2e-9]  # less is rounding
        return min(steps, default=1e-6)


def open_device(
    *, name: str = "cuda", match: str | None = None, index: int = 0, facts: dict[str, Any] | None = None, **_: Any
) -> CudaDevice:
    """The device that a file of the gpu group names.

    Args:
        name: name of the group's file (`h200`).
        match: regular expression for the name that the driver reports.
        index: number of the device.
        facts: of the data sheet; its product is named where it is not found.

    Raises:
        DeviceMismatch: the machine has no such device; both are named.
    """
    found = torch.cuda.get_device_name(index) if is_available(index) else None
    if found is None or (match is not None and not re.search(match, found, re.IGNORECASE)):
        here = found or f"{processor_name()}, with {torch.cuda.device_count()} CUDA devices"
        wanted = (facts or {}).get("product") or "a CUDA device"
        raise DeviceMismatch(
            f"gpu={name} gpu.index={index} asks for {wanted}; this job runs on: {here}. "
            "Choose gpu=auto, another gpu.index, or the machine that has it."
        )
    return CudaDevice(index=index)


def is_available(index: int = 0) -> bool:
    """Whether torch can use a device of that number.

    Args:
        index: number of the device.
    """
    return torch.cuda.is_available() and 0 <= index < torch.cuda.device_count()


def last() -> int:
    """Number of the last device that torch has."""
    return torch.cuda.device_count() - 1
