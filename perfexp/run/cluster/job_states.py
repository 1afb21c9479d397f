"""How each run of a sweep is doing in SLURM, and the lines that show it.

The state comes from three places: jobs.jsonl in the sweep's folder (which job measures which run),
SLURM's queue and accounting, and the records. `perfexp status` and a waiting campaign use it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.host.files import safe_name
from perfexp.records import units
from perfexp.records.folders import run_folders
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Status, SweepMembership
from perfexp.records.subject import one_line
from perfexp.records.sweep_record import Sweep
from perfexp.report import run_status
from perfexp.run.cluster import slurm
from perfexp.run.cluster.slurm import QueuedJob

#: Size limit for jobs.jsonl, which takes about 250 bytes for each submitted run.
_MOST_BYTES = 64 << 20
#: A job, or an array element.
_JOB = re.compile(r"\d+(_\d+)?")
#: Job states that cut a run short.
_CUT_SHORT = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "reached its time limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "ran out of host memory",
    "BOOT_FAIL": "its node did not start",
    "DEADLINE": "missed its deadline",
}
#: Time until a record is visible on other machines: NFS caches folder contents for up to 60 s.
_GRACE_SECONDS = 90.0
_NOT_VISIBLE = "its job has ended; its record is not visible yet"
#: Why a job stays queued without ever starting.
_NEVER = "waits for a run that has failed; perfexp cluster cancel ends that"
#: Placeholder for a job that SLURM does not list.
_NO_JOB = QueuedJob("", "")
#: Longest list of runs for each state.
_MOST_LINES = 20


class SubmittedRun(msgspec.Struct, kw_only=True):
    """A line in jobs.jsonl: a sweep run, numbered from 0, and the SLURM job that measures it."""

    run: int
    job: str
    gpu: str
    submitted: str


def job_name(sweep: str) -> str:
    """Return the name that all jobs of a sweep share in SLURM.

    Cancelling and accounting select jobs by it.
    """
    return f"perfexp-{safe_name(sweep)}"


def append(paths: SweepPaths, entries: Iterable[SubmittedRun]) -> None:
    """Append lines to jobs.jsonl in one write.

    All runs in an array are submitted together. `campaign.submit` calls it right after sbatch.
    """
    content = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
    with foreign.open_append(paths.jobs) as file:
        file.write(content)


def load(paths: SweepPaths) -> dict[int, SubmittedRun]:
    """Return the latest submission of each run by its number; malformed lines are skipped.

    `states` and `perfexp cluster logs` read it.
    """
    submitted: dict[int, SubmittedRun] = {}
    with suppress(OSError):
        for line in foreign.read_bytes(paths.jobs, _MOST_BYTES).splitlines():
            with suppress(*foreign.DECODING_ERRORS):
                entry = msgspec.json.decode(line, type=SubmittedRun)
                if _JOB.fullmatch(entry.job):
                    submitted[entry.run] = entry
    return submitted


class JobState(StrEnum):
    """State of a run in a sweep, in display order."""

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
    """State of one run.

    Attributes:
        run: number of the run, from 0.
        job: SLURM job, or element of an array; empty if it was not submitted.
        node: node where the job runs or ran; empty if unknown.
        why: reason for waiting or failing; empty if there is none.
        left: time until the job's limit, as SLURM prints it.
    """

    run: int
    name: str
    folder: Path
    state: JobState
    job: str = ""
    node: str = ""
    why: str = ""
    left: str = ""

    @property
    def is_over(self) -> bool:
        """Return whether SLURM no longer has a job for the run."""
        return self.state not in (JobState.running, JobState.pending, JobState.unknown)

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more happens unless the run is submitted again."""
        return self.is_over or self.why == _NEVER

    @property
    def is_queued(self) -> bool:
        """Return whether SLURM has a job that has yet to end.

        An ended job does not count even if its record is not visible yet: it may have been removed.
        """
        return self.job != "" and not self.has_ended and self.why != _NOT_VISIBLE

    def __str__(self) -> str:
        """Return a line such as `run 2 NAME: running as job 7_2 on n1, 59:00 left`."""
        job = f" as job {self.job}" if self.job else ""
        node = f" on {self.node}" if self.node else ""
        left = f", {self.left} left" if self.left else ""
        why = f": {self.why}" if self.why else ""
        return f"run {self.run} {self.name}: {self.state}{job}{node}{left}{why}"


class _Outcome(msgspec.Struct):
    """The part of a point that shows how it ended."""

    status: Status
    error: str | None = None


class _RecordHead(msgspec.Struct):
    """The parts of a record.json that show how its run ended."""

    status: Status
    points: list[_Outcome]
    sweep: SweepMembership | None = None


def listed() -> tuple[dict[str, QueuedJob], str]:
    """Return SLURM's queue by job id, and why it cannot be listed (empty if it can)."""
    try:
        return slurm.queue(), ""
    except UserError as error:
        return {}, str(error)


def states(
    sweep: Sweep, folder: Path, queued: tuple[dict[str, QueuedJob], str] | None = None
) -> list[RunState]:
    """Return the state of each run in a sweep, in run order.

    `perfexp status`, `perfexp cluster cancel` and waiting campaigns ask for them.

    Args:
        queued: result of `listed`, shared by several sweeps; None lists the queue.
    """
    entries, name = load(SweepPaths(folder)), job_name(sweep.uid)
    jobs, unreachable = queued or listed()
    jobs = {job.job: job for job in jobs.values() if job.name == name}
    children = sorted(run_folders(sweep, folder), key=lambda pair: pair[0].job)
    heads = {
        child.job: _head(path / "record.json", sweep.uid, child.job) for child, path in children
    }
    has_ended = {
        run for run, head in heads.items() if head and head.status is not Status.INTERRUPTED
    }
    # only jobs that left the queue without a final record need the accounting
    if not unreachable and any(
        entry.job not in jobs for run, entry in entries.items() if run not in has_ended
    ):
        jobs = slurm.accounted(name) | jobs
    result = []
    for child, path in children:
        entry = entries.get(child.job)
        submitted = entry.job if entry else ""
        job = jobs.get(submitted, _NO_JOB)
        state, why = _state(submitted, job, heads[child.job], path, unreachable)
        result.append(
            RunState(
                run=child.job,
                name=child.name,
                folder=path,
                state=state,
                job=submitted,
                node=job.node,
                why=one_line(why),
                left=job.left if job.is_running else "",
            )
        )
    return result


def _head(file: Path, sweep: str, run: int) -> _RecordHead | None:
    """Return the beginning of a run's record; None if there is none, or if it is another run's.

    Args:
        file: record.json.
        sweep: identity of the sweep.
        run: number of the run.
    """
    with suppress(OSError, *foreign.DECODING_ERRORS):
        head = foreign.from_json(foreign.read_bytes(file), _RecordHead)
        if head.sweep is not None and (head.sweep.uid, head.sweep.job) == (sweep, run):
            return head
    return None


def _state(
    submitted: str, job: QueuedJob, head: _RecordHead | None, folder: Path, unreachable: str
) -> tuple[JobState, str]:
    """Return the state of a run and the reason for it.

    A live job takes precedence over a record, which may come from an earlier attempt.

    Args:
        submitted: job id; empty if the run was not submitted.
        job: the job as SLURM lists it.
        head: the run's record; None without one.
        folder: folder of the run.
        unreachable: why the queue cannot be listed; empty if it can.
    """
    if job.is_running:
        return JobState.running, ""
    if job.is_pending:
        held = (
            f"; perfexp cluster cancel, or scontrol release {job.job}"
            if "held" in job.reason.lower()
            else ""
        )
        return JobState.pending, _NEVER if job.is_held_forever else f"{job.reason}{held}"
    if head is not None and head.status is Status.OK:
        return JobState.done, ""
    if head is not None and head.status is not Status.INTERRUPTED:
        failures = (
            point.error for point in head.points if point.status is not Status.OK and point.error
        )
        return JobState.failed, next(failures, head.status.value)
    if not submitted:
        return JobState.unsubmitted, ""
    if job is _NO_JOB:
        # some process measures it, although SLURM lists no job
        if RunPaths(folder).in_use():
            return JobState.running, ""
        if unreachable:
            return JobState.unknown, unreachable
        record = "its record is not complete" if head else "it left no record"
        return JobState.lost, f"SLURM does not list its job any more, and {record}"
    if job.state == "CANCELLED":
        return JobState.cancelled, ""
    is_lost = job.state == "COMPLETED"
    # NFS may show the record on this machine a little later
    if is_lost and _has_just_ended(job):
        return JobState.running, _NOT_VISIBLE
    refusal = run_status.refusal(RunPaths(folder).refusal)
    why = refusal or _CUT_SHORT.get(job.state) or job.reason or job.state.lower()
    return JobState.lost if is_lost else JobState.failed, why


def _has_just_ended(job: QueuedJob) -> bool:
    """Return whether a job ended less than 90 s ago, so that its record may not be visible yet."""
    with suppress(ValueError):
        return (
            datetime.now().timestamp() - datetime.fromisoformat(job.ended).timestamp()
            < _GRACE_SECONDS
        )
    return False


def counted(states: Sequence[RunState]) -> str:
    """Return the run count for each state: `3 done, 1 running, 2 pending`.

    A waiting campaign prints it whenever it changes.
    """
    numbers = Counter(state.state for state in states)
    return ", ".join(f"{numbers[state]} {state}" for state in JobState if numbers[state])


def lines(states: Sequence[RunState]) -> Iterator[str]:
    """Yield a line for each running, failed or cancelled run.

    Waiting and lost runs are grouped by reason. `perfexp status` prints them.
    """
    for kind in (JobState.running, JobState.failed, JobState.cancelled):
        runs = [state for state in states if state.state is kind]
        yield from map(str, runs[:_MOST_LINES])
        if len(runs) > _MOST_LINES:
            yield f"and {len(runs) - _MOST_LINES} more {kind}"
    grouped = Counter(
        (state.job.partition("_")[0], state.state, state.why)
        for state in states
        if state.state in (JobState.pending, JobState.lost, JobState.unknown)
    )
    for (job, kind, why), number in grouped.items():
        yield f"{units.counted(number, 'run')} of job {job} {kind}{f': {why}' if why else ''}"
    if unsubmitted := sum(state.state is JobState.unsubmitted for state in states):
        yield f"{units.counted(unsubmitted, 'run')} not submitted: repeat the command of the sweep"
