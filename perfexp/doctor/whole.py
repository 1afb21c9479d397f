"""Verdicts of `perfexp doctor`: on the whole machine, and on a Cityscapes folder.

`diagnose` covers software and devices, then energy meters and profilers, locks, CPU, clock and
folders. `dataset_findings` covers the data set for `data=cityscapes`, from the facts of
`data.cityscapes_folder.survey`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from perfexp.doctor import (
    CheckResult,
    Choice,
    Facts,
    Finding,
    fail,
    missing,
    ok,
    part,
    untested,
    warn,
    warn_if,
)
from perfexp.doctor.devices import Chosen, choose, cuda_devices, device_findings, state_findings
from perfexp.doctor.environment import NSIGHT
from perfexp.doctor.meter_selftest import findings as meter_findings
from perfexp.doctor.software import software_findings
from perfexp.records import units

#: Tolerated load from other processes, in cores or as a share of all cores.
_QUIET_CORES, _QUIET_SHARE = 0.5, 0.1
#: Resolution that times a call of 1 µs to 10 %.
_FINE_SECONDS = 1e-7
#: Clock sources of Linux that take microseconds to read.
_SLOW_CLOCKS = ("hpet", "acpi_pm")
#: Less free space for results gives a warning.
_LITTLE_BYTES = 2**30


def diagnose(facts: Facts, choice: Choice) -> list[Finding]:
    """Return all findings about a machine, in the order of the report.

    `perfexp doctor` calls it.

    Args:
        facts: see `perfexp.doctor.Facts`.
        choice: the device that the user wants to measure.
    """
    chosen = choose(facts, choice)
    return [
        *software_findings(facts, choice),
        *device_findings(facts, choice, chosen),
        *(state_findings(facts, chosen) if chosen.kind == "cuda" else ()),
        *_instrument_findings(facts),
        *_host_findings(facts, chosen),
    ]


def works(findings: list[Finding]) -> bool:
    """Return whether nothing prevents measuring: no finding is a `fail`."""
    return all(finding.verdict is not CheckResult.fail for finding in findings)


def _host_findings(facts: Facts, chosen: Chosen) -> Iterator[Finding]:
    """Yield findings about the host: device lock, CPU, clock, repeatability and folders."""
    machine = facts["machine"]
    if chosen.lock_name:
        yield _lock(machine["folders"]["lock"], facts["locks"].get(chosen.lock_name))
    yield from _cpu(machine["cpu"], machine["cpu_quota_cores"])
    yield _clock(machine["clock"])
    if chosen.kind in ("cpu", "cuda"):
        yield _repeatability(facts["processes"])
    yield from _folders(machine["folders"], machine["store"])


def _lock(folder: Mapping[str, Any], holder: str | None) -> Finding:
    """Return whether the device is free, and its lock file can be written.

    Args:
        holder: process that holds the lock; None if it is free.
    """
    if not folder["writable"]:
        return fail(
            "device lock",
            f"{folder['path']} can't be written",
            "have it removed: it must be yours alone",
        )
    if holder:
        return warn("device lock", f"held: {holder}", "wait for it, or set device_lock=wait")
    return ok("device lock", "free")


def _cpu(cpu: Mapping[str, Any], quota_cores: float | None) -> Iterator[Finding]:
    """Yield findings about other load, the frequency governor, and the usable cores."""
    load, governors, cores = cpu["load_average_1min"], cpu["governors"], cpu["logical_cores"] or 1
    is_busy = load > max(_QUIET_CORES, _QUIET_SHARE * cores)
    remedy = "end other work on this machine before you measure"
    yield warn_if(is_busy, "load", f"load average {load:.2f} on {cores} cores", remedy)
    is_slow = bool({*governors} - {"performance"})
    governor = (
        ", ".join(governors)
        or "unknown: the system has no setting (a virtual machine, a container)"
    )
    yield warn_if(is_slow, "governor", governor, "as root: cpupower frequency-set -g performance")
    usable = len(cpu["affinity"] or []) or cores
    remedy = "request whole cores (SLURM: --cpus-per-task), and keep execution.threads within them"
    if quota_cores is not None and quota_cores < usable:
        observation = (
            f"control groups leave the time of {quota_cores:g} cores; "
            f"{usable} of {cores} may be used"
        )
        yield warn("processors", observation, remedy)
    else:
        share = f"{usable} of" if usable < cores else "all"
        yield warn_if(
            usable < cores, "processors", f"{share} {cores} logical cores may be used", remedy
        )


def _clock(clock: Mapping[str, Any]) -> Finding:
    """Return whether the host's clock is fine enough for short calls."""
    resolution, source = clock["resolution_seconds"], clock["source"]
    observation = (
        f"resolution {units.format_seconds(resolution, 2)}{f', {source}' if source else ''}"
    )
    remedy = "short calls are timed coarsely; Linux with the clock source tsc does better"
    return warn_if(
        resolution > _FINE_SECONDS or source in _SLOW_CLOCKS, "clock", observation, remedy
    )


def _repeatability(classes: Mapping[str, Any]) -> Finding:
    """Return how much processes differ on this machine, from earlier runs.

    Args:
        classes: relative spread between processes, and number of measurements, by class of points.
    """
    shown = {name: spread for name, spread in classes.items() if spread["measurements"]}
    if not shown:
        remedy = "perfexp selfcheck measures it"
        return missing("repeatability", "how much processes differ here is not known", remedy)
    spreads = ", ".join(
        f"{name} {spread['spread']:.1%} ({spread['measurements']})"
        for name, spread in shown.items()
    )
    return ok("repeatability", f"typical spread between processes (measurements): {spreads}")


def _folders(folders: Mapping[str, Any], store: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings about the output folder and the tracking store.

    A record that cannot be sent stays on disk.
    """
    path, free_bytes = folders["outputs"]["path"], folders["outputs"]["free_bytes"]
    if folders["outputs"]["writable"]:
        observation = f"{path} can be written, {units.format_bytes(free_bytes)} free"
        remedy = "free some space: a point stores all of its samples"
        yield warn_if(free_bytes < _LITTLE_BYTES, "outputs", observation, remedy)
    else:
        yield fail(
            "outputs", f"{path} can't be written here", "go to another folder, or output_dir=DIR"
        )
    problem = store["problem"] or ("" if folders["store"]["writable"] else "it cannot be created")
    remedy = (
        "tracking.uri=URI, or tracking=none; records stay on disk, perfexp sync sends them later"
    )
    yield warn_if(
        bool(problem), "tracking store", store["path"] + (f": {problem}" if problem else ""), remedy
    )


def _instrument_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings about energy meters and profilers."""
    machine = facts["machine"]
    energy = part(facts, "energy")
    if "error" in energy:
        yield missing("energy", str(energy["error"]), "energy will be null")
    elif energy:
        yield from meter_findings(energy)
    rocm = bool(part(facts, "torch").get("rocm"))
    if rocm or machine["amd"]["driver"]:
        if machine["amd"]["amdsmi"]:
            yield untested("amdsmi", "installed; ROCm has not been tried")
        else:
            yield missing(
                "amdsmi",
                "not installed",
                "pip install /opt/rocm/share/amd_smi: energy of AMD's boards",
            )
        yield _tool(
            "rocprofv3", machine["tools"], "install ROCm's package rocprofiler-sdk", tested=False
        )
    if not rocm:
        for name, remedy in NSIGHT.items():
            yield _tool(name, machine["tools"], remedy, needed=bool(cuda_devices(facts)))


def _tool(
    name: str, tools: Mapping[str, Any], remedy: str, *, needed: bool = True, tested: bool = True
) -> Finding:
    """Return whether a profiler is installed.

    Args:
        needed: whether this machine has a device that it profiles.
        tested: whether perfexp is tested with it.
    """
    program = tools[name]
    if program is None:
        return missing(
            name, "not found" if needed else "not found; only CUDA devices need it", remedy
        )
    if not program["on_path"]:
        return warn(
            name,
            f"{program['path']}, not on the PATH",
            f"PATH={PurePath(program['path']).parent}:$PATH",
        )
    if tested:
        return ok(name, program["path"])
    return untested(name, program["path"])


#: Maximum problems listed per split; the rest is counted.
_LISTED_PROBLEMS = 3


def dataset_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings about a Cityscapes folder; for an incomplete split only the missing folder.

    `perfexp doctor` calls it if the command names the folder.

    Args:
        facts: `made` (whether the masks are artificial), `where` (data source), and `splits`. A
            split has `missing`, or it has `images`, `masks`, `pairs`, `label_ids`, `without_mask`,
            `without_image`, `read` and `problems`.
    """
    reported = set()
    for split, of_split in facts["splits"].items():
        if missing := of_split["missing"]:
            if missing not in reported:
                reported.add(missing)
                yield fail(split, f"there is no folder {missing}", facts["where"])
        else:
            yield _split_counts(split, of_split)
            if of_split["without_image"]:
                lonely = of_split["masks"] - of_split["pairs"]
                observation = (
                    f"{lonely} masks have no image, the first is {of_split['without_image'][0]}"
                )
                yield warn(
                    f"{split} masks", observation, "get the images; these masks are not used"
                )
            yield from _read_pairs(split, of_split)
    if facts["made"]:
        remedy = "use it to try out and to time; no accuracy is reported"
        yield warn("masks", "made by perfexp make-data from colors: not ground truth", remedy)


def _split_counts(split: str, facts: Mapping[str, Any]) -> Finding:
    """Return whether a split has images, and a mask for each.

    Args:
        facts: facts about this split, see `dataset_findings`.
    """
    observation = f"{facts['images']} images, {facts['masks']} masks, {facts['pairs']} pairs"
    if not facts["images"]:
        return fail(split, observation, "put images CITY/*_leftImg8bit.png there")
    if facts["without_mask"]:
        missing = facts["images"] - facts["pairs"]
        observation += f"; {missing} without a mask, the first is {facts['without_mask'][0]}"
        return fail(
            split, observation, "get its *_gtFine_labelTrainIds.png or *_gtFine_labelIds.png"
        )
    if facts["label_ids"]:
        observation += (
            f"; {facts['label_ids']} masks hold label ids, which become train ids as they are read"
        )
    return ok(split, observation)


def _read_pairs(split: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the problems of pairs that were read, or that all of them are usable."""
    check, problems = f"{split} files", facts["problems"]
    for problem in problems[:_LISTED_PROBLEMS]:
        yield fail(check, problem, "")
    if len(problems) > _LISTED_PROBLEMS:
        yield fail(
            check,
            f"{len(problems)} of {facts['read']} pairs that were read can't be used",
            "--json lists all",
        )
    if facts["read"] and not problems:
        summary = (
            "all"
            if facts["read"] == facts["pairs"]
            else f"{facts['read']} of {facts['pairs']}, evenly spread,"
        )
        yield ok(
            check, f"{summary} read whole: images and masks agree, labels from 0 to 18 and 255"
        )
