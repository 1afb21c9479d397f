"""Collect a machine's facts other than its devices: packages, tools, meters, folders, clocks, CPU cores.

The queries change nothing and do not import torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from perfexp.diagnosis import environment

#: Profilers, and the folders of their installers.
_TOOLS = {
    "nsys": (
        "/opt/nvidia/nsight-systems/*/bin/nsys",
        "/usr/local/cuda*/bin/nsys",
        "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
    ),
    "ncu": ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu"),
    "rocprofv3": ("/opt/rocm*/bin/rocprofv3",),
}
_SQLITE_MAGIC = b"SQLite format 3\0"


def facts(folders: Mapping[str, Path], store: Path | None) -> dict[str, Any]:
    """All facts as JSON values, with output folders by purpose and the file of the tracking database, if any."""
    return {
        **environment.collect(),
        "system": platform.system(),
        "requirements": requirements(),
        "cpu_quota_cores": cpu_quota_cores(),
        "clock": {
            "resolution_seconds": time.get_clock_info("perf_counter").resolution,
            "source": _first_line(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        },
        "amd": {"driver": Path("/dev/kfd").exists(), "amdsmi": importlib.util.find_spec("amdsmi") is not None},
        "tools": {name: tool(name) for name in _TOOLS},
        "folders": {name: folder(path) for name, path in folders.items()},
        "store": None if store is None else {"path": str(store), "problem": _database_problem(store)},
    }


def requirements(distribution: str = "perfexp") -> dict[str, dict[str, Any]] | None:
    """Required packages of a distribution with range, installed version and fit; None if it is not installed."""
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires(distribution) or []]
    except importlib.metadata.PackageNotFoundError:
        return None
    needed = [
        requirement
        for requirement in wanted
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    return {requirement.name: _requirement(requirement) for requirement in needed}


def cpu_quota_cores(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPU quota of this process's control groups in cores; None without a limit."""
    own = next((line[3:] for line in _lines(membership) if line.startswith("0::")), "/")
    place = root / own.lstrip("/")
    limits = [_quota(at / "cpu.max") for at in (place, *place.parents) if at.is_relative_to(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def tool(name: str, places: tuple[str, ...] | None = None, root: Path = Path("/")) -> dict[str, Any] | None:
    """Path of a program on the PATH or, the newest first, at its installer's places; None if it is in neither."""
    if on_path := shutil.which(name):
        return {"path": on_path, "on_path": True}
    for place in _TOOLS[name] if places is None else places:
        programs = [file for file in root.glob(place.lstrip("/")) if os.access(file, os.X_OK)]
        if programs:
            return {"path": str(max(programs)), "on_path": False}
    return None


def folder(path: Path) -> dict[str, Any]:
    """Whether files can be written in a folder, which may not exist yet, and its free space."""
    # a missing folder will be made in its nearest existing parent
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return {"path": str(path), "writable": writable, "free_bytes": shutil.disk_usage(existing).free}


def _requirement(wanted: Requirement) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return {"wanted": str(wanted.specifier), "version": None, "fits": False}
    fits = wanted.specifier.contains(version, prereleases=True)
    return {"wanted": str(wanted.specifier), "version": version, "fits": fits}


def _quota(file: Path) -> float | None:
    for line in _lines(file):
        quota, _, period = line.partition(" ")
        if quota.isdigit() and period.isdigit():
            return int(quota) / int(period)
    return None


def _database_problem(file: Path) -> str | None:
    """The problem of an SQLite file; None without a problem, or if it does not exist yet."""
    try:
        with file.open("rb") as stream:
            head = stream.read(len(_SQLITE_MAGIC))
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    # an empty file is a valid new database
    if head and head != _SQLITE_MAGIC:
        return "it is not an SQLite database"
    return None if os.access(file, os.W_OK) else "it can't be written"


def _first_line(file: Path) -> str | None:
    return next(_lines(file), None)


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text().splitlines()
    except OSError:
        return
