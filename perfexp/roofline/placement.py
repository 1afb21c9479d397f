"""The data of a roofline: the work of kernels, ranges or layers, and the share of each ceiling that it reaches.

The model is that of Williams, Waterman and Patterson, Roofline (CACM 52:4, 2009): attainable FLOP/s are the smaller of
peak FLOP/s and intensity × bandwidth. Each data type has a compute ceiling of its own, since the pipes run side by
side, and the fullest pipe counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from perfexp.roofline.peaks import NAMES, Peaks

DRAM, L2 = "DRAM", "L2"
#: Owners of a range: push/pop ranges belong to a thread, start/end ranges to the process.
THREAD, PROCESS = "of a thread", "of the process"
#: From this share of a ceiling on, the ceiling is the limit; below it, none is. ncu's rules draw the line there.
NEAR = 0.6
#: Share of a ceiling that clocks and rounding do not explain.
ABOVE = 1.02


class Basis(StrEnum):
    """Where a number of FLOPs or bytes comes from; times are always measured."""

    counted = "counted"
    instructions = "instructions"  # counted, times their usual size
    percentage = "percentage"  # a measured share of a peak
    analytic = "analytic"  # the definition of the layer
    mixed = "mixed"


class Limit(Enum):
    """The kind of ceiling that limits a row."""

    memory = "near a memory ceiling"
    cached = "above the memory ceiling"
    compute = "near a compute ceiling"
    unclear = "of unclear limit"
    neither = "near neither"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work, with FLOPs by data type (`fp32`, `half`, `tensor fp16`, …), and its duration; None where unknown.

    Attributes:
        may_be_less: whether fewer FLOPs than these may have been computed, as by Winograd.
    """

    seconds: float
    launches: int = 1
    flops: Mapping[str, float] | None = None
    dram_bytes: float | None = None
    l2_bytes: float | None = None
    flops_basis: Basis = Basis.counted
    bytes_basis: Basis = Basis.counted
    may_be_less: bool = False

    @property
    def total_flops(self) -> float | None:
        """FLOPs of all data types."""
        return None if self.flops is None else sum(self.flops.values())

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of DRAM; None where nothing was moved."""
        return ratio(self.total_flops, self.dram_bytes)

    @property
    def l2_intensity(self) -> float | None:
        """FLOPs per byte of L2; None where nothing was moved."""
        return ratio(self.total_flops, self.l2_bytes)

    @property
    def flops_per_second(self) -> float | None:
        """Achieved rate of all data types together."""
        return ratio(self.total_flops, self.seconds)


def together(loads: Iterable[Load]) -> Load:
    """The sum of at least one load; a quantity that is unknown in one is unknown in the sum."""
    parts = list(loads)
    flops: defaultdict[str, float] = defaultdict(float)
    for kind, amount in (item for part in parts for item in (part.flops or {}).items()):
        flops[kind] += amount
    return Load(
        seconds=sum(part.seconds for part in parts),
        launches=sum(part.launches for part in parts),
        flops=None if any(part.flops is None for part in parts) else dict(flops),
        dram_bytes=_sum(part.dram_bytes for part in parts),
        l2_bytes=_sum(part.l2_bytes for part in parts),
        flops_basis=_basis(part.flops_basis for part in parts),
        bytes_basis=_basis(part.bytes_basis for part in parts),
        may_be_less=any(part.may_be_less for part in parts),
    )


def _basis(bases: Iterable[Basis]) -> Basis:
    distinct = set(bases)
    return distinct.pop() if len(distinct) == 1 else Basis.mixed


def _sum(values: Iterable[float | None]) -> float | None:
    amounts = list(values)
    known = [amount for amount in amounts if amount is not None]
    return sum(known, 0.0) if len(known) == len(amounts) else None


def ratio(above: float | None, below: float | None) -> float | None:
    """A quotient; None where one figure is unknown or the divisor is 0."""
    return None if above is None or not below else above / below


def shares_of(load: Load, peaks: Peaks) -> dict[str, float]:
    """The achieved rates of a load over their peaks, by the name of the ceiling (`DRAM`, `L2`, `FP32`, …)."""
    memory = {
        DRAM: ratio(ratio(load.dram_bytes, load.seconds), peaks.dram_bytes_per_second),
        L2: ratio(ratio(load.l2_bytes, load.seconds), peaks.l2_bytes_per_second),
    }
    compute: defaultdict[str, float] = defaultdict(float)
    for kind, flops in (load.flops or {}).items():
        if (ceiling := peaks.of(kind)) and load.seconds:
            compute[NAMES[ceiling[0]]] += flops / load.seconds / ceiling[1]
    # work without a FLOP reaches nothing of the reference
    if load.flops is not None and not compute and peaks.reference:
        compute[NAMES[peaks.reference[0]]] = 0.0
    return {name: share for name, share in memory.items() if share is not None} | dict(compute)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel, a launch, a range, a layer, or the total.

    Attributes:
        level: `kernel`, `launch`, `range`, `layer` or `total`.
        name: whole name of a kernel or layer, or path of a range (`train_step/forward`).
        where: ranges of a launch, owner of a range, or pass of a layer.
        number: number in plot and tables: `1` for the slowest kernel or layer, `R1` for the first range.
    """

    level: str
    name: str
    label: str
    load: Load
    shares: Mapping[str, float]
    time_share: float
    where: str = ""
    number: str = ""

    @property
    def memory_share(self) -> float | None:
        """Share of the peak bandwidth of DRAM."""
        return self.shares.get(DRAM)

    @property
    def fullest_pipe(self) -> str:
        """The compute ceiling with the largest share; empty where there is none."""
        pipes = [name for name in self.shares if name not in (DRAM, L2)]
        return max(pipes, key=lambda name: self.shares[name], default="")

    @property
    def compute_share(self) -> float | None:
        """Share of the peak of the fullest pipe."""
        return self.shares.get(self.fullest_pipe)

    @property
    def binds(self) -> str | None:
        """The ceiling that would be hit first if everything went faster; None where FLOPs or bytes are unknown."""
        if self.memory_share is None or self.compute_share is None:
            return None
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def share(self) -> float | None:
        """Share of the ceiling that binds."""
        return self.shares[self.binds] if self.binds else None

    @property
    def limit(self) -> Limit:
        """The kind of the ceiling that is near."""
        if self.share is None or self.share < NEAR:
            return Limit.neither
        if self.binds in (DRAM, L2):
            return (
                Limit.cached
                if self.share > ABOVE and self.load.bytes_basis is Basis.analytic
                else Limit.memory
            )
        return Limit.unclear if self.load.may_be_less else Limit.compute

    @property
    def has_place(self) -> bool:
        """Whether the row is a point in the plane of intensity and rate."""
        return bool(self.load.intensity and self.load.flops_per_second)

    @property
    def flops_are_estimated(self) -> bool:
        """Whether the FLOPs rest on something else than counters."""
        return self.load.flops_basis is not Basis.counted

    @property
    def bytes_are_estimated(self) -> bool:
        """Whether the bytes rest on something else than counters."""
        return self.load.bytes_basis is not Basis.counted

    def is_estimated(self, ceiling: str) -> bool:
        """Whether the share of a ceiling is an estimate; a measured percentage is not, and L2 is always counted."""
        basis = self.load.bytes_basis if ceiling == DRAM else self.load.flops_basis
        return ceiling != L2 and basis not in (Basis.counted, Basis.percentage)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The data of a plot, its tables and sentences.

    Attributes:
        parts: kernels by name, or layers by pass; the slowest first.
        ranges: ranges by path, in the order in which they began; passes of a record.
        launches: single launches in their order; empty for a record.
        analytic: whether FLOPs and bytes come from the definition of the layers.
    """

    title: str
    peaks: Peaks
    parts: tuple[Row, ...]
    ranges: tuple[Row, ...]
    total: Row
    launches: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    analytic: bool = False

    @property
    def noun(self) -> str:
        """The plural noun for the parts."""
        return "layers" if self.analytic else "kernels"

    @property
    def percentages(self) -> bool:
        """Whether FLOPs are shares of peak of the busiest part of the SM."""
        return any(row.load.flops_basis is Basis.percentage for row in self.launches)

    @property
    def estimated(self) -> bool:
        """Whether FLOPs or bytes of a launch are estimates."""
        return any(row.flops_are_estimated or row.bytes_are_estimated for row in self.launches)
