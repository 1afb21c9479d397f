"""Judge energy meters and profilers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from perfexp.diagnosis import Facts, Finding, meter_selftest, missing, ok, part, untested, warn
from perfexp.diagnosis.devices import cuda_devices

_NSIGHT = {
    "nsys": "Nsight Systems: https://developer.nvidia.com/nsight-systems, or the package nsight-systems",
    "ncu": "Nsight Compute: https://developer.nvidia.com/nsight-compute, or the package nsight-compute",
}


def findings(facts: Facts) -> Iterator[Finding]:
    """A line per check."""
    machine = facts["machine"]
    yield from _energy(part(facts, "energy"))
    rocm = bool(part(facts, "torch").get("rocm"))
    if rocm or machine["amd"]["driver"]:
        yield _amdsmi(machine["amd"])
        yield _tool("rocprofv3", machine["tools"], "install ROCm's package rocprofiler-sdk", tested=False)
    if not rocm:
        for name, remedy in _NSIGHT.items():
            yield _tool(name, machine["tools"], remedy, needed=bool(cuda_devices(facts)))


def _energy(tried: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in tried:
        yield missing("energy", str(tried["error"]), "energy will be null")
    elif tried:
        yield from meter_selftest.findings(tried)


def _amdsmi(amd: Mapping[str, Any]) -> Finding:
    if amd["amdsmi"]:
        return untested("amdsmi", "installed; ROCm has not been tried")
    return missing("amdsmi", "not installed", "pip install /opt/rocm/share/amd_smi: energy of AMD's boards")


def _tool(name: str, tools: Mapping[str, Any], remedy: str, *, needed: bool = True, tested: bool = True) -> Finding:
    program = tools[name]
    if program is None:
        return missing(name, "not found" if needed else "not found; only CUDA devices need it", remedy)
    if not program["on_path"]:
        return warn(name, f"{program['path']}, not on the PATH", f"PATH={PurePath(program['path']).parent}:$PATH")
    return ok(name, program["path"]) if tested else untested(name, program["path"])
