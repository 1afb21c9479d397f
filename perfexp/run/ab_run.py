"""A/B run: alternating processes for two plans, until their comparison is decided or time is up.

`perfexp ab` calls it. The comparison is repeated after each pair of processes, with a stricter
level each time (`statistics.sequential`), so that looking often does not produce false verdicts.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from perfexp.comparison import comparison_table, judging
from perfexp.comparison.document import Compared, Verdict, with_verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.errors import PerfexpError
from perfexp.records import units
from perfexp.records.analysis import Analysis
from perfexp.records.record import Record, Status
from perfexp.report.console import Console
from perfexp.run import driver
from perfexp.run.job import Job, exit_code
from perfexp.run.preparation import Assignment
from perfexp.run.sweep_run import SweepRun
from perfexp.statistics import sequential


class AbRun:
    """Two runs measured in turn, for example A B, B A, A B.

    Attributes:
        exit_codes: exit codes of ended runs; the greatest counts.

    Args:
        sweep_run: the pair's folder and table.
        settings: how to compare the runs. Without measures, the most precise time at each point
            decides.
        max_seconds: time limit; no process starts that would probably end later.
    """

    def __init__(
        self,
        sweep_run: SweepRun,
        console: Console,
        settings: Settings,
        max_seconds: float,
    ) -> None:
        self.exit_codes: list[int] = []
        self._sweep_run, self._console = sweep_run, console
        self._settings = replace(settings, measures=settings.measures or judging.DECISIVE)
        # measures that the user named decide all together; else the most precise one per point does
        self._decisive = list if settings.measures else judging.decisive
        self._max_seconds, self._start = max_seconds, time.monotonic()

    def measure(self, assignments: Sequence[Assignment]) -> None:
        """Measure until there is a verdict, or until the time limit.

        Finished points are recorded before KeyboardInterrupt is raised.
        """
        results = Console(quiet=True, out=io.StringIO())  # the sweep's table shows them
        driver.measure(assignments, self._console, self._ended, turns=self._turns, results=results)

    def _turns(self, runs: Sequence[Job]) -> Iterator[tuple[Job, int | None]]:
        """Yield the next run with its replicate, for `driver.measure`, until the pair is decided.

        Args:
            runs: the two runs; a run that fails disappears from it, which ends the sequence.
        """
        if len(runs) != 2:
            return
        for number in count():
            begun = time.monotonic()
            in_turn = runs if number % 2 == 0 else runs[::-1]
            for run in list(in_turn):
                if number >= run.assignment.plan.least_processes:
                    run.set_num_processes(number + 1)
                yield run, number
            if len(runs) < 2 or self._is_over(runs, number + 1, 2 * time.monotonic() - begun):
                return

    def _is_over(self, runs: Sequence[Job], processes: int, next_end: float) -> bool:
        """Return whether measuring ends, judged by the results so far; also print them.

        Args:
            runs: the two runs.
            processes: number of processes that each run should have.
            next_end: estimated end of the next pair, on the monotonic clock, in seconds.
        """
        records = [run.assembled() for run in runs]
        measured = min(len(_replicates(record)) for record in records)
        for run in runs:
            if run.assignment.sweep:
                run.assignment.sweep.level = sequential.level(measured)
        if measured < processes:
            return True  # the run's report has the reason
        sides = []
        for name, record in zip("AB", records, strict=False):
            sides.append(Side.of(name, name, [Analysis.of(record)]))
        pairs = self._decisive(judging.compare(sides, self._settings).pairs)
        is_late = next_end - self._start > self._max_seconds
        verdicts = {pair.verdict for pair in pairs}
        if Verdict.NOT_COMPARABLE in verdicts:
            return True
        # a continued run was judged with this many processes before
        if measured > processes or processes < sequential.LEAST:
            return is_late
        self._console.note(_look(processes, pairs))
        return Verdict.UNDECIDED not in verdicts or is_late or processes >= sequential.MOST

    def _ended(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        """Remember a run's exit code, and enter its outcome into the pair's folder."""
        if isinstance(outcome, PerfexpError):
            self._console.error(str(outcome))
            self.exit_codes.append(outcome.exit_code)
        else:
            self.exit_codes.append(exit_code(outcome))
        if assignment.sweep is not None:
            self._sweep_run.ended(assignment.sweep, assignment.name, assignment.folder, outcome)


def _replicates(record: Record) -> set[int]:
    """Return the replicates that have measured every point successfully.

    Only they count for the verdict and for the level of the next one.
    """
    timed, failed = set[int](), set[int]()
    for point in record.points:
        if point.key.is_timed:
            timed.add(point.key.replicate)
            if point.status is not Status.OK:
                failed.add(point.key.replicate)
    return timed - failed


def _look(processes: int, pairs: Sequence[Compared]) -> str:
    """Return an interim result in one line, such as `3 processes of each: latency B/A …`."""
    of_each = f"{processes} processes of each"
    if len(pairs) == 1:
        ratio, verdict = comparison_table.ratio_of(pairs[0]), comparison_table.verdict_of(pairs[0])
        return f"{of_each}: {pairs[0].measure} B/A {ratio} {verdict}"
    decided = len(pairs) - len(with_verdict(pairs, Verdict.UNDECIDED))
    return f"{of_each}: {decided} of {units.counted(len(pairs), 'figure')} decided"
