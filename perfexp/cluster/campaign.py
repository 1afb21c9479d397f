"""Campaign: a sweep whose runs are jobs of SLURM: submitted, waited for, collected."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perfexp.cluster import job_states, slurm, submission
from perfexp.cluster.element import Campaign, Ended, Run
from perfexp.cluster.job_states import RunState, State
from perfexp.cluster.local_queue import LocalCampaign
from perfexp.cluster.submission import SlurmSettings
from perfexp.errors import PerfexpError, UserError
from perfexp.orchestration.preparation import Assignment
from perfexp.orchestration.sweep_run import SweepRun
from perfexp.plan import config
from perfexp.plan.schema import Cluster
from perfexp.records import units
from perfexp.records.record import Status
from perfexp.reports.console import Console
from perfexp.tracking import Tracker, store

_ROOM = "hydra_plugins.perfexp_launchers.launchers."


class SlurmCampaign(Campaign):
    """Runs of a sweep that become jobs, by the launcher's node; raises UserError for settings out of range."""

    outlives = True

    def __init__(self, launcher: Mapping[str, Any]) -> None:
        super().__init__()
        self._settings = SlurmSettings(**{name: value for name, value in launcher.items() if name != "_target_"})

    def _run(self, assignment: Assignment, cluster: Cluster, command: Sequence[str]) -> Run:
        sends = _later(assignment) is None
        return submission.request_of(assignment, command, cluster, self._settings, sends=sends)

    def _measure(self, runs: list[Run], sweep_run: SweepRun, console: Console, ended: Ended) -> bool:
        """Submit the runs that are not queued; after an interrupt the jobs stay in the queue."""
        try:
            self._submit(runs, sweep_run, console)
            if self._settings.wait:
                self._wait(runs, sweep_run, console, ended)
                return True
            self._hand_over(sweep_run, console)
            return not runs
        except PerfexpError:
            sweep_run.withdraw()
            raise
        except KeyboardInterrupt:
            console.note("The jobs stay in the queue.")
            self._hand_over(sweep_run, console)
            raise

    def _submit(self, runs: Sequence[Run], sweep_run: SweepRun, console: Console) -> None:
        states = job_states.states(sweep_run.sweep, sweep_run.paths.root)
        queued = {state.run for state in states if state.is_queued}
        new = [run for run in runs if run.number not in queued]
        if len(new) < len(runs):
            console.note(f"{units.counted(len(runs) - len(new), 'run')} in the queue already")
        dependency = submission.dependency(self._settings.after) if new else []
        if dependency:
            console.note(f"after {self._settings.after}: {dependency[0].removeprefix('--dependency=')}")
        for job, chunk in submission.submit(new, sweep_run.paths, sweep_run.sweep.uid, self._settings, dependency):
            console.note(f"job {job}: {units.counted(len(chunk), 'run')} on gpu={chunk[0].assignment.plan.gpu_name}")

    def _hand_over(self, sweep_run: SweepRun, console: Console) -> None:
        commands = ["status", "cancel"]
        if any(_later(run.assignment) for run in self.runs):
            commands.append("log")
        folder = shlex.quote(str(sweep_run.paths.root))
        lines = [f"perfexp {command} {folder}" for command in commands]
        console.show_lines("to follow, to cancel, and to send the results", lines)

    @staticmethod
    def _wait(runs: Sequence[Run], sweep_run: SweepRun, console: Console, ended: Ended) -> None:
        """Enter each run when its job has ended."""
        left, shown = {run.number: run for run in runs}, ""
        while left:
            states = job_states.states(sweep_run.sweep, sweep_run.paths.root)
            for state in states:
                if state.run in left and state.has_ended:
                    _collect(left.pop(state.run), state, console, ended)
            text = job_states.counted(states)
            if text != shown:
                console.note(text)
                shown = text
            if left:
                time.sleep(slurm.QUEUE_SECONDS)


def _collect(run: Run, state: RunState, console: Console, ended: Ended) -> None:
    """Enter the record of a run, or the state of its job if that left none of its own."""
    assignment, record = run.assignment, run.record()
    is_earlier = state.state is not State.done and run.version == run.earlier
    is_cut_short = record is not None and record.status is Status.INTERRUPTED
    if record is None or is_earlier or is_cut_short or state.state not in (State.done, State.failed):
        why = f": {state.why}" if state.why else ""
        text = f"{state.name}: {state.state}{why} (job {state.job}; perfexp job-output {assignment.folder})"
        ended(assignment, PerfexpError(text))
        return
    if (tracker := _later(assignment)) is not None:
        try:
            tracker.publish(record, assignment.folder)
        except PerfexpError as error:
            assignment.is_sent = False
            console.error(str(error))
    ended(assignment, record)


def _later(assignment: Assignment) -> Tracker | None:
    """Return the tracker of a run if its store is a file, which jobs on several nodes must not write to."""
    tracker: Tracker = config.build(assignment.plan.tracking)
    uri = tracker.settings.get("uri")
    return tracker if uri is not None and store.database(uri) is not None else None


def campaign_of(name: str, launcher: Mapping[str, Any], *, is_sweep: bool) -> Campaign | None:
    """Return the launcher of the runs, by the option and the node of hydra/launcher; None for this process.

    Raises UserError for a launcher that perfexp does not know, or settings out of range.
    """
    target = str(launcher["_target_"])
    kinds = {f"{_ROOM}SlurmLauncher": SlurmCampaign, f"{_ROOM}LocalLauncher": LocalCampaign}
    if target.endswith(".BasicLauncher") or (target not in kinds and not is_sweep):
        return None
    if target not in kinds:
        raise UserError(
            f"hydra/launcher={name} can't measure: leave it at basic (one run "
            "after another), or choose local (several GPUs) or slurm (jobs of a cluster)."
        )
    if not is_sweep:
        raise UserError("hydra/launcher is for the runs of a sweep: add -m.")
    return kinds[target](launcher)
