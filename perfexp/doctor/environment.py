"""Facts about this machine and its software, without torch. Nothing is changed.

`collect` returns the environment of each record, to repeat a measurement and to judge whether two
are comparable (`differences`). `machine_facts` adds what `perfexp doctor` checks. The device and
the model add their own facts elsewhere.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
from packaging.requirements import Requirement

from perfexp.devices.cpu import processor_name
from perfexp.errors import UserError
from perfexp.host import foreign, scheduler
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.fact_lookup import fact_at
from perfexp.version import __version__

#: Packages with their version in the environment.
_PACKAGES = ["torch", "torchvision", "numpy", "hydra-core", "omegaconf"]
_PACKAGES += ["mlflow", "mlflow-skinny", "pillow", "triton", "nvidia-ml-py"]
#: Profilers and their installers' folders.
_TOOLS = {
    "nsys": (
        "/opt/nvidia/nsight-systems/*/bin/nsys",
        "/usr/local/cuda*/bin/nsys",
        "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
    ),
    "ncu": ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu"),
    "rocprofv3": ("/opt/rocm*/bin/rocprofv3",),
}
#: Sources of NVIDIA's profilers.
NSIGHT = {
    "nsys": "Nsight Systems: https://developer.nvidia.com/nsight-systems, "
    "or the package nsight-systems",
    "ncu": "Nsight Compute: https://developer.nvidia.com/nsight-compute, "
    "or the package nsight-compute",
}
#: Facts shared by environments with comparable times.
_IDENTITY = (
    "perfexp",
    "python",
    "packages.torch",
    "device.name",
    "device.uuid",
    "device.driver",
    "cpu.name",
)
#: Device facts that limit the clock. Administrators may change them at any time.
_LIMITS = ("device.power_limit_watts", "device.application_clock_hertz", "device.auto_boost")
#: Variable with name and digest of perfexp's container image, `NAME@sha256:…`. It is only recorded.
IMAGE_VARIABLE = "PERFEXP_IMAGE"
#: Maximum characters per image fact.
_LONGEST = 300
#: First bytes of an SQLite database.
_SQLITE_MAGIC = b"SQLite format 3\0"
#: Turn off programs that a repository can configure: a file monitor, and hooks.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
#: Keep git from locking, fetching and prompting.
_GIT_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
_GIT_ENVIRONMENT |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0"}
_GIT_STATUS = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
_GIT_SECONDS = 10.0


def collect() -> dict[str, Any]:
    """Return the facts needed to repeat a measurement, as JSON values; None if unknown.

    A worker calls it at its start.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    affinity = None
    if hasattr(os, "sched_getaffinity"):
        affinity = sorted(os.sched_getaffinity(0))
    return {
        "perfexp": __version__,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "executable": sys.executable,
        "packages": {name: version for name, version in versions.items() if version is not None},
        "host": socket.gethostname(),
        "user": _user(),
        "os": _operating_system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "container": _container(),
        "image": _image(),
        "job": scheduler.job_facts(),
        "cpu": {
            "name": processor_name(),
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "affinity": affinity,
            "governors": governors(),
            # simultaneous multithreading: several logical cores per core
            "smt": {"1": True, "0": False}.get(_read("/sys/devices/system/cpu/smt/active") or ""),
            "load_average_1min": round(psutil.getloadavg()[0], 2),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "git": git_facts(),
        "threads_variables": _threads_variables(),
    }


def _threads_variables() -> dict[str, str]:
    """Return the variables that limit threads of OpenMP and MKL, if they are set."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: value for name in names if (value := os.environ.get(name))}


def _user() -> str | None:
    """Return the user's name; None if there is only a number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in a container
        return None


def load(path: Path) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Return the facts and diagnostics in a run's environment.json, which its worker has written.

    The worker and the supervisor call it.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        content = msgspec.convert(foreign.json_data(foreign.read_bytes(path)), _EnvironmentFile)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} does not hold the facts of an environment: {error}.") from error
    return content.environment, content.doubts


class _EnvironmentFile(msgspec.Struct):
    """Content of an environment.json."""

    environment: dict[str, Any]
    doubts: list[Diagnostic]


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return differences that make times incomparable: dotted name, old and new value.

    `perfexp reproduce` and comparisons print them.
    """
    differing = []
    for name in (*_IDENTITY, *_LIMITS):
        old, new = fact_at(before, name), fact_at(now, name)
        # an earlier version, or another user's rights, may leave limits out
        is_unknown = name in _LIMITS and None in (old, new)
        if old != new and not is_unknown:
            differing.append((name, old, new))
    return differing


def governors(root: Path = Path("/sys/devices/system/cpu")) -> list[str]:
    """Return the frequency governors of all cores; empty if the system has no such setting.

    The doctor warns unless all are `performance`; each record has them.
    """
    files = root.glob("cpu[0-9]*/cpufreq/scaling_governor")
    return sorted(set(filter(None, map(_read, files))))


def cores() -> int:
    """Return the machine's number of logical cores.

    Verdicts on other load compare with it.
    """
    return psutil.cpu_count() or 1


def other_cpu_seconds(*, of_ranks: bool = False) -> float:
    """Return the CPU seconds of other processes, and of guests on the same hardware, since boot.

    Only differences are meaningful: other work during a measurement. This process, its waiting
    parent and its children, terminated children included, are not counted.

    Args:
        of_ranks: whether to leave out the parent's other children, which measure together with this
            one.
    """
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # already counted in user and nice
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    this_process = psutil.Process()
    parent = this_process.parent()
    family = [this_process, *this_process.children(recursive=True)]
    if parent:
        family = [parent, *(parent.children(recursive=True) if of_ranks else family)]
    return float(sum(times) - idle - guests - sum(map(_cpu_seconds, family)))


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its terminated children; 0 if it cannot be read."""
    try:
        used = process.cpu_times()
    except psutil.Error:  # the process has just ended or belongs to another user
        return 0.0
    # terminated children are included
    return float(used.user + used.system + used.children_user + used.children_system)


def _version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _operating_system() -> str:
    """Return the system's name, such as `Debian GNU/Linux 12 (bookworm)`."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _container() -> str | None:
    """Return the kind of container around this process; None outside."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "APPTAINER_NAME" in os.environ:
        return "apptainer"
    return None


def _image(root: Path = Path("/")) -> dict[str, str] | None:
    """Return facts about perfexp's container image; None outside a container.

    The build writes commit and base image to /etc/perfexp-image. The digest does not exist at that
    time, so the engine (podman) or the user passes it.
    """
    facts = _pairs(_read(root / "etc/perfexp-image") or "")
    named = _pairs((_read(root / "run/.containerenv") or "").replace('"', ""))  # podman
    digest = named.get("imageid")
    reference = os.environ.get(IMAGE_VARIABLE)
    if digest and not reference:
        reference = f"{named['image']}@sha256:{digest}"
    if reference:
        facts["reference"] = reference[:_LONGEST]
    return facts or None


def _pairs(text: str) -> dict[str, str]:
    """Return the lines NAME=VALUE in a text, without those that have no value."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip()[:_LONGEST] for name, _, value in pairs if value.strip()}


def _read(path: Path | str) -> str | None:
    """Return a file's text; None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def machine_facts(folders: Mapping[str, Path], store: Path | None) -> dict[str, Any]:
    """Return facts about the machine for `perfexp doctor`: those from `collect`, and more.

    Args:
        folders: output folders by purpose.
        store: file of the tracking database; None if tracking does not use a file.
    """
    tools = {name: tool(name) for name in _TOOLS}
    tracking = None
    if store is not None:
        tracking = {"path": str(store), "problem": _database_problem(store)}
    return {
        **collect(),
        "system": platform.system(),
        "requirements": requirements(),
        "cpu_quota_cores": cpu_quota_cores(),
        "clock": {
            "resolution_seconds": time.get_clock_info("perf_counter").resolution,
            "source": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        },
        "amd": {
            "driver": Path("/dev/kfd").exists(),
            "amdsmi": importlib.util.find_spec("amdsmi") is not None,
        },
        "tools": tools,
        "folders": {name: folder(path) for name, path in folders.items()},
        "store": tracking,
    }


def requirements(distribution: str = "perfexp") -> dict[str, dict[str, Any]] | None:
    """Return the packages that a distribution requires, by name; None if it is not installed.

    Each has a version range (`wanted`), the installed `version`, and whether it `fits`. The doctor
    compares the installed versions with it.
    """
    try:
        declared = list(map(Requirement, importlib.metadata.requires(distribution) or []))
    except importlib.metadata.PackageNotFoundError:
        return None
    packages = {}
    for requirement in declared:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            packages[requirement.name] = _requirement(requirement)
    return packages


def cpu_quota_cores(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the CPU quota in this process's control groups, in cores; None without a limit.

    The smallest quota of the group and its parents counts.
    """
    lines = (_read(membership) or "").splitlines()
    # version 2 of control groups has the number 0
    group_path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = root / group_path.lstrip("/")
    groups = [at for at in (group, *group.parents) if at.is_relative_to(root)]
    quotas = [_quota(at / "cpu.max") for at in groups]
    return min((quota for quota in quotas if quota is not None), default=None)


def tool(
    name: str, places: tuple[str, ...] | None = None, root: Path = Path("/")
) -> dict[str, Any] | None:
    """Return a program's path, and whether it is on the PATH; None if it is not installed.

    Without a program on the PATH, the newest at its installers' places counts.

    Args:
        name: `nsys`, `ncu` or `rocprofv3`.
        places: patterns of paths; None for the installers' places.
    """
    if on_path := shutil.which(name):
        return {"path": on_path, "on_path": True}
    for pattern in _TOOLS[name] if places is None else places:
        programs = [file for file in root.glob(pattern.lstrip("/")) if os.access(file, os.X_OK)]
        if programs:
            return {"path": str(max(programs)), "on_path": False}
    return None


def folder(path: Path) -> dict[str, Any]:
    """Return a folder's path, whether it is writable, and its free bytes; it may not exist yet."""
    # a missing folder will be created in its nearest existing parent
    places = (path.absolute(), *path.absolute().parents)
    existing = next(filter(Path.exists, places))
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return {"path": str(path), "writable": writable, "free_bytes": shutil.disk_usage(existing).free}


def _requirement(declared: Requirement) -> dict[str, Any]:
    """Return one package's range of versions, its installed version, and whether it fits."""
    version = _version(declared.name)
    fits = version is not None and declared.specifier.contains(version, prereleases=True)
    return {"wanted": str(declared.specifier), "version": version, "fits": fits}


def _quota(file: Path) -> float | None:
    """Return the cores that a cpu.max file (`QUOTA PERIOD` in µs) grants; None without a limit."""
    quota, _, period = (_read(file) or "").partition(" ")
    if quota.isdigit() and period.isdigit():
        return int(quota) / int(period)
    return None


def _database_problem(file: Path) -> str | None:
    """Return why a file cannot be the tracking database; None if it can, or does not exist."""
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
    if os.access(file, os.W_OK):
        return None
    return "it can't be written"


def git_facts() -> dict[str, Any] | None:
    """Return the working folder's `commit` and `dirty` (tracked files changed); None without git.

    No code in the repository is run. To read changed files, git runs the filters in its
    configuration, which are programs. If the repository itself configures filters (`.git/config`),
    `dirty` is therefore None.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    # if git cannot list its settings, filters are assumed
    settings = _git("config", "--show-scope", "--name-only", "--list") or "local filter."
    lines = [line.split(maxsplit=1) for line in settings.splitlines()]
    has_filters = any(
        scope in ("local", "worktree") and key.startswith("filter.") for scope, key in lines
    )
    status = None if has_filters else _git(*_GIT_STATUS)
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(*arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or takes longer than 10 s."""
    try:
        done = subprocess.run(
            [*_GIT, *arguments],
            env={**os.environ, **_GIT_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
