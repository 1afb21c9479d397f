"""Results: append a measured point to points.jsonl, unless the measured code has changed the process that measures."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from perfexp.host import fork_server
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths, append_line
from perfexp.records.record import Key, Point, Status, point_to_line

#: The clock before any code of the user's was imported.
_CLOCK = time.perf_counter_ns
#: Modules whose forked processes never return to the worker.
_HARMLESS = ("multiprocessing.popen_fork", "subprocess")
#: Whether this process has begun a point.
_has_begun: list[bool] = []
#: The time from the start of this process to its first point, until that has been appended.
_start_seconds: list[float] = []
#: Names of the modules that have forked this process since the point in progress began.
_forks: list[str] = []


def begin(key: Key, emit: Events) -> None:
    """Report that the measurement of a point begins; forks before it do not count."""
    _forks.clear()
    if not _has_begun:
        _has_begun.append(True)
        _start_seconds.append(_age_seconds())
    emit.point(key)


def append(point: Point, paths: RunPaths, emit: Events) -> None:
    """Append a point; it failed if its code forked this process or replaced the clock. A copy ends here."""
    emit.end_copy()
    if fork_server.process_start is not None:
        point.facts["process_start"] = fork_server.process_start
    if _start_seconds:
        point.facts["start_seconds"] = round(_start_seconds.pop(), 3)
    if point.status is Status.OK and _forks:
        point.status = Status.FAILED
        point.error = f"{_forks[0]} forked this process during the measurement, which two processes cannot share"
    elif point.status is Status.OK and (time.perf_counter_ns is not _CLOCK or _took_no_time(point)):
        point.status, point.error = Status.FAILED, "the clock stands still, or was replaced by the measured code"
    append_line(paths.points, point_to_line(point))
    emit.done(point.key, point.status.value)


def _age_seconds() -> float:
    """Time since this process was started or forked, to a tick of the kernel; 0 where the system does not tell."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def _took_no_time(point: Point) -> bool:
    return any(not any(series.samples) for series in point.series if series.name in ("latency", "throughput"))


def _forked() -> None:
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    if caller not in _HARMLESS:
        _forks.append(caller)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_forked)
