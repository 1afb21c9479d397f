"""Compute a launch's FLOPs and bytes from any set of ncu counters.

* **CUDA-core FLOPs** are additions + products + 2 × fused multiply-adds in unmasked threads, per
precision. Half-precision instructions are packed: each counts for two numbers, as in ncu's own
roofline sections (for example `derived__…_hadd_pred_on_x2`, `…_hfma_pred_on_x4`). Code that uses
one half of a pair is counted twice too high.
* **Tensor-core FLOPs** are `sm__ops_path_tensor_src_*`, which count operations. A
multiply-accumulate counts as two. NVIDIA recommends these counters because instruction sizes differ
per variant and chip: https://forums.developer.nvidia.com/t/275450 If only pipe instructions were
counted, `HMMA_FLOPS` gives the usual size: an estimate.
* **Bytes** are DRAM bytes, read and written, and L2 bytes if counted.
* `ncu --set roofline` gives rates: a count per cycle, times cycles per second, times the duration.
Sources: ncu's section files SpeedOfLight_HierarchicalSingleRooflineChart, …HalfRooflineChart,
…TensorRooflineChart.
* **Percentages of peak** alone give rates relative to a stated peak. `sm__throughput` describes
the busiest SM part, such as the load/store unit, so it is an upper bound for FLOPs (ncu's Profiling
Guide, "Metrics Guide").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perfexp.roofline.listing import KernelLaunch

#: Prefixes of a counter, and its name for one kind of instruction.
_UNITS = ("smsp", "sm", "derived")
_OPERATION = "sass_thread_inst_executed_op_{}_pred_on"
#: FLOPs per CUDA-core instruction, by data type.
_CORES = {
    "fp32": {"fadd": 1, "fmul": 1, "ffma": 2},
    "fp64": {"dadd": 1, "dmul": 1, "dfma": 2},
    "half": {"hadd": 2, "hmul": 2, "hfma": 4},
}
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?P<source>bf16|tf32|fp\d+(?:_fp\d+)*)(?P<rest>\w*)")
_PIPE = re.compile(r"(?:sm|smsp)__inst_executed_pipe_tensor(?P<kind>_op_hmma|_op_dmma)?")
#: FLOPs per warp matrix instruction by compute capability. Volta's HMMA.884 takes four steps of
#: 512, Turing's HMMA.1688 has 2 × 16 × 8 × 8, Ampere's HMMA.16816 twice as many (half of it with
#: TF32). From 9.0 on it varies too much.
HMMA_FLOPS = {
    "7.0": 512,
    "7.2": 512,
    "7.5": 2048,
    "8.0": 4096,
    "8.6": 4096,
    "8.7": 4096,
    "8.9": 4096,
}
#: DMMA.884 has 2 × 8 × 8 × 4.
_DMMA_FLOPS = 512

_SECONDS = ("gpu__time_duration.sum", "gpu__time_duration.avg", "gpu__time_duration.max")
_CYCLES, _SM_CLOCK = "sm__cycles_elapsed.avg", "sm__cycles_elapsed.avg.per_second"
_CLOCKS = ("smsp__cycles_elapsed.avg.per_second", _SM_CLOCK)
_OF_PEAK = ".avg.pct_of_peak_sustained_elapsed"
_SM = f"sm__throughput{_OF_PEAK}"
_DRAM = (f"dram__throughput{_OF_PEAK}", f"gpu__dram_throughput{_OF_PEAK}")
_L2_OF_PEAK = ("lts__t_bytes.sum.pct_of_peak_sustained_elapsed", f"lts__t_bytes{_OF_PEAK}")
_L2_BYTES = "lts__t_bytes"
#: All bytes, or bytes read and bytes written: ncu's names on older and on newer chips (Blackwell).
_DRAM_BYTES = (
    ("dram__bytes",),
    ("dram__bytes_read", "dram__bytes_write"),
    ("dram__bytes_op_read", "dram__bytes_op_write"),
)
#: Peak per cycle, clock, and factor from the counter to FLOPs or bytes, by ceiling.
_PEAKS = {
    "dram": ("dram__bytes.sum.peak_sustained", "dram__cycles_elapsed.avg.per_second", 1),
    "l2": ("lts__t_bytes.sum.peak_sustained", "lts__cycles_elapsed.avg.per_second", 1),
    "fp32": ("sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained", _SM_CLOCK, 2),
    "fp64_vector": (
        "sm__sass_thread_inst_executed_op_dfma_pred_on.sum.peak_sustained",
        _SM_CLOCK,
        2,
    ),
    "half": ("sm__sass_thread_inst_executed_op_hfma_pred_on.sum.peak_sustained", _SM_CLOCK, 4),
}
_DERIVED = re.compile(r"derived__smsp__sass_thread_inst_executed_op_(\w+)_pred_on_x(\d)")
_COUNTER = re.compile(
    r"(?:sm(?:sp)?__sass_thread_inst_executed_op_[fhd](?:add|mul|fma)_pred_on"
    r"|dram__bytes(?:(?:_op)?_(?:read|write))?"
    rf"|{_L2_BYTES}|{_TENSOR.pattern}|{_PIPE.pattern})\.sum(?:\.per_second|\.per_cycle_elapsed)?"
)
_NAMES = {_CYCLES, _SM, *_SECONDS, *_CLOCKS, *_DRAM, *_L2_OF_PEAK}
for _counter, _clock, _ in _PEAKS.values():
    _NAMES |= {_counter, _clock}

#: Command that collects all counters for a hierarchical roofline, also on chips whose tensor cores
#: do not count operations.
COLLECT = (
    "ncu --nvtx --clock-control none --metrics "
    "gpu__time_duration.sum,dram__bytes.sum,lts__t_bytes.sum,"
    "lts__t_bytes.sum.pct_of_peak_sustained_elapsed,"
    "regex:smsp__sass_thread_inst_executed_op_[fhd](add|mul|fma)_pred_on.sum,"
    "regex:sm__ops_path_tensor_src_.*,regex:sm__inst_executed_pipe_tensor.* --csv COMMAND"
)

#: Names of single-precision kernels, unless they also match `_NOT_SINGLE`.
_SINGLE = re.compile(r"\bfloat\b|(?<![a-z])c?f32")
_NOT_SINGLE = re.compile(
    r"half|bfloat|(?<![a-z])b?f16|[hi]?s?16816|1688|[hi]gemm|e4m3|e5m2|int8", re.I
)


def wanted(name: str) -> bool:
    """Return whether a roofline needs an ncu metric; other metrics in a file are skipped."""
    return name in _NAMES or bool(_COUNTER.fullmatch(name) or _DERIVED.fullmatch(name))


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The work in one launch; None if no metric gives a quantity.

    Attributes:
        seconds: duration.
        flops: FLOPs by data type, for example `fp32`, `half` or `tensor fp16`.
        sm_share: `sm__throughput`, as a fraction.
        dram_share: `dram__throughput`, as a fraction.
        estimated: whether the matrix-instruction size was assumed.
        lacking: missing counters; without them the FLOPs are too low.
        moves: FLOPs of half-precision instructions that only move constants, not in `flops`.
    """

    seconds: float | None
    flops: Mapping[str, float] | None
    dram_bytes: float | None
    l2_bytes: float | None
    sm_share: float | None
    dram_share: float | None
    estimated: bool = False
    lacking: tuple[str, ...] = ()
    moves: float = 0.0


def count(launch: KernelLaunch) -> Counted:
    """Return the work in a launch, from whichever counters it has.

    `perfexp.roofline` calls it for each launch.
    """
    seconds, amounts = _amounts(launch.metrics)
    flops, lacking = _core_flops(amounts)
    moves = _remove_moves(launch.kernel, flops)
    tensor, estimated, tensor_lacking = _tensor_flops(amounts, launch.capability)
    names = next((names for names in _DRAM_BYTES if amounts.keys() >= set(names)), ())
    return Counted(
        seconds=seconds,
        flops={**flops, **tensor} or None,
        dram_bytes=sum(map(amounts.__getitem__, names)) if names else None,
        l2_bytes=amounts.get(_L2_BYTES),
        sm_share=launch.metrics.get(_SM),
        dram_share=_first(launch.metrics, _DRAM),
        estimated=estimated,
        lacking=(*lacking, *tensor_lacking),
        moves=moves,
    )


def recorded_peaks(launch: KernelLaunch) -> dict[str, float]:
    """Return the peaks that ncu recorded with a launch, in FLOP/s and bytes/s at its clocks.

    The names are `dram`, `l2`, `fp32`, `fp64_vector` and `half`. They are the ceilings of a GPU
    without a data sheet.
    """
    seconds, amounts = _amounts(launch.metrics)
    peaks = {}
    for name, (counter, clock, factor) in _PEAKS.items():
        if counter in launch.metrics and clock in launch.metrics:
            peaks[name] = launch.metrics[counter] * launch.metrics[clock] * factor
    share = _first(launch.metrics, _L2_OF_PEAK)
    moved = amounts.get(_L2_BYTES)
    if share and seconds and moved:
        peaks.setdefault("l2", moved / seconds / share)
    return {name: value for name, value in peaks.items() if value > 0}


def _first(metrics: Mapping[str, float], names: Iterable[str]) -> float | None:
    """Return the value of the first metric that is there; None if none is."""
    return next((metrics[name] for name in names if name in metrics), None)


def _amounts(metrics: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """Return a launch's duration in seconds, and its counts by counter name.

    A metric is a counter with a form: its sum, or a rate per second or cycle, which is multiplied
    by the duration.
    """
    seconds, clock = _first(metrics, _SECONDS), _first(metrics, _CLOCKS)
    if seconds is None and _CYCLES in metrics and metrics.get(_SM_CLOCK):
        seconds = metrics[_CYCLES] / metrics[_SM_CLOCK]
    cycles = (seconds or 0.0) * (clock or 0.0)
    amounts: dict[str, float] = {}
    for form, factor in (
        (".sum", 1.0),
        (".sum.per_second", seconds),
        (".sum.per_cycle_elapsed", cycles),
    ):
        for name, value in metrics.items():
            if factor and name.endswith(form):
                amounts.setdefault(name.removesuffix(form), value * factor)
    for name, value in metrics.items():
        if cycles and (derived := _DERIVED.fullmatch(name)):
            amounts[f"derived__{_OPERATION.format(derived[1])}"] = value * cycles / int(derived[2])
    return seconds or None, amounts


def _remove_moves(kernel: str, flops: dict[str, float]) -> float:
    """Remove half-precision FLOPs that only move constants, and return their number.

    NVIDIA's assembler loads a constant into a register with an HFMA2 on zeros. For sm_90, for
    example, nvdisasm shows `HFMA2.MMA R5, -RZ, RZ, 0, 0`. The counter counts it: a float32
    addition had twice as many such FLOPs as its own. In a kernel whose name shows that it
    computes in float32 alone, all half-precision FLOPs are such loads.
    """
    moves = flops.get("half")
    if not moves or not _SINGLE.search(kernel) or _NOT_SINGLE.search(kernel):
        return 0.0
    flops["half"] = 0.0
    return moves


def _core_flops(amounts: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return CUDA-core FLOPs by precision, and the missing counters for these precisions.

    A precision without any counter is not listed as missing, because ncu did not collect it.
    """
    flops: dict[str, float] = {}
    lacking: list[str] = []
    for precision, operations in _CORES.items():
        missing = []
        for operation, flops_each in operations.items():
            name = _OPERATION.format(operation)
            number = _first(amounts, (f"{unit}__{name}" for unit in _UNITS))
            if number is None:
                missing.append(f"smsp__{name}.sum")
            else:
                flops[precision] = flops.get(precision, 0) + flops_each * number
        if precision in flops:
            lacking += missing
    return flops, lacking


def _tensor_flops(
    amounts: Mapping[str, float], capability: str
) -> tuple[dict[str, float], bool, list[str]]:
    """Return tensor-core FLOPs by data type, whether they are estimated, and missing counters.

    Without operation counters, the FLOPs are estimated from instruction counts. If the instruction
    size of this GPU is unknown, too, the operation counters are reported as missing.

    Args:
        amounts: counts by counter name.
        capability: compute capability of the GPU, for example `7.5`.
    """
    by_source: dict[str, dict[str, float]] = {}
    pipes: dict[str, float] = {}
    for name, amount in amounts.items():
        if match := _TENSOR.fullmatch(name):
            by_source.setdefault(match["source"], {})[match["rest"]] = amount
        elif match := _PIPE.fullmatch(name):
            pipes[match["kind"] or ""] = amount
    flops = {
        f"tensor {source}": _without_overlap(counters) for source, counters in by_source.items()
    }
    if by_source:
        return flops, False, []
    if "_op_dmma" in pipes:
        flops["tensor fp64"] = pipes["_op_dmma"] * _DMMA_FLOPS
    matrix = pipes.get("_op_hmma")
    if matrix is None and "" in pipes:
        # the whole pipe includes double precision
        matrix = pipes[""] - pipes.get("_op_dmma", 0.0)
    size = HMMA_FLOPS.get(capability)
    if matrix is not None and size:
        flops["tensor"] = matrix * size
    missing = ["sm__ops_path_tensor_src_*.sum"] if matrix and not size else []
    return flops, any(flops.values()), missing


def _without_overlap(counts: Mapping[str, float]) -> float:
    """Return the tensor-core operations on one source type, from counters that overlap.

    One counter has all operations. Others split them by destination type, and further ones split
    each destination type by sparsity. The least split counters are added up.

    Args:
        counts: operations by the counter name after the source type: empty for all operations,
            otherwise for example `_dst_fp32` or `_dst_fp32_sparsity_off`.
    """
    if "" in counts:
        return counts[""]
    total = 0.0
    for variant, operations in counts.items():
        destination, sparsity, _ = variant.partition("_sparsity_")
        if not sparsity or destination not in counts:
            total += operations
    return total
