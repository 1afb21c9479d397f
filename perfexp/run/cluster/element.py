"""One run of a sweep in its own process: in a SLURM job, or on one GPU of this machine.

`Campaign` is the command that starts these processes. `Element` is the same run as its own process
sees it.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perfexp.errors import PerfexpError, UserError
from perfexp.host import credentials, interrupts, lifeline
from perfexp.host.scheduler import job_id
from perfexp.plan.flags import OF_SWEEP, PARENT, REQUEUE
from perfexp.plan.override_keys import key_of
from perfexp.plan.overrides import quoted
from perfexp.plan.schema import Cluster
from perfexp.records import units
from perfexp.records.folders import run_folders
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Record, SweepMembership, read_points
from perfexp.records.sweep_record import Sweep
from perfexp.report.console import Console
from perfexp.run.cluster import slurm
from perfexp.run.driver import Ended
from perfexp.run.preparation import Assignment, is_finished
from perfexp.run.sweep_run import SweepRun

#: A job on an unresponsive node may live on for a while after SLURM has requeued it.
_PATIENCE_SECONDS, _LOOK_SECONDS = 300.0, 2.0


@dataclass(kw_only=True)
class SweepElement:
    """A run of a sweep that its own process measures, as the campaign sees it.

    Attributes:
        assignment: plan and folder.
        overrides: overrides as typed, without the output folder.
        cluster: the site's settings.
        requests: sbatch options.
        earlier: version of the record before this command; None if there was no record.
    """

    assignment: Assignment
    overrides: Sequence[str]
    cluster: Cluster
    requests: Sequence[str] = ()
    earlier: tuple[int, int] | None = None

    @property
    def number(self) -> int:
        """Return the number in the sweep, from 0."""
        return self.assignment.number - 1

    @property
    def version(self) -> tuple[int, int] | None:
        """Return a value that changes when the record is written; None without a record.

        It does not depend on how the clocks of different nodes compare. Comparing it with `earlier`
        shows whether this command's process has written a record.
        """
        try:
            status = RunPaths(self.assignment.folder).record.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def record(self) -> Record | None:
        """Return the record in the run folder; None if it is missing or unreadable.

        A campaign reports it when the process has ended.
        """
        with suppress(UserError):
            return Record.load(self.assignment.folder)
        return None

    def arguments(self, sweep: SweepPaths, *, requeue: bool = False) -> list[str]:
        """Return the words after `perfexp` that measure the run in its own process.

        `Element` reads them in that process.

        Args:
            sweep: folder of the sweep.
            requeue: whether the job queues itself again at its time limit.
        """
        flags = [f"{OF_SWEEP}={sweep.root}:{self.number}", *([REQUEUE] if requeue else [])]
        folder = f"output_dir={quoted(str(self.assignment.folder.absolute()))}"
        return [*flags, *self.overrides, folder, "hydra.mode=RUN", "quiet=true"]


class Campaign(ABC):
    """The runs of a sweep, each measured by its own process. Subclasses start the processes.

    Attributes:
        outlives: whether the processes continue after the command has ended.
        runs: all runs, in order.
    """

    outlives: bool

    def __init__(self) -> None:
        self.runs: list[SweepElement] = []

    def add(self, assignment: Assignment, cluster: Cluster, command: Sequence[str]) -> None:
        """Add a composed run.

        `main` calls it for each run instead of measuring it.

        Args:
            assignment: plan and folder.
            cluster: the site's settings.
            command: overrides as typed.

        Raises:
            UserError: the run cannot be measured this way, for example because of a credential.
        """
        if assignment.overwrites:
            raise UserError(
                "--overwrite is not for runs in processes of their own: choose another "
                "output_dir=DIR."
            )
        if secret := next(filter(credentials.is_masked, command), None):
            key = secret.partition("=")[0]
            raise UserError(
                f"{key} has a credential, which a job's script would show; set it in the "
                "environment."
            )
        self.runs.append(self._run(assignment, cluster, command))

    @abstractmethod
    def _run(
        self, assignment: Assignment, cluster: Cluster, command: Sequence[str]
    ) -> SweepElement:
        """Return a run as its process will get it; raise `UserError` if that is impossible."""

    def measure(self, sweep_run: SweepRun, console: Console, ended: Ended) -> bool:
        """Measure the unfinished runs; return whether every run has ended.

        `main` calls it once, after all runs are composed.

        Args:
            ended: called with each run that has ended.
        """
        sweep_run.expect([run.assignment for run in self.runs])
        # a record with another version was written by this command's process
        for run in self.runs:
            run.earlier = run.version
        return self._measure(unfinished(self.runs, console, ended), sweep_run, console, ended)

    @abstractmethod
    def _measure(
        self, runs: list[SweepElement], sweep_run: SweepRun, console: Console, ended: Ended
    ) -> bool:
        """Start the processes of unfinished runs; return whether every run has ended."""


def unfinished(runs: Sequence[SweepElement], console: Console, ended: Ended) -> list[SweepElement]:
    """Return the runs to measure; call `ended` with the records of those that are finished.

    `Campaign.measure` calls it first.
    """
    left, finished = [], 0
    for run in runs:
        assignment = run.assignment
        if not is_finished(RunPaths(assignment.folder), assignment.plan):
            left.append(run)
            continue
        try:
            ended(assignment, Record.load(assignment.folder))
            finished += 1
        except UserError as error:  # another version may have written it: do not measure again
            ended(assignment, error)
    if finished:
        console.note(f"{units.counted(finished, 'run')} finished already")
    return left


def overrides_of(command: Sequence[str], *, sends: bool) -> list[str]:
    """Return the overrides of a run as typed, without its output folder.

    Both kinds of campaigns build their command lines from them.

    Args:
        sends: whether the run's own process sends the record; otherwise tracking is turned off.
    """
    left_out = ("output_dir",) if sends else ("output_dir", "tracking")
    overrides = [text for text in command if key_of(text).split(".")[0] not in left_out]
    if sends:
        return overrides
    return [*overrides, "tracking=none"]


class Element:
    """The sweep run that this process measures.

    Attributes:
        child: the run's entry in the sweep.
        folder: folder of the run.

    Args:
        value: value of `--of-sweep`: the sweep folder, a colon, and the run number.
        requeue: whether to requeue a job that reaches its time limit.
        is_job: whether SLURM started this process. Otherwise a waiting process did, which needs
            every exit code.

    Raises:
        UserError: there is no such run.
    """

    def __init__(self, value: str, *, requeue: bool, is_job: bool) -> None:
        folder, _, number = value.rpartition(":")
        self._sweep_folder, self._requeues, self._is_job = Path(folder), requeue, is_job
        self._sweep = Sweep.load(self._sweep_folder)
        runs = {
            str(child.job): (child, path)
            for child, path in run_folders(self._sweep, self._sweep_folder)
        }
        if number not in runs:
            raise UserError(f"{folder} has no run {number}: submit the sweep again.")
        self.child, self.folder = runs[number]
        self._num_points = self._count()

    @property
    def membership(self) -> SweepMembership:
        """Return the sweep description for the run's record.

        The sweep's tables and the tracker find the run by it.
        """
        directory = Path(os.path.relpath(self._sweep_folder, self.folder)).as_posix()
        sweep, child = self._sweep, self.child
        return SweepMembership(
            uid=sweep.uid, job=child.job, jobs=sweep.jobs, axes=child.axes, directory=directory
        )

    def wait_for_folder(self) -> None:
        """Wait until no other process measures the run, for up to five minutes.

        A requeued job may start before its predecessor has ended.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while RunPaths(self.folder).in_use() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def end(self, exit_code: int) -> int:
        """Return the final exit code; requeue the job if SLURM warned about its time limit.

        A job succeeds even if a tracker did not accept the record, because the record is complete.
        `main` calls it last.
        """
        if interrupts.last() != signal.SIGUSR2 or exit_code != 130:
            if exit_code == 3 and self._is_job:
                return 0
            return exit_code
        job = job_id()
        text = f": job {job} is queued again for the rest."
        if not self._requeues or job is None:
            text, job = ".", None
        elif self._count() == self._num_points:
            text, job = " before it finished a point: raise cluster.time_limit.", None
        print(f"The job reached its time limit{text}", flush=True)
        if job is not None:
            try:
                slurm.requeue(job)
                time.sleep(_PATIENCE_SECONDS)  # SLURM ends this process
            except PerfexpError as error:
                print(f"error: {error}", flush=True)
        return 1

    def _count(self) -> int:
        """Return the number of finished points; 0 if they cannot be read."""
        with suppress(UserError):
            return len(read_points(RunPaths(self.folder).points))
        return 0


def of_arguments(arguments: Sequence[str]) -> tuple[list[str], Element | None]:
    """Split a command line into the arguments without element flags, and the element.

    The element is None without `--of-sweep`. `main` calls this for every command line.
    """
    sweep_arguments = [
        text for text in arguments if text.partition("=")[0] in (OF_SWEEP, PARENT, REQUEUE)
    ]
    values = dict(text.partition("=")[::2] for text in sweep_arguments)
    if OF_SWEEP not in values:
        return list(arguments), None
    parent = values.get(PARENT)
    element = Element(
        values[OF_SWEEP], requeue=REQUEUE in values, is_job=job_id() is not None and not parent
    )
    if parent:
        lifeline.die_with(int(parent))
    return [text for text in arguments if text not in sweep_arguments], element
