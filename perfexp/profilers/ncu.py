"""Profile one whole call with the counters of each kernel, by Nsight Compute (ncu).

* Kernels are replayed one by one, with restored memory in between, so that the step runs once; otherwise the whole
  program would have to run again for each group of counters, and would differ.
* Counting covers all threads between cudaProfilerStart and Stop; a filter on a pushed range would leave out the
  backward pass.
* The clock is not changed (`--clock-control none`), so that rates are those of the timed run.

Source: Nsight Compute CLI, https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html, and its Profiling Guide,
"Replay", https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.profilers import WHOLE, About, Found, Place, Profiler, ProfilerFailed, ncu_metrics, refuse_other_devices
from perfexp.profilers.tools import (
    Tool,
    ask,
    escaped,
    find,
    first_line_with,
    has_content,
    missing_library,
    ranked,
    reason,
)
from perfexp.records import diagnostics
from perfexp.records.paths import RunPaths
from perfexp.roofline import listing

#: NVIDIA's instructions to permit counters.
PERMISSION = "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
_NOT_PERMITTED = (
    "this user may not read the GPU's counters (ERR_NVGPUCTRPERM). The administrator of the machine can permit it: "
    "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in a file of /etc/modprobe.d, then load the driver again; or "
    "run as root, or in a container with --cap-add=SYS_ADMIN (from driver 565 on CAP_PERFMON is enough). "
    f"See {PERMISSION}"
)
#: Patterns of ncu's error messages, and their meaning.
_FAILURES = {
    "ERR_NVGPUCTRPERM": _NOT_PERMITTED,
    "driver resource was unavailable": (
        "another tool reads the GPU's counters (DCGM, another profiler). End it, or pause it: dcgmi profile --pause"
    ),
    "no kernels were profiled": "it saw no kernel between cudaProfilerStart and Stop; see run.log",
    "unsupported gpu|not supported on this device|driver version is (?:too old|not supported)": (
        "this version of ncu does not know the GPU or its driver: install a newer Nsight Compute"
    ),
    "failed to find metric": "the chip has no such counter: see ncu --query-metrics",
}
#: Options for every profile.
_OPTIONS = ("--target-processes=all", "--replay-mode=kernel", "--clock-control=none", "--profile-from-start=off")
_METRIC = re.compile(r"(?:regex:)?[\w.*\[\]|()^$+?-]+")
_IMPORT_SECONDS = 1800.0
_DURATION = "gpu__time_duration.sum"


class Ncu(Profiler):
    """Nsight Compute on exactly one call (profiler=ncu); common arguments as in `Profiler`.

    Args:
        metrics: counters; by default the chip's counters for a roofline.
        sections: further sections of ncu (`SpeedOfLight`, `Occupancy`, …).
        cache_control: cache state before each replay: `all` (flushed) or `none` (unchanged).
        tool: path of ncu; None searches for it.
    """

    def __init__(
        self,
        *,
        name: str = "ncu",
        warmup: int = 20,
        modules: bool = False,
        all_points: bool = False,
        metrics: Sequence[str] | None = None,
        sections: Sequence[str] = (),
        cache_control: str = "all",
        top: int = 20,
        options: Sequence[str] = (),
        tool: str | None = None,
    ) -> None:
        super().__init__(name=name, warmup=warmup, steps=1, modules=modules, all_points=all_points, top=top)
        if cache_control not in ("all", "none"):
            raise UserError(f"profiler.cache_control={cache_control}: all or none.")
        for metric in metrics or ():
            if not _METRIC.fullmatch(metric):
                raise UserError(f"profiler.metrics: '{metric}' is not a counter of ncu; see ncu --query-metrics.")
        self._metrics, self._sections = metrics, list(sections)
        self._cache_control, self._options, self._tool = cache_control, list(options), tool

    def outputs(self, place: Place) -> list[Path]:
        return [place.file(".ncu-rep"), place.file("_ncu.csv")]

    def command(self, place: Place, about: About) -> list[str]:
        refuse_other_devices(about.device)
        tool = find("ncu", self._tool)
        counters = list(self._metrics or ()) or ncu_metrics.chosen(
            ncu_metrics.available(tool, about.device.get("compute_capability"), about.device.get("index") or 0)
        )
        counting = [f"--metrics={','.join(counters)}", *(f"--section={section}" for section in self._sections)]
        counting += [f"--cache-control={self._cache_control}", "--nvtx", "--force-overwrite"]
        return [tool.path, *_OPTIONS, *counting, f"--export={escaped(place.file())}", *self._options]

    def collect(self, place: Place, about: About, said: str, observations: Mapping[str, Any]) -> Found:
        tool = find("ncu", self._tool)
        report, table = self.outputs(place)
        files = [report.name, table.name]
        if not has_content(report):
            raise ProfilerFailed(f"ncu left no profile: {_why(said)}")
        RunPaths(place.folder).claim(table)
        content = exported(tool, report)
        write_atomically(table, content)
        try:
            launches = listing.parse(content.decode(), str(table), lambda name: name == _DURATION).launches
        except UserError as error:
            raise ProfilerFailed(f"ncu's table of {report.name} can't be used: {error}", files) from error
        results = Found(files=files)
        kernels = ranked((launch.kernel, 1, launch.metrics.get(_DURATION, 0.0)) for launch in launches)
        within = {name: sum(_is_in(launch, name) for launch in launches) for name in observations.get("marked", ())}
        results.facts = {
            "version": tool.version,
            "kernels": kernels[: self.top],
            "kernel_names": len(kernels),
            "launches": len(launches),
            "kernel_seconds": sum(kernel["seconds"] for kernel in kernels),
            "kernels_in": within,
            "cache_control": self._cache_control,
        }
        forward, backward = within.get("forward", 0), within.get("backward", 0)
        if about.phase == "train" and 0 < backward < forward:
            doubt = diagnostics.make("backward_incomplete", profiler="ncu", forward=forward, backward=backward)
            results.doubts.append(doubt)
        is_named = any(_is_in(launch, WHOLE[about.phase]) for launch in launches)
        why = "" if is_named else "ncu named no range, so kernels have no phase"
        if why := _NOT_PERMITTED if "ERR_NVGPUCTRPERM" in said else why:
            results.doubts.append(diagnostics.make("profile_incomplete", reason=why))
        return results


def exported(tool: Tool, report: Path) -> bytes:
    """The raw page of a report as CSV in base units, with the ranges of kernels; `ProfilerFailed` without any."""
    command = [tool.path, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    answer = ask(command, _IMPORT_SECONDS)
    lines = [line for line in answer.out.splitlines() if not line.startswith("==")]
    begin = next((number for number, line in enumerate(lines) if "Kernel Name" in line), None)
    if begin is None or len(lines) < begin + 3:  # the names, the units, a kernel
        why = reason(answer.text, ("error", "warning")) or "it is empty"
        raise ProfilerFailed(f"ncu can't read {report.name}: {why}", [report.name])
    return ("\n".join(lines[begin:]) + "\n").encode()


def _is_in(launch: listing.Launch, name: str) -> bool:
    """Whether a kernel was launched in a range; ncu writes number and domain before the name."""
    return any(span == name or span.endswith(f":{name}") for span in (*launch.spans, *launch.stack))


def _why(said: str) -> str:
    meanings = (text for pattern, text in _FAILURES.items() if re.search(pattern, said, re.IGNORECASE))
    meaning = next(meanings, None) or missing_library(said)
    lines = "\n".join(line for line in said.splitlines() if line.startswith("=="))
    message = first_line_with(lines, ("error",)) or reason(said)
    return meaning or (f"{message}; see run.log" if message else "without a message")
