"""Result of a comparison as versioned JSON, comparison.json."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from perfexp.comparison.comparability import Difference
from perfexp.records.record import Key, Status
from perfexp.statistics.distributions import ALPHA

#: History: 1 — first version.
SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """Verdict on a pair of figures; reports name the first two as it suits the measure (FASTER, LESS, …)."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


class Compared(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One figure of two points.

    Attributes:
        side: name of the other side; the baseline is `A`.
        point: identity in words, without the words common to all pairs.
        curve: identity in words without the input size.
        key: key of the baseline's point.
        baseline: figure of the baseline in the unit, the geometric mean over its processes.
        processes: number of processes of the baseline and of the other side.
        estimated: whether the figure of each is estimated from others, or has too few samples for an interval.
        ratio: other over baseline; None if one of them is 0.
        low: lower end of the ratio's interval at the level of its side, up to `high`; None without one.
        p: p-value of a difference beyond the margin; 1 without an interval.
        word: the verdict as reports name it: FASTER, SLOWER, LESS, …
        clock: disagreement of time and cycles in words, empty if they agree; None unless both have a verdict.
        further_processes: how many more processes of each side would decide; None if unknown, or decided.
        confounders: facts that differ and prevent a comparison, with allowed confounders.
    """

    side: str
    point: str
    curve: str
    model: str
    key: Key
    measure: str
    unit: str
    baseline: float
    other: float
    processes: tuple[int, int]
    ratio: float | None
    low: float | None
    high: float | None
    p: float
    verdict: Verdict
    word: str
    clock: str | None = None
    further_processes: int | None = None
    confounders: tuple[str, ...] = ()
    estimated: tuple[bool, bool] = (False, False)


class SideFacts(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One side: its name, the user's argument, its runs, those without a record, and differences from the baseline.

    Attributes:
        level: level of a single verdict, 1 minus the confidence of intervals; below 5 % if `perfexp ab` measured both.
        decided_by: measures by which `perfexp ab` decides, empty for the first time of each point; None if unknown.
        coverage: share of the convolutions' FLOPs that the algorithm computed, in words, unless all of it is proven.
        warnings: codes of the errors and warnings of its runs.
    """

    name: str
    source: str
    runs: tuple[str, ...]
    missing: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    level: float = ALPHA
    decided_by: tuple[str, ...] | None = None
    coverage: str = ""
    warnings: tuple[str, ...] = ()


class Alone(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A point, or a measure of it, that one side has alone; `status` is that of the other side (`against`), if any."""

    side: str
    point: str
    against: str
    status: Status | None = None
    measure: str | None = None


class Mean(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Geometric mean of the ratios of one measure and phase, with its 95 % interval over models (None with too few)."""

    side: str
    phase: str
    measure: str
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    models: int


class DeviceSummary(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Another device against the baseline's in one phase; ratios are geometric means over the comparable pairs.

    Attributes:
        speedup: time of the baseline over time of the other side.
        throughput_ratio: rate of the other side over that of the baseline.
        memory_efficiency: ratio of the rates per byte of peak memory.
        accuracy_difference: accuracy of the other side minus that of the baseline.
        undecided: names of the ratios that contain an undecided pair.
    """

    side: str
    phase: str
    speedup: float | None
    throughput_ratio: float | None
    memory_efficiency: float | None
    accuracy_difference: float | None
    undecided: tuple[str, ...] = ()


class LayerDifference(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a layer contributes to the difference of a pair's call.

    Attributes:
        which: pass: `forward`, …
        baseline_seconds: median time as profiled, with the gap before it, of the first process; 0 where the baseline
            does not have the layer.
        share: share of the difference of all layers.
        agrees: whether both profiled calls took as long as the timed ones; if not, the times do not hold.
        baseline_kernels: short names of the kernels that the baseline ran, of `other_kernels` the other side.
    """

    side: str
    point: str
    layer: str
    which: str
    baseline_seconds: float
    other_seconds: float
    share: float
    baseline_kernels: tuple[str, ...] = ()
    other_kernels: tuple[str, ...] = ()
    agrees: bool = True


class Comparison(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Complete result of a comparison; comparison.json.

    Attributes:
        perfexp_version: version of perfexp that compared.
        margin: difference up to which two figures count as the same, see `judging.Settings`.
        fdr: tolerated share of false verdicts among all that are not UNDECIDED.
        allowed: confounders that the user accepts.
        constant: facts common to all pairs, in words.
        pairs: all figures by measure: in the order of batch sizes alone, otherwise the largest regressions first.
    """

    schema_version: int = SCHEMA_VERSION
    perfexp_version: str
    margin: float
    fdr: float
    allowed: tuple[str, ...]
    constant: str
    sides: tuple[SideFacts, ...]
    pairs: tuple[Compared, ...]
    means: tuple[Mean, ...]
    alone: tuple[Alone, ...]
    layers: tuple[LayerDifference, ...]
    devices: tuple[DeviceSummary, ...] = ()

    def to_json(self) -> bytes:
        """The comparison as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
