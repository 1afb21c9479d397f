"""Campaign: a sweep whose runs are jobs of SLURM: submitted, waited for, collected."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfexp.cluster import gate, job_report, job_states, slurm, submission
from perfexp.cluster.job_states import RunState, State
from perfexp.cluster.submission import RunRequest, SlurmSettings
from perfexp.errors import PerfexpError, UserError
from perfexp.orchestration.preparation import Assignment, is_finished
from perfexp.orchestration.sweep_run import SweepRun
from perfexp.plan import config
from perfexp.plan.schema import Cluster
from perfexp.records import units
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, Status
from perfexp.reports.console import Console
from perfexp.tracking import Tracker, store

#: What changes when a record is written; None without one.
Version = tuple[int, int] | None
Ended = Callable[[Assignment, Record | PerfexpError], None]


class SlurmCampaign:
    """Runs of a sweep that become jobs, by the launcher's node; raises UserError for settings out of range."""

    outlives = True

    def __init__(self, launcher: Mapping[str, Any]) -> None:
        self._settings = SlurmSettings.of_node(launcher)
        self._requests: list[RunRequest] = []
        self._earlier: dict[int, Version] = {}

    def add(self, assignment: Assignment, cluster: Cluster, command: Sequence[str]) -> None:
        """Take a run of the sweep; raises UserError if it can't be a job."""
        sends = not _is_sent_later(config.build(assignment.plan.tracking))
        self._requests.append(submission.request_of(assignment, command, cluster, self._settings, sends=sends))

    def measure(self, sweep_run: SweepRun, console: Console, ended: Ended) -> bool:
        """Submit the runs that are neither finished nor queued; returns whether every run has ended.

        `ended` is called with each run that has. After an interrupt the jobs stay in the queue.
        """
        sweep_run.expect([request.assignment for request in self._requests])
        self._earlier = {run.assignment.number: version(run.assignment) for run in self._requests}
        left = enter_finished([request.assignment for request in self._requests], console, ended)
        numbers = {assignment.number for assignment in left}
        waiting = [request for request in self._requests if request.assignment.number in numbers]
        try:
            self._submit(waiting, sweep_run, console)
            if not self._settings.wait:
                self._hand_over(sweep_run, console)
                return not waiting
            return self._wait(waiting, sweep_run, console, ended)
        except PerfexpError:
            sweep_run.withdraw()
            raise
        except KeyboardInterrupt:
            console.note("The jobs stay in the queue.")
            self._hand_over(sweep_run, console)
            raise

    def _submit(self, runs: Sequence[RunRequest], sweep_run: SweepRun, console: Console) -> None:
        states = {state.run: state for state in job_states.states(sweep_run.sweep, sweep_run.paths.root)}
        queued = {run for run, state in states.items() if state.is_queued}
        new = [run for run in runs if run.assignment.number - 1 not in queued]
        if len(new) < len(runs):
            console.note(f"{units.counted(len(runs) - len(new), 'run')} in the queue already")
        dependency = gate.dependency(self._settings.after) if new else []
        if dependency:
            console.note(f"after {self._settings.after}: {dependency[0].removeprefix('--dependency=')}")
        for job, chunk in submission.submit(new, sweep_run.paths, sweep_run.sweep.uid, self._settings, dependency):
            console.note(f"job {job}: {units.counted(len(chunk), 'run')} on gpu={chunk[0].kind}")

    def _hand_over(self, sweep_run: SweepRun, console: Console) -> None:
        folder = shlex.quote(str(sweep_run.paths.root))
        lines = [f"perfexp status {folder}", f"perfexp cancel {folder}"]
        if any(_is_sent_later(config.build(request.assignment.plan.tracking)) for request in self._requests):
            lines.append(f"perfexp log {folder}")
        console.show_lines("to follow, to cancel, and to send the results", lines)

    def _wait(self, runs: Sequence[RunRequest], sweep_run: SweepRun, console: Console, ended: Ended) -> bool:
        """Enter each run when its job has ended."""
        left = {run.assignment.number - 1: run for run in runs}
        shown = ""
        while left:
            states = job_states.states(sweep_run.sweep, sweep_run.paths.root)
            for state in states:
                if state.run in left and state.has_ended:
                    self._collect(left.pop(state.run), state, console, ended)
            text = job_report.counted(states)
            if text != shown:
                console.note(text)
                shown = text
            if left:
                time.sleep(slurm.QUEUE_SECONDS)
        return True

    def _collect(self, run: RunRequest, state: RunState, console: Console, ended: Ended) -> None:
        assignment = run.assignment
        try:
            record = Record.load(assignment.folder)
        except UserError:
            record = None
        if state.state is not State.done and version(assignment) == self._earlier.get(assignment.number):
            record = None  # an earlier job's
        is_cut_short = record is not None and record.status is Status.INTERRUPTED
        if record is None or is_cut_short or state.state not in (State.done, State.failed):
            why = f": {state.why}" if state.why else ""
            text = f"{state.name}: {state.state}{why} (job {state.job}; perfexp job-output {assignment.folder})"
            ended(assignment, PerfexpError(text))
            return
        tracker = config.build(assignment.plan.tracking)
        if _is_sent_later(tracker):
            try:
                tracker.publish(record, assignment.folder)
            except PerfexpError as error:
                assignment.is_sent = False
                console.error(str(error))
        ended(assignment, record)


def version(assignment: Assignment) -> Version:
    """Return what differs between the record in a run's folder and an earlier one, whatever the clocks of the nodes."""
    try:
        found = RunPaths(assignment.folder).record.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def enter_finished(assignments: Sequence[Assignment], console: Console, ended: Ended) -> list[Assignment]:
    """Return the runs that are not finished, after calling `ended` with the others."""
    left, finished = [], 0
    for assignment in assignments:
        if not is_finished(RunPaths(assignment.folder), assignment.plan):
            left.append(assignment)
            continue
        try:
            ended(assignment, Record.load(assignment.folder))
            finished += 1
        except UserError as error:  # a record that cannot be read is not measured again: it may be another version's
            ended(assignment, error)
    if finished:
        console.note(f"{units.counted(finished, 'run')} finished already")
    return left


def _is_sent_later(tracker: Tracker) -> bool:
    """Whether the store is a file, which jobs on several nodes must not write to."""
    uri = tracker.settings.get("uri")
    return uri is not None and store.database(uri) is not None
