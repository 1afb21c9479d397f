"""Standing: how the work of a kernel, a range or a layer stands to the roofs.

The model is that of Williams, Waterman and Patterson, Roofline (CACM 52:4, 2009): no more than the smaller of peak
FLOP/s and intensity × bandwidth can be reached. With several kinds of FLOPs each has its own roof, since the pipes run
side by side, and the one that is fullest counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from perfexp.roofline.peaks import NAMES, Peaks

DRAM, L2 = "DRAM", "L2"
#: Of what a range is: push/pop ranges are of a thread, start/end ranges of the process.
THREAD, PROCESS = "of a thread", "of the process"
#: From this part of a roof on, the roof is what holds it back; below it, none does. ncu's rules draw the line there.
NEAR = 0.6


class Basis(StrEnum):
    """Where a number of FLOPs or bytes comes from; times are measured, whatever the work rests on."""

    #: By the device.
    counted = "counted"
    #: Instructions were counted, and taken for the usual size.
    instructions = "instructions"
    #: A measured part of a peak.
    percentage = "percentage"
    #: By definition of the layer.
    analytic = "analytic"
    #: Of several of them together.
    mixed = "mixed"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What was done in some time.

    Attributes:
        seconds: of all launches.
        launches: how many.
        flops: by the roof that they count against; None where they are not known.
        dram_bytes: read and written; None likewise.
        l2_bytes: through L2; None likewise.
        flops_basis: where the FLOPs come from.
        bytes_basis: where the bytes of DRAM do.
    """

    seconds: float
    launches: int = 1
    flops: Mapping[str, float] | None = None
    dram_bytes: float | None = None
    l2_bytes: float | None = None
    flops_basis: Basis = Basis.counted
    bytes_basis: Basis = Basis.counted

    @property
    def total_flops(self) -> float | None:
        """Of all kinds."""
        return None if self.flops is None else sum(self.flops.values())

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of DRAM; None where one is not known, or nothing was moved."""
        return _ratio(self.total_flops, self.dram_bytes)

    @property
    def l2_intensity(self) -> float | None:
        """FLOPs per byte of L2."""
        return _ratio(self.total_flops, self.l2_bytes)

    @property
    def flops_per_second(self) -> float | None:
        """Achieved."""
        return _ratio(self.total_flops, self.seconds)

    @property
    def dram_bytes_per_second(self) -> float | None:
        """Achieved."""
        return _ratio(self.dram_bytes, self.seconds)

    @property
    def l2_bytes_per_second(self) -> float | None:
        """Achieved."""
        return _ratio(self.l2_bytes, self.seconds)


def together(loads: Iterable[Load]) -> Load:
    """Several loads as one; what is not known of one is not known of all.

    Args:
        loads: at least one.
    """
    parts = list(loads)
    kinds = [part.flops for part in parts]
    sums: defaultdict[str, float] = defaultdict(float)
    for name, flops in (item for kind in kinds if kind is not None for item in kind.items()):
        sums[name] += flops
    return Load(
        seconds=sum(part.seconds for part in parts),
        launches=sum(part.launches for part in parts),
        flops=None if None in kinds else dict(sums),
        dram_bytes=_sum(part.dram_bytes for part in parts),
        l2_bytes=_sum(part.l2_bytes for part in parts),
        flops_basis=_basis(part.flops_basis for part in parts),
        bytes_basis=_basis(part.bytes_basis for part in parts),
    )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Parts of the roofs that a load reaches.

    Attributes:
        shares: by the name of the roof (`DRAM`, `L2`, `FP32`, …): achieved rate ÷ peak.
    """

    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def memory_share(self) -> float | None:
        """Of the peak bandwidth of DRAM."""
        return self.shares.get(DRAM)

    @property
    def compute_share(self) -> float | None:
        """Of the peak of the fullest pipe."""
        return max((share for name, share in self.shares.items() if name not in (DRAM, L2)), default=None)

    @property
    def binds(self) -> str | None:
        """The roof that would be hit first if everything went faster; None where FLOPs or bytes are not known."""
        if self.memory_share is None or self.compute_share is None:
            return None
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def share(self) -> float | None:
        """Of the roof that binds."""
        return self.shares[self.binds] if self.binds else None


def stand(load: Load, peaks: Peaks) -> Standing:
    """How a load stands to the roofs.

    Args:
        load: that took some time.
        peaks: of the device.
    """
    shares: dict[str, float] = {}
    for name, achieved, peak in (
        (DRAM, load.dram_bytes_per_second, peaks.dram_bytes_per_second),
        (L2, load.l2_bytes_per_second, peaks.l2_bytes_per_second),
    ):
        if achieved is not None and peak:
            shares[name] = achieved / peak
    by_roof: defaultdict[str, float] = defaultdict(float)
    for kind, flops in (load.flops or {}).items():
        roof = peaks.of(kind)
        if roof and load.seconds:
            by_roof[NAMES[roof[0]]] += flops / load.seconds / roof[1]
    if load.flops is not None and not by_roof and peaks.reference:
        by_roof[NAMES[peaks.reference[0]]] = 0.0
    return Standing(shares=shares | dict(by_roof))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel, a launch, a range, a layer, or all of it.

    Attributes:
        level: `kernel`, `launch`, `range`, `layer` or `total`.
        name: of the kernel or layer; of a range its path, `train_step/forward`.
        label: short name.
        load: what it did.
        standing: to the roofs.
        time_share: of all.
        where: of a launch its ranges, of a range whether it is of a thread or of the process.
        mark: the end of the label, or a word of it, that tells it from other rows, if it needs one.
    """

    level: str
    name: str
    label: str
    load: Load
    standing: Standing
    time_share: float
    where: str = ""
    mark: str = ""

    @property
    def flops_are_estimated(self) -> bool:
        """Whether the FLOPs, and what is made of them, rest on something else than counters."""
        return self.load.flops_basis is not Basis.counted

    @property
    def bytes_are_estimated(self) -> bool:
        """Whether the bytes do."""
        return self.load.bytes_basis is not Basis.counted

    @property
    def compute_is_estimated(self) -> bool:
        """Whether the part of the compute roof is: a percentage was measured as it is."""
        return self.load.flops_basis not in (Basis.counted, Basis.percentage)

    @property
    def memory_is_estimated(self) -> bool:
        """Whether the part of the memory roof is."""
        return self.load.bytes_basis not in (Basis.counted, Basis.percentage)


def _basis(found: Iterable[Basis]) -> Basis:
    each = set(found)
    return each.pop() if len(each) == 1 else Basis.mixed


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
