"""Undecided pairs: the measure that decides which of two runs is faster, and what would decide those left open."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.comparison.document import Compared, SideFacts, Verdict
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.statistics import sequential
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.ratios import MOST_PROCESSES

#: Measures of which the first that a run shares with the baseline decides.
DECISIVE = (*DEVICE_TIMES, "latency", "throughput")
_NEW_RUN = "for a verdict on another measure start a new perfexp ab with --metric NAME in a new folder"


def decisive(pairs: Sequence[Compared]) -> list[Compared]:
    """For each run and point the pair of the measure that decides."""
    chosen: dict[tuple[str, object], Compared] = {}
    for pair in sorted(pairs, key=lambda pair: DECISIVE.index(pair.measure)):
        chosen.setdefault((pair.side, pair.key), pair)
    return sorted(chosen.values(), key=lambda pair: (pair.key.phase, pair.key.input_size, pair.key.batch_size))


def remedies(side: SideFacts, pairs: Sequence[Compared]) -> list[str]:
    """What would decide the undecided pairs of a side, by the reason."""
    undecided = [pair for pair in pairs if pair.verdict is Verdict.UNDECIDED]
    if not undecided:
        return []
    return _by_more_processes(undecided) if side.level == ALPHA else [_in_turn(side, pairs)]


def _by_more_processes(pairs: Sequence[Compared]) -> list[str]:
    counts = [max(pair.processes) + pair.further_processes for pair in pairs if pair.further_processes]
    notes = []
    if counts:
        notes.append(
            "+N: N more processes of each side would probably decide; measure both again with "
            f"processes={max(counts)}, enough for the largest N"
        )
    if any(pair.low is not None and not pair.further_processes for pair in pairs):
        notes.append(
            f"UNDECIDED without +N: even {MOST_PROCESSES} processes would not decide, or they do not repeat this "
            "measure; a wider --margin may"
        )
    if any(pair.low is None for pair in pairs):
        notes.append("no interval: a side has one process with too few samples; measure it again with processes=3")
    return notes


def _in_turn(side: SideFacts, pairs: Sequence[Compared]) -> str:
    """What would decide the pairs of two runs whose processes took turns."""
    fewest = min(min(pair.processes) for pair in pairs if pair.verdict is Verdict.UNDECIDED)
    if fewest >= sequential.MOST:
        return f"UNDECIDED after {sequential.MOST} processes of each side, the most: a wider --margin may decide"
    if fewest < sequential.LEAST:
        return (
            f"UNDECIDED with {fewest} process{'' if fewest == 1 else 'es'} of each side: intervals need "
            f"{sequential.LEAST}; repeat perfexp ab with output_dir=DIR and a longer --max-seconds to continue"
        )
    deciding = _deciding(side, pairs)
    names = ", ".join(dict.fromkeys(pair.measure for pair in deciding))
    if deciding and all(pair.verdict is not Verdict.UNDECIDED for pair in deciding):
        return f"UNDECIDED: perfexp ab ended when {names} was decided; {_NEW_RUN}"
    return (
        "UNDECIDED: repeat perfexp ab with output_dir=DIR and a longer --max-seconds, which goes on while "
        f"{names or 'the measure that it decides by (--metric)'} is undecided; {_NEW_RUN}"
    )


def _deciding(side: SideFacts, pairs: Sequence[Compared]) -> list[Compared]:
    """The pairs that end `perfexp ab`; none if that is unknown, or not all of them are among these pairs."""
    if side.decided_by is None:
        return []
    if side.decided_by:
        found = [pair for pair in pairs if pair.measure in side.decided_by]
        return found if {pair.measure for pair in found} == {*side.decided_by} else []
    return decisive([pair for pair in pairs if pair.measure in DECISIVE])
