"""History: changes of a run's figures over earlier runs of the same points."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from perfexp.comparison import judging, pairing
from perfexp.comparison.comparability import Role
from perfexp.comparison.judging import Settings
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import KEY_FIELDS, Side
from perfexp.records.fact_lookup import fact_at
from perfexp.records.record import Record
from perfexp.statistics.change_points import segments, shift
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.ratios import LogRatio

#: Number of runs that a series needs.
LEAST_RUNS = 10
#: Subjects that may change within a series. A run that differs in another subject is left out.
_EVOLVING = {"commit", "code", "board", "seed", "driver", "torch", "libraries"}
#: A change and its 95 % interval.
_PERCENT = "{:+.1f} % ({:+.1f} … {:+.1f} %)"


class Change(NamedTuple):
    """Change of a figure between two successive runs in a series.

    Attributes:
        before: commit of the last run before the change, or its start time outside of git.
        after: commit of the first run after the change.
        word: direction as verdicts name it: FASTER, SLOWER, LESS, …
        percent: size of the change and the ends of its 95 % interval, in percent.
        total: the same from the baseline's level to the new run's; None for a change that did not
            come between them.
        is_regression: whether `total` is worse beyond the margin, and the change contributes to it.
    """

    point: str
    measure: str
    before: str
    after: str
    word: str
    percent: list[float]
    total: list[float] | None
    is_regression: bool

    @property
    def text(self) -> str:
        """Return the change as a line."""
        since = "not since the baseline"
        if self.total:
            since = f"{_PERCENT.format(*self.total)} since the baseline"
        place = f"{self.measure} of {self.point} between {self.before} and {self.after}"
        return f"{self.word} {place}: {_PERCENT.format(*self.percent)}; {since}"


class _Run(NamedTuple):
    """Figure of one run, as its logarithm; runs are sorted by start time.

    Attributes:
        number: 0 for the baseline, 1 for the new run.
    """

    started: str
    number: int
    commit: str
    log: float


def history(
    sides: Sequence[Side], earlier: Iterable[Side], settings: Settings
) -> tuple[list[Change], list[str]]:
    """Find the changes in a run's figures over earlier runs, the baseline among them.

    Args:
        sides: the baseline, then the new run.
        earlier: runs in any order; a run that is found twice counts once.

    Returns:
        the changes that are larger than the margin or add up to a regression, and a line if all
        series are too short. A series is one measure at one point.
    """
    new = sides[1]
    names = pairing.varying(new.measurements) or KEY_FIELDS[1:]
    series: dict[tuple[str, str], dict[str, _Run]] = defaultdict(dict)
    confounders = set[str]()
    for number, side in enumerate(chain(sides, earlier)):
        for pair in judging.drafted_pairs(side, pairing.match(new, side), settings):
            subjects = {one.key for one in pair.differences if one.role is Role.SUBJECT}
            for measure, draft in pair.drafts.items():
                if not (subjects <= _EVOLVING and draft.ratio):
                    continue
                confounders |= {one.key for one in draft.confounders if not one.allowed}
                if draft.is_comparable:
                    record = pair.points[1].record
                    run = _Run(record.started, number, _commit(record), draft.ratio.value)
                    place = pairing.label(pair.points[0], names), measure
                    series[place].setdefault(record.uid, run)
    changes = list[Change]()
    for (point, measure), runs in series.items():
        if len(runs) >= LEAST_RUNS:
            changes += _changes(point, measure, runs.values(), settings.margin)
    most = max(map(len, series.values()))
    if most >= LEAST_RUNS:
        return changes, []
    line = f"--history: at most {most} comparable runs, {LEAST_RUNS} are needed"
    if confounders:
        line += f"; others differ in {', '.join(sorted(confounders))} (--allow)"
    return changes, [line]


def _commit(record: Record) -> str:
    commit = str(fact_at(record.environment, "git.commit") or record.started)[:19]
    if fact_at(record.environment, "git.dirty"):
        commit += "-dirty"
    return commit


def _changes(point: str, measure: str, runs: Collection[_Run], margin: float) -> Iterator[Change]:
    """Yield the changes in a series, ordered by commit, and commits by their first run."""
    begun = {run.commit: run.started for run in sorted(runs, reverse=True)}
    ordered = sorted(runs, key=lambda run: (begun[run.commit], run))
    parts = segments(np.array([run.log for run in ordered]))
    starts = list(accumulate(map(len, parts)))
    numbers = [run.number for run in ordered]
    accepted = bisect_right(starts, numbers.index(0)) if 0 in numbers else 0
    checked = bisect_right(starts, numbers.index(1))
    kind, total = MEASURES[measure], shift(parts[accepted], parts[checked])
    sign = 1 if kind.is_better_if_lower else -1
    is_worse = sign * total.value > 0 and total.p_beyond(margin) <= ALPHA
    for number, start in enumerate(starts[:-1]):
        one = shift(parts[number], parts[number + 1])
        is_since = accepted <= number < checked
        is_regression = is_since and is_worse and sign * one.value > 0
        if is_regression or abs(one.value) > math.log1p(margin):
            yield Change(
                point=point,
                measure=measure,
                before=ordered[start - 1].commit,
                after=ordered[start].commit,
                word=kind.worse if sign * one.value > 0 else kind.better,
                percent=_percent(one),
                total=_percent(total) if is_since else None,
                is_regression=is_regression,
            )


def _percent(one: LogRatio) -> list[float]:
    ratio = one.interval()
    ends = ratio.value, ratio.low, ratio.high
    return [100 * end - 100 for end in ends if end is not None]
