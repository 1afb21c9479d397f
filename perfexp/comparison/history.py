"""History: changes of a run's figures over earlier runs of the same points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from perfexp.comparison import judging, pairing
from perfexp.comparison.comparability import Role
from perfexp.comparison.judging import Settings
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import KEY_FIELDS, Side
from perfexp.errors import UserError
from perfexp.records.fact_lookup import fact_at
from perfexp.statistics.change_points import segments, shift
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.ratios import LogRatio

#: Number of runs that a series needs, and the limit on its latest runs.
LEAST_RUNS, _MOST_RUNS = 10, 1000
#: Subjects that may change within a series. A run that differs in another subject is left out.
_EVOLVING = {"commit", "code", "board", "seed", "driver", "torch", "libraries"}
_PERCENT = "{:+.1f} % ({:+.1f} … {:+.1f} %)"


class Change(NamedTuple):
    """Change of a figure between two successive runs in a series.

    Attributes:
        before: commit of the last run before the change, or its start time outside of git.
        after: commit of the first run after the change.
        percent: size of the change and the ends of its 95 % interval, in percent.
        total: the same from the baseline's level to the new run's, if that is worse beyond the
            margin and the change came between them; otherwise None.
    """

    point: str
    measure: str
    before: str
    after: str
    percent: list[float]
    total: list[float] | None

    @property
    def text(self) -> str:
        """Return the change as a line."""
        subject = f"{self.measure} of {self.point} between {self.before} and {self.after}"
        text = f"CHANGED {subject}: {_PERCENT.format(*self.percent)}"
        if self.total:
            word = MEASURES[self.measure].worse
            text += f"; {word} since the baseline: {_PERCENT.format(*self.total)}"
        return text


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

    A series is one measure at one point.

    Args:
        sides: the baseline, then the new run.
        earlier: runs in any order; a run that is found twice counts once.

    Returns:
        the changes, and a line if all series are too short.
    """
    new = sides[1]
    names = pairing.varying(new.measurements) or KEY_FIELDS[1:]
    series: dict[tuple[str, str], dict[str, _Run]] = defaultdict(dict)
    confounders = set[str]()
    for number, side in enumerate(chain(sides, earlier)):
        try:
            matching = pairing.match(new, side)
        except UserError:  # a run with other features cannot tell the new side's points apart
            continue
        for pair in judging.drafted_pairs(side, matching, settings):
            subjects = {one.key for one in pair.differences if one.role is Role.SUBJECT}
            if not subjects <= _EVOLVING:
                continue
            earlier_point, other = pair.points
            record = other.record
            commit = str(fact_at(record.environment, "git.commit") or record.started)[:19]
            for measure, draft in pair.drafts.items():
                if draft.is_comparable and draft.ratio:
                    runs = series[pairing.label(earlier_point, names), measure]
                    run = _Run(record.started, number, commit, draft.ratio.value)
                    # the same record may be found in several folders
                    runs.setdefault(record.uid, run)
                confounders |= {
                    difference.key for difference in draft.confounders if not difference.allowed
                }
    changes = list[Change]()
    for (point, measure), runs in series.items():
        if len(runs) >= LEAST_RUNS:
            changes += _changes(point, measure, runs.values(), settings.margin)
    most = max(map(len, series.values()), default=0)
    if most >= LEAST_RUNS:
        return changes, []
    line = f"--history: at most {most} comparable runs, {LEAST_RUNS} are needed"
    if confounders:
        line += f"; others differ in {', '.join(sorted(confounders))} (--allow)"
    return [], [line]


def _changes(point: str, measure: str, runs: Collection[_Run], margin: float) -> list[Change]:
    """Return the changes in a series, ordered by commit, and commits by their first run."""
    begun = {run.commit: run.started for run in sorted(runs, reverse=True)}
    ordered = sorted(runs, key=lambda run: (begun[run.commit], run))[-_MOST_RUNS:]
    parts = segments(np.array([run.log for run in ordered]))
    part_of = np.repeat(range(len(parts)), [part.size for part in parts]).tolist()
    of_sides = {run.number: part for run, part in zip(ordered, part_of, strict=True)}
    accepted, checked = of_sides.get(0, 0), of_sides.get(1, 0)
    total = shift(parts[accepted], parts[checked])
    is_worse = total.value > 0 if MEASURES[measure].is_better_if_lower else total.value < 0
    has_baseline = {0, 1} <= of_sides.keys()
    if not has_baseline or total.p_beyond(margin) > ALPHA or not is_worse:
        checked = accepted
    changes = []
    for (before, part_before), (after, part_after) in pairwise(zip(ordered, part_of, strict=True)):
        if part_before != part_after:
            places = point, measure, before.commit, after.commit
            since = _percent(total) if accepted <= part_before < checked else None
            changes.append(
                Change(*places, _percent(shift(parts[part_before], parts[part_after])), since)
            )
    return changes


def _percent(ratio_of_levels: LogRatio) -> list[float]:
    """Return the change in percent, with the ends of its interval if they are known."""
    ratio = ratio_of_levels.interval()
    ends = ratio.value, ratio.low, ratio.high
    return [100 * end - 100 for end in ends if end is not None]
