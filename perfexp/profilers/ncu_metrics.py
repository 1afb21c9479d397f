"""Select ncu's counters for a hierarchical roofline, as available on the chip.

Chips differ: tensor cores with counters of operations (`sm__ops_path_tensor_*`) or of instructions
(`sm__inst_executed_pipe_tensor*`), `dram__bytes_read` or `dram__bytes_op_read`. ncu lists the available ones. Sources:
Nsight Compute CLI, `--query-metrics` and `--list-chips`,
https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html, and the metrics of its section files
SpeedOfLight_Hierarchical*RooflineChart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from perfexp.profilers import ProfilerFailed
from perfexp.profilers.tools import Tool, ask, first_line_with

#: Counters for every chip; of several in one entry, the first available one.
_WANTED: tuple[tuple[str, ...], ...] = (
    ("gpu__time_duration.sum",),
    *((f"smsp__sass_thread_inst_executed_op_{k}{do}_pred_on.sum",) for k in "fhd" for do in ("add", "mul", "fma")),
    ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    ("dram__bytes.sum",),
    ("lts__t_bytes.sum",),
    ("l1tex__t_bytes.sum",),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    ("lts__t_bytes.sum.pct_of_peak_sustained_elapsed",),
    *((f"{name}.sum.peak_sustained",) for name in ("dram__bytes", "lts__t_bytes")),
    *((f"sm__sass_thread_inst_executed_op_{kind}fma_pred_on.sum.peak_sustained",) for kind in "fhd"),
    *((f"{unit}__cycles_elapsed.avg.per_second",) for unit in ("dram", "lts", "sm")),
)
#: Operations of the tensor cores by type, sparse and dense together; integer operations are not FLOPs.
_OPERATIONS = re.compile(r"sm__ops_path_tensor_src_(?:bf16|tf32|fp\d+(?:_fp\d+)*)(?:_dst_\w+?)?")
#: Instructions of the tensor pipe, on chips without counters of operations.
_INSTRUCTIONS = re.compile(r"sm__inst_executed_pipe_tensor(?:_op_[a-z]+)?")
_CHIPS = {"7.0": "gv100", "7.2": "gv11b", "7.5": "tu102", "8.0": "ga100", "8.6": "ga102", "8.7": "ga10b"}
_CHIPS |= {"8.9": "ad102", "9.0": "gh100", "10.0": "gb100", "10.3": "gb110", "12.0": "gb202"}
_NAME = re.compile(r"^\s*([a-z][a-z0-9]*__[a-z0-9_]+)", re.MULTILINE)
_QUERY_SECONDS = 120.0


def available(tool: Tool, capability: str | None, index: int = 0) -> frozenset[str]:
    """The counters of a chip, without suffixes; without a compute capability (`9.0`), ncu queries the device."""
    chip = _CHIPS.get(capability or "")
    by_chip = [[tool.path, "--query-metrics", "--chips", chip]] if chip else []
    output = ""
    for command in (*by_chip, [tool.path, "--query-metrics", "--devices", str(index)]):
        answer = ask(command, _QUERY_SECONDS)
        output += answer.text
        if names := frozenset(_NAME.findall(answer.out)):
            return names
    why = first_line_with(output, ("error", "unsupported", "unknown")) or "it named none"
    raise ProfilerFailed(
        f"ncu {tool.version or ''} does not list the counters of a device of compute capability "
        f"{capability or 'unknown'}: {why}. A newer Nsight Compute knows newer chips; "
        "profiler.metrics=[…] names counters without this query."
    )


def chosen(there: Iterable[str]) -> list[str]:
    """The counters for a roofline among available ones without suffixes."""
    names = frozenset(there)
    wanted = [
        next((counter for counter in alternatives if counter.partition(".")[0] in names), None)
        for alternatives in _WANTED
    ]
    operations = sorted(name for name in names if _OPERATIONS.fullmatch(name) and "_sparsity_" not in name)
    tensor = operations or sorted(name for name in names if _INSTRUCTIONS.fullmatch(name))
    return [*(name for name in wanted if name), *(f"{name}.sum" for name in tensor)]
