"""Roofline data: work in kernels, ranges or layers, and the share of each ceiling it reaches.

The model follows Williams, Waterman and Patterson, Roofline (CACM 52:4, 2009). Attainable FLOP/s
are the smaller value among peak FLOP/s and intensity × bandwidth. Each data type has its own
compute ceiling, since the pipes (execution units) run side by side, and the fullest pipe counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from perfexp.roofline.peaks import NAMES, Peaks

DRAM, L2 = "DRAM", "L2"
#: Owners of a range: push/pop ranges belong to a thread, start/end ranges to the process.
THREAD, PROCESS = "of a thread", "of the process"
#: Smallest share at which a ceiling is the limit, as in ncu's rules.
NEAR = 0.6
#: Share of a ceiling that clocks and rounding do not explain.
ABOVE = 1.02


class Basis(StrEnum):
    """The source for FLOPs or bytes; times are always measured."""

    counted = "counted"
    instructions = "instructions"  # counted, times their usual size
    percentage = "percentage"  # a measured share of a peak
    analytic = "analytic"  # the definition of the layer
    mixed = "mixed"


class Limit(Enum):
    """What limits a row, as words for tables."""

    memory = "near a memory ceiling"
    cached = "above the memory ceiling"
    compute = "near a compute ceiling"
    unclear = "of unclear limit"
    neither = "near neither"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work and its duration; None if a quantity is unknown.

    Attributes:
        seconds: duration of all launches together.
        launches: number of launches or layers.
        flops: FLOPs by data type, for example `fp32`, `half` or `tensor fp16`.
        may_be_less: whether fewer FLOPs may have been computed, for example by Winograd.
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
        """Return the FLOPs over all data types; None if they are unknown."""
        if self.flops is None:
            return None
        return sum(self.flops.values())

    @property
    def intensity(self) -> float | None:
        """Return FLOPs per DRAM byte; None if nothing was moved."""
        return ratio(self.total_flops, self.dram_bytes)

    @property
    def l2_intensity(self) -> float | None:
        """Return FLOPs per L2 byte; None if nothing was moved."""
        return ratio(self.total_flops, self.l2_bytes)

    @property
    def flops_per_second(self) -> float | None:
        """Return the achieved FLOP/s over all data types; None if unknown."""
        return ratio(self.total_flops, self.seconds)


def together(loads: Iterable[Load]) -> Load:
    """Return the sum of at least one load; a quantity unknown in one is unknown in the sum.

    Kernels, ranges and the whole file have such sums.
    """
    parts = list(loads)
    flops: Counter[str] | None = Counter()
    for part in parts:
        if flops is None or part.flops is None:
            flops = None
            break
        flops.update(part.flops)
    return Load(
        seconds=sum(part.seconds for part in parts),
        launches=sum(part.launches for part in parts),
        flops=None if flops is None else dict(flops),
        dram_bytes=_sum([part.dram_bytes for part in parts]),
        l2_bytes=_sum([part.l2_bytes for part in parts]),
        flops_basis=_common({part.flops_basis for part in parts}),
        bytes_basis=_common({part.bytes_basis for part in parts}),
        may_be_less=any(part.may_be_less for part in parts),
    )


def _common(bases: Collection[Basis]) -> Basis:
    """Return the only basis, or `mixed` for several."""
    first, *others = bases
    if others:
        return Basis.mixed
    return first


def _sum(amounts: Sequence[float | None]) -> float | None:
    """Return the sum of bytes; None if any amount is unknown."""
    counted = [amount for amount in amounts if amount is not None]
    if len(counted) == len(amounts):
        return sum(counted, 0.0)
    return None


def ratio(above: float | None, below: float | None) -> float | None:
    """Return a quotient; None if a figure is unknown or the divisor is 0."""
    if above is None or not below:
        return None
    return above / below


def shares_of(load: Load, peaks: Peaks) -> dict[str, float]:
    """Return a load's rates as fractions of the peaks, by ceiling name, for example `DRAM`.

    Ceilings whose peak or whose work is unknown are left out.
    """
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
class RooflineRow:
    """A kernel, a launch, a range, a layer, or the total, with its place below the ceilings.

    Attributes:
        level: `kernel`, `launch`, `range`, `layer` or `total`.
        name: full kernel or layer name, or range path (`train_step/forward`).
        label: short name.
        load: work and time.
        shares: see `shares_of`.
        time_share: fraction of the total time.
        where: a launch's ranges, a range's owner, or a layer's pass.
        number: number in plot and tables, for example `1` for the slowest kernel or layer and `R1`
            for the first range.
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
        """Return the share of DRAM's peak bandwidth; None if unknown."""
        return self.shares.get(DRAM)

    @property
    def fullest_pipe(self) -> str:
        """Return the compute ceiling with the largest share; empty if there is none."""
        pipes = [name for name in self.shares if name not in (DRAM, L2)]
        return max(pipes, key=self.shares.__getitem__, default="")

    @property
    def compute_share(self) -> float | None:
        """Return the share of the fullest pipe's peak; None if unknown."""
        return self.shares.get(self.fullest_pipe)

    @property
    def binds(self) -> str | None:
        """Return the ceiling that would be hit first if everything went faster.

        None if FLOPs or bytes are unknown.
        """
        if self.memory_share is None or self.compute_share is None:
            return None
        return max(self.shares, key=self.shares.__getitem__)

    @property
    def share(self) -> float | None:
        """Return the share of the binding ceiling; None if there is none."""
        if not self.binds:
            return None
        return self.shares[self.binds]

    @property
    def limit(self) -> Limit:
        """Return what limits the row: the ceiling that binds it, if that is near.

        Plots color the row by it.
        """
        if self.share is None or self.share < NEAR:
            return Limit.neither
        if self.binds in (DRAM, L2):
            if self.share > ABOVE and self.load.bytes_basis is Basis.analytic:
                return Limit.cached
            return Limit.memory
        if self.load.may_be_less:
            return Limit.unclear
        return Limit.compute

    @property
    def has_place(self) -> bool:
        """Return whether the row has both intensity and rate, so that it can be drawn."""
        return bool(self.load.intensity and self.load.flops_per_second)

    @property
    def flops_are_estimated(self) -> bool:
        """Return whether the FLOPs do not come from counters."""
        return self.load.flops_basis is not Basis.counted

    @property
    def bytes_are_estimated(self) -> bool:
        """Return whether the bytes do not come from counters."""
        return self.load.bytes_basis is not Basis.counted

    def is_estimated(self, ceiling: str) -> bool:
        """Return whether a ceiling's share is an estimate.

        A measured percentage is not an estimate, and L2 is always counted.
        """
        basis = self.load.bytes_basis if ceiling == DRAM else self.load.flops_basis
        return ceiling != L2 and basis not in (Basis.counted, Basis.percentage)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The data for a plot, its tables and sentences.

    Attributes:
        parts: kernels by name, or layers by pass; slowest first.
        ranges: ranges by path, in the order they began; for a record, its passes.
        total: everything together.
        launches: single launches in their order; empty for a record.
        notes: caveats for the user.
        analytic: whether FLOPs and bytes come from layer definitions.
    """

    title: str
    peaks: Peaks
    parts: tuple[RooflineRow, ...]
    ranges: tuple[RooflineRow, ...]
    total: RooflineRow
    launches: tuple[RooflineRow, ...] = ()
    notes: tuple[str, ...] = ()
    analytic: bool = False

    @property
    def noun(self) -> str:
        """Return the plural noun for the parts."""
        if self.analytic:
            return "layers"
        return "kernels"

    @property
    def percentages(self) -> bool:
        """Return whether FLOPs are peak shares from the busiest SM part."""
        return any(row.load.flops_basis is Basis.percentage for row in self.launches)

    @property
    def estimated(self) -> bool:
        """Return whether any launch has estimated FLOPs or bytes."""
        return any(row.flops_are_estimated or row.bytes_are_estimated for row in self.launches)
