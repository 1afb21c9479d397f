"""Sweep verdicts: the runs of a sweep against the first of them, and how often each is the fastest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from perfexp.comparison import comparison_table, judging, pairing
from perfexp.comparison.comparison_table import SYMBOLS
from perfexp.comparison.document import Compared, Verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import Side
from perfexp.diagnosis.environment import fact_at
from perfexp.errors import UserError
from perfexp.records import units
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import Key, Record
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.sweep_summary import paired

#: Measures of which the first that a run shares with the baseline decides.
DECISIVE = (*DEVICE_TIMES, "latency", "throughput")


@dataclass
class SweepVerdicts:
    """What the comparison of a sweep's runs shows.

    Attributes:
        baseline: number of the run that the others are compared with; None if no two runs have a point in common.
        ratios: ratio of the times to the baseline with its verdict, or the number of each verdict over several points,
            by run's number and phase.
        fastest: a line for each run that is the fastest at some of several points, or why there is no comparison.
    """

    baseline: int | None = None
    ratios: dict[tuple[int, str], str] = field(default_factory=dict)
    fastest: list[str] = field(default_factory=list)


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> SweepVerdicts:
    """Compare all runs of a sweep with `compare.baseline`, or with the first one that was measured."""
    sides = _sides(sweep, records)
    wanted = next((str(name) for one in records if (name := fact_at(one.plan, "compare.baseline")) is not None), None)
    first = next((side for side in sides if wanted is None or wanted in _names(sweep, side)), None)
    if first is None:
        return SweepVerdicts(fastest=[f"compare.baseline={wanted}: no timed run has this name"] if sides else [])
    others = [other for other in sides if other is not first and _have_a_pair(first, other)]
    if not others:
        return SweepVerdicts()
    found = judging.compare([first, *others], Settings(measures=DECISIVE))
    names = {other.name: int(other.name) for other in others}
    by_run: dict[tuple[int, str], list[Compared]] = {}
    for pair in decisive(found.pairs):
        by_run.setdefault((names[pair.side], pair.key.phase), []).append(pair)
    ratios = {place: _text(pairs) for place, pairs in by_run.items()}
    return SweepVerdicts(int(first.name), ratios, _fastest(int(first.name), by_run))


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


def decisive(pairs: Sequence[Compared]) -> list[Compared]:
    """For each run and point the pair of the measure that decides."""
    chosen: dict[tuple[str, object], Compared] = {}
    for pair in sorted(pairs, key=lambda pair: DECISIVE.index(pair.measure)):
        chosen.setdefault((pair.side, pair.key), pair)
    return sorted(chosen.values(), key=lambda pair: (pair.key.phase, pair.key.input_size, pair.key.batch_size))


def _text(pairs: Sequence[Compared]) -> str:
    if len(pairs) == 1:
        is_time = MEASURES[pairs[0].measure].is_better_if_lower
        baseline, other = pairs[0].baseline, pairs[0].other
        ratio = other / baseline if is_time else baseline / other  # a rate too, below the title of a time
        return f"{ratio:.3g} {comparison_table.verdict_of(pairs[0])}"
    counts = Counter(pair.verdict for pair in pairs)
    return ", ".join(f"{counts[verdict]} {SYMBOLS[verdict]}" for verdict in Verdict if counts[verdict])


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
    """The run with the best figure of those that are shown to be faster than the baseline; else the baseline."""
    better = [(job, pair) for job, pair in compared if pair.verdict is Verdict.BETTER]
    return max(better, key=lambda one: abs(math.log(one[1].ratio or 1.0)))[0] if better else baseline
