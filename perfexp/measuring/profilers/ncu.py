"""Profiles of one whole call with counters for each kernel, from Nsight Compute (ncu).

The counters are what `perfexp roofline` needs: FLOPs, bytes and time of each kernel.

* Kernels are replayed one by one, with memory restored in between, so that the step runs once.
  Otherwise the whole program would run again for each group of counters, and would differ.
* Counting covers all threads between cudaProfilerStart and Stop. A filter on a pushed range would
  leave out the backward pass.
* The clock is not changed (`--clock-control none`), so that rates match the timed run.
* Counters are chosen for a hierarchical roofline on the chip. Tensor cores count operations
  (`sm__ops_path_tensor_*`) or instructions (`sm__inst_executed_pipe_tensor*`), memories
  `dram__bytes_read` or `dram__bytes_op_read`.

Sources:

* Nsight Compute CLI, https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html
  (`--query-metrics`, `--list-chips`)
* Profiling Guide, "Replay", https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html
* section files SpeedOfLight_Hierarchical*RooflineChart
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.measuring.profilers import (
    About,
    ProfileLocation,
    Profiler,
    ProfileResult,
    ProfilerFailed,
    tools,
)
from perfexp.records.paths import RunPaths
from perfexp.records.profile_keys import WHOLE
from perfexp.roofline import listing

_NOT_PERMITTED = (
    "this user may not read the GPU's counters (ERR_NVGPUCTRPERM). The administrator of the "
    "machine can permit it: options nvidia NVreg_RestrictProfilingToAdminUsers=0 in a file of "
    "/etc/modprobe.d, then load the driver again; or run as root, or in a container with "
    "--cap-add=SYS_ADMIN (from driver 565 on CAP_PERFMON is enough). See "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)
#: Patterns of ncu's error messages, and their meaning.
_FAILURES = {
    "ERR_NVGPUCTRPERM": _NOT_PERMITTED,
    "driver resource was unavailable": (
        "another tool reads the GPU's counters (DCGM, another profiler). End it, or pause it: "
        "dcgmi profile --pause"
    ),
    "no kernels were profiled": (
        "it saw no kernel between cudaProfilerStart and Stop; see details/run.log"
    ),
    "unsupported gpu|not supported on this device|driver version is (?:too old|not supported)": (
        "this version of ncu does not know the GPU or its driver: install a newer Nsight Compute"
    ),
    "failed to find metric": "the chip has no such counter: see ncu --query-metrics",
}
#: Options for every profile.
_OPTIONS = (
    "--target-processes=all",
    "--replay-mode=kernel",
    "--clock-control=none",
    "--profile-from-start=off",
)
_METRIC = re.compile(r"(?:regex:)?[\w.*\[\]|()^$+?-]+")
#: Time limit for reading a report.
_IMPORT_SECONDS = 1800.0
#: Counter with a kernel's time.
_DURATION = "gpu__time_duration.sum"
#: Counters for every chip. An entry lists alternatives; the first available counter is used.
_WANTED: tuple[tuple[str, ...], ...] = (
    (_DURATION,),
    ("smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_hadd_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_hmul_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_hfma_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_dadd_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_dmul_pred_on.sum",),
    ("smsp__sass_thread_inst_executed_op_dfma_pred_on.sum",),
    ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    ("dram__bytes.sum",),
    ("lts__t_bytes.sum",),
    ("l1tex__t_bytes.sum",),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    ("lts__t_bytes.sum.pct_of_peak_sustained_elapsed",),
    ("dram__bytes.sum.peak_sustained",),
    ("lts__t_bytes.sum.peak_sustained",),
    ("sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained",),
    ("sm__sass_thread_inst_executed_op_hfma_pred_on.sum.peak_sustained",),
    ("sm__sass_thread_inst_executed_op_dfma_pred_on.sum.peak_sustained",),
    ("dram__cycles_elapsed.avg.per_second",),
    ("lts__cycles_elapsed.avg.per_second",),
    ("sm__cycles_elapsed.avg.per_second",),
)
#: Tensor core operations by type, sparse and dense together. Integer operations are not FLOPs.
_OPERATIONS = re.compile(r"sm__ops_path_tensor_src_(?:bf16|tf32|fp\d+(?:_fp\d+)*)(?:_dst_\w+?)?")
#: Tensor pipe instructions, for chips without operation counters.
_INSTRUCTIONS = re.compile(r"sm__inst_executed_pipe_tensor(?:_op_[a-z]+)?")
#: ncu's chip names by compute capability.
_CHIPS = {
    "7.0": "gv100",
    "7.2": "gv11b",
    "7.5": "tu102",
    "8.0": "ga100",
    "8.6": "ga102",
    "8.7": "ga10b",
}
_CHIPS |= {"8.9": "ad102", "9.0": "gh100", "10.0": "gb100", "10.3": "gb110", "12.0": "gb202"}
#: A counter's name in ncu's list.
_NAME = re.compile(r"^\s*([a-z][a-z0-9]*__[a-z0-9_]+)", re.MULTILINE)
#: Time limit for listing a chip's counters.
_QUERY_SECONDS = 120.0


@dataclass(kw_only=True)
class Ncu(Profiler):
    """Nsight Compute on exactly one call (profiler=ncu).

    The keys are described in `plan/key_descriptions.yaml`.
    """

    name: str = "ncu"
    metrics: Sequence[str] | None = None
    sections: Sequence[str] = ()
    cache_control: str = "all"
    top: int = 20
    options: Sequence[str] = ()
    tool: str | None = None

    needs_nvidia = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.cache_control not in ("all", "none"):
            raise UserError(f"profiler.cache_control={self.cache_control}: all or none.")
        for metric in self.metrics or ():
            if not _METRIC.fullmatch(metric):
                raise UserError(
                    f"profiler.metrics: '{metric}' is not a counter of ncu; see ncu "
                    "--query-metrics."
                )

    def outputs(self, location: ProfileLocation) -> list[Path]:
        return [location.file(".ncu-rep"), location.file("_ncu.csv")]

    def command(self, location: ProfileLocation, about: About) -> list[str]:
        """See `Profiler`; asks ncu which counters the chip has, unless the plan names them."""
        super().command(location, about)
        tool = tools.find("ncu", self.tool)
        counters = list(self.metrics or ())
        if not counters:
            capability, index = about.device.get("compute_capability"), about.device.get("index")
            counters = roofline_counters(available_counters(tool, capability, index or 0))
        command = [tool.path, *_OPTIONS, f"--metrics={','.join(counters)}"]
        command += [f"--section={section}" for section in self.sections]
        command += [f"--cache-control={self.cache_control}", "--nvtx", "--force-overwrite"]
        return [*command, f"--export={tools.escaped(location.file())}", *self.options]

    def collect(
        self, location: ProfileLocation, about: About, said: str, observations: Mapping[str, Any]
    ) -> ProfileResult:
        """See `Profiler`; exports ncu's report to a table, and sums kernels by name and range."""
        tool = tools.find("ncu", self.tool)
        report, table = self.outputs(location)
        files = [report.name, table.name]
        if not tools.has_content(report):
            raise ProfilerFailed(f"ncu left no profile: {_why(said)}")
        RunPaths(location.folder).claim(table)
        content = exported(tool, report)
        write_atomically(table, content)
        try:
            listed = listing.parse(content.decode(), str(table), lambda name: name == _DURATION)
        except UserError as error:
            why = f"ncu's table of {report.name} can't be used: {error}"
            raise ProfilerFailed(why, files) from error
        launches = listed.launches
        results = ProfileResult(files=files)
        times = ((launch.kernel, 1, launch.metrics.get(_DURATION, 0.0)) for launch in launches)
        results.add_kernels(tools.ranked(times), self.top)
        counts: dict[str, int] = {}
        for name in observations.get("marked", ()):
            counts[name] = sum(_is_in(launch, name) for launch in launches)
        results.facts |= {"version": tool.version, "launches": len(launches), "kernels_in": counts}
        results.facts["cache_control"] = self.cache_control
        if about.phase == "train" and counts.get("backward"):
            results.compare_passes("ncu", counts.get("forward", 0), counts["backward"])
        if "ERR_NVGPUCTRPERM" in said:
            results.doubt(_NOT_PERMITTED)
        elif not any(_is_in(launch, WHOLE[about.phase]) for launch in launches):
            results.doubt("ncu named no range, so kernels have no phase")
        return results


def exported(tool: tools.Tool, report: Path) -> bytes:
    """Return a report's raw page as CSV in base units, with the kernels' ranges.

    `perfexp roofline` reads reports with it, too.

    Raises:
        ProfilerFailed: there are no kernels in the report, or ncu cannot read it.
    """
    page = ("--csv", "--page", "raw", "--print-units", "base")
    answer = tools.ask([tool.path, "--import", str(report.absolute()), *page], _IMPORT_SECONDS)
    lines = list[str]()
    for line in answer.out.splitlines():
        if not line.startswith("==") and (lines or "Kernel Name" in line):
            lines.append(f"{line}\n")
    if len(lines) < 3:  # names, units, a kernel
        why = tools.reason(answer.text, ("error", "warning")) or "it is empty"
        raise ProfilerFailed(f"ncu can't read {report.name}: {why}", [report.name])
    return "".join(lines).encode()


def _is_in(launch: listing.KernelLaunch, name: str) -> bool:
    """Return whether a kernel was launched in a range.

    ncu writes a number and a domain before the range's name.
    """
    return any(span == name or span.endswith(f":{name}") for span in (*launch.spans, *launch.stack))


def _why(said: str) -> str:
    """Return why ncu left no profile, from its output: a known failure, or its own message."""
    for pattern, meaning in _FAILURES.items():
        if re.search(pattern, said, re.IGNORECASE):
            return meaning
    if library := tools.missing_library(said):
        return library
    lines = "\n".join(re.findall("^==.*", said, re.MULTILINE))
    message = tools.first_line_with(lines, ("error",)) or tools.reason(said)
    return f"{message}; see details/run.log" if message else "without a message"


def available_counters(tool: tools.Tool, capability: str | None, index: int = 0) -> frozenset[str]:
    """Return a chip's counters, without suffixes.

    Args:
        capability: compute capability, for example `9.0`; None to query the device.
        index: number of the device to query.

    Raises:
        ProfilerFailed: ncu does not list the chip's counters.
    """
    queries = [("--devices", str(index))]
    if chip := _CHIPS.get(capability or ""):
        queries.insert(0, ("--chips", chip))
    output = ""
    for query in queries:
        answer = tools.ask([tool.path, "--query-metrics", *query], _QUERY_SECONDS)
        output += answer.text
        if names := frozenset(_NAME.findall(answer.out)):
            return names
    why = tools.first_line_with(output, ("error", "unsupported", "unknown")) or "it named none"
    raise ProfilerFailed(
        f"ncu {tool.version or ''} does not list the counters of a device of compute capability "
        f"{capability or 'unknown'}: {why}. A newer Nsight Compute knows newer chips; "
        "profiler.metrics=[…] names counters without this query."
    )


def roofline_counters(available: Iterable[str]) -> list[str]:
    """Return the counters for a roofline, with suffixes, that a chip has.

    Args:
        available: the chip's counters, without suffixes.
    """
    names = frozenset(available)
    counters = []
    for alternatives in _WANTED:
        counters += [name for name in alternatives if name.partition(".")[0] in names][:1]
    dense = (name for name in names if "_sparsity_" not in name)
    tensor = list(filter(_OPERATIONS.fullmatch, dense))
    tensor = tensor or list(filter(_INSTRUCTIONS.fullmatch, names))
    return counters + [f"{name}.sum" for name in sorted(tensor)]
