"""Facts of this machine and its software, without torch; the device and the model add their own."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil

from perfexp import __version__
from perfexp.devices.cpu import processor_name
from perfexp.errors import UserError
from perfexp.host import repository, untrusted
from perfexp.records.diagnostics import Diagnostic

_PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "hydra-core",
    "omegaconf",
    "mlflow",
    "mlflow-skinny",
    "pillow",
    "triton",
    "nvidia-ml-py",
)


def collect() -> dict[str, Any]:
    """Facts that are needed to repeat the measurement, as JSON values; unknown ones are None."""
    return {
        "perfexp": __version__,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "executable": sys.executable,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "host": socket.gethostname(),
        "os": _operating_system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "container": _container(),
        "cpu": {
            "name": processor_name(),
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "affinity": _affinity(),
            "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            "load_average_1min": round(psutil.getloadavg()[0], 2),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "git": repository.facts(),
        "threads_variables": {
            name: value for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if (value := os.environ.get(name))
        },
    }


def load(path: Path) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The facts and diagnostics in an environment.json; raises `UserError` if it cannot be read."""
    try:
        content = msgspec.convert(untrusted.json_data(untrusted.read_bytes(path)), _File)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} does not hold the facts of an environment: {error}.") from error
    return content.environment, content.doubts


class _File(msgspec.Struct):
    environment: dict[str, Any]
    doubts: list[Diagnostic]


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Differences between two environments that make times incomparable: name, old and new."""
    places = ("perfexp", "python", "packages.torch", "device.name", "device.uuid", "device.driver", "cpu.name")
    pairs = ((place, _at(before, place), _at(now, place)) for place in places)
    return [(place, old, new) for place, old, new in pairs if old != new]


def _at(facts: dict[str, Any], place: str) -> Any:
    for name in place.split("."):
        facts = facts.get(name) if isinstance(facts, dict) else None  # type: ignore[assignment]
    return facts


def cores() -> int:
    """Logical cores of the machine."""
    return psutil.cpu_count() or 1


def other_cpu_seconds(*, of_ranks: bool = False) -> float:
    """CPU time of other processes, and of other guests of the same hardware, since the machine started.

    This process, its parent (which waits) and its children, including terminated ones, are not counted; `of_ranks` adds
    the parent's other children. Only differences are meaningful.
    """
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    own = psutil.Process()
    parent = own.parent()
    family = parent.children(recursive=True) if of_ranks and parent else [own, *own.children(recursive=True)]
    ours = sum(_cpu_seconds(process) for process in (parent, *family) if process)
    return float(sum(times) - idle - guests - ours)


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.Error:  # the process has just ended, or belongs to another user
        return 0.0
    return float(used.user + used.system + used.children_user + used.children_system)  # terminated children


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _container() -> str | None:
    """Kind of container, or None without signs of one."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "apptainer" if "APPTAINER_NAME" in os.environ else None


def _affinity() -> list[int] | None:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
