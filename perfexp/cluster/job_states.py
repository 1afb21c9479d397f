"""Job states: the state of each run of a sweep, from jobs.jsonl, the queue, the accounting and the records."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from perfexp.cluster import jobs_file, slurm
from perfexp.cluster.jobs_file import SubmittedRun
from perfexp.cluster.slurm import Queue, QueuedJob
from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.records.folders import run_folders
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Status
from perfexp.records.sweep_record import Sweep
from perfexp.reports import run_status
from perfexp.summaries.subject import one_line

#: States in which a job ended before its run could.
_CUT_SHORT = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "reached its time limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "ran out of host memory",
    "BOOT_FAIL": "its node did not start",
    "DEADLINE": "missed its deadline",
}
#: Time in which a record becomes visible on other machines: NFS keeps what it knows of a folder for up to 60 s.
_GRACE_SECONDS = 90.0
_NOT_VISIBLE = "its job has ended; its record is not visible yet"
#: Reason of a job that SLURM keeps without ever starting it.
_NEVER = "waits for a run that has failed; perfexp cancel ends that"


class State(StrEnum):
    """State of a run that was submitted; the order is that of display."""

    done = "done"
    running = "running"
    pending = "pending"
    failed = "failed"
    cancelled = "cancelled"
    lost = "lost"
    unknown = "unknown"
    unsubmitted = "not submitted"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of one run, numbered from 0.

    Attributes:
        node: node where the job runs or ran; empty if unknown.
        why: reason for waiting or failing; empty if there is none.
        left: time until the job's limit, as SLURM prints it.
    """

    run: int
    name: str
    folder: Path
    state: State
    job: str = ""
    node: str = ""
    why: str = ""
    left: str = ""

    @property
    def is_over(self) -> bool:
        """Whether SLURM has no job for it any more."""
        return self.state not in (State.running, State.pending, State.unknown)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens unless the run is submitted again."""
        return self.is_over or self.why == _NEVER

    @property
    def is_queued(self) -> bool:
        """Whether SLURM has a job that has yet to end; a record that was removed is not waited for."""
        return self.job != "" and not self.has_ended and self.why != _NOT_VISIBLE


class _Outcome(msgspec.Struct):
    status: Status
    error: str | None = None


class _Membership(msgspec.Struct):
    uid: str
    job: int


class _RecordHead(msgspec.Struct):
    """The parts of a record.json that say how its run ended."""

    status: Status
    points: list[_Outcome]
    sweep: _Membership | None = None


def listed() -> tuple[Queue, str]:
    """Return the queue, and why it cannot be listed; empty if it can."""
    try:
        return slurm.queue(), ""
    except UserError as error:
        return Queue("", {}), str(error)


def states(sweep: Sweep, folder: Path, queued: tuple[Queue, str] | None = None) -> list[RunState]:
    """Return the state of each run of a sweep that was submitted, in the order of the runs.

    Args:
        queued: answer of `listed` that several sweeps share; without it the queue is listed.
    """
    entries, name = jobs_file.load(SweepPaths(folder)), jobs_file.job_name(sweep.uid)
    queue, unreachable = queued or listed()
    jobs = {job.job: job for job in queue.jobs.values() if job.name == name}
    children = sorted(run_folders(sweep, folder), key=lambda pair: pair[0].job)
    ended = {child.job: _head(path / "record.json", sweep.uid, child.job) for child, path in children}
    unknown = [
        entry.job
        for run, entry in entries.items()
        if entry.job not in jobs and ((head := ended.get(run)) is None or head.status is Status.INTERRUPTED)
    ]
    if unknown and not unreachable:
        jobs |= slurm.accounted(unknown, name)
    result = []
    for child, path in children:
        entry = entries.get(child.job)
        job = jobs.get(entry.job) if entry else None
        if job is not None and job.state == "COMPLETED" and ended.get(child.job) is None:
            ended[child.job] = _looked_up(path, sweep.uid, child.job)
        state, why = _state(entry, job, ended.get(child.job), path, queue.at, unreachable)
        result.append(
            RunState(
                run=child.job,
                name=child.name,
                folder=path,
                state=state,
                job=entry.job if entry else "",
                node=job.node if job else "",
                why=one_line(why),
                left=job.left if job and job.is_running else "",
            )
        )
    return result


def _head(file: Path, sweep: str, run: int) -> _RecordHead | None:
    with suppress(OSError, *untrusted.DECODING_ERRORS):
        head = untrusted.from_json(untrusted.read_bytes(file), _RecordHead)
        if head.sweep is not None and (head.sweep.uid, head.sweep.job) == (sweep, run):
            return head
    return None


def _looked_up(folder: Path, sweep: str, run: int) -> _RecordHead | None:
    """Read the head of a record once more after listing its folder, which a network file system then looks up."""
    with suppress(OSError):
        any(folder.iterdir())
    return _head(folder / "record.json", sweep, run)


def _has_just_ended(job: QueuedJob) -> bool:
    with suppress(ValueError):
        return datetime.now().timestamp() - datetime.fromisoformat(job.ended).timestamp() < _GRACE_SECONDS
    return False


def _state(
    entry: SubmittedRun | None,
    job: QueuedJob | None,
    head: _RecordHead | None,
    folder: Path,
    listed_at: str,
    unreachable: str,
) -> tuple[State, str]:
    """Join the sources; a job that has not ended outweighs the record of an earlier attempt."""
    if job is not None and job.is_running:
        return State.running, ""
    if job is not None and job.is_pending:
        held = f"; perfexp cancel, or scontrol release {job.job}" if "held" in job.reason.lower() else ""
        return State.pending, _NEVER if job.is_held_forever else f"{job.reason}{held}"
    if entry is not None and job is None and entry.submitted > listed_at and not unreachable:
        return State.pending, "just submitted" if head is None else ""
    if head is not None and head.status is not Status.INTERRUPTED:
        failure = next((point.error for point in head.points if point.status is not Status.OK and point.error), None)
        is_done = head.status is Status.OK
        return (State.done, "") if is_done else (State.failed, failure or head.status.value)
    if entry is None:
        return State.unsubmitted, ""
    if job is None:
        if RunPaths(folder).in_use():
            return State.running, ""
        if unreachable:
            return State.unknown, unreachable
        record = "its record is not complete" if head else "it left no record"
        return State.lost, f"SLURM does not list its job any more, and {record}"
    if job.state == "CANCELLED":
        return State.cancelled, ""
    if job.state == "COMPLETED" and _has_just_ended(job):
        return State.running, _NOT_VISIBLE
    refusal = run_status.refusal(RunPaths(folder).refusal)
    text = refusal or _CUT_SHORT.get(job.state) or job.reason or job.state.lower()
    return State.failed if job.state != "COMPLETED" else State.lost, text
