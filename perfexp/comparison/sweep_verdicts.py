"""Sweep verdicts: a sweep's groups of runs against a baseline group, and how often each wins.

A group is one or several runs of a sweep that differ only in phase, input size and batch size.
`of_sweep` gives each group's time ratio to the baseline, for tables. `winners` names the fastest
group at each point, and `time_ratios` gives ratios for plots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec

from perfexp.comparison import comparison_table, judging, pairing
from perfexp.comparison.document import Compared, Verdict, measures_of, with_verdict
from perfexp.comparison.judging import DECISIVE, Settings, decisive
from perfexp.comparison.pairing import Group, Side
from perfexp.errors import UserError
from perfexp.records import units
from perfexp.records.analysis import SweepAnalysis
from perfexp.records.fact_lookup import fact_at
from perfexp.records.record import Key, Status
from perfexp.records.subject import MODEL_AXES
from perfexp.statistics.distributions import ALPHA

#: Fewest points of a group that make a curve.
_CURVE = 4
#: Verdicts that leave open which run is faster.
_OPEN = (Verdict.UNDECIDED, Verdict.NOT_COMPARABLE)


@dataclass
class SweepVerdicts:
    """Results from comparing a sweep's runs.

    Attributes:
        title: compared time and baseline: `device / run 0`, or `device / model=resnet50` for
            several runs, or `device / default` if each model has a baseline.
        ratios: time ratio to the baseline with its verdict, by run number and phase. With several
            points, the number of each verdict instead.
        notes: runs at points where the baseline has no time, and other times with a different
            verdict.
        fastest: a line for each group that is fastest at some of several points, or why none was
            compared.
    """

    title: str = ""
    ratios: dict[tuple[int, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fastest: list[str] = field(default_factory=list)


class TimeRatio(NamedTuple):
    """Time of a run over its model's baseline, with the verdict; a rate becomes time per sample."""

    value: float
    verdict: Verdict

    @property
    def is_open(self) -> bool:
        """Return whether the verdict leaves open which run is faster."""
        return self.verdict in _OPEN


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Fastest group at a point, by verdict; within a model if several groups share it.

    Attributes:
        key: the point, from the first group.
        model: the groups' model; empty if the sweep has a single model, or if models are compared.
        measure: measure that decides.
        best: axes of the fastest group; None if no verdict at this point is decided.
        ties: axes of the other groups not shown to be slower; all groups if nothing is decided.
    """

    key: Key
    model: str
    measure: str
    best: Mapping[str, str] | None
    ties: tuple[Mapping[str, str], ...]


class _Contest:
    """Groups of a sweep's runs with a time, by first run number, and their comparisons.

    Attributes:
        wanted: value of `compare.baseline`; None if it is not set.
        groups: groups with a time, by name, their first run number as text.
        sides: the groups as sides of a comparison, by name.
        models: each group's model; empty texts unless there are several models and several groups
            share one.
        baselines: baseline group of each model, chosen by `compare.baseline`, by default the first
            group.
        points: groups that measured each point, by model and point, with the number of the run that
            did.
    """

    def __init__(self, sweep_analysis: SweepAnalysis) -> None:
        self.groups: dict[str, Group] = {}
        self.sides: dict[str, Side] = {}
        self.models: dict[str, str] = {}
        for group in pairing.groups(sweep_analysis.runs):
            if group.timed:
                name = str(group.number)
                side = Side.of(name, group.name, group.timed)
                self.groups[name], self.sides[name] = group, side
                self.models[name] = side.measurements[0].features["model"]
        self.wanted: str | None = None
        for analysis in reversed(sweep_analysis.analyses):  # the first run that sets it counts
            wanted = fact_at(analysis.record.plan, "compare.baseline")
            if wanted is not None:
                self.wanted = str(wanted)
        # several models with several groups each: a group is compared within its model
        counts = Counter(self.models.values())
        if len(counts) < 2 or max(counts.values()) < 2:
            self.models = dict.fromkeys(self.models, "")
        self.baselines: dict[str, str] = {}
        for name, group in self.groups.items():
            if self.wanted is None or _is_named(group, self.wanted):
                self.baselines.setdefault(self.models[name], name)
        self.points: dict[tuple[str, Key], dict[str, int]] = {}
        for name, side in self.sides.items():
            for measurement in side.measurements:
                if measurement.status is Status.OK and measurement.record.sweep:
                    model_point = self.models[name], _place(measurement.key)
                    self.points.setdefault(model_point, {})[name] = measurement.record.sweep.job
        #: Points that each group tried, of groups with a curve whose runs all left a record.
        self._tried: dict[str, set[Key]] = {}
        for name, group in self.groups.items():
            rows = list(chain.from_iterable(analysis.rows for analysis in group.recorded))
            is_curve = sum(row.status is Status.OK for row in rows) >= _CURVE
            if is_curve and len(group.recorded) == len(group.runs):
                self._tried[name] = {_place(row.key) for row in rows}
        #: Results of `against`, by baseline.
        self._known: dict[str, tuple[Sequence[Compared], float]] = {}

    def is_partial(self, name: str, key: Key) -> bool:
        """Return whether a curve of this group's model lacks a point, as in sparse sweeps.

        What its group would have measured there is unknown, and so is the fastest.
        """
        return any(
            self.models[other] == self.models[name] and _place(key) not in tried
            for other, tried in self._tried.items()
        )

    def job(self, name: str, key: Key) -> int:
        """Return the number of the group's run that measured a point."""
        return self.points[self.models[name], _place(key)][name]

    def against(self, baseline: str) -> tuple[Sequence[Compared], float]:
        """Compare the other groups of a model with one of them, and return pairs and verdict level.

        There are no pairs if no other group has a point in common.

        Args:
            baseline: name of the group to compare with.
        """
        if baseline not in self._known:
            sides = [self.sides[baseline]]
            for name, side in self.sides.items():
                is_other = name != baseline and self.models[name] == self.models[baseline]
                if is_other and _have_a_pair(sides[0], side):
                    sides.append(side)
            self._known[baseline] = (), ALPHA
            if len(sides) > 1:
                comparison = judging.compare(sides, Settings(measures=DECISIVE))
                self._known[baseline] = (
                    comparison.pairs,
                    min(side.level for side in comparison.sides[1:]),
                )
        return self._known[baseline]

    def at(
        self, point_key: Key, members: Collection[str], baseline: str = ""
    ) -> tuple[str, list[Compared]]:
        """Return the baseline at a point, and the other groups' pairs there.

        If the model's baseline did not measure the point, the first group that did takes its place.

        Args:
            point_key: the point, as from `_place`.
            members: names of the groups that measured it.
            baseline: name of a group to compare with instead.
        """
        of_baselines = [name for name in self.baselines.values() if name in members]
        baseline = baseline or next(iter([*of_baselines, *members]))
        pairs = self.against(baseline)[0]
        return baseline, [
            pair for pair in pairs if pair.side in members and _place(pair.key) == point_key
        ]


def _is_named(group: Group, wanted: str) -> bool:
    """Return whether `compare.baseline` names this group.

    It may be a run number, an axis value, or an axis with its value (`model=resnet50`).
    """
    for child, _ in group.runs:
        if wanted == str(child.job) or wanted in child.axes.values():
            return True
        axis = wanted.partition("=")[0]
        if axis in child.axes and wanted == f"{axis}={child.axes[axis]}":
            return True
    return False


def of_sweep(sweep_analysis: SweepAnalysis) -> SweepVerdicts:
    """Compare a sweep's groups of runs with a baseline, for the sweep's report.

    The baseline is `compare.baseline`, by default the first measured group. If several groups share
    a model, each group is compared within its model. The result is empty if there is nothing to
    compare.
    """
    contest = _Contest(sweep_analysis)
    if contest.groups and not contest.baselines:
        reason = f"compare.baseline={contest.wanted}: no timed run has this name"
        return SweepVerdicts(fastest=[reason])
    baselines, every, fastest, lowest = [], list[Compared](), list[str](), ALPHA
    for name in contest.baselines.values():
        pairs, level = contest.against(name)
        if pairs:
            baselines.append(contest.groups[name])
            every += pairs
            shared = [pair for pair in pairs if not contest.is_partial(name, pair.key)]
            fastest += _fastest(name, contest.groups, shared)
            lowest = min(lowest, level)
    if not baselines:
        return SweepVerdicts()
    deciding = decisive(every)
    title = f"{_compared_time(deciding)} / {_name_of(baselines)}"
    by_run: dict[tuple[int, str], list[Compared]] = {}
    for pair in deciding:
        by_run.setdefault((contest.job(pair.side, pair.key), pair.key.phase), []).append(pair)
    notes = _of_level(title, lowest)
    timed = set()
    for (_, point_key), members in contest.points.items():
        for name in members.keys() - contest.baselines.values():
            timed.add((members[name], point_key.phase))
    if timed - by_run.keys():
        notes.append(f"no {title}: the baseline has no time of the same phase, size and batch")
    return SweepVerdicts(
        title=title,
        ratios={point_key: _text(pairs) for point_key, pairs in by_run.items()},
        notes=notes + _other_verdicts(deciding, every),
        fastest=fastest,
    )


def _name_of(baselines: Sequence[Group]) -> str:
    """Return the baseline's name for a title, or the common part if each model has a baseline."""
    if len(baselines) == 1:
        return baselines[0].name
    names = set()
    for group in baselines:
        names.add(tuple(text for axis, text in group.axes.items() if axis not in MODEL_AXES))
    if len(names) > 1:
        return "the first of its model"
    return ", ".join(names.pop()) or "the first of its model"


def winners(sweep_analysis: SweepAnalysis) -> list[Winner]:
    """Return the fastest group at each point that several groups measured.

    It is the best group shown to be faster than the baseline by the verdicts of `of_sweep`,
    otherwise the baseline. If the baseline did not measure a point, the first group that did takes
    its place. Points that a curve lacks are left out.
    """
    contest = _Contest(sweep_analysis)
    winning = []
    for (model, point_key), members in contest.points.items() if contest.baselines else ():
        baseline, every = contest.at(point_key, members)
        compared = decisive(every)
        if not compared or contest.is_partial(baseline, point_key):
            continue
        measure = min(measures_of(compared), key=DECISIVE.index)
        best, axes, slower = None, None, set[str]()
        if any(pair.verdict not in _OPEN for pair in compared):
            best, faster, others = baseline, _fastest_of(baseline, compared), compared
            # compare with the fastest so far, until no group is faster than that: another kind of
            # time may decide between two groups that both beat the baseline
            for _ in members:
                measure = next((pair.measure for pair in others if pair.side == faster), measure)
                if faster == best:
                    break
                best, others = faster, decisive(contest.at(point_key, members, faster)[1])
                faster = _fastest_of(best, others)
            slower = {best, *(pair.side for pair in with_verdict(others, Verdict.WORSE))}
            axes = contest.groups[best].axes
        ties = tuple(contest.groups[name].axes for name in members if name not in slower)
        winner = Winner(key=compared[0].key, model=model, measure=measure, best=axes, ties=ties)
        winning.append(winner)
    return winning


def time_ratios(sweep_analysis: SweepAnalysis) -> dict[tuple[int, str, str], TimeRatio | None]:
    """Return each run's time ratios by run number, phase and measure, with verdicts.

    They are as in `of_sweep`, for the plots of a sweep.

    A baseline's ratio is None. Runs without a comparison have no entry.

    Args:
        sweep_analysis: a sweep in which each run has a single size and batch size.
    """
    contest = _Contest(sweep_analysis)
    ratios: dict[tuple[int, str, str], TimeRatio | None] = {}
    for (_, point_key), members in contest.points.items() if contest.baselines else ():
        baseline, pairs = contest.at(point_key, members)
        for pair in pairs:
            ratio = TimeRatio(comparison_table.time_ratio(pair).value, pair.verdict)
            ratios[members[pair.side], point_key.phase, pair.measure] = ratio
            ratios[members[baseline], point_key.phase, pair.measure] = None
    return ratios


def _place(key: Key) -> Key:
    """Return a point without its precision, which may differ between a sweep's runs."""
    return msgspec.structs.replace(key, precision="")


def _of_level(title: str, level: float) -> list[str]:
    """Return a note on the intervals' confidence if processes alternated until a verdict.

    Empty for the usual 95 % intervals.

    Args:
        title: compared time and baseline.
        level: error probability of the intervals; 0 without intervals.
    """
    if level >= ALPHA:
        return []
    if not level:
        return [f"± of {title}: {comparison_table.interval_words(level)}"]
    confidence = comparison_table.confidence(level)
    return [f"± of {title}: {confidence} intervals, since processes took turns (perfexp ab)"]


def _compared_time(pairs: Sequence[Compared]) -> str:
    """Return the name of the compared time.

    A rate becomes time per sample, because a call on several devices has more samples.
    """
    measure, *others = measures_of(pairs)
    if others:
        return "time"
    if measure == "throughput":
        return "time per sample"
    return measure


def _other_verdicts(deciding: Sequence[Compared], every: Sequence[Compared]) -> list[str]:
    """Return a line with times whose verdict differs from the deciding time; empty without any."""
    words = {(pair.side, pair.key): pair.verdict for pair in deciding}
    others = Counter((p.word, p.measure) for p in every if p.verdict is not words[p.side, p.key])
    if not others:
        return []
    by_word: dict[str, list[str]] = {}
    for word, measure in sorted(others, key=lambda other: DECISIVE.index(other[1])):
        text = measure
        if len(deciding) > 1:
            text += f" ({others[word, measure]} of {len(deciding)})"
        by_word.setdefault(word, []).append(text)
    texts = (f"{', '.join(measures)}: {word}" for word, measures in by_word.items())
    return [f"by {_compared_time(deciding)}; {'; '.join(texts)} (perfexp compare DIR)"]


def _have_a_pair(first: Side, other: Side) -> bool:
    """Return whether two sides can be compared at any point."""
    try:
        return bool(pairing.match(first, other).pairs)
    except UserError:  # a run with several results for the same point
        return False


def _text(pairs: Sequence[Compared]) -> str:
    """Describe a run's pairs: ratio and verdict of a single pair, otherwise counts of points."""
    if len(pairs) == 1:
        return f"{ratio_of_times(pairs[0])} {comparison_table.verdict_of(pairs[0])}"
    by_verdict = sorted(pairs, key=lambda pair: list(Verdict).index(pair.verdict))
    counts = Counter(map(comparison_table.verdict_of, by_verdict))
    return ", ".join(f"{text} at {count}" for text, count in counts.items())


def ratio_of_times(pair: Compared) -> str:
    """Return a pair's time ratio, with its interval if known."""
    ratio = comparison_table.time_ratio(pair)
    if ratio.low is None:
        return units.digits(ratio.value)
    return comparison_table.ratio_text(ratio)


def _fastest(first: str, groups: Mapping[str, Group], every: Sequence[Compared]) -> list[str]:
    """Return a line for each group that is fastest at some of several points.

    Empty if no group is faster than the baseline.

    Args:
        first: name of the baseline group.
        groups: all groups by name.
        every: the other groups' pairs.
    """
    points: dict[Key, list[Compared]] = {}
    for pair in decisive(every):
        points.setdefault(pair.key, []).append(pair)
    counts = Counter(_fastest_of(first, compared) for compared in points.values())
    if len(points) < 2 or not counts.keys() - {first}:
        return []
    num_points = units.counted(len(points), "point")
    lines = []
    for name, group in groups.items():
        words = "fastest"
        if name == first:
            other = "no other run is" if len(group.runs) == 1 else "nothing else is"
            words = f"{other} shown to be faster"
        if name in counts:
            lines.append(f"{group.name}: {words} at {counts[name]} of {num_points}")
    return lines


def _fastest_of(baseline: str, compared: Sequence[Compared]) -> str:
    """Return the best side among those shown to be faster than the baseline, else the baseline.

    The first deciding measure picks the best, since ratios of different measures are not
    comparable.
    """
    better = with_verdict(compared, Verdict.BETTER)
    if not better:
        return baseline
    return min(
        better, key=lambda pair: (DECISIVE.index(pair.measure), -abs(math.log(pair.ratio or 1.0)))
    ).side
