"""Peak rates of a device: the ceilings of a roofline, and their sources.

They come from the command line, a data sheet in conf/gpu, ncu's file, or rates measured in the run.
"""

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
from perfexp.records.record import Point, Record, timed_key

#: Ceiling names. A data sheet's FP64, FP16 and TF32 peaks belong to matrix units, if it has any.
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
#: Peak names by data type, if they differ from it.
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
    """Device ceilings.

    Attributes:
        flops_per_second: peaks by data type; only `peak` if the user passed a single figure.
        dram_bytes_per_second: bandwidth of the device's memory.
        l2_bytes_per_second: L2 cache bandwidth, which data sheets do not give.
        measured: rates that the device reached in the run, by data type and for `dram`.
        sources: names of the sources, for the plot.
        match: regular expression for device names with these peaks; None if unknown.
        foreign: name of the measured device, if the peaks belong to another; otherwise empty.
    """

    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    dram_bytes_per_second: float | None = None
    l2_bytes_per_second: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    match: str | None = None
    foreign: str = ""

    def of(self, kind: str) -> tuple[str, float] | None:
        """Return the name and the FLOP/s of a data type's ceiling; None if it is unknown.

        A single figure from the user holds for all data types.
        """
        peaks = self.flops_per_second
        for name in ("peak", *_FALLBACKS.get(kind, (kind.removeprefix("tensor "),))):
            if name in peaks:
                return name, peaks[name]
        return None

    @property
    def reference(self) -> tuple[str, float] | None:
        """Return the ceiling for percentages without a data type: the user's, or FP32."""
        return self.of("fp32")

    def or_else(self, other: Peaks) -> Peaks:
        """Return these peaks, with those that are unknown taken from another source.

        Peaks given by hand come first, then those of a data sheet.
        """
        sources, match = self.sources, self.match
        if (not self.flops_per_second and other.flops_per_second) or (
            not self.dram_bytes_per_second and other.dram_bytes_per_second
        ):
            sources += other.sources
            match = match or other.match
        return replace(
            self,
            flops_per_second=self.flops_per_second or other.flops_per_second,
            dram_bytes_per_second=self.dram_bytes_per_second or other.dram_bytes_per_second,
            l2_bytes_per_second=self.l2_bytes_per_second or other.l2_bytes_per_second,
            measured=self.measured or other.measured,
            sources=sources,
            match=match,
        )

    def compared_with(self, product: str) -> Peaks:
        """Return the same peaks, marked as foreign if the measured device is known to differ."""
        is_own = not (self.match and product) or re.search(self.match, product, re.IGNORECASE)
        if is_own:
            return self
        return replace(self, foreign=product)


def from_source(
    source: str,
    flops: Mapping[str, float | None],
    dram_bytes: float | None,
    l2_bytes: float | None = None,
) -> Peaks:
    """Return peaks from one source, without zeros.

    Args:
        source: name of the source.
        flops: FLOP/s by data type.
        dram_bytes: memory bandwidth in bytes/s.
        l2_bytes: L2 bandwidth in bytes/s.
    """
    stated = {name: peak for name, peak in flops.items() if peak}
    sources = (source,) if stated or dram_bytes else ()
    return Peaks(
        flops_per_second=stated,
        dram_bytes_per_second=dram_bytes or None,
        l2_bytes_per_second=l2_bytes,
        sources=sources,
    )


def by_hand(compute_tflops: float | None, memory_gigabytes: float | None) -> Peaks:
    """Return peaks from the command line, in 10¹² FLOPs and 10⁹ bytes per second.

    `perfexp roofline` calls it; these peaks come first.

    Raises:
        UserError: a peak is not above zero.
    """
    for option, value in (("--peak-compute", compute_tflops), ("--peak-bw", memory_gigabytes)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(
                f"{option} {value:g}: a peak is above zero. "
                "Leave it out to use the data sheet's (--gpu NAME)."
            )
    compute = {"peak": (compute_tflops or 0) * 1e12}
    return from_source("given by hand", compute, (memory_gigabytes or 0) * 1e9)


def of_sheet(facts: GpuFacts) -> Peaks:
    """Return a data sheet's peaks; empty if it has none."""
    compute = {name: peak for name, peak in facts.peak_flops_per_second.items() if name in NAMES}
    return from_source(
        f"data sheet of {facts.product or 'the device'}", compute, facts.memory_bytes_per_second
    )


def named(name: str, sheets: Mapping[str, GpuFile]) -> Peaks:
    """Return the peaks from a named data sheet, for example `t4` or `h200`.

    It is `perfexp roofline --gpu NAME`.

    Raises:
        UserError: no data sheet with peaks has the name.
    """
    sheets = {stem: file for stem, file in sheets.items() if of_sheet(file.facts).sources}
    sheet = sheets.get(name) or sheets.get(name.lower())
    if sheet is None:
        raise UserError(
            f"There is no data sheet of a GPU '{name}'. {did_you_mean(name.lower(), sheets)} "
            f"For another, add {ADD} or give --peak-compute TFLOP/s and --peak-bw GB/s."
        )
    return replace(of_sheet(sheet.facts), match=sheet.match)


def matching(product: str, sheets: Mapping[str, GpuFile]) -> Peaks:
    """Return the peaks of the only data sheet that matches a driver's GPU name; otherwise empty."""
    name = gpu_sheets.matching(sheets, product)
    if name:
        return of_sheet(sheets[name].facts)
    return Peaks()


def of_plan(plan: Mapping[str, Any]) -> Peaks:
    """Return the data-sheet peaks in a plan; empty without them, or if values have wrong types.

    `perfexp roofline` and the report call it.
    """
    node = plan.get("gpu")
    facts = GpuFacts.of_node(node.get("facts") if isinstance(node, Mapping) else None)
    try:
        return of_sheet(msgspec.convert(vars(facts), GpuFacts))
    except msgspec.ValidationError:  # a record of somebody else's
        return Peaks()


def device_of(record: Record) -> tuple[str, str]:
    """Return the name and kind of a record's device, such as `cuda`; empty if unknown.

    Messages name it, and its data sheet is searched.
    """
    device = record.environment.get("device")
    facts = device if isinstance(device, Mapping) else {}
    return str(facts.get("name") or ""), str(facts.get("kind") or "")


def of_layers(record: Record, point: Point) -> Peaks:
    """Return a record's peaks for a point with layers.

    They are those of the plan's data sheet, and the rates reached in the run: the timed point with
    the same key has them (probes.ceilings=true).
    """
    peaks = of_plan(record.plan)
    key = timed_key(point.key)
    timed = next((other for other in record.points if other.key == key), None)
    if timed is None:
        return peaks
    measured: dict[str, float] = {}
    if rates := timed.facts.get("ceilings"):  # by number format
        for kind, rate in rates.items():
            measured["dram" if kind == "bytes_per_second" else kind] = rate
        return replace(peaks, measured=measured)
    names = {point.key.precision.removeprefix("amp_"): FLOPS_CEILING, "dram": BYTES_CEILING}
    for kind, name in names.items():
        if (metric := timed.metric(name)) and metric.value:
            measured[kind] = metric.value
    return replace(peaks, measured=measured)


def from_measured(peaks: Peaks) -> Peaks:
    """Return peaks that are the rates reached by a matrix product and a copy in the run.

    They serve a device without a data sheet.
    """
    compute = {name: value for name, value in peaks.measured.items() if name != "dram"}
    return from_source(
        "a matrix product and a copy, measured in the run", compute, peaks.measured.get("dram")
    )
