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

#: Number of runs that a series needs, and the limit on its latest runs.
LEAST_RUNS, _MOST_RUNS = 10, 500
#: Subjects that may change within a series. A run that differs in another subject is left out.
_EVOLVING = {"commit", "code", "board", "seed", "driver", "torch", "libraries"}


class Change(NamedTuple):
    """Change of a figure between two successive runs in a series.

    Attributes:
        before: commit of the last run before the change, or its start time outside of git.
        after: commit of the first run after the change.
        percent: size of the change and the ends of its 95 % interval, in percent.
        word: direction as verdicts name it: FASTER, SLOWER, LESS, …
        total: change in percent, with its interval, from the baseline's level to the new run's. It
            is None for a change that did not come between them.
        is_regression: whether `total` is worse beyond the margin, and the change contributes to it.
    """

    point: str
    measure: str
    before: str
    after: str
    percent: list[float]
    word: str
    total: list[float] | None
    is_regression: bool


class History(NamedTuple):
    """Changes in all series of a run; a series is one measure at one point.

    Attributes:
        changes: changes that are larger than the margin, or add up to a regression.
        runs: number of runs in each series.
        confounders: keys of the facts that make other runs incomparable.
    """

    changes: list[Change]
    runs: list[int]
    confounders: set[str]


class _Run(NamedTuple):
    """Figure of one run, as its logarithm; runs are sorted by start time."""

    started: str
    uid: str
    commit: str
    log: float


def history(sides: Sequence[Side], earlier: Iterable[Side], settings: Settings) -> History:
    """Find the changes in a run's figures over earlier runs, the baseline among them.

    Args:
        sides: the baseline, then the new run.
        earlier: runs in any order; a run that is found twice counts once.
    """
    new = sides[1]
    names = pairing.varying(new.measurements) or KEY_FIELDS[1:]
    series: dict[tuple[str, str], dict[str, _Run]] = defaultdict(dict)
    confounders = set[str]()
    for side in chain(sides, earlier):
        for pair in judging.drafted_pairs(side, pairing.match(new, side), settings):
            subjects = {one.key for one in pair.differences if one.role is Role.SUBJECT}
            if subjects <= _EVOLVING:
                own, other = pair.points
                for measure, draft in pair.drafts.items():
                    confounders |= {one.key for one in draft.confounders if not one.allowed}
                    if draft.is_comparable and draft.ratio:
                        run = _run(other.record, draft.figures[1].mean)
                        series[pairing.label(own, names), measure][run.uid] = run
    changes = list[Change]()
    for (point, measure), runs in series.items():
        if len(runs) >= LEAST_RUNS:
            changes += _changes(point, measure, runs.values(), sides, settings.margin)
    return History(changes, list(map(len, series.values())), confounders)


def _run(record: Record, figure: float) -> _Run:
    commit = str(fact_at(record.environment, "git.commit") or record.started)[:19]
    if fact_at(record.environment, "git.dirty"):
        commit += "-dirty"
    return _Run(record.started, record.uid, commit, math.log(figure))


def _changes(
    point: str, measure: str, runs: Collection[_Run], sides: Sequence[Side], margin: float
) -> Iterator[Change]:
    """Yield the changes in a series, ordered by commit, and commits by their first run."""
    begun = {run.commit: run.started for run in sorted(runs, reverse=True)}
    ordered = sorted(runs, key=lambda run: (begun[run.commit], run))[-_MOST_RUNS:]
    parts = segments(np.array([run.log for run in ordered]))
    starts = list(accumulate(map(len, parts)))
    numbers = []
    for side in sides:
        uids = {one.record.uid for one in side.measurements}
        places = (place for place, run in enumerate(ordered) if run.uid in uids)
        numbers.append(bisect_right(starts, max(places, default=0)))
    accepted, checked = numbers
    total = shift(parts[accepted], parts[checked])
    kind = MEASURES[measure]
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
                percent=_percent(one),
                word=kind.worse if sign * one.value > 0 else kind.better,
                total=_percent(total) if is_since else None,
                is_regression=is_regression,
            )


def _percent(one: LogRatio) -> list[float]:
    ratio = one.interval()
    ends = ratio.value, ratio.low, ratio.high
    return [100 * end - 100 for end in ends if end is not None]
