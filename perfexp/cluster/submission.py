"""Submission: the runs of a sweep become arrays of SLURM, one for each kind of request, cut to the site's limit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfexp.cluster import job_states, site, slurm
from perfexp.cluster.element import Run, overrides_of
from perfexp.cluster.job_states import State, SubmittedRun
from perfexp.errors import UserError
from perfexp.host import interrupts
from perfexp.orchestration.preparation import Assignment
from perfexp.plan.schema import Cluster
from perfexp.records import units
from perfexp.records.folders import below, run_folders
from perfexp.records.paths import SweepPaths
from perfexp.records.sweep_record import Sweep

#: Least values of settings: ending the worker and writing the record take some seconds.
_LEAST = {"warn_seconds": 10, "max_running": 1}
#: Limit on a batch script; SLURM's default is 4 MiB.
_MOST_SCRIPT_BYTES = 3 << 20
#: Folder in which the sweeps of a stage are looked up.
_OUTPUTS = Path("outputs")
_JOBS = re.compile(r"\d+(_\d+)?([:,]\d+(_\d+)?)*")


@dataclass(kw_only=True)
class SlurmSettings:
    """Settings of `hydra/launcher=slurm`; raises UserError for a value that is out of range."""

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
                raise UserError(f"hydra.launcher.{name}={value}: set an integer of at least {least}.")
        for name in ("wait", "requeue", "exclusive"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"hydra.launcher.{name}={getattr(self, name)}: set true or false.")


def request_of(
    assignment: Assignment, command: Sequence[str], cluster: Cluster, settings: SlurmSettings, *, sends: bool
) -> Run:
    """Return a run with its requests; raises UserError if its cluster does not allow the job.

    Args:
        command: overrides of the run as typed.
        sends: whether the job sends its record to the tracking store.
    """
    plan = assignment.plan
    if cluster.container and settings.requeue:
        raise UserError("A job in cluster.container can't queue itself again: set hydra.launcher.requeue=false.")
    if cluster.container and plan.nodes > 1:
        raise UserError("A container has no srun, which gpu.nodes needs: leave cluster.container or gpu.nodes out.")
    requests = site.requests(cluster, plan.gpu_name, count=plan.devices, nodes=plan.nodes)
    return Run(
        assignment=assignment,
        overrides=overrides_of(command, sends=sends),
        cluster=cluster,
        requests=[*requests, *(["--exclusive"] if settings.exclusive else [])],
    )


def submit(
    runs: Sequence[Run], paths: SweepPaths, sweep: str, settings: SlurmSettings, dependency: Sequence[str]
) -> Iterator[tuple[str, Sequence[Run]]]:
    """Submit runs and yield each array's job with its runs; every array is in jobs.jsonl before the next one.

    Args:
        sweep: identity of the sweep.
        dependency: options of sbatch that make the arrays wait for other jobs.
    """
    paths.make_job_logs()
    paths.claim(paths.jobs)
    most = slurm.max_array_size()
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(repr((run.requests, run.cluster)), []).append(run)
    for group in alike.values():
        for start in range(0, len(group), most):
            array = group[start : start + most]
            script, options = _script(array, paths, settings), _options(array, paths, sweep, settings)
            with interrupts.held():  # nobody would know of jobs that are not in the file
                job = slurm.submit(script, [*options, *dependency])
                job_states.append(paths, (_entry(run, f"{job}_{index}") for index, run in enumerate(array)))
            yield job, array


def _entry(run: Run, job: str) -> SubmittedRun:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return SubmittedRun(run=run.number, job=job, gpu=run.assignment.plan.gpu_name, submitted=now)


def _options(runs: Sequence[Run], paths: SweepPaths, sweep: str, settings: SlurmSettings) -> list[str]:
    running = f"%{settings.max_running}" if settings.max_running else ""
    logs = f"{str(paths.job_logs).replace('%', '%%')}/%A_%a"
    return [
        *runs[0].requests,
        f"--job-name={job_states.job_name(sweep)}",
        f"--array=0-{len(runs) - 1}{running}",
        f"--output={logs}.out",
        f"--error={logs}.err",
        "--open-mode=append",  # a job that is queued again
        "--requeue",
        f"--signal=B:USR2@{settings.warn_seconds}",
    ]


def _script(runs: Sequence[Run], paths: SweepPaths, settings: SlurmSettings) -> str:
    """Return the script of an array. It holds the commands themselves: a job takes none from a results folder."""
    cluster = runs[0].cluster
    perfexp = shlex.join([*site.python(cluster), "-m", "perfexp"])
    lines = ["#!/bin/bash", f"cd {shlex.quote(str(Path.cwd()))} || exit 2", *site.preparation(cluster)]
    lines.append('case "$SLURM_ARRAY_TASK_ID" in')
    for index, run in enumerate(runs):
        lines.append(f"{index}) set -- {shlex.join(run.arguments(paths, requeue=settings.requeue))} ;;")
    lines += ["*) exit 2 ;;", "esac", f'exec {perfexp} "$@"', ""]
    script = "\n".join(lines)
    if len(script.encode()) > _MOST_SCRIPT_BYTES:
        raise UserError(f"The script of {units.counted(len(runs), 'run')} is too long for SLURM: sweep in parts.")
    return script


def dependency(after: Any) -> list[str]:
    """Return the options of sbatch for `hydra.launcher.after`; none if everything has succeeded already.

    Raises UserError if there is no such sweep, or if one of its runs has failed: the jobs would wait forever.
    """
    if after is None:
        return []
    text = str(after)
    if _JOBS.fullmatch(text):
        return [f"--dependency=afterok:{text.replace(',', ':')}"]
    sweep, folder = _sweep(text)
    states = job_states.states(sweep, folder)
    ended = [state for state in states if state.has_ended and state.state is not State.done]
    if ended:
        first = ended[0]
        why = f": {first.why}" if first.why else ""
        raise UserError(
            f"hydra.launcher.after={text}: {units.counted(len(ended), 'run')} of {folder} did not succeed "
            f"({first.name}: {first.state}{why}). Repeat that sweep, or leave hydra.launcher.after out."
        )
    waiting = sorted({state.job for state in states if state.state is not State.done})
    return [f"--dependency=afterok:{':'.join(waiting)}"] if waiting else []


def _sweep(text: str) -> tuple[Sweep, Path]:
    """Return the sweep in a folder, or the latest sweep of a stage."""
    if (Path(text) / "sweep.json").is_file():
        return Sweep.load(Path(text)), Path(text)
    stages = sorted(_sweeps_of(text), key=lambda pair: pair[0].started)
    if not stages:
        raise UserError(
            f"hydra.launcher.after={text}: no sweep of a stage {text!r} in {_OUTPUTS}, and no sweep.json there; name a "
            "stage (sanity), the folder of a sweep, or the ids of jobs."
        )
    return stages[-1]


def _sweeps_of(stage: str) -> Iterator[tuple[Sweep, Path]]:
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
