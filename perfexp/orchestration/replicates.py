"""Rounds: the replicates of several runs, interleaved, so that what drifts in hours does not fall on one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from perfexp.errors import PerfexpError
from perfexp.host import interrupts
from perfexp.orchestration.assignment import Assignment
from perfexp.orchestration.job import Run
from perfexp.reports.progress import Whole

if TYPE_CHECKING:
    from perfexp.records.record import Record
    from perfexp.reports.console import Console

Ended = Callable[[Assignment, "Record | PerfexpError"], None]


def measure(assignments: Sequence[Assignment], console: Console, ended: Ended) -> None:
    """Measure the first replicate of every run, then the second of every run, …, each round in an order of its own.

    Args:
        assignments: the runs of a sweep.
        console: where they are reported.
        ended: told of each run that has ended.

    Raises:
        KeyboardInterrupt: interrupted; what was finished has been recorded.
    """
    with ExitStack() as stack:
        runs: list[Run] = []
        kept: list[tuple[Run, Record]] = []
        try:
            for assignment in assignments:
                try:
                    runs.append(stack.enter_context(Run(assignment, console)))
                except PerfexpError as error:
                    ended(assignment, error)
            with interrupts.held():  # a second one finds all records on disk
                try:
                    whole = Whole(sum(run.assignment.plan.replicate for run in runs), noun="process")
                    for replicate in range(max((run.assignment.plan.replicate for run in runs), default=0)):
                        for run in order(runs, replicate):
                            run.assignment.whole, run.assignment.number = whole, whole.number + 1
                            _measure(run, replicate, runs, ended)
                finally:
                    for run in runs:
                        if run.has_results:
                            with suppress(PerfexpError):  # the disk is full; the points are on it
                                kept.append((run, record := run.save()))
                                ended(run.assignment, record)
        finally:
            for run, record in kept:
                run.publish(record)


def order(runs: Sequence[Run], replicate: int) -> list[Run]:
    """The runs that have such a replicate, shuffled by their seed.

    Args:
        runs: of a sweep.
        replicate: number of the round.
    """
    chosen = [run for run in runs if run.assignment.plan.replicate > replicate]
    seed = runs[0].assignment.plan.seed if runs else 0
    random.Random(f"{seed} {replicate}").shuffle(chosen)
    return chosen


def _measure(run: Run, replicate: int, runs: list[Run], ended: Ended) -> None:
    """One run's part of a round; a run that fails leaves the others alone."""
    try:
        run.measure([replicate])
    except PerfexpError as error:
        runs.remove(run)
        if run.has_results:
            with suppress(PerfexpError):
                run.publish(run.save())
        ended(run.assignment, error)
