"""Judge the host: locks, load, CPU cores, clock, and output folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.diagnosis import Facts, Finding, fail, ok, warn
from perfexp.diagnosis.devices import Chosen
from perfexp.records import units

#: Tolerated load of other processes, in cores or as a share of them.
_QUIET_CORES, _QUIET_SHARE = 0.5, 0.1
#: Resolution that times a call of a microsecond to a tenth of it.
_FINE_SECONDS = 1e-7
_SLOW_CLOCKS = ("hpet", "acpi_pm")
_LITTLE_BYTES = 2**30


def findings(facts: Facts, chosen: Chosen) -> Iterator[Finding]:
    """A line per check, for the device on which a job would measure."""
    machine = facts["machine"]
    if chosen.lock_name:
        yield _lock(machine["folders"]["lock"], facts["locks"].get(chosen.lock_name))
    yield _load(machine["cpu"])
    yield _governor(machine["cpu"])
    yield _processors(machine["cpu"], machine["cpu_quota_cores"])
    yield _clock(machine["clock"])
    yield _outputs(machine["folders"]["outputs"])
    yield _store(machine)


def _lock(folder: Mapping[str, Any], holder: str | None) -> Finding:
    if not folder["writable"]:
        return fail("device lock", f"{folder['path']} can't be written", "have it removed: it must be yours alone")
    if holder:
        return warn("device lock", f"held: {holder}", "wait for it, or set device_lock=wait")
    return ok("device lock", "free")


def _load(cpu: Mapping[str, Any]) -> Finding:
    load, cores = cpu["load_average_1min"], cpu["logical_cores"] or 1
    observation = f"load average {load:.2f} on {cores} cores"
    if load > max(_QUIET_CORES, _QUIET_SHARE * cores):
        return warn("load", observation, "end other work on this machine before you measure")
    return ok("load", observation)


def _governor(cpu: Mapping[str, Any]) -> Finding:
    governor = cpu["governor"]
    if governor in (None, "performance"):
        return ok("governor", governor or "unknown: the system has no setting (a virtual machine, a container)")
    return warn("governor", governor, "as root: cpupower frequency-set -g performance")


def _processors(cpu: Mapping[str, Any], quota_cores: float | None) -> Finding:
    cores = cpu["logical_cores"] or 1
    usable = len(cpu["affinity"] or []) or cores
    remedy = "request whole cores (SLURM: --cpus-per-task), and keep execution.threads within them"
    if quota_cores is not None and quota_cores < usable:
        observation = f"control groups leave the time of {quota_cores:g} cores; {usable} of {cores} may be used"
        return warn("processors", observation, remedy)
    if usable < cores:
        return warn("processors", f"{usable} of {cores} logical cores may be used", remedy)
    return ok("processors", f"all {cores} logical cores may be used")


def _clock(clock: Mapping[str, Any]) -> Finding:
    source = clock["source"]
    observation = f"resolution {units.format_seconds(clock['resolution_seconds'], 2)}" + (
        f", {source}" if source else ""
    )
    if clock["resolution_seconds"] > _FINE_SECONDS or source in _SLOW_CLOCKS:
        return warn("clock", observation, "short calls are timed coarsely; Linux with the clock source tsc does better")
    return ok("clock", observation)


def _outputs(folder: Mapping[str, Any]) -> Finding:
    if not folder["writable"]:
        return fail("outputs", f"{folder['path']} can't be written here", "go to another folder, or output_dir=DIR")
    observation = f"{folder['path']} can be written, {units.format_bytes(folder['free_bytes'])} free"
    if folder["free_bytes"] < _LITTLE_BYTES:
        return warn("outputs", observation, "free some space: a point stores all of its samples")
    return ok("outputs", observation)


def _store(machine: Mapping[str, Any]) -> Finding:
    """The tracking store of the folder; a record that cannot be sent stays on disk."""
    store, folder = machine["store"], machine["folders"]["store"]
    remedy = "tracking.uri=URI, or tracking=none; records stay on disk, perfexp log sends them later"
    if store["problem"] or not folder["writable"]:
        return warn("tracking store", f"{store['path']}: {store['problem'] or 'it cannot be created'}", remedy)
    return ok("tracking store", store["path"])
