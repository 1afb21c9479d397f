"""The host's CPU, a synchronous device with the host's clock."""

from __future__ import annotations

import ctypes
import gc
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from perfexp.devices import Event
from perfexp.errors import is_out_of_host_memory
from perfexp.meters import Found
from perfexp.meters.finding import find_meters
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric

#: Bytes to write to evict everything else, relative to the largest cache.
_FLUSH_FACTOR = 2
#: Default size of the largest cache where the system does not report it.
_UNKNOWN_CACHE_BYTES = 64 * 2**20


class _Stamp:
    """A time of the host's clock."""

    nanoseconds: int = 0


class CpuDevice:
    """The CPU that perfexp runs on, under its own or a given name."""

    kind = "cpu"
    identifier: str | None = "cpu"
    asynchronous = False
    lock_name: str | None = "cpu"
    record_seconds = 0.0

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name or processor_name()
        self.event_tick_seconds = time.get_clock_info("perf_counter").resolution
        self.cache_bytes = _last_level_bytes()
        self._flushed: NDArray[np.float64] | None = None

    def settle(self) -> None:
        """See `Device`; the diagnostic `busy_host` covers other users of a CPU."""

    def start(self) -> None:
        """See `Device`; it is always ready."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """See `Device`; nothing is ever pending."""

    def new_event(self) -> Event:
        return _Stamp()

    def record(self, event: Event) -> None:
        """Store the host's time."""
        assert isinstance(event, _Stamp)
        event.nanoseconds = time.perf_counter_ns()

    def passed(self, event: Event) -> bool:
        """See `Device`; a recorded event has always passed."""
        return True

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        assert isinstance(start, _Stamp)
        assert isinstance(end, _Stamp)
        return (end.nanoseconds - start.nanoseconds) * 1e-9

    def hold(self, seconds: float) -> None:
        """See `Device`; there is no queue."""

    def waits_inside(self, call: Callable[[], object]) -> bool:
        """See `Device`; nothing is ever pending."""
        return False

    def flush_cache(self) -> None:
        """See `Device`; writes twice the size of the last-level cache."""
        if self._flushed is None:
            self._flushed = np.ones(_FLUSH_FACTOR * self.cache_bytes // 8)
        self._flushed += 1.0

    def is_lost(self) -> bool:
        """See `Device`; a CPU cannot be lost."""
        return False

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Free unused memory, and reset the peak of the resident memory to the current value (Linux)."""
        if give_back:
            self._flushed = None
            gc.collect()
            with suppress(OSError, AttributeError):  # only glibc retains freed memory and has this function
                ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def memory(self) -> list[Metric]:
        """Peak resident memory of the process, libraries and data included, since the reset where possible."""
        peak = _peak_resident_bytes()
        reason = None if peak is not None else "the system does not report the peak resident memory"
        if peak is not None and self._flushed is not None:
            peak -= self._flushed.nbytes
        return [Metric(name="memory/peak_bytes", value=peak, unit="bytes", reason=reason)]

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_host_memory(error)

    def state(self) -> dict[str, Any]:
        """Load average and current CPU frequency."""
        load = psutil.getloadavg()
        frequency = psutil.cpu_freq()
        return {
            "load_average_1min": round(load[0], 2),
            "frequency_hertz": frequency.current * 1e6 if frequency else None,
        }

    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "usable_cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else None,
            "memory_bytes": psutil.virtual_memory().total,
            "event_tick_seconds": self.event_tick_seconds,
        }

    def meters(self) -> Found:
        """See `Device`; the meters of the CPU packages."""
        return find_meters(self.kind)

    def doubts(self) -> list[Diagnostic]:
        """See `Device`; disturbances are checked at each point."""
        return []


def open_device(**_: Any) -> CpuDevice:
    """The CPU, for the `_target_` of gpu=cpu, which ignores the configuration's data sheet."""
    return CpuDevice()


def processor_name() -> str:
    """The CPU's product name, or its architecture where the system has no name."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _last_level_bytes() -> int:
    """Size of the largest cache of the first core (Linux), or a large default."""
    sizes = [_kibibytes(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) * 1024 or _UNKNOWN_CACHE_BYTES


def _kibibytes(path: Path) -> int:
    try:
        match = re.fullmatch(r"(\d+)K", path.read_text().strip())
    except OSError:
        match = None
    return int(match[1]) if match else 0


def _peak_resident_bytes() -> int | None:
    """Peak resident memory: since the last reset on Linux, since the start of the process elsewhere."""
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
