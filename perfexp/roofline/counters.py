"""FLOPs and bytes of a launch from ncu's counters, whichever of them were collected.

* **FLOPs of the CUDA cores** are additions + products + 2 × fused multiply-adds of threads that were not masked out,
  per precision. Half-precision instructions are packed: each counts for two numbers, as in ncu's own roofline sections
  (`derived__…_hadd_pred_on_x2`, `…_hfma_pred_on_x4`); code that uses one half of a pair is counted twice too high.
* **FLOPs of the tensor cores** are `sm__ops_path_tensor_src_*`, which count operations (a multiply-accumulate is two).
  NVIDIA recommends them because instructions differ in size per variant and chip
  (https://forums.developer.nvidia.com/t/number-of-floating-point-operations-in-one-hmma-instruction/275450). Where only
  the instructions of the pipe were counted, `HMMA_FLOPS` gives the size of the usual one: an estimate.
* **Bytes** are those of DRAM, read and written, and of L2 where it was counted.
* `ncu --set roofline` gives rates: a count per cycle, times cycles per second, times the duration. Sources: ncu's
  section files SpeedOfLight_HierarchicalSingleRooflineChart, …HalfRooflineChart, …TensorRooflineChart.
* **Percentages of peak** alone give rates relative to a stated peak. `sm__throughput` is that of the busiest part of
  an SM, which may be the load/store unit: an upper bound of FLOPs (ncu's Profiling Guide, "Metrics Guide").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perfexp.roofline.listing import Launch

_UNITS, _OPERATION = ("smsp", "sm", "derived"), "sass_thread_inst_executed_op_{}_pred_on"
#: FLOPs of an instruction of the CUDA cores, by data type.
_CORES = {
    "fp32": {"fadd": 1, "fmul": 1, "ffma": 2},
    "fp64": {"dadd": 1, "dmul": 1, "dfma": 2},
    "half": {"hadd": 2, "hmul": 2, "hfma": 4},
}
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?P<source>bf16|tf32|fp\d+(?:_fp\d+)*)(?P<rest>\w*)")
_PIPE = re.compile(r"(?:sm|smsp)__inst_executed_pipe_tensor(?P<kind>_op_hmma|_op_dmma)?")
#: FLOPs of a warp's matrix instruction by compute capability: Volta's HMMA.884 takes four steps of 512, Turing's
#: HMMA.1688 has 2 × 16 × 8 × 8, Ampere's HMMA.16816 twice that (half of it with TF32). From 9.0 on it varies too much.
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
#: Bytes, or those read and those written, as ncu names them on older and on newer chips (Blackwell).
_DRAM_BYTES = (
    ("dram__bytes",),
    *((f"dram__bytes{op}_read", f"dram__bytes{op}_write") for op in ("", "_op")),
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
    r"(?:sm(?:sp)?__sass_thread_inst_executed_op_[fhd](?:add|mul|fma)_pred_on|dram__bytes(?:(?:_op)?_(?:read|write))?"
    rf"|{_L2_BYTES}|{_TENSOR.pattern}|{_PIPE.pattern})\.sum(?:\.per_second|\.per_cycle_elapsed)?"
)
_NAMES = {_CYCLES, _SM, *_SECONDS, *_CLOCKS, *_DRAM, *_L2_OF_PEAK}
_NAMES |= {name for *names, _ in _PEAKS.values() for name in names}

#: Command that collects all counters of a hierarchical roofline, whether a chip's tensor cores count operations or not.
COLLECT = (
    "ncu --nvtx --clock-control none --metrics gpu__time_duration.sum,dram__bytes.sum,lts__t_bytes.sum,"
    "lts__t_bytes.sum.pct_of_peak_sustained_elapsed,"
    "regex:smsp__sass_thread_inst_executed_op_[fhd](add|mul|fma)_pred_on.sum,"
    "regex:sm__ops_path_tensor_src_.*,regex:sm__inst_executed_pipe_tensor.* --csv COMMAND"
)

#: Names of kernels that compute in single precision, unless they also name another one.
_SINGLE = re.compile(r"\bfloat\b|(?<![a-z])c?f32")
_NOT_SINGLE = re.compile(
    r"half|bfloat|(?<![a-z])b?f16|[hi]?s?16816|1688|[hi]gemm|e4m3|e5m2|int8", re.I
)


def wanted(name: str) -> bool:
    """Whether a roofline needs a metric of ncu."""
    return name in _NAMES or bool(_COUNTER.fullmatch(name) or _DERIVED.fullmatch(name))


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The work of one launch; None where no metric gives a quantity.

    Attributes:
        flops: FLOPs by data type (`fp32`, `half`, `tensor fp16`, …).
        sm_share: `sm__throughput`, a fraction of peak.
        dram_share: `dram__throughput`, a fraction of peak.
        estimated: whether the size of a matrix instruction was assumed.
        lacking: missing counters, without which the FLOPs are too low.
        moves: half-precision instructions that only move constants, as FLOPs that are not among `flops`.
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


def count(launch: Launch) -> Counted:
    """Compute the work of a launch."""
    seconds, amounts = _amounts(launch.metrics)
    flops, lacking = _core_flops(amounts)
    moves = _remove_moves(launch.kernel, flops)
    tensor, estimated, unsized = _tensor_flops(amounts, launch.capability)
    moved = (
        sum(amounts[name] for name in names)
        for names in _DRAM_BYTES
        if amounts.keys() >= set(names)
    )
    return Counted(
        seconds=seconds,
        flops={**flops, **tensor} or None,
        dram_bytes=next(moved, None),
        l2_bytes=amounts.get(_L2_BYTES),
        sm_share=launch.metrics.get(_SM),
        dram_share=_first(launch.metrics, _DRAM),
        estimated=estimated,
        lacking=(*lacking, *unsized),
        moves=moves,
    )


def recorded_peaks(launch: Launch) -> dict[str, float]:
    """Peaks that ncu recorded with a launch, per second at its clocks: `dram`, `l2`, `fp32`, `fp64_vector`, `half`."""
    seconds, amounts = _amounts(launch.metrics)
    peaks = {
        name: launch.metrics[counter] * launch.metrics[clock] * factor
        for name, (counter, clock, factor) in _PEAKS.items()
        if counter in launch.metrics and clock in launch.metrics
    }
    share, moved = _first(launch.metrics, _L2_OF_PEAK), amounts.get(_L2_BYTES)
    if share and seconds and moved:
        peaks.setdefault("l2", moved / seconds / share)
    return {name: value for name, value in peaks.items() if value > 0}


def _first(metrics: Mapping[str, float], names: Iterable[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _amounts(metrics: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """The duration of a launch, and its counters by their names without a form: sums, or rates times the duration."""
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

    NVIDIA's assembler puts a constant into a register by an HFMA2 of zeros (for sm_90 `HFMA2.MMA R5, -RZ, RZ, 0, 0`, as
    nvdisasm shows), and the counter counts it: an addition of float32 tensors had twice as many of these as of its own.
    """
    if not flops.get("half") or not _SINGLE.search(kernel) or _NOT_SINGLE.search(kernel):
        return 0.0
    moves, flops["half"] = flops["half"], 0.0
    return moves


def _core_flops(amounts: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """FLOPs of the CUDA cores by precision, and the missing counters of precisions that have some."""
    flops, lacking = dict[str, float](), list[str]()
    for precision, sizes in _CORES.items():
        names = {operation: _OPERATION.format(operation) for operation in sizes}
        counts = {
            operation: _first(amounts, (f"{unit}__{name}" for unit in _UNITS))
            for operation, name in names.items()
        }
        counted = [
            sizes[operation] * count for operation, count in counts.items() if count is not None
        ]
        if counted:
            flops[precision] = sum(counted)
            lacking += [
                f"smsp__{names[operation]}.sum"
                for operation, count in counts.items()
                if count is None
            ]
    return flops, lacking


def _tensor_flops(
    amounts: Mapping[str, float], capability: str
) -> tuple[dict[str, float], bool, list[str]]:
    """FLOPs of the tensor cores, whether they are estimated, and counters whose instructions have an unknown size."""
    by_source: dict[str, dict[str, float]] = {}
    pipes: dict[str, float] = {}
    for name, amount in amounts.items():
        if match := _TENSOR.fullmatch(name):
            by_source.setdefault(match["source"], {})[match["rest"]] = amount
        elif match := _PIPE.fullmatch(name):
            pipes[match["kind"] or ""] = amount
    if by_source:
        return (
            {f"tensor {source}": _without_overlap(counts) for source, counts in by_source.items()},
            False,
            [],
        )
    flops = {"tensor fp64": pipes["_op_dmma"] * _DMMA_FLOPS} if "_op_dmma" in pipes else {}
    # the whole pipe includes double precision
    matrix = pipes.get(
        "_op_hmma", pipes.get("", 0.0) - pipes.get("_op_dmma", 0.0) if "" in pipes else None
    )
    size = HMMA_FLOPS.get(capability)
    if matrix is not None and size:
        flops["tensor"] = matrix * size
    unsized = ["sm__ops_path_tensor_src_*.sum"] if matrix and not size else []
    return flops, any(flops.values()), unsized


def _without_overlap(counts: Mapping[str, float]) -> float:
    """Operations of one source type by counters that overlap: all, by destination, with and without sparsity."""
    if "" in counts:
        return counts[""]
    own = (
        rest
        for rest in counts
        if "_sparsity_" not in rest or rest.partition("_sparsity_")[0] not in counts
    )
    return sum(counts[rest] for rest in own)
