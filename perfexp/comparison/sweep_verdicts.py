"""Sweep verdicts: the runs of a sweep against the first of them, and how often each is the fastest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from perfexp.comparison import comparison_table, judging, pairing
from perfexp.comparison.comparison_table import SYMBOLS
from perfexp.comparison.document import Compared, Verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import Side
from perfexp.comparison.undecided import DECISIVE, decisive
from perfexp.diagnosis.environment import fact_at
from perfexp.errors import UserError
from perfexp.records import units
from perfexp.records.record import Key, Record, Status
from perfexp.records.sweep_record import Sweep
from perfexp.statistics.estimators import Interval
from perfexp.summaries.sweep_summary import paired
from perfexp.summaries.wording import with_width

#: Verdicts that leave open which of two runs is faster.
_OPEN = (Verdict.UNDECIDED, Verdict.NOT_COMPARABLE)


@dataclass
class SweepVerdicts:
    """What the comparison of a sweep's runs shows.

    Attributes:
        baseline: number of the run that the others are compared with; None if no two runs have a point in common.
        title: title of the ratios: the time that is compared and the baseline, `device / run 0`.
        ratios: ratio of the times to the baseline with its verdict, or the number of each verdict over several points,
            by run's number and phase.
        notes: other times of the same runs that have another verdict.
        fastest: a line for each run that is the fastest at some of several points, or why there is no comparison.
    """

    baseline: int | None = None
    title: str = ""
    ratios: dict[tuple[int, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fastest: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest run of a point by the verdicts, among the runs of one model if several were compared.

    Attributes:
        key: the point, of the first of the runs.
        model: model of the runs; empty if all runs of the sweep have one, or models are what is compared.
        measure: the measure that decides.
        job: number of the run; None if no verdict on the point is decided.
        ties: numbers of the other runs that are not shown to be slower; all runs if nothing is decided.
    """

    key: Key
    model: str
    measure: str
    job: int | None
    ties: tuple[int, ...]


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> SweepVerdicts:
    """Compare all runs of a sweep with `compare.baseline`, or with the first one that was measured."""
    sides = _sides(sweep, records)
    wanted, first = _baseline(sweep, records, sides)
    if first is None:
        return SweepVerdicts(fastest=[f"compare.baseline={wanted}: no timed run has this name"] if sides else [])
    by_run: dict[tuple[int, str], list[Compared]] = {}
    every = _compared(first, sides)
    deciding = decisive(every)
    for pair in deciding:
        by_run.setdefault((int(pair.side), pair.key.phase), []).append(pair)
    if not by_run:
        return SweepVerdicts()
    return SweepVerdicts(
        baseline=int(first.name),
        title=f"{_compared_time(deciding)} / run {first.name}",
        ratios={place: _text(pairs) for place, pairs in by_run.items()},
        notes=_other_verdicts(deciding, every),
        fastest=_fastest(int(first.name), by_run),
    )


def winners(sweep: Sweep, records: Sequence[Record]) -> list[Winner]:
    """The fastest run of each point that several runs of a sweep measured, by the verdicts of `of_sweep`.

    It is the best of the runs that are shown to be faster than the baseline, otherwise the baseline. The baseline of
    runs that cannot be compared with that of the sweep, of another model or batch size, is the first of them.
    """
    sides = _sides(sweep, records)
    first = _baseline(sweep, records, sides)[1]
    if first is None:
        return []
    models = _models(sides)
    groups: dict[tuple[str, Key], list[Side]] = {}
    for side in sides:
        for key in (one.key for one in side.measurements if one.status is Status.OK):
            groups.setdefault((models[side.name], _place(key)), []).append(side)
    known: dict[str, list[Compared]] = {first.name: _against(first, sides)}

    def against(baseline: Side) -> list[Compared]:
        if baseline.name not in known:
            of_model = [side for side in sides if models[side.name] == models[baseline.name]]
            known[baseline.name] = _against(baseline, of_model)
        return known[baseline.name]

    found = []
    for (model, place), members in groups.items():
        baseline = first if first in members else members[0]
        names = {side.name for side in members}

        def rivals(of: Side, place: Key = place, names: set[str] = names) -> list[Compared]:
            return [pair for pair in against(of) if pair.side in names and _place(pair.key) == place]

        if not (compared := rivals(baseline)):
            continue
        key, measure = compared[0].key, min((pair.measure for pair in compared), key=DECISIVE.index)
        job, slower = None, set[str]()
        if any(pair.verdict not in _OPEN for pair in compared):
            job = _fastest_of(int(baseline.name), [(int(pair.side), pair) for pair in compared])
            measure = next((pair.measure for pair in compared if int(pair.side) == job), measure)
            for _ in members:  # runs with other kinds of time: one may be faster by a time that decided nothing yet
                best = next(side for side in members if int(side.name) == job)
                if (faster := _fastest_of(job, [(int(pair.side), pair) for pair in rivals(best)])) == job:
                    break
                measure = next(pair.measure for pair in rivals(best) if int(pair.side) == faster)
                job = faster
            slower = {best.name} | {pair.side for pair in rivals(best) if pair.verdict is Verdict.WORSE}
        ties = tuple(int(side.name) for side in members if side.name not in slower)
        found.append(Winner(key=key, model=model, measure=measure, job=job, ties=ties))
    return found


def _place(key: Key) -> Key:
    """A point without its precision, in which the runs of a sweep may differ."""
    return msgspec.structs.replace(key, precision="")


def _baseline(sweep: Sweep, records: Sequence[Record], sides: Sequence[Side]) -> tuple[str | None, Side | None]:
    """The value of `compare.baseline`, and the run that it names: the first by default, None for an unknown name."""
    wanted = next((str(name) for one in records if (name := fact_at(one.plan, "compare.baseline")) is not None), None)
    return wanted, next((side for side in sides if wanted is None or wanted in _names(sweep, side)), None)


def _against(baseline: Side, sides: Sequence[Side]) -> list[Compared]:
    """For each other run and common point the pair of the measure that decides; empty without a common point."""
    return decisive(_compared(baseline, sides))


def _compared(baseline: Side, sides: Sequence[Side]) -> Sequence[Compared]:
    """The pairs of all times of the other runs; empty without a common point."""
    others = [other for other in sides if other is not baseline and _have_a_pair(baseline, other)]
    return judging.compare([baseline, *others], Settings(measures=DECISIVE)).pairs if others else []


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


def _models(sides: Sequence[Side]) -> dict[str, str]:
    """The model of each run by its number; empty texts unless several runs have one of several models."""
    models = {side.name: side.measurements[0].features["model"] for side in sides}
    counts = Counter(models.values())
    return models if len(counts) > 1 and max(counts.values()) > 1 else dict.fromkeys(models, "")


def _sides(sweep: Sweep, records: Sequence[Record]) -> list[Side]:
    """Each run with a time as a side, named by its number."""
    sides = []
    for child, record in paired(sweep, records):
        if record and any(point.series for point in record.points if point.key.is_timed):
            sides.append(Side.of(str(child.job), child.name, [record]))
    return sides


def _names(sweep: Sweep, side: Side) -> list[str]:
    """By what `compare.baseline` may name a run: its number, a value of its axes, or an axis with its value."""
    axes = next(child.axes for child in sweep.children if str(child.job) == side.name)
    return [side.name, *axes.values(), *(f"{axis}={value}" for axis, value in axes.items())]


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


def _ratio_of_times(pair: Compared) -> str:
    """The ratio of times with its interval, if it has one; of rates it is the inverse."""
    ratio = Interval(value=pair.other / pair.baseline, low=pair.low, high=pair.high)
    if not MEASURES[pair.measure].is_better_if_lower:
        ratio = Interval(value=1 / ratio.value, low=pair.high and 1 / pair.high, high=pair.low and 1 / pair.low)
    text = f"{ratio.value:.3g}"
    ends = " … ".join(f"{end:.3g}" for end in (ratio.low, ratio.high) if end is not None)
    return with_width(ratio, text, ends) if ends else text


def _fastest(baseline: int, by_run: dict[tuple[int, str], list[Compared]]) -> list[str]:
    """A line for each run that is the fastest at some of several points; none if no run is faster than the baseline."""
    points: dict[Key, list[tuple[int, Compared]]] = {}
    for (job, _), pairs in by_run.items():
        for pair in pairs:
            points.setdefault(pair.key, []).append((job, pair))
    counts = Counter(_fastest_of(baseline, compared) for compared in points.values())
    if len(points) < 2 or not counts.keys() - {baseline}:
        return []
    total = units.counted(len(points), "point")
    return [
        f"run {job}: fastest at {counts[job]} of {total}"
        if job != baseline
        else f"run {job}: no other run is shown to be faster at {counts[job]} of {total}"
        for job in sorted(counts)
    ]


def _fastest_of(baseline: int, compared: Sequence[tuple[int, Compared]]) -> int:
    """The run with the best figure of those that are shown to be faster than the baseline; else the baseline.

    It is the best by the measure that decides first, since ratios of different measures do not compare.
    """
    better = [(job, pair) for job, pair in compared if pair.verdict is Verdict.BETTER]
    if not better:
        return baseline
    return min(better, key=lambda one: (DECISIVE.index(one[1].measure), -abs(math.log(one[1].ratio or 1.0))))[0]
