"""Judging: ratios and verdicts of all pairs of two or more sides."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from perfexp import __version__
from perfexp.comparison import comparability, device_summary, layer_differences, pairing
from perfexp.comparison.comparability import Difference
from perfexp.comparison.document import Alone, Compared, Comparison, Mean, SideFacts, Verdict
from perfexp.comparison.measures import MEASURES, Measure, repeats
from perfexp.comparison.pairing import KEY_FIELDS, Matching, Measurement, Side
from perfexp.errors import UserError
from perfexp.records.point_times import DEVICE_TIMES, GRAPH
from perfexp.records.record import Key, Status
from perfexp.statistics import ratios
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.ratios import LogRatio
from perfexp.summaries.subject import common_device

_WORDS = {Verdict.SAME: "SAME", Verdict.UNDECIDED: "UNDECIDED", Verdict.NOT_COMPARABLE: "NOT COMPARABLE"}
#: Whose the figures of a run on several devices are.
_OF_RANKS = "; batch, times, cycles and memory are of one rank, throughput and energy of all"
#: Level and most degrees of freedom of a verdict on one process of each side: either may be one of the few that are
#: far from the others, which only several show.
_ALONE, _ALONE_DEGREES = 0.01, 3.0
#: Relative rounding error of a figure.
_ROUNDING = 1e-12
#: Verdicts on time and on cycles that disagree, and why.
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
    """What the user chooses.

    Attributes:
        margin: difference up to which two figures count as the same: relative, but absolute for exact measures, such
            as 0.01 for one point of accuracy in a hundred.
        fdr: tolerated share of false verdicts among all that are not UNDECIDED.
        measures: the measures to compare.
        allowed: accepted confounders.
    """

    margin: float = 0.01
    fdr: float = 0.05
    measures: Collection[str] = tuple(MEASURES)
    allowed: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """One figure of a pair before its verdict."""

    side: str
    measure: str
    points: tuple[Measurement, Measurement]
    figures: tuple[Repeats, Repeats]
    ratio: LogRatio | None
    confounders: tuple[Difference, ...]
    level: float

    @property
    def is_comparable(self) -> bool:
        """Whether no confounder prevents the comparison."""
        return all(difference.allowed for difference in self.confounders)

    def p_values(self, margin: float) -> tuple[float, float]:
        """P-values of a difference beyond and within a margin, in units in which 5 % is the level of the verdict."""
        if not self.level or not self.ratio:
            return 1.0, 1.0
        beyond, within = self.ratio.p_beyond(margin), self.ratio.p_within(margin)
        return min(1.0, ALPHA / self.level * beyond), min(1.0, ALPHA / self.level * within)


def compare(sides: Sequence[Side], settings: Settings) -> Comparison:
    """Compare each side with the first one, the baseline.

    A verdict needs both: the ratio's interval lies wholly beyond the margin (BETTER, WORSE) or within it (SAME), and
    it is among those that Benjamini and Hochberg's procedure selects from all pairs of the measure, of all sides. The
    procedure is applied twice, for differences and for SAME. An exact measure has no interval: its figures themselves
    decide. Runs that took turns until a comparison had decided have the level of that look (`statistics.sequential`).

    Raises:
        UserError: two sides contain the same run, or nothing of two sides can be paired.
    """
    baseline, *others = sides
    _refuse_same_runs(sides)
    matched = [(other, pairing.match(baseline, other)) for other in others]
    every = [one for _, matching in matched for pair in matching.pairs for one in pair]
    for other, matching in matched:
        if not matching.pairs:
            raise UserError(_nothing_in_common(baseline, other))
    between, figures = _Differences(settings.allowed), _Figures(settings.measures)
    drafts = list(_drafts(matched, between, figures))
    names = pairing.varying(pair[0] for _, matching in matched for pair in matching.pairs)
    names = names or list(KEY_FIELDS[1:])
    verdicts = _verdicts(drafts, settings)
    clocks = _clocks(drafts, verdicts)
    alone = [_alone(baseline, other, matching, one) for other, matching in matched for one in matching.alone]
    pairs = [_compared(*judged, names, settings) for judged in zip(drafts, verdicts, clocks, strict=True)]
    facts = [
        _facts(baseline),
        *(_facts(other, between.of_all(matching), matching.level) for other, matching in matched),
    ]
    return Comparison(
        perfexp_version=__version__,
        margin=settings.margin,
        fdr=settings.fdr,
        allowed=tuple(settings.allowed),
        constant=_constant(every, names),
        sides=tuple(facts),
        pairs=tuple(sorted(pairs, key=_by_batch if _differs_in_batch(pairs) else _regressions_first)),
        means=tuple(_means(drafts)),
        alone=(*alone, *_measures_alone(baseline, matched, figures, names)),
        layers=tuple(
            line
            for other, matching in matched
            for one, two in matching.pairs
            for line in layer_differences.of_pair(other.name, pairing.label(one, names), one, two)
        ),
        devices=tuple(device_summary.summaries(facts, pairs)),
    )


def _drafts(matched: Sequence[tuple[Side, Matching]], between: _Differences, figures: _Figures) -> Iterator[_Draft]:
    """The ratios of all pairs by the measures that both points have."""
    for other, matching in matched:
        level = matching.level
        for pair in matching.pairs:
            differences = between.of(pair)
            of_baseline, of_other = map(figures.of, pair)
            for measure in (name for name in MEASURES if name in of_baseline and name in of_other):
                both = of_baseline[measure], of_other[measure]
                if level is not None:  # processes that took turns were forked from one server
                    both = both[0].without_server(), both[1].without_server()
                ratio = ratios.log_ratio(both[1], both[0]) if both[0].mean and both[1].mean else None
                own_level = ALPHA if level is None else level
                if level is None and _is_alone(both):
                    own_level, ratio = _ALONE, ratio and replace(ratio, degrees=min(ratio.degrees, _ALONE_DEGREES))
                yield _Draft(
                    side=other.name,
                    measure=measure,
                    points=pair,
                    figures=both,
                    ratio=LogRatio(value=ratio.value) if ratio and level == 0 else ratio,
                    confounders=tuple(one for one in differences if one.affects(measure)),
                    level=own_level,
                )


def _is_alone(figures: tuple[Repeats, Repeats]) -> bool:
    """Whether neither side shows how much its processes differ."""
    return all(len(one.values) == 1 for one in figures)


def _measures_alone(
    baseline: Side, matched: Sequence[tuple[Side, Matching]], figures: _Figures, names: Sequence[str]
) -> Iterator[Alone]:
    """The measures of pairs that one of the two points lacks."""
    for other, matching in matched:
        for pair in matching.pairs:
            of_baseline, of_other = map(figures.of, pair)
            for measure in (name for name in MEASURES if (name in of_baseline) is not (name in of_other)):
                ends, lacking = ((baseline, other), pair[1]) if measure in of_baseline else ((other, baseline), pair[0])
                if measure == GRAPH and "device" in {*of_baseline} & {*of_other} and not _tried_graph(lacking):
                    continue  # which points it is measured at depends on the others of the run
                point, (side, against) = pairing.label(pair[0], names), (end.name for end in ends)
                yield Alone(side=side, point=point, against=against, measure=measure)


def _tried_graph(one: Measurement) -> bool:
    points = (point for point in one.record.points if point.key == one.key)
    return any(point.metric(f"{GRAPH}_seconds") for point in points)


class _Figures:
    """The figures of points by the chosen measures; each record is evaluated once."""

    def __init__(self, measures: Collection[str]) -> None:
        self._measures = measures
        self._known: dict[int, dict[Key, dict[str, Repeats]]] = {}

    def of(self, one: Measurement) -> dict[str, Repeats]:
        """The figures of a point."""
        if id(one.record) not in self._known:
            self._known[id(one.record)] = repeats(one.record)
        figures = self._known[id(one.record)].get(one.key, {})
        return {name: figure for name, figure in figures.items() if name in self._measures}


class _Differences:
    """What differs between the points of pairs; each pair of runs is examined once."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._known: dict[tuple[int, int], list[Difference]] = {}

    def of(self, pair: tuple[Measurement, Measurement]) -> list[Difference]:
        """What differs between the runs and between the points of a pair."""
        one, two = pair
        place = id(one.record), id(two.record)
        if place not in self._known:
            self._known[place] = comparability.differences(one.record, two.record, self._allowed)
        of_points = comparability.point_differences((one.record, one.points), (two.record, two.points), self._allowed)
        return [*self._known[place], *of_points]

    def of_all(self, matching: Matching) -> tuple[Difference, ...]:
        """What differs in any pair, each difference once."""
        return tuple(dict.fromkeys(difference for pair in matching.pairs for difference in self.of(pair)))


def _verdicts(drafts: Sequence[_Draft], settings: Settings) -> list[Verdict]:
    verdicts = [Verdict.UNDECIDED if draft.is_comparable else Verdict.NOT_COMPARABLE for draft in drafts]
    for number, draft in enumerate(drafts):
        if MEASURES[draft.measure].is_exact and draft.is_comparable:
            verdicts[number] = _exact_verdict(draft, settings.margin)
    for measure in (name for name in MEASURES if not MEASURES[name].is_exact):
        numbers = [number for number, draft in enumerate(drafts) if draft.measure == measure and draft.is_comparable]
        p_values = [drafts[number].p_values(settings.margin) for number in numbers]
        beyond = ratios.benjamini_hochberg([p for p, _ in p_values], settings.fdr)
        within = ratios.benjamini_hochberg([p for _, p in p_values], settings.fdr)
        for number, (p_beyond, p_within), differs, agrees in zip(numbers, p_values, beyond, within, strict=True):
            if differs and p_beyond <= ALPHA:
                one, two = (figure.mean for figure in drafts[number].figures)
                is_better = (two < one) is MEASURES[measure].is_better_if_lower
                verdicts[number] = Verdict.BETTER if is_better else Verdict.WORSE
            elif agrees and p_within <= ALPHA:
                verdicts[number] = Verdict.SAME
    return verdicts


def _exact_verdict(draft: _Draft, margin: float) -> Verdict:
    """The verdict by the difference of two exact figures, which are rounded."""
    baseline, other = (figure.mean for figure in draft.figures)
    if abs(other - baseline) <= margin + _ROUNDING * max(baseline, other):
        return Verdict.SAME
    return Verdict.BETTER if (other < baseline) is MEASURES[draft.measure].is_better_if_lower else Verdict.WORSE


def _clocks(drafts: Sequence[_Draft], verdicts: Sequence[Verdict]) -> list[str | None]:
    """`Compared.clock` of each figure; clocks of two kinds of devices are not compared."""
    places = [(draft.side, id(draft.points)) for draft in drafts]
    of_cycles, times = dict[tuple[str, int], Verdict](), dict[tuple[str, int], str]()
    for place, draft, verdict in zip(places, drafts, verdicts, strict=True):
        if draft.measure == "cycles":
            of_cycles[place] = verdict
        elif draft.measure in DEVICE_TIMES:
            times.setdefault(place, draft.measure)  # cycles are those of the first of them
    clocks: list[str | None] = []
    for place, draft, verdict in zip(places, drafts, verdicts, strict=True):
        cycles = of_cycles.get(place, Verdict.UNDECIDED)
        one, two = (point.features["device"] for point in draft.points)
        is_decided = {verdict, cycles} <= {Verdict.BETTER, Verdict.WORSE, Verdict.SAME}
        is_known = draft.measure == times.get(place) and one == two and is_decided
        clocks.append(_CLOCKS.get((verdict, cycles), "") if is_known else None)
    return clocks


def _compared(draft: _Draft, verdict: Verdict, clock: str | None, names: Sequence[str], settings: Settings) -> Compared:
    measure, ratio, point = MEASURES[draft.measure], draft.ratio, draft.points[0]
    interval = ratio.interval_at(draft.level) if ratio else None
    baseline, other = draft.figures
    further = None  # further processes measure times and memory only
    is_repeated = measure.metric is None or max(len(one.values) for one in draft.figures) > 1
    if ratio and verdict is Verdict.UNDECIDED and is_repeated and draft.level in (ALPHA, _ALONE):
        further = ratios.further_processes(other, baseline, ratio, settings.margin)
    return Compared(
        side=draft.side,
        point=pairing.label(point, names),
        curve=pairing.label(point, [name for name in names if name != "input_size"]),
        model=point.features["model"],
        key=point.key,
        measure=draft.measure,
        unit=measure.unit,
        baseline=baseline.mean,
        other=other.mean,
        processes=(len(baseline.values), len(other.values)),
        ratio=interval.value if interval else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        p=ratio.p_beyond(settings.margin) if ratio else 1.0,
        verdict=verdict,
        word={Verdict.BETTER: measure.better, Verdict.WORSE: measure.worse, **_WORDS}[verdict],
        clock=clock,
        further_processes=further,
        confounders=tuple(dict.fromkeys(difference.key for difference in draft.confounders)),
        estimated=(_is_estimate(baseline, measure), _is_estimate(other, measure)),
    )


def _is_estimate(figure: Repeats, measure: Measure) -> bool:
    return figure.is_estimate or (figure.error is None and not measure.is_exact)


def _regressions_first(pair: Compared) -> tuple[str, int, float]:
    worst_is_high = MEASURES[pair.measure].is_better_if_lower
    ratio = pair.other / pair.baseline if pair.baseline else 1 + pair.other
    return pair.side, list(MEASURES).index(pair.measure), -ratio if worst_is_high else ratio


def _differs_in_batch(pairs: Sequence[Compared]) -> bool:
    """Whether the points of a comparison are batch sizes of one phase and input size."""
    keys = [pair.key for pair in pairs]
    return len({key.batch_size for key in keys}) > 1 and len({(key.phase, key.input_size) for key in keys}) == 1


def _by_batch(pair: Compared) -> tuple[str, int, int]:
    return pair.side, list(MEASURES).index(pair.measure), pair.key.batch_size


def _means(drafts: Sequence[_Draft]) -> Iterator[Mean]:
    """The geometric means of measures with several comparable pairs of one phase, if all of them have a ratio."""
    groups: dict[tuple[str, str, str], list[_Draft]] = {}
    for draft in drafts:
        if draft.is_comparable:
            groups.setdefault((draft.side, draft.points[0].key.phase, draft.measure), []).append(draft)
    for (side, phase, measure), group in groups.items():
        clusters: dict[str, list[float]] = {}
        for draft in group:
            if draft.ratio:
                clusters.setdefault(draft.points[0].features["model"], []).append(draft.ratio.value)
        if len(group) > 1 and all(draft.ratio for draft in group):
            mean = ratios.geometric_mean(clusters)
            low, high = mean.low, mean.high
            counts = {"pairs": len(group), "models": len(clusters)}
            yield Mean(side=side, phase=phase, measure=measure, ratio=mean.value, low=low, high=high, **counts)


def _constant(every: Sequence[Measurement], names: Sequence[str]) -> str:
    """What all points of all sides have in common, in words."""
    varying = pairing.varying(every)
    features = dict.fromkeys(name for one in every for name in one.features)
    same = [name for name in (*features, *KEY_FIELDS) if name not in (*varying, *names)]
    words = pairing.label(every[0], same, every)
    devices = common_device(one.record.environment for one in every) if "device" not in same else None
    ranks = _OF_RANKS if any("ranks" in one.record.environment for one in every) else ""
    return " on ".join(filter(None, (words, devices))) + ranks


def _facts(side: Side, differences: tuple[Difference, ...] = (), level: float | None = None) -> SideFacts:
    runs = dict.fromkeys(one.record.name for one in side.measurements)
    return SideFacts(
        name=side.name,
        source=side.source,
        runs=tuple(runs),
        missing=side.missing,
        decided_by=side.decided_by,
        coverage=side.coverage,
        warnings=side.warnings,
        differences=differences,
        level=ALPHA if level is None else level,
    )


def _alone(baseline: Side, other: Side, matching: Matching, alone: tuple[str, Measurement, Status | None]) -> Alone:
    name, one, missing = alone
    names = [name for name in (*one.features, *KEY_FIELDS) if name not in matching.subject]
    against = other.name if name == baseline.name else baseline.name
    return Alone(side=name, point=pairing.label(one, names), against=against, status=missing)


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
        points = dict.fromkeys(f"{pairing.label(one, KEY_FIELDS)}{_failure(one)}" for one in side.measurements[:3])
        has.append(f"{side.source} has {'; '.join(points)}")
    return f"No points can be paired: {', '.join(has)}. Measure the same phase, input_size and batch_size."


def _failure(one: Measurement) -> str:
    return "" if one.status is Status.OK else f" ({one.status.value})"
