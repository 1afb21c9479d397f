"""Sweep verdicts: the groups of a sweep's runs against the first of them, and how often each is the fastest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from perfexp.comparison import comparison_table, judging, pairing, sweep_groups
from perfexp.comparison.comparison_table import SYMBOLS
from perfexp.comparison.document import Compared, Verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import Side
from perfexp.comparison.sweep_groups import Group
from perfexp.comparison.undecided import DECISIVE, decisive
from perfexp.diagnosis.environment import fact_at
from perfexp.errors import UserError
from perfexp.records import units
from perfexp.records.record import Key, Record, Status
from perfexp.records.sweep_record import Sweep
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.estimators import Interval
from perfexp.summaries.sweep_summary import paired

#: Verdicts that leave open which of two runs is faster.
_OPEN = (Verdict.UNDECIDED, Verdict.NOT_COMPARABLE)


@dataclass
class SweepVerdicts:
    """What the comparison of a sweep's runs shows.

    Attributes:
        baseline: number of the first run of the group that the others are compared with; None if no two groups have a
            point in common.
        title: title of the ratios: the time that is compared and the baseline, `device / run 0`, or
            `device / model=resnet50` of several runs.
        ratios: ratio of the times to the baseline with its verdict, or the number of each verdict over several points,
            by run's number and phase.
        notes: runs at whose points the baseline has no time, and other times that have another verdict.
        fastest: a line for each group that is the fastest at some of several points, or why none was compared.
    """

    baseline: int | None = None
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


@dataclass(frozen=True, kw_only=True)
class _Contender:
    """A group of runs as a side that is named by the number of its first run.

    Attributes:
        jobs: number of the run that measured a point.
    """

    group: Group
    side: Side
    jobs: Mapping[Key, int]

    @property
    def name(self) -> str:
        """The name of its side."""
        return self.side.name

    @property
    def names(self) -> set[str]:
        """Names in `compare.baseline`: the number of a run, a value of its axes, or an axis with its value."""
        found = {str(child.job) for child, _ in self.group.runs}
        for child, _ in self.group.runs:
            found |= {*child.axes.values(), *(f"{axis}={value}" for axis, value in child.axes.items())}
        return found


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> SweepVerdicts:
    """Compare the groups of a sweep's runs with that of `compare.baseline`, or with the first one that was measured."""
    contenders = _contenders(sweep, records)
    wanted, first = _baseline(records, contenders)
    if first is None:
        return SweepVerdicts(fastest=[f"compare.baseline={wanted}: no timed run has this name"] if contenders else [])
    by_name = {one.name: one for one in contenders}
    by_run: dict[tuple[int, str], list[Compared]] = {}
    every, level = _compared(first, contenders)
    deciding = decisive(every)
    for pair in deciding:
        place = _place(pair.key)
        by_run.setdefault((by_name[pair.side].jobs[place], place.phase), []).append(pair)
    if not by_run:
        return SweepVerdicts()
    title = f"{_compared_time(deciding)} / {first.group.name}"
    return SweepVerdicts(
        baseline=first.group.number,
        title=title,
        ratios={place: _text(pairs) for place, pairs in by_run.items()},
        notes=[
            *_of_level(title, level),
            *_without_ratio(title, first, contenders, by_run),
            *_other_verdicts(deciding, every),
        ],
        fastest=_fastest(first, by_name, deciding),
    )


def winners(sweep: Sweep, records: Sequence[Record]) -> list[Winner]:
    """The fastest group of each point that several groups of a sweep measured, by the verdicts of `of_sweep`.

    It is the best of the groups that are shown to be faster than the baseline, otherwise the baseline. The baseline of
    groups that cannot be compared with that of the sweep, of another model or point, is the first of them.
    """
    contenders = _contenders(sweep, records)
    first = _baseline(records, contenders)[1]
    if first is None:
        return []
    known: dict[str, list[Compared]] = {}

    def against(baseline: _Contender) -> list[Compared]:
        if baseline.name not in known:
            known[baseline.name] = decisive(_compared(baseline, _rivals(baseline, first, contenders))[0])
        return known[baseline.name]

    found = []
    for (model, place), members in _by_point(contenders).items():
        baseline = first if first in members else members[0]
        by_name = {one.name: one for one in members}

        def rivals(of: _Contender, place: Key = place, names: Collection[str] = by_name.keys()) -> list[Compared]:
            return [pair for pair in against(of) if pair.side in names and _place(pair.key) == place]

        if not (compared := rivals(baseline)):
            continue
        key, measure = compared[0].key, min((pair.measure for pair in compared), key=DECISIVE.index)
        best, slower = None, set[str]()
        if any(pair.verdict not in _OPEN for pair in compared):
            best = by_name[_fastest_of(baseline.name, compared)]
            measure = next((pair.measure for pair in compared if pair.side == best.name), measure)
            for _ in members:  # runs with other kinds of time: one may be faster by a time that decided nothing yet
                if (faster := _fastest_of(best.name, rivals(best))) == best.name:
                    break
                measure = next(pair.measure for pair in rivals(best) if pair.side == faster)
                best = by_name[faster]
            slower = {best.name} | {pair.side for pair in rivals(best) if pair.verdict is Verdict.WORSE}
        ties = tuple(one.group.axes for one in members if one.name not in slower)
        found.append(Winner(key=key, model=model, measure=measure, best=best.group.axes if best else None, ties=ties))
    return found


def time_ratios(sweep: Sweep, records: Sequence[Record]) -> dict[tuple[int, str, str], TimeRatio | None]:
    """The ratio of each time of each run, by number, phase and measure, with the verdicts of `of_sweep`.

    The baseline is that of the sweep, or for another model the first of its groups; its ratio is None. Runs that no
    other run is compared with have no entry.

    Args:
        records: runs of one size and batch size each.
    """
    contenders = _contenders(sweep, records)
    first = _baseline(records, contenders)[1]
    if first is None:
        return {}
    found: dict[tuple[int, str, str], TimeRatio | None] = {}
    every: dict[str, Sequence[Compared]] = {}
    for place, members in ((place, members) for (_, place), members in _by_point(contenders).items()):
        baseline, by_name = first if first in members else members[0], {one.name: one for one in members}
        if baseline.name not in every:
            every[baseline.name] = _compared(baseline, _rivals(baseline, first, contenders))[0]
        for pair in every[baseline.name]:
            if _place(pair.key) == place and pair.side in by_name:
                ratio = TimeRatio(_ratio_of(pair).value, pair.verdict)
                found[by_name[pair.side].jobs[place], place.phase, pair.measure] = ratio
                found[baseline.jobs[place], place.phase, pair.measure] = None
    return found


def _place(key: Key) -> Key:
    """A point without its precision, in which the runs of a sweep may differ."""
    return msgspec.structs.replace(key, precision="")


def _baseline(records: Sequence[Record], contenders: Sequence[_Contender]) -> tuple[str | None, _Contender | None]:
    """The value of `compare.baseline`, and the group of the run that it names; the first one without it."""
    wanted = next((str(name) for one in records if (name := fact_at(one.plan, "compare.baseline")) is not None), None)
    return wanted, next((one for one in contenders if wanted is None or wanted in one.names), None)


def _by_point(contenders: Sequence[_Contender]) -> dict[tuple[str, Key], list[_Contender]]:
    """The groups that measured each point, by the model (`_models`) and the point."""
    models, found = _models(contenders), dict[tuple[str, Key], list[_Contender]]()
    for one in contenders:
        for key in (measured.key for measured in one.side.measurements if measured.status is Status.OK):
            found.setdefault((models[one.name], _place(key)), []).append(one)
    return found


def _rivals(baseline: _Contender, first: _Contender, contenders: Sequence[_Contender]) -> list[_Contender]:
    """The groups that are compared with a baseline: all with that of the sweep, otherwise those of its model."""
    models = _models(contenders)
    return [one for one in contenders if baseline is first or models[one.name] == models[baseline.name]]


def _compared(baseline: _Contender, contenders: Sequence[_Contender]) -> tuple[Sequence[Compared], float]:
    """The pairs of all times of the other groups, empty without a common point, and the level of their verdicts."""
    others = [one.side for one in contenders if one is not baseline and _have_a_pair(baseline.side, one.side)]
    if not others:
        return [], ALPHA
    found = judging.compare([baseline.side, *others], Settings(measures=DECISIVE))
    return found.pairs, min(side.level for side in found.sides[1:])


def _of_level(title: str, level: float) -> list[str]:
    """A line on the confidence of the ratios' intervals, where processes took turns until a verdict was reached."""
    if level >= ALPHA:
        return []
    if not level:
        return [f"± of {title}: {comparison_table.interval_words(level)}"]
    return [f"± of {title}: {comparison_table.confidence(level)} intervals, since processes took turns (perfexp ab)"]


def _without_ratio(
    title: str, first: _Contender, contenders: Sequence[_Contender], by_run: Collection[tuple[int, str]]
) -> list[str]:
    """A line if a run of another group has a time, and the baseline none of the same point."""
    timed = {
        (one.jobs[_place(found.key)], found.key.phase)
        for one in contenders
        for found in one.side.measurements
        if one is not first and found.status is Status.OK
    }
    return [f"no {title}: the baseline has no time of the same phase, size and batch"] if timed - {*by_run} else []


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
    for (word, measure), count in sorted(others.items(), key=lambda item: DECISIVE.index(item[0][1])):
        by_word.setdefault(word, []).append(f"{measure} ({count} of {len(deciding)})" if len(deciding) > 1 else measure)
    texts = (f"{', '.join(measures)}: {word}" for word, measures in by_word.items())
    return [f"by {_compared_time(deciding)}; {'; '.join(texts)} (perfexp compare DIR)"]


def _models(contenders: Sequence[_Contender]) -> dict[str, str]:
    """The model of each group by its name; empty texts unless several groups have one of several models."""
    models = {one.name: one.side.measurements[0].features["model"] for one in contenders}
    counts = Counter(models.values())
    return models if len(counts) > 1 and max(counts.values()) > 1 else dict.fromkeys(models, "")


def _contenders(sweep: Sweep, records: Sequence[Record]) -> list[_Contender]:
    """The groups of runs with a time."""
    found = []
    for group in sweep_groups.groups(paired(sweep, records)):
        if group.timed:
            side = Side.of(str(group.number), group.name, group.timed)
            jobs = {_place(point.key): child.job for child, one in group.runs if one for point in one.points}
            found.append(_Contender(group=group, side=side, jobs=jobs))
    return found


def _have_a_pair(first: Side, other: Side) -> bool:
    try:
        return bool(pairing.match(first, other).pairs)
    except UserError:  # a run with several results of one point
        return False


def _text(pairs: Sequence[Compared]) -> str:
    if len(pairs) == 1:
        return f"{_ratio_of_times(pairs[0])} {comparison_table.verdict_of(pairs[0])}"
    counts = Counter(pair.verdict for pair in pairs)
    return ", ".join(f"{counts[verdict]} {SYMBOLS[verdict]}" for verdict in Verdict if counts[verdict])


def _ratio_of(pair: Compared) -> Interval:
    """The ratio of times with its interval, if it has one; of rates it is the inverse."""
    ratio = Interval(value=pair.other / pair.baseline, low=pair.low, high=pair.high)
    if not MEASURES[pair.measure].is_better_if_lower:
        ratio = Interval(value=1 / ratio.value, low=pair.high and 1 / pair.high, high=pair.low and 1 / pair.low)
    return ratio


def _ratio_of_times(pair: Compared) -> str:
    ratio = _ratio_of(pair)
    return units.digits(ratio.value) if ratio.low is None else comparison_table.ratio_text(ratio)


def _fastest(first: _Contender, by_name: Mapping[str, _Contender], deciding: Sequence[Compared]) -> list[str]:
    """A line for each group that is the fastest at some of several points; none if none is faster than the baseline."""
    points: dict[Key, list[Compared]] = {}
    for pair in deciding:
        points.setdefault(pair.key, []).append(pair)
    counts = Counter(_fastest_of(first.name, compared) for compared in points.values())
    if len(points) < 2 or not counts.keys() - {first.name}:
        return []
    total = units.counted(len(points), "point")
    other = "no other run is" if len(first.group.runs) == 1 else "nothing else is"
    return [
        f"{one.group.name}: fastest at {counts[name]} of {total}"
        if one is not first
        else f"{one.group.name}: {other} shown to be faster at {counts[name]} of {total}"
        for name, one in by_name.items()
        if name in counts
    ]


def _fastest_of(baseline: str, compared: Sequence[Compared]) -> str:
    """The side with the best figure of those that are shown to be faster than the baseline; else the baseline.

    It is the best by the measure that decides first, since ratios of different measures do not compare.
    """
    better = [pair for pair in compared if pair.verdict is Verdict.BETTER]
    if not better:
        return baseline
    return min(better, key=lambda pair: (DECISIVE.index(pair.measure), -abs(math.log(pair.ratio or 1.0)))).side
