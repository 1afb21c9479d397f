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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perfexp.roofline.listing import Launch

_OPERATION = "sass_thread_inst_executed_op_{}_pred_on"
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
HMMA_FLOPS = {"7.0": 512, "7.2": 512, "7.5": 2048, "8.0": 4096, "8.6": 4096, "8.7": 4096, "8.9": 4096}
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
_DRAM_BYTES = (("dram__bytes",), *((f"dram__bytes{op}_read", f"dram__bytes{op}_write") for op in ("", "_op")))
#: Peak per cycle, clock, and factor from the counter to FLOPs or bytes, by ceiling.
_PEAKS = {
    "dram": ("dram__bytes.sum.peak_sustained", "dram__cycles_elapsed.avg.per_second", 1),
    "l2": ("lts__t_bytes.sum.peak_sustained", "lts__cycles_elapsed.avg.per_second", 1),
    "fp32": ("sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained", _SM_CLOCK, 2),
    "fp64_vector": ("sm__sass_thread_inst_executed_op_dfma_pred_on.sum.peak_sustained", _SM_CLOCK, 2),
    "half": ("sm__sass_thread_inst_executed_op_hfma_pred_on.sum.peak_sustained", _SM_CLOCK, 4),
}
_DERIVED = re.compile(r"derived__smsp__sass_thread_inst_executed_op_(\w+)_pred_on_x(\d)")
_CORE = r"(?:sm|smsp)__sass_thread_inst_executed_op_[fhd](?:add|mul|fma)_pred_on"
_BYTES = rf"dram__bytes(?:(?:_op)?_(?:read|write))?|{_L2_BYTES}"
_COUNTER = re.compile(
    rf"(?:{_CORE}|{_BYTES}|{_TENSOR.pattern}|{_PIPE.pattern})\.sum(?:\.per_second|\.per_cycle_elapsed)?"
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
_NOT_SINGLE = re.compile(r"half|bfloat|(?<![a-z])b?f16|[hi]?s?16816|1688|[hi]gemm|e4m3|e5m2|int8", re.I)


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
    counters = _Counters(launch.metrics)
    flops, lacking = _core_flops(counters)
    moves = _remove_moves(launch.kernel, flops)
    tensor, estimated, unsized = _tensor_flops(counters, launch.capability)
    return Counted(
        seconds=counters.seconds,
        flops={**flops, **tensor} or None,
        dram_bytes=_dram_bytes(counters),
        l2_bytes=counters.amount(_L2_BYTES),
        sm_share=launch.metrics.get(_SM),
        dram_share=counters.first(_DRAM),
        estimated=estimated,
        lacking=(*lacking, *unsized),
        moves=moves,
    )


def recorded_peaks(launch: Launch) -> dict[str, float]:
    """Peaks that ncu recorded with a launch, per second at its clocks: `dram`, `l2`, `fp32`, `fp64_vector`, `half`."""
    counters = _Counters(launch.metrics)
    peaks = {
        name: launch.metrics[counter] * launch.metrics[clock] * factor
        for name, (counter, clock, factor) in _PEAKS.items()
        if counter in launch.metrics and clock in launch.metrics
    }
    share, moved = counters.first(_L2_OF_PEAK), counters.amount(_L2_BYTES)
    if share and counters.seconds and moved:
        peaks.setdefault("l2", moved / counters.seconds / share)
    return {name: value for name, value in peaks.items() if value > 0}


class _Counters:
    """The metrics of a launch."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics
        self.clock = self.first(_CLOCKS)
        seconds = self.first(_SECONDS)
        if seconds is None and _CYCLES in metrics and (clock := metrics.get(_SM_CLOCK)):
            seconds = metrics[_CYCLES] / clock
        self.seconds = seconds or None

    def first(self, names: tuple[str, ...]) -> float | None:
        return next((self.metrics[name] for name in names if name in self.metrics), None)

    def amount(self, base: str) -> float | None:
        """The sum of a counter, or its rate times the duration."""
        total = self.metrics.get(f"{base}.sum")
        if total is not None or self.seconds is None:
            return total
        rate = self.metrics.get(f"{base}.sum.per_second")
        if rate is None and self.clock and (per_cycle := self.metrics.get(f"{base}.sum.per_cycle_elapsed")) is not None:
            rate = per_cycle * self.clock
        return None if rate is None else rate * self.seconds

    def matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], float]]:
        """Amounts of the counters whose name matches."""
        for base in dict.fromkeys(name.partition(".sum")[0] for name in self.metrics):
            if (match := pattern.fullmatch(base)) and (amount := self.amount(base)) is not None:
                yield match, amount


def _dram_bytes(counters: _Counters) -> float | None:
    for names in _DRAM_BYTES:
        amounts = [amount for name in names if (amount := counters.amount(name)) is not None]
        if len(amounts) == len(names):
            return sum(amounts)
    return None


def _remove_moves(kernel: str, flops: dict[str, float]) -> float:
    """Remove half-precision FLOPs that only move constants, and return their number.

    NVIDIA's assembler puts a constant into a register by an HFMA2 of zeros (for sm_90 `HFMA2.MMA R5, -RZ, RZ, 0, 0`, as
    nvdisasm shows), and the counter counts it: an addition of float32 tensors had twice as many of these as of its own.
    """
    if not flops.get("half") or not _SINGLE.search(kernel) or _NOT_SINGLE.search(kernel):
        return 0.0
    moves, flops["half"] = flops["half"], 0.0
    return moves


def _core_flops(counters: _Counters) -> tuple[dict[str, float], list[str]]:
    """FLOPs of the CUDA cores by precision, and the missing counters of precisions that have some."""
    flops, lacking = dict[str, float](), list[str]()
    for precision, sizes in _CORES.items():
        amounts = {operation: _instructions(counters, operation) for operation in sizes}
        counted = [sizes[operation] * amount for operation, amount in amounts.items() if amount is not None]
        if counted:
            flops[precision] = sum(counted)
            lacking += [f"smsp__{_OPERATION.format(name)}.sum" for name, amount in amounts.items() if amount is None]
    return flops, lacking


def _instructions(counters: _Counters, operation: str) -> float | None:
    for unit in ("smsp", "sm"):
        amount = counters.amount(f"{unit}__{_OPERATION.format(operation)}")
        if amount is not None:
            return amount
    for name, value in counters.metrics.items():
        derived = _DERIVED.fullmatch(name)
        if derived and derived[1] == operation and counters.clock and counters.seconds:
            return value * counters.clock * counters.seconds / int(derived[2])
    return None


def _tensor_flops(counters: _Counters, capability: str) -> tuple[dict[str, float], bool, list[str]]:
    """FLOPs of the tensor cores, whether they are estimated, and counters whose instructions have an unknown size."""
    by_source: dict[str, dict[str, float]] = {}
    for match, amount in counters.matching(_TENSOR):
        by_source.setdefault(match["source"], {})[match["rest"]] = amount
    if by_source:
        return {f"tensor {source}": _without_overlap(counts) for source, counts in by_source.items()}, False, []
    pipes = {match["kind"] or "": amount for match, amount in counters.matching(_PIPE)}
    flops = {"tensor fp64": pipes["_op_dmma"] * _DMMA_FLOPS} if "_op_dmma" in pipes else {}
    # the whole pipe includes double precision
    matrix = pipes.get("_op_hmma", pipes.get("", 0.0) - pipes.get("_op_dmma", 0.0) if "" in pipes else None)
    size = HMMA_FLOPS.get(capability)
    if matrix is not None and size:
        flops["tensor"] = matrix * size
    unsized = ["sm__ops_path_tensor_src_*.sum"] if matrix and not size else []
    return flops, any(flops.values()), unsized


def _without_overlap(counts: Mapping[str, float]) -> float:
    """Operations of one source type by counters that overlap: all, by destination, with and without sparsity."""
    if "" in counts:
        return counts[""]
    destinations = {rest: rest.partition("_sparsity_")[0] for rest in counts}
    return sum(
        value for rest, value in counts.items() if destinations[rest] == rest or destinations[rest] not in counts
    )
