"""Submission: the runs of a sweep become arrays of SLURM, one for each kind of request, cut to the site's limit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perfexp.cli.overrides import quoted
from perfexp.cluster import element, jobs_file, site, slurm
from perfexp.cluster.jobs_file import SubmittedRun
from perfexp.errors import UserError
from perfexp.host import credentials, interrupts
from perfexp.orchestration.preparation import Assignment
from perfexp.plan.schema import Cluster
from perfexp.records import units
from perfexp.records.paths import SweepPaths

#: Least warning before a time limit: ending the worker and writing the record take some seconds.
_LEAST_WARNING_SECONDS = 10
#: Limit on a batch script; SLURM's default is 4 MiB.
_MOST_SCRIPT_BYTES = 3 << 20


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
        for name, least in (("warn_seconds", _LEAST_WARNING_SECONDS), ("max_running", 1)):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_number and not (name == "max_running" and value is None):
                raise UserError(f"hydra.launcher.{name}={value}: set an integer of at least {least}.")
        for name in ("wait", "requeue", "exclusive"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"hydra.launcher.{name}={getattr(self, name)}: set true or false.")

    @classmethod
    def of_node(cls, node: Mapping[str, Any]) -> SlurmSettings:
        """Return the settings in the node of the launcher."""
        return cls(**{field.name: node[field.name] for field in fields(cls) if field.name in node})


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run to submit: its assignment, its overrides as typed, its kind of device, and its requests to SLURM."""

    assignment: Assignment
    overrides: Sequence[str]
    kind: str
    site: Cluster
    requests: tuple[str, ...]


def request_of(
    assignment: Assignment, command: Sequence[str], cluster: Cluster, settings: SlurmSettings, *, sends: bool
) -> RunRequest:
    """Return the requests of a run; raises UserError if its cluster or its command does not allow a job.

    Args:
        command: overrides of the run as typed.
        sends: whether the job sends its record to the tracking store.
    """
    plan = assignment.plan
    if assignment.overwrites:
        raise UserError("--overwrite is not for jobs, which may be queued again: choose another output_dir=DIR.")
    if secret := next((text for text in command if credentials.is_masked(text)), None):
        key = secret.partition("=")[0]
        raise UserError(f"{key} has a credential, which a job's script would show; set it in the environment instead.")
    if cluster.container and settings.requeue:
        raise UserError("A job in cluster.container can't queue itself again: set hydra.launcher.requeue=false.")
    if cluster.container and plan.nodes > 1:
        raise UserError("A container has no srun, which gpu.nodes needs: leave cluster.container or gpu.nodes out.")
    requests = site.requests(cluster, plan.gpu_name, count=plan.devices, nodes=plan.nodes)
    return RunRequest(
        assignment=assignment,
        overrides=element.overrides_of(command, sends=sends),
        kind=plan.gpu_name,
        site=cluster,
        requests=(*requests, *(["--exclusive"] if settings.exclusive else [])),
    )


def submit(
    runs: Sequence[RunRequest], paths: SweepPaths, sweep: str, settings: SlurmSettings, dependency: Sequence[str]
) -> Iterator[tuple[str, Sequence[RunRequest]]]:
    """Submit runs and yield each array's job with its runs; every array is in jobs.jsonl before the next one.

    Args:
        sweep: identity of the sweep.
        dependency: options of sbatch that make the arrays wait for other jobs.
    """
    paths.make_job_logs()
    paths.claim(paths.jobs)
    most = slurm.max_array_size()
    for group in _alike(runs):
        for chunk in _chunks(group, most):
            script = _script(chunk, paths, settings)
            options = [*_options(chunk, paths, sweep, settings), *dependency]
            with interrupts.held():  # nobody would know of jobs that are not in the file
                job = slurm.submit(script, options)
                jobs_file.append(paths, _entries(job, chunk))
            yield job, chunk


def _entries(job: str, runs: Sequence[RunRequest]) -> Iterator[SubmittedRun]:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    for index, run in enumerate(runs):
        element_id = f"{job}_{index}"
        yield SubmittedRun(run=run.assignment.number - 1, job=element_id, gpu=run.kind, submitted=now, log=element_id)


def _alike(runs: Sequence[RunRequest]) -> list[list[RunRequest]]:
    """Group the runs that request the same in the same way."""
    groups: dict[str, list[RunRequest]] = {}
    for run in runs:
        groups.setdefault(repr((run.requests, run.site)), []).append(run)
    return list(groups.values())


def _chunks(runs: Sequence[RunRequest], most: int) -> Iterator[Sequence[RunRequest]]:
    """Cut runs into arrays of the site's greatest size, the last of which may be smaller."""
    for start in range(0, len(runs), most):
        yield runs[start : start + most]


def _options(runs: Sequence[RunRequest], paths: SweepPaths, sweep: str, settings: SlurmSettings) -> list[str]:
    running = f"%{settings.max_running}" if settings.max_running else ""
    logs = f"{str(paths.job_logs).replace('%', '%%')}/%A_%a"
    return [
        *runs[0].requests,
        f"--job-name={jobs_file.job_name(sweep)}",
        f"--array=0-{len(runs) - 1}{running}",
        f"--output={logs}.out",
        f"--error={logs}.err",
        "--open-mode=append",  # a job that is queued again
        "--requeue",
        f"--signal=B:USR2@{settings.warn_seconds}",
    ]


def _script(runs: Sequence[RunRequest], paths: SweepPaths, settings: SlurmSettings) -> str:
    """Return the script of an array. It holds the commands themselves: a job takes none from a results folder."""
    perfexp = shlex.join([*site.python(runs[0].site), "-m", "perfexp"])
    lines = ["#!/bin/bash", f"cd {shlex.quote(str(Path.cwd()))} || exit 2", *site.preparation(runs[0].site)]
    lines.append('case "$SLURM_ARRAY_TASK_ID" in')
    for index, run in enumerate(runs):
        number, folder = run.assignment.number - 1, run.assignment.folder.absolute()
        overrides = [*run.overrides, f"output_dir={quoted(str(folder))}"]
        arguments = element.arguments(paths, number, overrides, requeue=settings.requeue)
        lines.append(f"{index}) set -- {shlex.join(arguments)} ;;")
    lines += ["*) exit 2 ;;", "esac", f'exec {perfexp} "$@"', ""]
    script = "\n".join(lines)
    if len(script.encode()) > _MOST_SCRIPT_BYTES:
        raise UserError(f"The script of {units.counted(len(runs), 'run')} is too long for SLURM: sweep in parts.")
    return script
