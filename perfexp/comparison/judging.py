"""Judging: ratios and verdicts for all pairs of two or more sides."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from perfexp import __version__
from perfexp.comparison import comparability, pairing
from perfexp.comparison.comparability import Difference
from perfexp.comparison.document import (
    Alone,
    Compared,
    Comparison,
    DeviceSummary,
    LayerDifference,
    Mean,
    SideFacts,
    Verdict,
)
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import KEY_FIELDS, Matching, Measurement, Side
from perfexp.errors import UserError
from perfexp.records.layer_lines import disagreement, gap_of, name_of, pass_of, seconds_of
from perfexp.records.point_times import DEVICE_TIMES, GRAPH
from perfexp.records.record import Point, Status
from perfexp.roofline.kernel_names import short
from perfexp.statistics import ratios
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.ratios import LogRatio
from perfexp.summaries.subject import common_device

#: Measures that can decide; the first that both runs have is used.
DECISIVE = (*DEVICE_TIMES, "latency", "throughput")
_WORDS = {
    Verdict.SAME: "SAME",
    Verdict.UNDECIDED: "UNDECIDED",
    Verdict.NOT_COMPARABLE: "NOT COMPARABLE",
}
#: Which ranks the figures of a multi-device run cover.
_OF_RANKS = "; batch, times, cycles and memory are of one rank, throughput and energy of all"
#: Level and maximum degrees of freedom if each side has a single process. Either may be an outlier,
#: which only further processes would show.
_ALONE, _ALONE_DEGREES = 0.01, 3.0
#: Relative rounding error of a figure.
_ROUNDING = 1e-12
#: Explanations for disagreeing verdicts on time and cycles.
_CLOCKS = {
    (Verdict.BETTER, Verdict.SAME): "faster only because the clock was higher",
    (Verdict.BETTER, Verdict.WORSE): "faster only because the clock was higher, with more cycles",
    (Verdict.WORSE, Verdict.SAME): "slower only because the clock was lower",
    (Verdict.WORSE, Verdict.BETTER): "slower only because the clock was lower, with fewer cycles",
    (Verdict.SAME, Verdict.BETTER): "fewer cycles in the same time: the clock was lower",
    (Verdict.SAME, Verdict.WORSE): "more cycles in the same time: the clock was higher",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """User settings for a comparison.

    Attributes:
        margin: largest difference that counts as the same: relative, but absolute for exact
            measures. For example, 0.01 is one percentage point of accuracy.
        fdr: tolerated share of false verdicts among all verdicts other than UNDECIDED.
        measures: measures to compare.
        allowed: accepted confounders.
    """

    margin: float = 0.01
    fdr: float = 0.05
    measures: Collection[str] = tuple(MEASURES)
    allowed: Collection[str] = ()


@dataclass(kw_only=True)
class _Draft:
    """One figure of a pair, and its verdict once it is known."""

    measure: str
    figures: tuple[Repeats, Repeats]
    ratio: LogRatio | None
    confounders: tuple[Difference, ...]
    level: float
    verdict: Verdict = Verdict.UNDECIDED

    @property
    def is_comparable(self) -> bool:
        """Return whether no confounder prevents the comparison."""
        return all(difference.allowed for difference in self.confounders)

    def p_values(self, margin: float) -> tuple[float, float]:
        """Return p-values for "differs by more than the margin" and "lies within it".

        They are rescaled so that the threshold is always 5 %.
        """
        if not self.level or not self.ratio:
            return 1.0, 1.0
        scale = ALPHA / self.level
        return min(1.0, scale * self.ratio.p_beyond(margin)), min(
            1.0, scale * self.ratio.p_within(margin)
        )


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Two points that belong together, the baseline's first."""

    side: str
    points: tuple[Measurement, Measurement]
    differences: tuple[Difference, ...]
    level: float | None
    drafts: dict[str, _Draft] = field(default_factory=dict)

    def draft(self, measures: Collection[str]) -> None:
        """Compute the ratios for the measures that both points have."""
        one, two = (point.figures for point in self.points)
        for measure in (
            name for name in MEASURES if name in measures and name in one and name in two
        ):
            figures, level = (one[measure], two[measure]), self.level
            if level is not None:  # alternating processes were forked from the same server
                figures = figures[0].without_server(), figures[1].without_server()
            ratio = (
                ratios.log_ratio(figures[1], figures[0])
                if figures[0].mean and figures[1].mean
                else None
            )
            if ratio and level is None and all(len(figure.values) == 1 for figure in figures):
                ratio = replace(ratio, degrees=min(ratio.degrees, _ALONE_DEGREES))
                level = _ALONE
            if ratio and level == 0:
                ratio = LogRatio(value=ratio.value)
            self.drafts[measure] = _Draft(
                measure=measure,
                figures=figures,
                ratio=ratio,
                confounders=tuple(one for one in self.differences if one.affects(measure)),
                level=ALPHA if level is None else level,
            )

    @property
    def clocks(self) -> dict[str, str]:
        """Return `Compared.clock` for the time that cycles were counted for.

        Clocks of different device kinds are not compared.
        """
        cycles, time = (
            self.drafts.get("cycles"),
            next((name for name in DEVICE_TIMES if name in self.drafts), ""),
        )
        one, two = (point.features["device"] for point in self.points)
        if not cycles or not time or one != two:
            return {}
        verdicts = self.drafts[time].verdict, cycles.verdict
        is_decided = {*verdicts} <= {Verdict.BETTER, Verdict.WORSE, Verdict.SAME}
        return {time: _CLOCKS.get(verdicts, "")} if is_decided else {}


def compare(sides: Sequence[Side], settings: Settings) -> Comparison:
    """Compare each side with the first side, the baseline.

    A verdict needs two conditions. First, the ratio's interval lies entirely beyond the margin
    (BETTER, WORSE) or within it (SAME). Second, the Benjamini-Hochberg procedure selects it among
    all pairs of the measure, over all sides. The procedure is applied separately to differences and
    to SAME.

    Exact measures have no interval: the figures themselves decide. If processes alternated until a
    verdict was reached, that look's level applies (`statistics.sequential`).

    Raises:
        UserError: two sides contain the same run, or two sides have no points to pair.
    """
    baseline, *others = sides
    _refuse_same_runs(sides)
    matched = [(other, pairing.match(baseline, other)) for other in others]
    for other, matching in matched:
        if not matching.pairs:
            raise UserError(_nothing_in_common(baseline, other))
    pairs = [pair for other, matching in matched for pair in _pairs(other, matching, settings)]
    judge([draft for pair in pairs for draft in pair.drafts.values()], settings)
    every = [point for pair in pairs for point in pair.points]
    names = pairing.varying(every[::2]) or list(KEY_FIELDS[1:])
    compared = [
        _compared(pair, draft, names, settings) for pair in pairs for draft in pair.drafts.values()
    ]
    facts = [baseline.facts]
    for other, matching in matched:
        differences = dict.fromkeys(
            one for pair in pairs if pair.side == other.name for one in pair.differences
        )
        level = ALPHA if matching.level is None else matching.level
        facts.append(
            msgspec.structs.replace(other.facts, differences=tuple(differences), level=level)
        )
    alone = [one for _, matching in matched for one in matching.alone]
    alone += [
        one for pair in pairs for one in _measures_alone(baseline.name, pair, names, settings)
    ]
    return Comparison(
        perfexp_version=__version__,
        margin=settings.margin,
        fdr=settings.fdr,
        allowed=tuple(settings.allowed),
        constant=_constant(every, names),
        sides=tuple(facts),
        pairs=tuple(sorted(compared, key=_order(compared))),
        means=tuple(_means(compared)),
        alone=tuple(alone),
        layers=tuple(
            line for pair in pairs for line in _layers(pair, pairing.label(pair.points[0], names))
        ),
        devices=tuple(device_summaries(facts, compared)),
    )


def _pairs(other: Side, matching: Matching, settings: Settings) -> Iterator[_Pair]:
    """Yield a side's pairs with their ratios; each pair of runs is checked once."""
    known: dict[tuple[int, int], list[Difference]] = {}
    for one, two in matching.pairs:
        runs = id(one.record), id(two.record)
        if runs not in known:
            known[runs] = comparability.differences(one.record, two.record, settings.allowed)
        of_points = comparability.point_differences(
            (one.record, one.points), (two.record, two.points), settings.allowed
        )
        differences = (*known[runs], *of_points)
        pair = _Pair(
            side=other.name, points=(one, two), differences=differences, level=matching.level
        )
        pair.draft(settings.measures)
        yield pair


def _measures_alone(
    baseline: str, pair: _Pair, names: Sequence[str], settings: Settings
) -> Iterator[Alone]:
    """Yield the measures that only a single point in the pair has."""
    one, two = pair.points
    for measure in (name for name in MEASURES if name in settings.measures):
        if (measure in one.figures) is (measure in two.figures):
            continue
        side, against, lacking = (
            (baseline, pair.side, two) if measure in one.figures else (pair.side, baseline, one)
        )
        tried = (
            point.metric(f"{GRAPH}_seconds") for point in lacking.points if point.key == lacking.key
        )
        if measure == GRAPH and "device" in pair.drafts and not any(tried):
            continue  # the run's other points decide which points it is measured at
        yield Alone(side=side, point=pairing.label(one, names), against=against, measure=measure)


def judge(drafts: Sequence[_Draft], settings: Settings) -> None:
    """Set each figure's verdict."""
    for draft in drafts:
        if not draft.is_comparable:
            draft.verdict = Verdict.NOT_COMPARABLE
        elif MEASURES[draft.measure].is_exact:
            _judge_exact(draft, settings.margin)
    for measure in (name for name in MEASURES if not MEASURES[name].is_exact):
        judged = [draft for draft in drafts if draft.measure == measure and draft.is_comparable]
        p_values = [draft.p_values(settings.margin) for draft in judged]
        beyond = ratios.benjamini_hochberg([p for p, _ in p_values], settings.fdr)
        within = ratios.benjamini_hochberg([p for _, p in p_values], settings.fdr)
        for draft, (p_beyond, p_within), differs, agrees in zip(
            judged, p_values, beyond, within, strict=True
        ):
            if differs and p_beyond <= ALPHA:
                draft.verdict = _better_or_worse(draft)
            elif agrees and p_within <= ALPHA:
                draft.verdict = Verdict.SAME


def _better_or_worse(draft: _Draft) -> Verdict:
    baseline, other = (figure.mean for figure in draft.figures)
    is_better = (other < baseline) is MEASURES[draft.measure].is_better_if_lower
    return Verdict.BETTER if is_better else Verdict.WORSE


def _judge_exact(draft: _Draft, margin: float) -> None:
    """Judge by the difference between two exact figures, which are rounded."""
    baseline, other = (figure.mean for figure in draft.figures)
    is_same = abs(other - baseline) <= margin + _ROUNDING * max(baseline, other)
    draft.verdict = Verdict.SAME if is_same else _better_or_worse(draft)


def _compared(pair: _Pair, draft: _Draft, names: Sequence[str], settings: Settings) -> Compared:
    measure, ratio, point = MEASURES[draft.measure], draft.ratio, pair.points[0]
    interval = ratio.interval(draft.level) if ratio else None
    baseline, other = draft.figures
    processes = len(baseline.values), len(other.values)
    further = None
    is_repeated = measure.is_time or max(processes) > 1
    if (
        ratio
        and draft.verdict is Verdict.UNDECIDED
        and is_repeated
        and draft.level in (ALPHA, _ALONE)
    ):
        further = ratios.further_processes(other, baseline, ratio, settings.margin)
    baseline_is_estimate, other_is_estimate = (
        one.is_estimate or (one.error is None and not measure.is_exact) for one in draft.figures
    )
    return Compared(
        side=pair.side,
        point=pairing.label(point, names),
        curve=pairing.label(point, [name for name in names if name != "input_size"]),
        model=point.features["model"],
        key=point.key,
        measure=draft.measure,
        unit=measure.unit,
        baseline=baseline.mean,
        other=other.mean,
        processes=processes,
        ratio=interval.value if interval else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        p=ratio.p_beyond(settings.margin) if ratio else 1.0,
        verdict=draft.verdict,
        word={Verdict.BETTER: measure.better, Verdict.WORSE: measure.worse, **_WORDS}[
            draft.verdict
        ],
        clock=pair.clocks.get(draft.measure),
        further_processes=further,
        confounders=tuple(dict.fromkeys(difference.key for difference in draft.confounders)),
        estimated=(baseline_is_estimate, other_is_estimate),
    )


def _order(pairs: Sequence[Compared]) -> Callable[[Compared], tuple[str, int, float]]:
    """Return a sort key for tables.

    If only the batch size varies, pairs are ordered by batch size. Otherwise the largest
    regressions come first.
    """
    keys = [pair.key for pair in pairs]
    is_over_batches = (
        len({key.batch_size for key in keys}) > 1
        and len({(key.phase, key.input_size) for key in keys}) == 1
    )

    def place(pair: Compared) -> tuple[str, int, float]:
        ratio = pair.other / pair.baseline if pair.baseline else 1 + pair.other
        worst_first = -ratio if MEASURES[pair.measure].is_better_if_lower else ratio
        return (
            pair.side,
            list(MEASURES).index(pair.measure),
            pair.key.batch_size if is_over_batches else worst_first,
        )

    return place


def _by_phase(pairs: Sequence[Compared]) -> dict[tuple[str, str], dict[str, list[Compared]]]:
    """Return comparable figures by side and phase, then by measure."""
    groups: dict[tuple[str, str], dict[str, list[Compared]]] = {}
    for pair in pairs:
        if pair.verdict is not Verdict.NOT_COMPARABLE:
            groups.setdefault((pair.side, pair.key.phase), {}).setdefault(pair.measure, []).append(
                pair
            )
    return groups


def _means(pairs: Sequence[Compared]) -> Iterator[Mean]:
    """Yield geometric means over several comparable pairs in one phase.

    All of the pairs must have a ratio.
    """
    for (side, phase), measures in _by_phase(pairs).items():
        for measure, group in measures.items():
            clusters: dict[str, list[float]] = {}
            for pair in group:
                if pair.ratio:
                    clusters.setdefault(pair.model, []).append(math.log(pair.ratio))
            if sum(map(len, clusters.values())) == len(group) > 1:
                mean = ratios.geometric_mean(clusters)
                yield Mean(
                    side=side,
                    phase=phase,
                    measure=measure,
                    ratio=mean.value,
                    low=mean.low,
                    high=mean.high,
                    pairs=len(group),
                    models=len(clusters),
                )


def _layers(pair: _Pair, label: str) -> list[LayerDifference]:
    """Return a pair's layers, largest contribution first.

    Empty unless both sides have layers and the same model.
    """
    one, two = pair.points
    if one.features["model"] != two.features["model"]:
        return []  # layers with the same name may be different layers
    before, after = _places(one.profiled), _places(two.profiled)
    if not (before and after):
        return []
    agree = disagreement(*filter(None, (one.profiled, two.profiled))) is None
    total = sum(seconds for seconds, _ in after.values()) - sum(
        seconds for seconds, _ in before.values()
    )
    found = []
    for layer, which in dict.fromkeys((*before, *after)):
        (old, old_kernels), (new, new_kernels) = (
            side.get((layer, which), (0.0, ())) for side in (before, after)
        )
        found.append(
            LayerDifference(
                side=pair.side,
                point=label,
                layer=layer,
                which=which,
                baseline_seconds=old,
                other_seconds=new,
                share=(new - old) / total if total else 0.0,
                baseline_kernels=tuple(old_kernels),
                other_kernels=tuple(new_kernels),
                agrees=agree,
            )
        )
    return sorted(found, key=lambda line: -abs(line.other_seconds - line.baseline_seconds))


def _places(point: Point | None) -> dict[tuple[str, str], tuple[float, Collection[str]]]:
    """Return a point's layers by name and pass: seconds per call including gaps, and kernels."""
    places: dict[tuple[str, str], tuple[float, Collection[str]]] = {}
    for line in (point.facts.get("layers") or {}).get("lines", ()) if point else ():
        seconds, kernels = places.get(place := (name_of(line), pass_of(line)), (0.0, ()))
        own = map(short, line.get("kernels") or {})
        places[place] = seconds + seconds_of(line) + gap_of(line), dict.fromkeys((*kernels, *own))
    return places


def device_summaries(
    sides: Sequence[SideFacts], pairs: Sequence[Compared]
) -> Iterator[DeviceSummary]:
    """Yield a summary for each phase of each side that compares another device."""
    devices = {side.name for side in sides if any(one.key == "device" for one in side.differences)}
    for (side, phase), measures in _by_phase(pairs).items():
        if side not in devices:
            continue
        known = {
            name: [pair.ratio for pair in group if pair.ratio] for name, group in measures.items()
        }
        means = {
            name: statistics.geometric_mean(values) for name, values in known.items() if values
        }
        time = next((name for name in DECISIVE[:-1] if name in means), "")
        rate, memory = means.get("throughput"), means.get("memory")
        accuracies = [pair.other - pair.baseline for pair in measures.get("accuracy", ())]
        parts = {
            "speedup": {time},
            "throughput_ratio": {"throughput"},
            "memory_efficiency": {"throughput", "memory"},
        }
        undecided = {
            name
            for name, group in measures.items()
            if any(pair.verdict is Verdict.UNDECIDED for pair in group)
        }
        yield DeviceSummary(
            side=side,
            phase=phase,
            speedup=1 / means[time] if time else None,
            throughput_ratio=rate,
            memory_efficiency=rate / memory if rate and memory else None,
            accuracy_difference=statistics.fmean(accuracies) if accuracies else None,
            undecided=tuple(name for name, needed in parts.items() if needed & undecided),
        )


def decisive(pairs: Sequence[Compared]) -> list[Compared]:
    """Return the pair with the deciding measure, for each run and point."""
    chosen: dict[tuple[str, object], Compared] = {}
    for pair in sorted(pairs, key=lambda pair: DECISIVE.index(pair.measure)):
        chosen.setdefault((pair.side, pair.key), pair)
    return sorted(
        chosen.values(), key=lambda pair: (pair.key.phase, pair.key.input_size, pair.key.batch_size)
    )


def _constant(every: Sequence[Measurement], names: Sequence[str]) -> str:
    """Describe the facts common to all points on all sides."""
    varying = pairing.varying(every)
    features = dict.fromkeys(name for one in every for name in one.features)
    same = [name for name in (*features, *KEY_FIELDS) if name not in (*varying, *names)]
    words = pairing.label(every[0], same, every)
    devices = (
        common_device(one.record.environment for one in every) if "device" not in same else None
    )
    ranks = _OF_RANKS if any("ranks" in one.record.environment for one in every) else ""
    return " on ".join(filter(None, (words, devices))) + ranks


def _refuse_same_runs(sides: Sequence[Side]) -> None:
    uids: dict[str, Side] = {}
    for side in sides:
        for one in side.measurements:
            if (first := uids.setdefault(one.record.uid, side)) is not side:
                raise UserError(
                    f"{first.source} and {side.source} contain the same run ({one.record.name}, uid {one.record.uid}); "
                    "name two different runs."
                )


def _nothing_in_common(baseline: Side, other: Side) -> str:
    has = []
    for side in (baseline, other):
        points = dict.fromkeys(
            f"{pairing.label(one, KEY_FIELDS)}{_failure(one)}" for one in side.measurements[:3]
        )
        has.append(f"{side.source} has {'; '.join(points)}")
    return f"No points can be paired: {', '.join(has)}. Measure the same phase, input_size and batch_size."


def _failure(one: Measurement) -> str:
    return "" if one.status is Status.OK else f" ({one.status.value})"
