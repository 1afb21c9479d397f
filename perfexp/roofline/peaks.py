"""Peaks: the rates that nothing can exceed, and who says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perfexp.errors import UserError, did_you_mean
from perfexp.host import gpu_sheets
from perfexp.host.gpu_sheets import GpuFacts, GpuFile
from perfexp.records.record import Point, Record, is_layers, timed_key

#: What a roof is called; a data sheet's FP64, half-precision and TF32 peaks are those of matrix units, where there are.
NAMES = {
    "peak": "compute",
    "fp64": "FP64 tensor",
    "fp64_vector": "FP64",
    "fp32": "FP32",
    "half": "half",
    "tf32": "TF32 tensor",
    "fp16": "FP16 tensor",
    "bf16": "BF16 tensor",
    "fp8": "FP8 tensor",
}
#: Under which peak FLOPs are looked for, where it is not their own name.
_FALLBACKS = {
    "fp64": ("fp64_vector", "fp64"),
    "half": ("half", "fp16"),
    "tensor": ("fp16",),
    "tensor fp6_fp8": ("fp8",),
}


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Roofs of a device.

    Attributes:
        flops_per_second: by data type; `peak` alone where somebody gave one figure for all.
        dram_bytes_per_second: of the device's memory; None where it is not known.
        l2_bytes_per_second: of the L2 cache; no data sheet says it.
        ceilings: what the device was seen to reach: data types and `dram`.
        sources: where the figures come from.
        match: searched in the name of a device to know whether it is theirs; None where that can't be known.
        foreign: the device that was measured, where they are those of another.
    """

    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    dram_bytes_per_second: float | None = None
    l2_bytes_per_second: float | None = None
    ceilings: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    match: str | None = None
    foreign: str = ""

    def of(self, kind: str) -> tuple[str, float] | None:
        """The name of the roof for FLOPs of a kind, and its height; None where it is not known.

        Args:
            kind: `fp32`, `half`, `tensor fp16`, ….
        """
        if "peak" in self.flops_per_second:
            return "peak", self.flops_per_second["peak"]
        own = kind.removeprefix("tensor ")
        names = _FALLBACKS.get(kind, (own,))
        return next(((name, self.flops_per_second[name]) for name in names if name in self.flops_per_second), None)

    @property
    def reference(self) -> tuple[str, float] | None:
        """The roof that a percentage of an unnamed peak is taken of: the one that was given, or FP32's."""
        return self.of("fp32")

    def or_else(self, other: Peaks) -> Peaks:
        """These peaks, and another's where these say nothing.

        Args:
            other: that count less.
        """
        compute = self.flops_per_second or other.flops_per_second
        memory = self.dram_bytes_per_second or other.dram_bytes_per_second
        used = (not self.flops_per_second and compute) or (not self.dram_bytes_per_second and memory)
        return replace(
            self,
            flops_per_second=compute,
            dram_bytes_per_second=memory,
            l2_bytes_per_second=self.l2_bytes_per_second or other.l2_bytes_per_second,
            ceilings=self.ceilings or other.ceilings,
            sources=(*self.sources, *(other.sources if used else ())),
            match=self.match or (other.match if used else None),
        )

    def held_against(self, product: str) -> Peaks:
        """These peaks, which know whether they are another device's than the one that was measured.

        Args:
            product: name of the device that was measured; empty where it is not known.
        """
        own = not (self.match and product) or re.search(self.match, product, re.IGNORECASE)
        return self if own else replace(self, foreign=product)


def given(compute_tflops: float | None, memory_gigabytes: float | None) -> Peaks:
    """Peaks by hand.

    Args:
        compute_tflops: 10¹² FLOPs per second.
        memory_gigabytes: 10⁹ bytes per second.

    Raises:
        UserError: one is not above zero.
    """
    for option, value in (("--peak-compute", compute_tflops), ("--peak-bw", memory_gigabytes)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(
                f"{option} {value:g}: a peak is above zero. Leave it out to take the data sheet's (--gpu NAME)."
            )
    return Peaks(
        flops_per_second={} if compute_tflops is None else {"peak": compute_tflops * 1e12},
        dram_bytes_per_second=None if memory_gigabytes is None else memory_gigabytes * 1e9,
        sources=() if compute_tflops is memory_gigabytes is None else ("given by hand",),
    )


def of_sheet(facts: GpuFacts) -> Peaks:
    """Peaks of a data sheet.

    Args:
        facts: as a file of conf/gpu gives them.
    """
    compute = {name: peak for name, peak in facts.peak_flops_per_second.items() if peak and name in NAMES}
    known = compute or facts.memory_bytes_per_second
    return Peaks(
        flops_per_second=compute,
        dram_bytes_per_second=facts.memory_bytes_per_second,
        sources=(f"data sheet of {facts.product or 'the device'}",) if known else (),
    )


def of_plan(plan: Mapping[str, Any]) -> Peaks:
    """Peaks of the data sheet that a run was planned with.

    Args:
        plan: the resolved configuration.
    """
    node = plan.get("gpu")
    return of_sheet(GpuFacts.of_node(node.get("facts") if isinstance(node, Mapping) else None))


def of_record_point(record: Record, point: Point) -> Peaks:
    """Peaks that a run recorded: its plan's data sheet, and what the device was seen to reach.

    Args:
        record: of any run.
        point: of its layers.
    """
    timed = next((each for each in record.points if each.key == timed_key(point.key) and not is_layers(each.key)), None)
    compute, memory = (_metric(timed, f"ceiling/{name}_per_second") for name in ("flops", "bytes"))
    seen = {data_type(point.key.precision): compute, "dram": memory}
    ceilings = {name: value for name, value in seen.items() if value}
    return replace(of_plan(record.plan), ceilings=ceilings)


def by_ceilings(peaks: Peaks) -> Peaks:
    """What the device was seen to reach, as its peaks.

    Args:
        peaks: with ceilings.
    """
    compute = {name: value for name, value in peaks.ceilings.items() if name != "dram"}
    known = bool(peaks.ceilings)
    return Peaks(
        flops_per_second=compute,
        dram_bytes_per_second=peaks.ceilings.get("dram"),
        sources=("a matrix product and a copy, measured in the run",) if known else (),
    )


def data_type(precision: str) -> str:
    """Of which data type the matrix products of a precision are.

    Args:
        precision: its name, `fp32`, `amp_bf16`, ….
    """
    return precision.removeprefix("amp_")


def named(name: str, known: Mapping[str, GpuFile]) -> Peaks:
    """Peaks of a device by the name of its file.

    Args:
        name: `t4`, `h200`, ….
        known: files of the gpu group.

    Raises:
        UserError: there is none, or it has no data sheet.
    """
    known = {stem: file for stem, file in known.items() if of_sheet(file.facts).sources}
    sheet = known.get(name) or known.get(name.lower())
    if sheet is None:
        raise UserError(
            f"There is no data sheet of a GPU '{name}'. {did_you_mean(name.lower(), known)} For another, add {ADD} "
            "or give --peak-compute TFLOP/s and --peak-bw GB/s."
        )
    return replace(of_sheet(sheet.facts), match=sheet.match)


#: What is added for hardware that is not known.
ADD = "gpu/NAME.yaml (as conf/gpu/t4.yaml) to a folder of your own, name it with --config-dir,"


def matching(product: str, known: Mapping[str, GpuFile]) -> Peaks:
    """Peaks of a device by the name that its driver reports; none unless just one file is for it.

    Args:
        product: `Tesla T4`, ….
        known: files of the gpu group.
    """
    name = gpu_sheets.matching(known, product)
    return of_sheet(known[name].facts) if name else Peaks()


def _metric(point: Point | None, name: str) -> float | None:
    metric = point.metric(name) if point else None
    return metric.value if metric else None
