"""Element: one run of a sweep, measured by a process of its own: in a job of SLURM, or on one GPU of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from perfexp.cli.flags import OF_SWEEP, PARENT, REQUEUE
from perfexp.cluster import slurm
from perfexp.errors import PerfexpError, UserError
from perfexp.host import interrupts, lifeline
from perfexp.host.scheduler import job_id
from perfexp.plan.override_keys import key_of
from perfexp.records.folders import run_folders
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import SweepMembership, read_points
from perfexp.records.sweep_record import Sweep, SweepChild

#: The job of a node that fell silent may live on for a while after SLURM has queued it again.
_PATIENCE_SECONDS, _LOOK_SECONDS = 300.0, 2.0


def arguments(sweep: SweepPaths, number: int, overrides: Sequence[str], *, requeue: bool = False) -> list[str]:
    """Return the arguments of perfexp that measure the run of a number, from 0."""
    flags = [f"{OF_SWEEP}={sweep.root}:{number}", *([REQUEUE] if requeue else [])]
    return [*flags, *overrides, "hydra.mode=RUN", "quiet=true"]


def overrides_of(command: Sequence[str], *, sends: bool) -> list[str]:
    """Return the overrides of a run as typed, without its place and, unless its process sends the record, its store."""
    left_out = ("output_dir",) if sends else ("output_dir", "tracking")
    kept = [text for text in command if key_of(text).split(".")[0] not in left_out]
    return kept if sends else [*kept, "tracking=none"]


class Element:
    """The run of a sweep that this process measures, by the value of `--of-sweep`: the sweep's folder and a number.

    Args:
        requeue: whether a job that reaches its time limit is queued again.
        is_job: whether SLURM started this process; otherwise a waiting one did, which is to know every exit code.

    Raises UserError if there is no such run.
    """

    def __init__(self, value: str, *, requeue: bool, is_job: bool) -> None:
        folder, _, number = value.rpartition(":")
        self._sweep_folder, self._requeues, self._is_job = Path(folder), requeue, is_job
        self._sweep = Sweep.load(self._sweep_folder)
        self.child, self.folder = self._child(number)
        self._num_points = self._count()

    def _child(self, number: str) -> tuple[SweepChild, Path]:
        for child, folder in run_folders(self._sweep, self._sweep_folder):
            if str(child.job) == number:
                return child, folder
        raise UserError(f"{self._sweep_folder} has no run {number}: submit the sweep again.")

    @property
    def membership(self) -> SweepMembership:
        """Description of the sweep for the run's record."""
        directory = Path(os.path.relpath(self._sweep_folder, self.folder)).as_posix()
        sweep, child = self._sweep, self.child
        return SweepMembership(uid=sweep.uid, job=child.job, jobs=sweep.jobs, axes=child.axes, directory=directory)

    def wait_for_folder(self) -> None:
        """Return when no other process measures the run, or after some minutes."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while RunPaths(self.folder).in_use() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def end(self, exit_code: int) -> int:
        """Queue the job again if SLURM warned of its time limit; returns the exit code of the process otherwise.

        A record that a tracker did not accept is complete: a job has succeeded.
        """
        if interrupts.last() != signal.SIGUSR2 or exit_code != 130:
            return 0 if exit_code == 3 and self._is_job else exit_code
        job = job_id()
        if not self._requeues or job is None:
            print("The job reached its time limit.", flush=True)
            return 1
        if self._count() == self._num_points:
            print("The job reached its time limit before it finished a point: raise cluster.time_limit.", flush=True)
            return 1
        print(f"The job reached its time limit: job {job} is queued again for the rest.", flush=True)
        try:
            slurm.requeue(job)
        except PerfexpError as error:
            print(f"error: {error}", flush=True)
            return 1
        time.sleep(_PATIENCE_SECONDS)  # SLURM ends this process
        return 1

    def _count(self) -> int:
        with suppress(UserError):
            return len(read_points(RunPaths(self.folder).points))
        return 0


def of_arguments(arguments: Sequence[str]) -> tuple[list[str], Element | None]:
    """Remove the flags of an element from a command line; returns the rest and the element, None without one."""
    values = [text.partition("=")[2] for text in arguments if text.startswith(f"{OF_SWEEP}=")]
    if not values:
        return list(arguments), None
    parents = [text.partition("=")[2] for text in arguments if text.startswith(f"{PARENT}=")]
    element = Element(values[-1], requeue=REQUEUE in arguments, is_job=job_id() is not None and not parents)
    if parents:
        lifeline.die_with(int(parents[-1]))
    flags = (f"{OF_SWEEP}=", f"{PARENT}=", REQUEUE)
    return [text for text in arguments if not text.startswith(flags)], element
