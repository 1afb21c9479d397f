"""The host's CPU, a synchronous device timed by the host's clock."""

from __future__ import annotations

import ctypes
import gc
import platform
import re
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from perfexp.devices import Device, Event
from perfexp.devices.meters import DeviceMeters, rapl
from perfexp.errors import is_out_of_host_memory
from perfexp.host import fork_server
from perfexp.records.quantities import PEAK_MEMORY
from perfexp.records.record import Metric

#: Bytes to write to evict everything else, relative to the largest cache.
_FLUSH_FACTOR = 2
#: Size of the largest cache if the system does not report it.
_UNKNOWN_CACHE_BYTES = 64 * 2**20


class _Stamp:
    """An event: the host's clock when it was recorded."""

    nanoseconds: int = 0


class CpuDevice(Device):
    """The CPU that runs perfexp, under its own or a given name."""

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

    def new_event(self) -> Event:
        """Return an event without a time."""
        return _Stamp()

    def record(self, event: Event) -> None:
        """Set the event's time to now."""
        assert isinstance(event, _Stamp)
        event.nanoseconds = self.now_ns()

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the host time between two recorded events."""
        assert isinstance(start, _Stamp) and isinstance(end, _Stamp)
        return (end.nanoseconds - start.nanoseconds) * 1e-9

    def flush_cache(self) -> None:
        """Write an array of twice the largest cache's size."""
        if self._flushed is None:
            self._flushed = np.ones(_FLUSH_FACTOR * self.cache_bytes // 8)
        self._flushed += 1.0

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Free unused memory and reset peak resident memory to the current value (Linux)."""
        if give_back:
            self._flushed = None
            gc.collect()
            # only glibc retains freed memory and has this function
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @contextmanager
    def memory_limited(self) -> Iterator[None]:
        """Limit this process to the host's free memory, so that larger allocations raise an error.

        Otherwise Linux kills a process, perhaps another one. Limits of control groups are ignored.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = psutil.Process().memory_info().vms + psutil.virtual_memory().available
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
        with ExitStack() as stack:
            with suppress(OSError, ValueError):  # macOS has no such limit
                resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
                stack.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
            yield

    def memory(self) -> list[Metric]:
        """Return the process's peak resident memory, libraries and data included.

        It counts from the last reset, if the system supports one.
        """
        flush_bytes = self._flushed.nbytes if self._flushed is not None else 0
        return [Metric.of(PEAK_MEMORY, _peak_resident_bytes() - flush_bytes)]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that the host ran out of memory."""
        return is_out_of_host_memory(error)

    def state(self) -> dict[str, Any]:
        """Return the load average over a minute and the current frequency in hertz."""
        load, frequency = psutil.getloadavg()[0], psutil.cpu_freq()
        return {
            "load_average_1min": round(load, 2),
            "frequency_hertz": frequency.current * 1e6 if frequency else None,
        }

    def facts(self) -> dict[str, Any]:
        """Return constant facts as JSON values; None for what the system does not report."""
        has_affinity = hasattr(psutil.Process, "cpu_affinity")  # not on macOS
        return {
            "kind": self.kind,
            "name": self.name,
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "usable_cores": len(psutil.Process().cpu_affinity()) if has_affinity else None,
            "memory_bytes": psutil.virtual_memory().total,
            "event_tick_seconds": self.event_tick_seconds,
        }

    def meters(self) -> DeviceMeters:
        """Return meters for the CPU's packages and memory, or the reason for having none."""
        return rapl.find()


def open_device(**_: Any) -> CpuDevice:
    """Return the CPU, for gpu=cpu. The configuration's data sheet is ignored."""
    return CpuDevice()


def processor_name() -> str:
    """Return the CPU's product name, or its architecture if the system has no name."""
    name = _search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo"))
    return name.strip() or platform.processor() or platform.machine()


def _last_level_bytes() -> int:
    """Return the size of the largest cache, or 64 MiB if Linux does not report it."""
    paths = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(_search(r"^(\d+)K$", path) or 0) for path in paths]
    return max(sizes, default=0) * 1024 or _UNKNOWN_CACHE_BYTES


def _peak_resident_bytes() -> int:
    """Return peak resident memory: since the last reset on Linux, elsewhere since process start.

    Library pages that a forked process uses after its fork server count twice: 3 % of 468 MiB for
    resnet18.
    """
    if kibibytes := _search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status")):
        return int(kibibytes) * 1024 + fork_server.uncounted_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if platform.system() == "Darwin":
        return peak
    return peak * 1024


def _search(pattern: str, path: Path) -> str:
    """Return the first group matching a pattern in a file; empty without a file or match."""
    with suppress(OSError):
        if match := re.search(pattern, path.read_text()):
            return match[1]
    return ""
