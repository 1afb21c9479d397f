"""Replicates: interleave the replicates of several runs, so that slow drifts do not affect one run alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

from perfexp.errors import PerfexpError
from perfexp.host import interrupts
from perfexp.orchestration.job import Run
from perfexp.orchestration.preparation import Assignment
from perfexp.plan.hydra_errors import as_perfexp_error
from perfexp.records.record import Record
from perfexp.reports.console import Console
from perfexp.reports.progress import Whole

Ended = Callable[[Assignment, Record | PerfexpError], None]
#: Chooses which replicate of which run is next; a run that fails is no longer among the runs.
Turns = Callable[[Sequence[Run]], Iterator[tuple[Run, int]]]


def measure(
    assignments: Sequence[Assignment],
    console: Console,
    ended: Ended,
    *,
    turns: Turns | None = None,
    results: Console | None = None,
) -> None:
    """Measure the first replicate of every run, then the second, …, each round in an order of its own.

    `ended` is called with each run that has ended. Finished points are recorded before a KeyboardInterrupt is raised.

    Args:
        turns: another order, which decides itself when it ends.
        results: console for the results of the runs, by default the same as for their progress.
    """
    with ExitStack() as stack:
        runs: list[Run] = []
        saved: list[tuple[Run, Record]] = []
        try:
            for assignment in assignments:
                try:
                    runs.append(stack.enter_context(Run(assignment, console)))
                except PerfexpError as error:
                    ended(assignment, error)
            with interrupts.held():  # a second interrupt comes after all records are on disk
                try:
                    in_all = sum(run.assignment.plan.processes for run in runs)
                    whole = Whole(None if turns else in_all, noun="process")
                    for run, replicate in (turns or rounds)(runs):
                        run.assignment.whole, run.assignment.number = whole, whole.number + 1
                        _measure(run, replicate, runs, ended)
                finally:
                    saved += _saved(runs, ended)
        finally:
            _publish(saved, results, ended)


def _saved(runs: Sequence[Run], ended: Ended) -> Iterator[tuple[Run, Record]]:
    """Save the records of runs with results; of one that cannot be saved the points are on disk."""
    for run in runs:
        try:
            if run.has_results:
                yield run, run.save()
        except Exception as error:
            ended(run.assignment, as_perfexp_error(error, run.assignment.folder))


def _publish(saved: Sequence[tuple[Run, Record]], results: Console | None, ended: Ended) -> None:
    """Publish records, and call `ended` with each; after an interrupt the others are not published."""
    left = list(saved)
    try:
        while left:
            run, record = left[0]
            outcome: Record | PerfexpError = record
            try:
                run.publish(record, results)
            except Exception as error:
                outcome = as_perfexp_error(error, run.assignment.folder)
            del left[0]
            ended(run.assignment, outcome)
    finally:
        for run, record in left:
            ended(run.assignment, record)


def rounds(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """One replicate of every run in each round, in a shuffled order."""
    for replicate in range(max((run.assignment.plan.processes for run in runs), default=0)):
        for run in order(runs, replicate):
            yield run, replicate


def order(runs: Sequence[Run], replicate: int) -> list[Run]:
    """Shuffle the runs that have a replicate of this number by their seed."""
    chosen = [run for run in runs if run.assignment.plan.processes > replicate]
    seed = runs[0].assignment.plan.seed if runs else 0
    random.Random(f"{seed} {replicate}").shuffle(chosen)
    return chosen


def _measure(run: Run, replicate: int, runs: list[Run], ended: Ended) -> None:
    try:
        run.measure([replicate])
    except PerfexpError as error:
        runs.remove(run)
        with suppress(Exception):  # what ended the run is reported
            if run.has_results:
                run.publish(run.save())
        ended(run.assignment, error)
