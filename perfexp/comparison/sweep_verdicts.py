"""Sweep verdicts: the groups of a sweep's runs against the first of them, and how often each is the fastest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from perfexp.comparison import comparison_table, judging, pairing
from perfexp.comparison.document import Compared, Verdict
from perfexp.comparison.judging import DECISIVE, Settings, decisive
from perfexp.comparison.pairing import Group, Side
from perfexp.diagnosis.environment import fact_at
from perfexp.errors import UserError
from perfexp.records import units
from perfexp.records.record import Key, Status
from perfexp.statistics.distributions import ALPHA
from perfexp.summaries.analysis import SweepAnalysis
from perfexp.summaries.subject import MODEL_AXES

#: Verdicts that leave open which of two runs is faster.
_OPEN = (Verdict.UNDECIDED, Verdict.NOT_COMPARABLE)


@dataclass
class SweepVerdicts:
    """What the comparison of a sweep's runs shows.

    Attributes:
        title: title of the ratios: the time that is compared and the baseline, `device / run 0`, or
            `device / model=resnet50` of several runs; `device / default` for a baseline of each model.
        ratios: ratio of the times to the baseline with its verdict, or the number of each verdict over several points,
            by run's number and phase.
        notes: runs at whose points the baseline has no time, and other times that have another verdict.
        fastest: a line for each group that is the fastest at some of several points, or why none was compared.
    """

    title: str = ""
    ratios: dict[tuple[int, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fastest: list[str] = field(default_factory=list)


class TimeRatio(NamedTuple):
    """A time of a run over that of the baseline of its model, with the verdict; of rates it is that of a sample."""

    value: float
    verdict: Verdict

    @property
    def is_open(self) -> bool:
        """Whether the verdict leaves open which of the two is faster."""
        return self.verdict in _OPEN


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest group of a point by the verdicts, among the runs of one model if several groups have the same.

    Attributes:
        key: the point, of the first of the groups.
        model: model of the groups; empty if all runs of the sweep have one, or models are what is compared.
        measure: the measure that decides.
        best: axes of the group; None if no verdict on the point is decided.
        ties: axes of the other groups that are not shown to be slower; of all if nothing is decided.
    """

    key: Key
    model: str
    measure: str
    best: Mapping[str, str] | None
    ties: tuple[Mapping[str, str], ...]


class _Contest:
    """The groups of a sweep's runs that have a time, by the number of their first run, and their comparisons.

    Attributes:
        wanted: value of `compare.baseline`; None without it.
        models: model of each group; empty texts unless several groups have one of several models.
        baselines: for each model the group that `compare.baseline` names, without it the first one.
        points: groups that measured each point, with the number of the run that did, by model and point.
    """

    def __init__(self, whole: SweepAnalysis) -> None:
        groups = pairing.groups(whole.runs)
        self.groups = {str(group.number): group for group in groups if group.timed}
        self.sides = {
            name: Side.of(name, group.name, group.timed) for name, group in self.groups.items()
        }
        wanted = (fact_at(one.record.plan, "compare.baseline") for one in whole.analyses)
        self.wanted = next((str(name) for name in wanted if name is not None), None)
        self.models = {
            name: side.measurements[0].features["model"] for name, side in self.sides.items()
        }
        counts = Counter(self.models.values())
        if len(counts) < 2 or max(counts.values()) < 2:
            self.models = dict.fromkeys(self.models, "")
        self.baselines: dict[str, str] = {}
        for name, group in self.groups.items():
            if self.wanted is None or _is_named(group, self.wanted):
                self.baselines.setdefault(self.models[name], name)
        self.points: dict[tuple[str, Key], dict[str, int]] = {}
        for name, side in self.sides.items():
            for one in side.measurements:
                if one.status is Status.OK and one.record.sweep:
                    place = self.models[name], _place(one.key)
                    self.points.setdefault(place, {})[name] = one.record.sweep.job
        self._known: dict[str, tuple[Sequence[Compared], float]] = {}

    def job(self, name: str, key: Key) -> int:
        """The run of a group that measured a point."""
        return self.points[self.models[name], _place(key)][name]

    def against(self, baseline: str) -> tuple[Sequence[Compared], float]:
        """All times of the other groups of its model against a baseline, and the level of the verdicts."""
        if baseline not in self._known:
            others = [
                side
                for name, side in self.sides.items()
                if name != baseline
                and self.models[name] == self.models[baseline]
                and _have_a_pair(self.sides[baseline], side)
            ]
            found = (
                judging.compare([self.sides[baseline], *others], Settings(measures=DECISIVE))
                if others
                else None
            )
            level = min(side.level for side in found.sides[1:]) if found else ALPHA
            self._known[baseline] = (found.pairs if found else ()), level
        return self._known[baseline]

    def at(
        self, place: Key, members: Collection[str], baseline: str = ""
    ) -> tuple[str, list[Compared]]:
        """Return the baseline of a model at a point, or else its first group there, and the other groups' times."""
        own = [name for name in self.baselines.values() if name in members]
        baseline = baseline or next(iter([*own, *members]))
        pairs = self.against(baseline)[0]
        return baseline, [one for one in pairs if one.side in members and _place(one.key) == place]


def _is_named(group: Group, wanted: str) -> bool:
    """Whether `compare.baseline` is the number of one of its runs, a value of its axes, or an axis with its value."""
    return any(
        wanted
        in (
            str(child.job),
            *child.axes.values(),
            *(f"{axis}={value}" for axis, value in child.axes.items()),
        )
        for child, _ in group.runs
    )


def of_sweep(whole: SweepAnalysis) -> SweepVerdicts:
    """Compare the groups of a sweep's runs with that of `compare.baseline`, or with the first one that was measured.

    Where several groups have the same model, each is compared within its model.
    """
    contest = _Contest(whole)
    if contest.groups and not contest.baselines:
        return SweepVerdicts(
            fastest=[f"compare.baseline={contest.wanted}: no timed run has this name"]
        )
    by_baseline = {name: contest.against(name) for name in contest.baselines.values()}
    by_baseline = {name: found for name, found in by_baseline.items() if found[0]}
    if not by_baseline:
        return SweepVerdicts()
    every = [pair for pairs, _ in by_baseline.values() for pair in pairs]
    deciding = decisive(every)
    title = (
        f"{_compared_time(deciding)} / {_name_of([contest.groups[name] for name in by_baseline])}"
    )
    by_run: dict[tuple[int, str], list[Compared]] = {}
    for pair in deciding:
        by_run.setdefault((contest.job(pair.side, pair.key), pair.key.phase), []).append(pair)
    timed = {
        (job, place.phase)
        for (_, place), members in contest.points.items()
        for name, job in members.items()
        if name not in contest.baselines.values()
    }
    notes = _of_level(title, min(level for _, level in by_baseline.values()))
    if timed - by_run.keys():
        notes.append(f"no {title}: the baseline has no time of the same phase, size and batch")
    return SweepVerdicts(
        title=title,
        ratios={place: _text(pairs) for place, pairs in by_run.items()},
        notes=[*notes, *_other_verdicts(deciding, every)],
        fastest=[
            line
            for name, (pairs, _) in by_baseline.items()
            for line in _fastest(name, contest.groups, pairs)
        ],
    )


def _name_of(baselines: Sequence[Group]) -> str:
    """The name of a baseline, or what the baselines of several models have in common."""
    if len(baselines) == 1:
        return baselines[0].name
    axes = [
        {axis: text for axis, text in group.axes.items() if axis not in MODEL_AXES}
        for group in baselines
    ]
    common = ", ".join(axes[0].values()) if all(one == axes[0] for one in axes) else ""
    return common or "the first of its model"


def winners(whole: SweepAnalysis) -> list[Winner]:
    """The fastest group of each point that several groups of a sweep measured, by the verdicts of `of_sweep`.

    It is the best of the groups that are shown to be faster than the baseline, otherwise the baseline. At a point that
    the baseline did not measure, it is the first group that did.
    """
    contest = _Contest(whole)
    found = []
    for (model, place), members in contest.points.items() if contest.baselines else ():
        baseline, every = contest.at(place, members)
        if not (compared := decisive(every)):
            continue
        key, measure = compared[0].key, min((pair.measure for pair in compared), key=DECISIVE.index)
        best, slower = None, set[str]()
        if any(pair.verdict not in _OPEN for pair in compared):
            best, faster = baseline, _fastest_of(baseline, compared)
            measure = next((pair.measure for pair in compared if pair.side == faster), measure)
            rivals = compared
            for _ in members:  # runs with other kinds of time: one may be faster by a time that decided nothing yet
                if faster == best:
                    break
                measure = next(pair.measure for pair in rivals if pair.side == faster)
                best, rivals = faster, decisive(contest.at(place, members, faster)[1])
                faster = _fastest_of(best, rivals)
            slower = {best} | {pair.side for pair in rivals if pair.verdict is Verdict.WORSE}
        ties = tuple(contest.groups[name].axes for name in members if name not in slower)
        axes = contest.groups[best].axes if best else None
        found.append(Winner(key=key, model=model, measure=measure, best=axes, ties=ties))
    return found


def time_ratios(whole: SweepAnalysis) -> dict[tuple[int, str, str], TimeRatio | None]:
    """The ratio of each time of each run, by number, phase and measure, with the verdicts of `of_sweep`.

    The ratio of a baseline is None. Runs that no
    other run is compared with have no entry.

    Args:
        whole: a sweep whose runs have one size and batch size each.
    """
    contest = _Contest(whole)
    found: dict[tuple[int, str, str], TimeRatio | None] = {}
    for (_, place), members in contest.points.items() if contest.baselines else ():
        baseline, pairs = contest.at(place, members)
        for pair in pairs:
            ratio = TimeRatio(comparison_table.time_ratio(pair).value, pair.verdict)
            found[members[pair.side], place.phase, pair.measure] = ratio
            found[members[baseline], place.phase, pair.measure] = None
    return found


def _place(key: Key) -> Key:
    """A point without its precision, in which the runs of a sweep may differ."""
    return msgspec.structs.replace(key, precision="")


def _of_level(title: str, level: float) -> list[str]:
    """A line on the confidence of the ratios' intervals, where processes took turns until a verdict was reached."""
    if level >= ALPHA:
        return []
    if not level:
        return [f"± of {title}: {comparison_table.interval_words(level)}"]
    return [
        f"± of {title}: {comparison_table.confidence(level)} intervals, since processes took turns (perfexp ab)"
    ]


def _compared_time(pairs: Sequence[Compared]) -> str:
    """The time whose ratios are shown; of rates it is that of a sample, of which a call of several devices has more."""
    measures = {pair.measure for pair in pairs}
    name = measures.pop() if len(measures) == 1 else "time"
    return "time per sample" if name == "throughput" else name


def _other_verdicts(deciding: Sequence[Compared], every: Sequence[Compared]) -> list[str]:
    """A line with the other times that have another verdict than the one that decides; empty without any."""
    words = {(pair.side, pair.key): pair.verdict for pair in deciding}
    others = Counter((p.word, p.measure) for p in every if p.verdict is not words[p.side, p.key])
    if not others:
        return []
    by_word: dict[str, list[str]] = {}
    for (word, measure), count in sorted(
        others.items(), key=lambda item: DECISIVE.index(item[0][1])
    ):
        by_word.setdefault(word, []).append(
            f"{measure} ({count} of {len(deciding)})" if len(deciding) > 1 else measure
        )
    texts = (f"{', '.join(measures)}: {word}" for word, measures in by_word.items())
    return [f"by {_compared_time(deciding)}; {'; '.join(texts)} (perfexp compare DIR)"]


def _have_a_pair(first: Side, other: Side) -> bool:
    try:
        return bool(pairing.match(first, other).pairs)
    except UserError:  # a run with several results of one point
        return False


def _text(pairs: Sequence[Compared]) -> str:
    if len(pairs) == 1:
        return f"{ratio_of_times(pairs[0])} {comparison_table.verdict_of(pairs[0])}"
    counts = Counter((pair.verdict, comparison_table.verdict_of(pair)) for pair in pairs)
    return ", ".join(
        f"{count} {text}" for (_, text), count in sorted(counts.items(), key=_by_verdict)
    )


def _by_verdict(counted: tuple[tuple[Verdict, str], int]) -> int:
    return list(Verdict).index(counted[0][0])


def ratio_of_times(pair: Compared) -> str:
    """The ratio of times of a pair, with its interval if it has one."""
    ratio = comparison_table.time_ratio(pair)
    return units.digits(ratio.value) if ratio.low is None else comparison_table.ratio_text(ratio)


def _fastest(first: str, groups: Mapping[str, Group], every: Sequence[Compared]) -> list[str]:
    """A line for each group that is the fastest at some of several points; none if none is faster than the baseline."""
    points: dict[Key, list[Compared]] = {}
    for pair in decisive(every):
        points.setdefault(pair.key, []).append(pair)
    counts = Counter(_fastest_of(first, compared) for compared in points.values())
    if len(points) < 2 or not counts.keys() - {first}:
        return []
    other = "no other run is" if len(groups[first].runs) == 1 else "nothing else is"
    words = dict.fromkeys(groups, "fastest") | {first: f"{other} shown to be faster"}
    of = units.counted(len(points), "point")
    return [
        f"{groups[name].name}: {words[name]} at {counts[name]} of {of}"
        for name in groups
        if name in counts
    ]


def _fastest_of(baseline: str, compared: Sequence[Compared]) -> str:
    """The side with the best figure of those that are shown to be faster than the baseline; else the baseline.

    It is the best by the measure that decides first, since ratios of different measures do not compare.
    """
    better = [pair for pair in compared if pair.verdict is Verdict.BETTER]
    if not better:
        return baseline
    return min(
        better, key=lambda pair: (DECISIVE.index(pair.measure), -abs(math.log(pair.ratio or 1.0)))
    ).side
