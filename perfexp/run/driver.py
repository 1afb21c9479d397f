"""Driver: measure one run, or several runs' processes in turns, so that drift affects all runs.

`main` and the Python interface call `run` for one run and `measure` for a sweep. Each `Job`
measures its points replicate by replicate; this module decides whose turn it is, and saves all
records even after an interrupt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial

from perfexp.errors import PerfexpError
from perfexp.host import interrupts
from perfexp.plan.hydra_errors import as_perfexp_error
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record
from perfexp.report.console import Console
from perfexp.report.progress import Whole
from perfexp.run.job import Job
from perfexp.run.preparation import Assignment

#: Callback for each run that has ended, with its record or the error that ended it.
Ended = Callable[[Assignment, Record | PerfexpError], None]
#: Yields the next run with its replicate, or with None for all replicates. Failed runs disappear
#: from the sequence that it gets.
Turns = Callable[[Sequence[Job]], Iterator[tuple[Job, int | None]]]


def run(
    assignment: Assignment, console: Console, measure_here: Callable[[], None] | None = None
) -> Record:
    """Measure one run and return its record, already written, sent and shown.

    `main` and the Python interface call it.

    Args:
        assignment: plan and folder.
        measure_here: measures in this process; None to use workers.

    Raises:
        PerfexpError: the run was refused or failed. Finished points are in the record.
        KeyboardInterrupt: an interrupt came. Finished points are in the record.
    """
    outcomes: list[Record | PerfexpError] = []
    measure(
        [assignment],
        console,
        lambda _, outcome: outcomes.append(outcome),
        measure_here=measure_here,
    )
    if isinstance(outcomes[-1], PerfexpError):
        raise outcomes[-1]
    return outcomes[-1]


def measure(
    assignments: Sequence[Assignment],
    console: Console,
    ended: Ended,
    *,
    turns: Turns | None = None,
    results: Console | None = None,
    measure_here: Callable[[], None] | None = None,
) -> None:
    """Measure each run's first replicate, then the second, and so on.

    Each round has its own order. Finished points are recorded before KeyboardInterrupt is raised.

    Args:
        assignments: runs to measure.
        console: console for progress.
        ended: called with each run that has ended.
        turns: another order, which also decides when to stop.
        results: console for results; by default, the console for progress.
        measure_here: measures the only run in this process; None to use workers.
    """
    # waits for workers check for interrupts; a call in this process must be interruptible itself
    waiting = nullcontext if measure_here else interrupts.held
    with ExitStack() as stack:
        runs: list[Job] = []
        saved: list[tuple[Job, Record]] = []
        try:
            for assignment in assignments:
                try:
                    runs.append(stack.enter_context(Job(assignment, console)))
                except PerfexpError as error:
                    ended(assignment, error)
            with waiting():  # a second interrupt comes after all records are on disk
                try:
                    in_all = sum(run.assignment.plan.least_processes for run in runs)
                    total_progress = Whole(None if turns else in_all, noun="process")
                    for run, replicate in (turns or rounds)(runs):
                        if replicate is not None and (turns or len(assignments) > 1):
                            number = total_progress.number + 1
                            total_progress.total = total_progress.total and max(
                                total_progress.total, number
                            )
                            run.assignment.whole, run.assignment.number = total_progress, number
                        _measure(run, measure_here or partial(run.measure, replicate), runs, ended)
                finally:
                    with interrupts.held():
                        saved += _saved(runs, ended)
        finally:
            _publish(saved, results, ended)


def _saved(runs: Sequence[Job], ended: Ended) -> Iterator[tuple[Job, Record]]:
    """Save the records of runs with results, and yield them.

    If saving fails, `ended` gets the error; the points remain on disk.
    """
    for run in runs:
        try:
            if run.has_results:
                yield run, run.save()
        except Exception as error:
            ended(run.assignment, as_perfexp_error(error, RunPaths(run.assignment.folder).log))


def _publish(saved: Sequence[tuple[Job, Record]], results: Console | None, ended: Ended) -> None:
    """Publish records and call `ended` with each.

    After an interrupt the remaining records are not published.
    """
    left = list(saved)
    try:
        while left:
            run, record = left[0]
            outcome: Record | PerfexpError = record
            try:
                run.publish(record, results)
            except Exception as error:
                outcome = as_perfexp_error(error, RunPaths(run.assignment.folder).log)
            del left[0]
            ended(run.assignment, outcome)
    finally:
        for run, record in left:
            ended(run.assignment, record)


def rounds(runs: Sequence[Job]) -> Iterator[tuple[Job, int | None]]:
    """Yield each run once per round, in shuffled order, until all runs are precise enough.

    A single run is measured as a whole. It is the usual order of `measure`.
    """
    if len(runs) == 1:
        yield runs[0], None
    else:
        for replicate in range(
            max((run.assignment.plan.least_processes for run in runs), default=0)
        ):
            for run in order(
                [run for run in runs if run.assignment.plan.least_processes > replicate], replicate
            ):
                yield run, replicate
    while further := {run: number for run in runs if (number := run.further()) is not None}:
        for run in order(list(further), max(further.values())):
            yield run, further[run]


def order(runs: list[Job], replicate: int) -> list[Job]:
    """Return the runs in an order shuffled by their seed and the replicate."""
    seed = runs[0].assignment.plan.seed if runs else 0
    random.Random(f"{seed} {replicate}").shuffle(runs)
    return runs


def _measure(run: Job, measure: Callable[[], None], runs: list[Job], ended: Ended) -> None:
    """Measure a run's turn. A failure ends the run: it is published with its results so far.

    Args:
        run: the run.
        measure: measures one replicate, or all.
        runs: all runs; a failed one is removed.
        ended: called with a failed run.
    """
    try:
        measure()
    except PerfexpError as error:
        run.ended_by(error)
        runs.remove(run)
        with suppress(Exception):  # the error that ended the run is reported
            if run.has_results:
                run.publish(run.save())
        ended(run.assignment, error)
