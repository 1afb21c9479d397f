"""A sweep whose runs are SLURM jobs (hydra/launcher=slurm): submit, wait for, and collect them.

Runs with the same requests become job arrays, cut to the site's array limit.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfexp.errors import PerfexpError, UserError
from perfexp.host import interrupts
from perfexp.plan import config
from perfexp.plan.schema import Cluster
from perfexp.records import units
from perfexp.records.analysis import Analysis
from perfexp.records.folders import below, run_folders
from perfexp.records.paths import SweepPaths
from perfexp.records.record import Status
from perfexp.records.sweep_record import Sweep
from perfexp.report.console import Console
from perfexp.report.tracking import Tracker, store
from perfexp.run.cluster import job_states, site, slurm
from perfexp.run.cluster.element import Campaign, SweepElement, overrides_of
from perfexp.run.cluster.job_states import JobState, RunState, SubmittedRun
from perfexp.run.cluster.local_queue import LocalCampaign
from perfexp.run.driver import Ended
from perfexp.run.preparation import Assignment
from perfexp.run.sweep_run import SweepRun

_ROOM = "hydra_plugins.perfexp_launchers.launchers."
#: Minimum settings: ending the worker and writing the record take some seconds.
_LEAST = {"warn_seconds": 10, "max_running": 1}
#: Batch script limit; SLURM's default is 4 MiB.
_MOST_SCRIPT_BYTES = 3 << 20
#: Folder to search for the sweeps of a stage.
_OUTPUTS = Path("outputs")
_JOBS = re.compile(r"\d+(_\d+)?([:,]\d+(_\d+)?)*")


@dataclass(kw_only=True)
class SlurmSettings:
    """Settings of `hydra/launcher=slurm`; conf/hydra/launcher/slurm.yaml describes them.

    Raises:
        UserError: a value is out of range.
    """

    wait: bool = True
    after: Any = None
    requeue: bool = True
    warn_seconds: int = 120
    max_running: int | None = None
    exclusive: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if (type(value) is not int or value < least) and (name, value) != ("max_running", None):
                raise UserError(
                    f"hydra.launcher.{name}={value}: set an integer of at least {least}."
                )
        for name in ("wait", "requeue", "exclusive"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"hydra.launcher.{name}={getattr(self, name)}: set true or false.")


class SlurmCampaign(Campaign):
    """Sweep runs that become SLURM jobs.

    Args:
        launcher: node of hydra/launcher; raises UserError if a setting is out of range.
    """

    outlives = True

    def __init__(self, launcher: Mapping[str, Any]) -> None:
        super().__init__()
        settings = dict(launcher)
        settings.pop("_target_", None)
        self._settings = SlurmSettings(**settings)

    def _run(
        self, assignment: Assignment, cluster: Cluster, command: Sequence[str]
    ) -> SweepElement:
        """Return a run of the sweep with its sbatch options.

        Raises:
            UserError: the container cannot do what the run needs, or the GPU kind is unknown.
        """
        plan, settings = assignment.plan, self._settings
        if cluster.container and settings.requeue:
            raise UserError(
                "A job in cluster.container can't queue itself again: set "
                "hydra.launcher.requeue=false."
            )
        if cluster.container and plan.nodes > 1:
            raise UserError(
                "A container has no srun, which gpu.nodes needs: leave cluster.container or "
                "gpu.nodes out."
            )
        requests = site.requests(cluster, plan.gpu_name, count=plan.devices, nodes=plan.nodes)
        if settings.exclusive:
            requests.append("--exclusive")
        overrides = overrides_of(command, sends=_later(assignment) is None)
        return SweepElement(
            assignment=assignment, overrides=overrides, cluster=cluster, requests=requests
        )

    def _measure(
        self, runs: list[SweepElement], sweep_run: SweepRun, console: Console, ended: Ended
    ) -> bool:
        """Submit the runs that are not queued yet, and wait for them if the user wants that.

        After an interrupt, the jobs stay in the queue.

        Returns:
            Whether every run has ended.
        """
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

    def _submit(self, runs: Sequence[SweepElement], sweep_run: SweepRun, console: Console) -> None:
        """Submit the runs that SLURM does not have yet, and print their jobs."""
        states = job_states.states(sweep_run.sweep, sweep_run.paths.root)
        queued = {state.run for state in states if state.is_queued}
        new = [run for run in runs if run.number not in queued]
        if len(new) < len(runs):
            console.note(f"{units.counted(len(runs) - len(new), 'run')} in the queue already")
        gate = dependency(self._settings.after) if new else []
        if gate:
            console.note(f"after {self._settings.after}: {gate[0].removeprefix('--dependency=')}")
        for job, array in submit(new, sweep_run.paths, sweep_run.sweep.uid, self._settings, gate):
            console.note(
                f"job {job}: {units.counted(len(array), 'run')} on "
                f"gpu={array[0].assignment.plan.gpu_name}"
            )

    def _hand_over(self, sweep_run: SweepRun, console: Console) -> None:
        """Print the commands that follow, cancel and send the sweep, since this one ends now."""
        commands = ["status", "cluster cancel"]
        if any(_later(run.assignment) for run in self.runs):
            commands.append("sync")
        folder = shlex.quote(str(sweep_run.paths.root))
        lines = [f"perfexp {command} {folder}" for command in commands]
        console.show_lines("to follow, to cancel, and to send the results", lines)

    @staticmethod
    def _wait(
        runs: Sequence[SweepElement], sweep_run: SweepRun, console: Console, ended: Ended
    ) -> None:
        """Wait for the jobs and report each run when its job has ended."""
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


def _collect(run: SweepElement, state: RunState, console: Console, ended: Ended) -> None:
    """Report the record of a run whose job has ended.

    Without a usable record, report the job's state as an error. A record is also sent from here if
    jobs must not write to its store.
    """
    assignment, record = run.assignment, run.record()
    is_earlier = state.state is not JobState.done and run.version == run.earlier
    is_cut_short = record is not None and record.status is Status.INTERRUPTED
    if (
        record is None
        or is_earlier
        or is_cut_short
        or state.state not in (JobState.done, JobState.failed)
    ):
        why = f": {state.why}" if state.why else ""
        logs = f"perfexp cluster logs {assignment.folder}"
        text = f"{state.name}: {state.state}{why} (job {state.job}; {logs})"
        ended(assignment, PerfexpError(text))
        return
    if (tracker := _later(assignment)) is not None:
        try:
            tracker.publish(Analysis.of(record), assignment.folder)
        except PerfexpError as error:
            assignment.is_sent = False
            console.error(str(error))
    ended(assignment, record)


def _later(assignment: Assignment) -> Tracker | None:
    """Return the run's tracker if its store is a file, otherwise None.

    Jobs on several nodes must not write to a file, so their records are sent afterwards.
    """
    tracker: Tracker = config.build(assignment.plan.tracking)
    uri = tracker.settings.get("uri")
    if uri is not None and store.database(uri) is not None:
        return tracker
    return None


def submit(
    runs: Sequence[SweepElement],
    paths: SweepPaths,
    sweep: str,
    settings: SlurmSettings,
    gate: Sequence[str],
) -> Iterator[tuple[str, Sequence[SweepElement]]]:
    """Submit runs as job arrays; yield each array's job id with its runs.

    Each array is in jobs.jsonl before the next is submitted.

    Args:
        sweep: sweep identity.
        gate: sbatch options that make the arrays wait for other jobs.
    """
    paths.make_job_logs()
    paths.claim(paths.jobs)
    most = slurm.max_array_size()
    groups: dict[str, list[SweepElement]] = {}
    for run in runs:
        groups.setdefault(repr((run.requests, run.cluster)), []).append(run)
    for group in groups.values():
        for start in range(0, len(group), most):
            array = group[start : start + most]
            script = _script(array, paths, settings)
            options = _options(array, paths, sweep, settings)
            with interrupts.held():  # jobs missing from the file would be lost
                job = slurm.submit(script, [*options, *gate])
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                kind = array[0].assignment.plan.gpu_name
                entries = []
                for index, run in enumerate(array):
                    name = f"{job}_{index}"
                    entries.append(SubmittedRun(run=run.number, job=name, gpu=kind, submitted=now))
                job_states.append(paths, entries)
            yield job, array


def _options(
    runs: Sequence[SweepElement], paths: SweepPaths, sweep: str, settings: SlurmSettings
) -> list[str]:
    """Return the sbatch options of a job array, without the requests to wait for other jobs."""
    running = f"%{settings.max_running}" if settings.max_running else ""
    logs = f"{str(paths.job_logs).replace('%', '%%')}/%A_%a"
    return [
        *runs[0].requests,
        f"--job-name={job_states.job_name(sweep)}",
        f"--array=0-{len(runs) - 1}{running}",
        f"--output={logs}.out",
        f"--error={logs}.err",
        "--open-mode=append",  # for a requeued job
        "--requeue",
        f"--signal=B:USR2@{settings.warn_seconds}",
    ]


def _script(runs: Sequence[SweepElement], paths: SweepPaths, settings: SlurmSettings) -> str:
    """Return the batch script for an array.

    The script contains the commands themselves: a job reads no command from a results folder.

    Raises:
        UserError: the script is too long for SLURM.
    """
    cluster = runs[0].cluster
    perfexp = shlex.join([*site.python(cluster), "-m", "perfexp"])
    lines = [
        "#!/bin/bash",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
        *site.preparation(cluster),
    ]
    lines.append('case "$SLURM_ARRAY_TASK_ID" in')
    for index, run in enumerate(runs):
        lines.append(
            f"{index}) set -- {shlex.join(run.arguments(paths, requeue=settings.requeue))} ;;"
        )
    lines += ["*) exit 2 ;;", "esac", f'exec {perfexp} "$@"', ""]
    script = "\n".join(lines)
    if len(script.encode()) > _MOST_SCRIPT_BYTES:
        raise UserError(
            f"The script of {units.counted(len(runs), 'run')} is too long for SLURM: sweep in "
            "parts."
        )
    return script


def dependency(after: Any) -> list[str]:
    """Return the sbatch options for `hydra.launcher.after`, which make jobs wait for others.

    There are none if everything has already succeeded. `submit` passes them to sbatch.

    Args:
        after: job ids, a sweep's folder, or the name of a stage; None for nothing.

    Raises:
        UserError: the sweep is unknown, or has a failed run: the jobs would wait forever.
    """
    if after is None:
        return []
    text = str(after)
    if _JOBS.fullmatch(text):
        return [f"--dependency=afterok:{text.replace(',', ':')}"]
    sweep, folder = _sweep(text)
    states = job_states.states(sweep, folder)
    ended = [state for state in states if state.has_ended and state.state is not JobState.done]
    if ended:
        first = ended[0]
        why = f": {first.why}" if first.why else ""
        raise UserError(
            f"hydra.launcher.after={text}: {units.counted(len(ended), 'run')} of {folder} did not "
            f"succeed ({first.name}: {first.state}{why}). Repeat that sweep, or leave "
            "hydra.launcher.after out."
        )
    unfinished_jobs = sorted({state.job for state in states if state.state is not JobState.done})
    if not unfinished_jobs:
        return []
    return [f"--dependency=afterok:{':'.join(unfinished_jobs)}"]


def _sweep(text: str) -> tuple[Sweep, Path]:
    """Return the sweep in a folder, or the latest sweep of a stage.

    Raises:
        UserError: there is neither.
    """
    if (Path(text) / "sweep.json").is_file():
        return Sweep.load(Path(text)), Path(text)
    stages = sorted(_sweeps_of(text), key=lambda pair: pair[0].started)
    if not stages:
        raise UserError(
            f"hydra.launcher.after={text}: no sweep of a stage {text!r} in {_OUTPUTS}, and no "
            "sweep.json there; name a stage (sanity), the folder of a sweep, or the ids of jobs."
        )
    return stages[-1]


def _sweeps_of(stage: str) -> Iterator[tuple[Sweep, Path]]:
    """Yield the sweeps below `outputs` whose runs belong to a stage, with their folders."""
    if not _OUTPUTS.is_dir():
        return
    for file in below(_OUTPUTS, "sweep.json", refused=lambda error: None):
        try:
            sweep = Sweep.load(file)
        except UserError:
            continue
        names = {path.parent.name for _, path in run_folders(sweep, file.parent)}
        if stage in names or any(name.endswith(f"_{stage}") for name in names):
            yield sweep, file.parent


def campaign_of(name: str, launcher: Mapping[str, Any], *, is_sweep: bool) -> Campaign | None:
    """Return the campaign that measures the runs; None if this process does.

    `main` calls it with Hydra's settings before the runs are composed.

    Args:
        name: option of hydra/launcher.
        launcher: node of hydra/launcher.
        is_sweep: whether there are several runs.

    Raises:
        UserError: the launcher is unknown or not for single runs, or a setting is out of range.
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
