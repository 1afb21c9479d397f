"""Document: a comparison as versioned JSON, comparison.json.

`judging.compare` builds it; reports, plots, CSV files and `perfexp check` read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from perfexp.comparison.comparability import Difference
from perfexp.records.record import Key, Status
from perfexp.statistics.distributions import ALPHA

#: History: 1 is the first version.
SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """Verdict on a pair of figures.

    Reports adapt the words for better and worse to the measure, for example FASTER or LESS.
    """

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


class Compared(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One figure of two points: a pair, for short.

    Attributes:
        side: name of the other side; the baseline is `A`.
        point: identity in words, without the words common to all pairs.
        curve: identity in words, without the input size.
        model: name of the baseline's model.
        key: key of the baseline's point.
        measure: name in `measures.MEASURES`.
        unit: SI unit of both figures.
        baseline: the baseline's figure in `unit`, as a geometric mean over its processes.
        other: the other side's figure.
        processes: number of processes of the baseline and of the other side.
        estimated: whether each side's figure is estimated from others, or has too few samples for
            an interval.
        ratio: other over baseline; None if either is 0.
        low: lower end of the ratio's interval, at the side's level; None without an interval.
        high: upper end of the interval.
        p: p-value of a difference beyond the margin; 1 without an interval.
        word: verdict as reports name it: FASTER, SLOWER, LESS, …
        clock: disagreement between time and cycles in words, empty if they agree; None unless both
            have a verdict.
        further_processes: processes to add on each side for a verdict; None if unknown or already
            decided.
        confounders: differing facts that prevent a comparison, including allowed confounders.
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
    """One side: name, the user's argument, runs, and differences from the baseline.

    Attributes:
        name: `A` for the baseline, then `B`, …
        source: the user's argument.
        runs: names of the runs.
        missing: runs without a record.
        differences: facts that differ from the baseline's, for all pairs together.
        level: level of a single verdict, 1 minus interval confidence; below 5 % if `perfexp ab`
            measured both sides.
        decided_by: measures that decide in `perfexp ab`. Empty for each point's first time; None if
            unknown.
        coverage: share of the convolutions' FLOPs that the algorithm computed, in words; empty if
            all of it is proven.
        warnings: codes of the runs' errors and warnings.
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
    """Point, or measure at a point, that only one side has.

    Attributes:
        side: name of the side that has it.
        point: the point in words.
        against: name of the side without it.
        status: status of the point on that side, if it tried.
        measure: the measure; None for a whole point.
    """

    side: str
    point: str
    against: str
    status: Status | None = None
    measure: str | None = None


class Mean(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Geometric mean ratio over one measure and phase, with its 95 % interval over models.

    Attributes:
        ratio: mean of the other side's figure over the baseline's.
        low: lower end of the interval; None if there are too few models.
        high: upper end of the interval.
        pairs: number of pairs in the mean.
        models: number of models in the mean.
    """

    side: str
    phase: str
    measure: str
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    models: int


class DeviceSummary(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Device compared with the baseline's device in one phase.

    Ratios are geometric means over comparable pairs.

    Attributes:
        speedup: the baseline's time over the other side's time.
        throughput_ratio: the other side's rate over the baseline's rate.
        memory_efficiency: ratio between the rates per byte of peak memory.
        accuracy_difference: the other side's accuracy minus the baseline's accuracy.
        undecided: names of ratios that contain an undecided pair.
    """

    side: str
    phase: str
    speedup: float | None
    throughput_ratio: float | None
    memory_efficiency: float | None
    accuracy_difference: float | None
    undecided: tuple[str, ...] = ()


class LayerDifference(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Contribution of a layer to the difference between two calls.

    Attributes:
        point: the point in words.
        layer: name of the layer.
        which: pass, for example `forward`.
        baseline_seconds: profiled median time in the first process, including the gap before the
            layer; 0 if the baseline does not have the layer.
        other_seconds: profiled median time for the other side.
        share: share in the total difference over all layers.
        agrees: whether profiled and timed calls took equally long on both sides; if not, the times
            are unreliable.
        baseline_kernels: short kernel names on the baseline.
        other_kernels: short kernel names on the other side.
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
        schema_version: version of the JSON's structure.
        perfexp_version: perfexp version that compared.
        margin: largest difference that counts as the same; see `judging.Settings`.
        fdr: tolerated share of false verdicts among all verdicts other than UNDECIDED.
        allowed: confounders that the user accepts.
        constant: facts common to all pairs, in words.
        sides: the baseline first.
        pairs: all figures by measure. They are in batch order if only the batch size varies;
            otherwise the largest regressions come first.
        means: geometric means over several pairs.
        alone: points and measures that only one side has.
        layers: layers' contributions to the differences.
        devices: summaries of sides on another device than the baseline's.
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

    def of_side(self, name: str) -> list[Compared]:
        """Return the pairs of the side with this name."""
        return [pair for pair in self.pairs if pair.side == name]

    def to_json(self) -> bytes:
        """Return the comparison as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def with_verdict(pairs: Iterable[Compared], verdict: Verdict) -> list[Compared]:
    """Return the pairs with a verdict."""
    return [pair for pair in pairs if pair.verdict is verdict]


def measures_of(pairs: Iterable[Compared]) -> list[str]:
    """Return the measures of some pairs, each once."""
    return list(dict.fromkeys(pair.measure for pair in pairs))
