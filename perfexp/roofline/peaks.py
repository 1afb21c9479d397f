"""Peak rates of a device and their sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from perfexp.errors import UserError, did_you_mean
from perfexp.host import gpu_sheets
from perfexp.host.gpu_sheets import GpuFacts, GpuFile
from perfexp.records.quantities import BYTES_CEILING, FLOPS_CEILING
from perfexp.records.record import Point, Record, is_layers, timed_key

#: Names of ceilings. A data sheet's FP64, FP16 and TF32 peaks are those of matrix units, where there are any.
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
#: Peaks for FLOPs of a data type whose peak has another name.
_FALLBACKS = {
    "fp64": ("fp64_vector", "fp64"),
    "half": ("half", "fp16"),
    "tensor": ("fp16",),
    "tensor fp6_fp8": ("fp8",),
}
#: How to add unknown hardware.
ADD = "gpu/NAME.yaml (as conf/gpu/t4.yaml) to a folder of your own, name it with --config-dir,"


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Ceilings of a device.

    Attributes:
        flops_per_second: peaks by data type; `peak` alone where the user passed one figure for all.
        l2_bytes_per_second: bandwidth of the L2 cache, which data sheets do not give.
        measured: rates that the device reached in the run, by data type and for `dram`.
        match: regular expression for names of devices with these peaks; None where the device is unknown.
        foreign: the measured device, where the peaks are those of another.
    """

    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    dram_bytes_per_second: float | None = None
    l2_bytes_per_second: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    match: str | None = None
    foreign: str = ""

    def of(self, kind: str) -> tuple[str, float] | None:
        """The name and the height of the ceiling for FLOPs of a data type; None where it is unknown."""
        names = (
            ("peak",)
            if "peak" in self.flops_per_second
            else _FALLBACKS.get(kind, (kind.removeprefix("tensor "),))
        )
        return next(
            (
                (name, self.flops_per_second[name])
                for name in names
                if name in self.flops_per_second
            ),
            None,
        )

    @property
    def reference(self) -> tuple[str, float] | None:
        """The ceiling of percentages without a data type: the user's, or that of FP32."""
        return self.of("fp32")

    def or_else(self, other: Peaks) -> Peaks:
        """These peaks, and another's where these are unknown."""
        compute = self.flops_per_second or other.flops_per_second
        memory = self.dram_bytes_per_second or other.dram_bytes_per_second
        used = (not self.flops_per_second and compute) or (
            not self.dram_bytes_per_second and memory
        )
        return replace(
            self,
            flops_per_second=compute,
            dram_bytes_per_second=memory,
            l2_bytes_per_second=self.l2_bytes_per_second or other.l2_bytes_per_second,
            measured=self.measured or other.measured,
            sources=(*self.sources, *(other.sources if used else ())),
            match=self.match or (other.match if used else None),
        )

    def compared_with(self, product: str) -> Peaks:
        """The same peaks, marked as foreign unless they belong to the measured device, or its name is empty."""
        is_own = not (self.match and product) or re.search(self.match, product, re.IGNORECASE)
        return self if is_own else replace(self, foreign=product)


def from_source(
    source: str,
    flops: Mapping[str, float | None],
    dram_bytes: float | None,
    l2_bytes: float | None = None,
) -> Peaks:
    """The peaks per second that one source knows: those above zero."""
    known = {name: peak for name, peak in flops.items() if peak}
    sources = (source,) if known or dram_bytes else ()
    return Peaks(
        flops_per_second=known,
        dram_bytes_per_second=dram_bytes or None,
        l2_bytes_per_second=l2_bytes,
        sources=sources,
    )


def by_hand(compute_tflops: float | None, memory_gigabytes: float | None) -> Peaks:
    """Peaks from the command line, in 10¹² FLOPs and 10⁹ bytes per second; `UserError` if one is not above zero."""
    for option, value in (("--peak-compute", compute_tflops), ("--peak-bw", memory_gigabytes)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(
                f"{option} {value:g}: a peak is above zero. Leave it out to use the data sheet's (--gpu NAME)."
            )
    return from_source(
        "given by hand", {"peak": (compute_tflops or 0) * 1e12}, (memory_gigabytes or 0) * 1e9
    )


def of_sheet(facts: GpuFacts) -> Peaks:
    """Peaks of a data sheet."""
    compute = {name: peak for name, peak in facts.peak_flops_per_second.items() if name in NAMES}
    return from_source(
        f"data sheet of {facts.product or 'the device'}", compute, facts.memory_bytes_per_second
    )


def named(name: str, sheets: Mapping[str, GpuFile]) -> Peaks:
    """Peaks of the data sheet with a name (`t4`, `h200`, …); `UserError` if there is none, or none with peaks."""
    sheets = {stem: file for stem, file in sheets.items() if of_sheet(file.facts).sources}
    sheet = sheets.get(name) or sheets.get(name.lower())
    if sheet is None:
        raise UserError(
            f"There is no data sheet of a GPU '{name}'. {did_you_mean(name.lower(), sheets)} For another, add {ADD} "
            "or give --peak-compute TFLOP/s and --peak-bw GB/s."
        )
    return replace(of_sheet(sheet.facts), match=sheet.match)


def matching(product: str, sheets: Mapping[str, GpuFile]) -> Peaks:
    """Peaks of the one data sheet that matches the name that a driver reports; otherwise none."""
    name = gpu_sheets.matching(sheets, product)
    return of_sheet(sheets[name].facts) if name else Peaks()


def of_plan(plan: Mapping[str, Any]) -> Peaks:
    """Peaks of the data sheet in a resolved configuration; none if its facts have other types."""
    node = plan.get("gpu")
    facts = GpuFacts.of_node(node.get("facts") if isinstance(node, Mapping) else None)
    try:
        return of_sheet(msgspec.convert(vars(facts), GpuFacts))
    except msgspec.ValidationError:  # a record of somebody else's
        return Peaks()


def device_of(record: Record) -> tuple[str, str]:
    """The name and the kind (`cuda`, `cpu`, …) of a record's device; empty where they are unknown."""
    device = record.environment.get("device")
    facts = device if isinstance(device, Mapping) else {}
    return str(facts.get("name") or ""), str(facts.get("kind") or "")


def of_layers(record: Record, point: Point) -> Peaks:
    """Peaks of the data sheet in a record's plan, and the rates that the device reached at a point with layers."""
    timed = next(
        (
            one
            for one in record.points
            if one.key == timed_key(point.key) and not is_layers(one.key)
        ),
        None,
    )
    names = {point.key.precision.removeprefix("amp_"): FLOPS_CEILING, "dram": BYTES_CEILING}
    metrics = {kind: timed.metric(name) if timed else None for kind, name in names.items()}
    measured = {kind: metric.value for kind, metric in metrics.items() if metric and metric.value}
    if timed is not None and (rates := timed.facts.get("ceilings")):  # by number format
        measured = {
            "dram" if kind == "bytes_per_second" else kind: rate for kind, rate in rates.items()
        }
    return replace(of_plan(record.plan), measured=measured)


def from_measured(peaks: Peaks) -> Peaks:
    """The rates that the device reached, as its peaks."""
    compute = {name: value for name, value in peaks.measured.items() if name != "dram"}
    return from_source(
        "a matrix product and a copy, measured in the run", compute, peaks.measured.get("dram")
    )
