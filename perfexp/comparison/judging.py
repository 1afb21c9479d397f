"""Judging: ratios and verdicts for all pairs of two or more sides.

`compare` is the way in: commands, the sweep's tables and `perfexp ab` call it with two or more
sides (`pairing.Side`) and get a `Comparison`. A draft is one figure of a pair before its verdict is
known: verdicts depend on all drafts of a measure, because of the false discovery rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import msgspec

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
    with_verdict,
)
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import KEY_FIELDS, Matching, Measurement, Side
from perfexp.errors import UserError
from perfexp.records.layer_lines import disagreement, gap_of, name_of, pass_of, seconds_of
from perfexp.records.point_times import DEVICE_TIMES, GRAPH
from perfexp.records.record import Point, Status
from perfexp.records.subject import common_device
from perfexp.roofline.kernel_names import short
from perfexp.statistics import ratios
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.ratios import LogRatio
from perfexp.version import __version__

#: Measures that can decide; the first that both runs have is used.
DECISIVE = (*DEVICE_TIMES, "latency", "throughput")
#: Verdicts in reports that do not depend on the measure.
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
    """One figure of a pair, and its verdict once it is known.

    Attributes:
        figures: the baseline's figure and the other side's.
        ratio: other over baseline; None if either is 0.
        confounders: differing facts that affect this measure.
        level: error probability of the ratio's interval; 0 for no interval.
    """

    measure: str
    figures: tuple[Repeats, Repeats]
    ratio: LogRatio | None
    confounders: tuple[Difference, ...]
    level: float
    verdict: Verdict = Verdict.UNDECIDED

    @property
    def is_exact(self) -> bool:
        """Return whether the figures themselves decide, because neither varies with a seed."""
        is_known = all(figure.within is not None for figure in self.figures)
        return MEASURES[self.measure].is_exact and is_known

    def relative(self, margin: float) -> float:
        """Return a margin as a ratio minus 1; the margin of exact measures is a difference."""
        if MEASURES[self.measure].is_exact and self.figures[0].mean:
            return margin / self.figures[0].mean
        return margin

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
        scale, margin = ALPHA / self.level, self.relative(margin)
        beyond, within = scale * self.ratio.p_beyond(margin), scale * self.ratio.p_within(margin)
        return min(1.0, beyond), min(1.0, within)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two points that belong together, the baseline's first.

    Attributes:
        side: name of the other side.
        differences: facts in which the two runs or the two points differ.
        level: level of the last look if the processes alternated (`perfexp ab`); None otherwise.
        drafts: the pair's figures, by measure.
    """

    side: str
    points: tuple[Measurement, Measurement]
    differences: tuple[Difference, ...]
    level: float | None
    drafts: dict[str, _Draft] = field(default_factory=dict)

    def draft(self, measures: Collection[str]) -> None:
        """Compute the ratios for the measures that both points have, and add them to `drafts`.

        Args:
            measures: measures that the user compares.
        """
        baselines, others = self.points[0].figures, self.points[1].figures
        for measure in MEASURES:
            if measure not in measures or measure not in baselines or measure not in others:
                continue
            level, baseline, other = self.level, baselines[measure], others[measure]
            if level is not None:  # alternating processes were forked from the same server
                baseline, other = baseline.without_server(), other.without_server()
            ratio = ratios.log_ratio(other, baseline) if baseline.mean and other.mean else None
            # a single process of each side: a wider interval
            if ratio and level is None and len(baseline.values) == len(other.values) == 1:
                ratio = replace(ratio, degrees=min(ratio.degrees, _ALONE_DEGREES))
                level = _ALONE
            if ratio and level == 0:  # too few processes for the first look
                ratio = LogRatio(value=ratio.value)
            self.drafts[measure] = _Draft(
                measure=measure,
                figures=(baseline, other),
                ratio=ratio,
                confounders=tuple(item for item in self.differences if item.affects(measure)),
                level=ALPHA if level is None else level,
            )

    @property
    def clocks(self) -> dict[str, str]:
        """Explain why the time and its cycles have different verdicts, as `{time: text}`.

        The text is empty if they agree. There is no entry if one of them is undecided or not
        comparable, or if the device kinds differ.
        """
        time = next(filter(self.drafts.__contains__, DEVICE_TIMES), "")
        baseline, other = self.points
        if (
            not time
            or "cycles" not in self.drafts
            or baseline.features["device"] != other.features["device"]
        ):
            return {}
        verdicts = self.drafts[time].verdict, self.drafts["cycles"].verdict
        if not {*verdicts} <= {Verdict.BETTER, Verdict.WORSE, Verdict.SAME}:
            return {}
        return {time: _CLOCKS.get(verdicts, "")}


def compare(sides: Sequence[Side], settings: Settings) -> Comparison:
    """Compare each side with the first side, the baseline.

    A verdict needs two conditions. First, the ratio's interval lies entirely beyond the margin
    (BETTER, WORSE) or within it (SAME). Second, the Benjamini-Hochberg procedure selects it among
    all pairs of the measure, over all sides. The procedure is applied separately to differences and
    to SAME.

    Exact measures have no interval: the figures themselves decide, except for trainings to a target
    accuracy. If processes alternated until a verdict was reached, that look's level applies
    (`statistics.sequential`).

    Raises:
        UserError: two sides contain the same run, or two sides have no points to pair.
    """
    baseline, *others = sides
    _refuse_same_runs(sides)
    matched = [(other, pairing.match(baseline, other)) for other in others]
    for other, matching in matched:
        if not matching.pairs:
            raise UserError(_nothing_in_common(baseline, other))
    pairs, alone, facts = list[Pair](), list[Alone](), [baseline.facts]
    for other, matching in matched:
        differences: dict[Difference, None] = {}
        for pair in drafted_pairs(other, matching, settings):
            pairs.append(pair)
            differences |= dict.fromkeys(pair.differences)
        level = ALPHA if matching.level is None else matching.level
        facts.append(
            msgspec.structs.replace(other.facts, differences=tuple(differences), level=level)
        )
        alone += matching.alone
    judge([draft for pair in pairs for draft in pair.drafts.values()], settings)
    every = [point for pair in pairs for point in pair.points]
    # labels name what varies among the baseline's points
    names = pairing.varying(every[::2]) or list(KEY_FIELDS[1:])
    compared, layers = list[Compared](), list[LayerDifference]()
    for pair in pairs:
        for draft in pair.drafts.values():
            compared.append(_compared(pair, draft, names, settings))
        alone += _measures_alone(baseline.name, pair, names, settings)
        layers += _layers(pair, pairing.label(pair.points[0], names))
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
        layers=tuple(layers),
        devices=tuple(device_summaries(facts, compared)),
    )


def drafted_pairs(other: Side, matching: Matching, settings: Settings) -> Iterator[Pair]:
    """Yield a side's pairs with their differences and ratios.

    The facts of two runs are compared once, not for each of their points.
    """
    run_differences: dict[tuple[int, int], list[Difference]] = {}
    for point, other_point in matching.pairs:
        runs = id(point.record), id(other_point.record)
        if runs not in run_differences:
            run_differences[runs] = comparability.differences(
                point.record, other_point.record, settings.allowed
            )
        of_points = comparability.point_differences(
            (point.record, point.points), (other_point.record, other_point.points), settings.allowed
        )
        differences = (*run_differences[runs], *of_points)
        pair = Pair(
            side=other.name,
            points=(point, other_point),
            differences=differences,
            level=matching.level,
        )
        pair.draft(settings.measures)
        yield pair


def _measures_alone(
    baseline: str, pair: Pair, names: Sequence[str], settings: Settings
) -> Iterator[Alone]:
    """Yield the measures that only one of the pair's points has.

    Args:
        baseline: name of the baseline's side.
        names: fields and features that label the point.
    """
    point, other_point = pair.points
    for measure in MEASURES:
        is_alone = (measure in point.figures) is not (measure in other_point.figures)
        if measure not in settings.measures or not is_alone:
            continue
        side, against, lacking = baseline, pair.side, other_point
        if measure in other_point.figures:
            side, against, lacking = pair.side, baseline, point
        if measure == GRAPH and "device" in pair.drafts:
            same_key = (item for item in lacking.points if item.key == lacking.key)
            if not any(item.metric(f"{GRAPH}_seconds") for item in same_key):
                continue  # a run has graph times at some of its points only, chosen among all
        yield Alone(side=side, point=pairing.label(point, names), against=against, measure=measure)


def judge(drafts: Sequence[_Draft], settings: Settings) -> None:
    """Set each figure's verdict; see `compare` for the rules.

    Figures start as UNDECIDED and remain so unless a rule applies.
    """
    judged: dict[str, list[_Draft]] = {}
    for draft in drafts:
        if not draft.is_comparable:
            draft.verdict = Verdict.NOT_COMPARABLE
        elif draft.is_exact:
            _judge_exact(draft, settings.margin)
        else:
            judged.setdefault(draft.measure, []).append(draft)
    for group in judged.values():
        p_beyond, p_within = zip(*(draft.p_values(settings.margin) for draft in group), strict=True)
        beyond = ratios.benjamini_hochberg(p_beyond, settings.fdr)
        within = ratios.benjamini_hochberg(p_within, settings.fdr)
        for index, draft in enumerate(group):
            if beyond[index] and p_beyond[index] <= ALPHA:
                draft.verdict = _better_or_worse(draft)
            elif within[index] and p_within[index] <= ALPHA:
                draft.verdict = Verdict.SAME


def _better_or_worse(draft: _Draft) -> Verdict:
    """Return the verdict for a difference beyond the margin, by the measure's direction."""
    baseline, other = draft.figures
    is_lower = other.mean < baseline.mean
    if is_lower is MEASURES[draft.measure].is_better_if_lower:
        return Verdict.BETTER
    return Verdict.WORSE


def _judge_exact(draft: _Draft, margin: float) -> None:
    """Judge by the difference between two exact figures, which are rounded."""
    baseline, other = draft.figures[0].mean, draft.figures[1].mean
    draft.verdict = _better_or_worse(draft)
    if abs(other - baseline) <= margin + _ROUNDING * max(baseline, other):
        draft.verdict = Verdict.SAME


def _compared(pair: Pair, draft: _Draft, names: Sequence[str], settings: Settings) -> Compared:
    """Return a judged figure for the document, with its interval and further processes to add.

    Args:
        names: fields and features that label the point.
    """
    measure, ratio, point = MEASURES[draft.measure], draft.ratio, pair.points[0]
    baseline, other = draft.figures
    processes = len(baseline.values), len(other.values)
    value = low = high = further = None
    p = 1.0
    if ratio:
        interval = ratio.interval(draft.level)
        value, low, high = interval.value, interval.low, interval.high
        margin = draft.relative(settings.margin)
        p = ratio.p_beyond(margin)
        # more processes help only if they repeat the measure, and if their number was not planned
        # in advance (`perfexp ab`)
        is_repeated = measure.is_time or max(processes) > 1
        can_repeat = is_repeated and draft.level in (ALPHA, _ALONE)
        if can_repeat and draft.verdict is Verdict.UNDECIDED:
            further = ratios.further_processes(other, baseline, ratio, margin)
    estimated = [
        figure.is_estimate or (figure.error is None and not draft.is_exact)
        for figure in draft.figures
    ]
    confounders = dict.fromkeys(difference.key for difference in draft.confounders)
    words = {Verdict.BETTER: measure.better, Verdict.WORSE: measure.worse, **_WORDS}
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
        ratio=value,
        low=low,
        high=high,
        p=p,
        verdict=draft.verdict,
        word=words[draft.verdict],
        clock=pair.clocks.get(draft.measure),
        further_processes=further,
        confounders=tuple(confounders),
        estimated=(estimated[0], estimated[1]),
    )


def _order(pairs: Sequence[Compared]) -> Callable[[Compared], tuple[str, int, float]]:
    """Return a sort key for tables: by side, measure, and then batch size or ratio.

    If only the batch size varies, pairs are ordered by batch size. Otherwise the largest
    regressions come first.
    """
    shapes, batches = set(), set()
    for pair in pairs:
        shapes.add((pair.key.phase, pair.key.input_size))
        batches.add(pair.key.batch_size)

    def place(pair: Compared) -> tuple[str, int, float]:
        """Return the place of a pair: side, measure, and batch size or (negated) ratio."""
        measure = list(MEASURES).index(pair.measure)
        if len(batches) > 1 and len(shapes) == 1:
            return pair.side, measure, pair.key.batch_size
        ratio = pair.other / pair.baseline if pair.baseline else 1 + pair.other
        if MEASURES[pair.measure].is_better_if_lower:
            ratio = -ratio
        return pair.side, measure, ratio

    return place


def _by_phase(pairs: Sequence[Compared]) -> dict[tuple[str, str], dict[str, list[Compared]]]:
    """Return comparable figures by side and phase, then by measure."""
    groups: dict[tuple[str, str], dict[str, list[Compared]]] = {}
    for pair in pairs:
        if pair.verdict is not Verdict.NOT_COMPARABLE:
            measures = groups.setdefault((pair.side, pair.key.phase), {})
            measures.setdefault(pair.measure, []).append(pair)
    return groups


def _means(pairs: Sequence[Compared]) -> Iterator[Mean]:
    """Yield geometric means over the comparable pairs of each side, phase and measure.

    There is a mean if there are several pairs and all of them have a ratio.
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


def _layers(pair: Pair, label: str) -> list[LayerDifference]:
    """Return each layer's contribution to the difference between a pair's calls, largest first.

    Empty unless both sides have layers and the same model.

    Args:
        label: the point in words.
    """
    point, other_point = pair.points
    if point.features["model"] != other_point.features["model"]:
        return []  # layers with the same name may be different layers
    before, after = _places(point.profiled), _places(other_point.profiled)
    if not (before and after):
        return []
    agree = disagreement(*filter(None, (point.profiled, other_point.profiled))) is None
    total = sum(map(itemgetter(0), after.values())) - sum(map(itemgetter(0), before.values()))
    lines = []
    for row in dict.fromkeys((*before, *after)):
        old, old_kernels = before.get(row, (0.0, ()))
        new, new_kernels = after.get(row, (0.0, ()))
        lines.append(
            LayerDifference(
                side=pair.side,
                point=label,
                layer=row[0],
                which=row[1],
                baseline_seconds=old,
                other_seconds=new,
                share=(new - old) / total if total else 0.0,
                baseline_kernels=tuple(old_kernels),
                other_kernels=tuple(new_kernels),
                agrees=agree,
            )
        )
    return sorted(lines, key=lambda line: -abs(line.other_seconds - line.baseline_seconds))


def _places(point: Point | None) -> dict[tuple[str, str], tuple[float, Collection[str]]]:
    """Return a point's layers by name and pass: seconds per call including gaps, and kernel names.

    Empty for None, a point without layers. Several calls of one layer add up.
    """
    places: dict[tuple[str, str], tuple[float, Collection[str]]] = {}
    if point is None:
        return places
    for line in (point.facts.get("layers") or {}).get("lines", ()):
        row = name_of(line), pass_of(line)
        seconds, kernels = places.get(row, (0.0, ()))
        kernel_names = map(short, line.get("kernels") or {})
        places[row] = (
            seconds + seconds_of(line) + gap_of(line),
            dict.fromkeys((*kernels, *kernel_names)),
        )
    return places


def device_summaries(
    sides: Sequence[SideFacts], pairs: Sequence[Compared]
) -> Iterator[DeviceSummary]:
    """Yield a summary for each phase of each side that compares another device.

    A ratio without a comparable pair is None.
    """
    devices = set()
    for facts in sides:
        if any(difference.key == "device" for difference in facts.differences):
            devices.add(facts.name)
    for (side, phase), measures in _by_phase(pairs).items():
        if side not in devices:
            continue
        means, undecided = dict[str, float](), set[str]()
        for name, group in measures.items():
            usable = [pair.ratio for pair in group if pair.ratio]
            if usable:
                means[name] = statistics.geometric_mean(usable)
            if with_verdict(group, Verdict.UNDECIDED):
                undecided.add(name)
        time = next(filter(means.__contains__, DECISIVE[:-1]), "")
        rate, memory = means.get("throughput"), means.get("memory")
        efficiency = rate / memory if rate and memory else None
        accuracies = [pair.other - pair.baseline for pair in measures.get("accuracy", ())]
        difference = statistics.fmean(accuracies) if accuracies else None
        parts = {
            "speedup": {time},
            "throughput_ratio": {"throughput"},
            "memory_efficiency": {"throughput", "memory"},
        }
        yield DeviceSummary(
            side=side,
            phase=phase,
            speedup=1 / means[time] if time else None,
            throughput_ratio=rate,
            memory_efficiency=efficiency,
            accuracy_difference=difference,
            undecided=tuple(name for name, needed in parts.items() if needed & undecided),
        )


def decisive(pairs: Sequence[Compared]) -> list[Compared]:
    """Return the pair with the deciding measure for each side and point, by point.

    The first of `DECISIVE` that a point has decides.

    Args:
        pairs: pairs of measures in `DECISIVE`.
    """
    chosen: dict[tuple[str, object], Compared] = {}
    for pair in sorted(pairs, key=lambda pair: DECISIVE.index(pair.measure)):
        chosen.setdefault((pair.side, pair.key), pair)
    return sorted(
        chosen.values(), key=lambda pair: (pair.key.phase, pair.key.input_size, pair.key.batch_size)
    )


def _constant(every: Sequence[Measurement], names: Sequence[str]) -> str:
    """Describe the facts common to all points on all sides, for example `resnet50 · fp32`.

    Args:
        every: all points.
        names: fields and features that the labels of points show anyway.
    """
    varying = {*pairing.varying(every), *names}
    features: dict[str, str] = {}
    for measurement in every:
        features |= measurement.features
    same = [name for name in (*features, *KEY_FIELDS) if name not in varying]
    text = pairing.label(every[0], same, every)
    environments = [measurement.record.environment for measurement in every]
    if "device" not in same and (device := common_device(environments)):
        text = " on ".join(filter(None, (text, device)))
    if any("ranks" in environment for environment in environments):
        text += _OF_RANKS
    return text


def _refuse_same_runs(sides: Sequence[Side]) -> None:
    """Raise `UserError` if two sides contain the same run."""
    side_of_uid: dict[str, Side] = {}
    for side in sides:
        for item in side.measurements:
            first = side_of_uid.setdefault(item.record.uid, side)
            if first is not side:
                raise UserError(
                    f"{first.source} and {side.source} contain the same run ({item.record.name}, "
                    f"uid {item.record.uid}); name two different runs."
                )


def _nothing_in_common(baseline: Side, other: Side) -> str:
    """Return the error text for two sides without a pair, with some points of each."""
    contents = []
    for side in (baseline, other):
        points = dict[str, None]()
        for item in side.measurements[:3]:
            failure = "" if item.status is Status.OK else f" ({item.status.value})"
            points[pairing.label(item, KEY_FIELDS) + failure] = None
        contents.append(f"{side.source} has {'; '.join(points)}")
    return (
        f"No points can be paired: {', '.join(contents)}. Measure the same phase, input_size and "
        "batch_size."
    )
