"""SLURM's commands: submit, list, account for, requeue and cancel jobs. The only module that calls them."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from perfexp.errors import UserError
from perfexp.host import locks, untrusted

#: Least time between two calls of squeue by the processes of a user on a machine: the controller serves everybody.
QUEUE_SECONDS = 10.0
#: Limit on one command; a controller that restarts answers late.
_COMMAND_SECONDS = 60.0
#: Further attempts while the controller restarts, and the pause before each.
_ATTEMPTS, _PAUSE_SECONDS = 4, 5.0
_RESTARTING = re.compile(r"Unable to contact|Connection refused|timed out|Zero Bytes|Socket timed out", re.I)
#: SLURM's default limit on the numbers in an array.
_MAX_ARRAY_SIZE = 1001
#: States of jobs that have not ended. A held job needs its user.
PENDING_STATES = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING", "RESV_DEL_HOLD"}
RUNNING_STATES = {"RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"}
#: Jobs of one call of scancel or sacct.
_MOST_ARGUMENTS = 500
_FIELDS = ("job", "state", "reason", "node", "left", "ended", "name")


class QueuedJob(NamedTuple):
    """One element of an array, or a job, as squeue or sacct lists it; `ended` is in local time."""

    job: str
    state: str
    reason: str = ""
    node: str = ""
    left: str = ""
    name: str = ""
    ended: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether it waits for its start or restart."""
        return self.state in PENDING_STATES

    @property
    def is_running(self) -> bool:
        """Whether it has started and has not ended."""
        return self.state in RUNNING_STATES

    @property
    def is_held_forever(self) -> bool:
        """Whether it waits for a job that has failed."""
        return self.is_pending and self.reason == "DependencyNeverSatisfied"


class Queue(NamedTuple):
    """Jobs of this user, by id, at a time in ISO 8601."""

    at: str
    jobs: dict[str, QueuedJob]


class Node(NamedTuple):
    """A node in a partition, with its state, its features, and its GRES as sinfo prints them."""

    name: str
    partition: str
    state: str
    features: tuple[str, ...]
    gres: str


def call(*command: str, text: str | None = None) -> str:
    """Run a command of SLURM and return its output; raises UserError with its message.

    A command that cannot reach the controller is repeated, except sbatch, which may have been heeded.
    """
    for attempt in range(_ATTEMPTS):
        try:
            done = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                start_new_session=command[0] == "sbatch",  # Ctrl-C would end it after SLURM has taken the jobs
            )
        except FileNotFoundError as error:
            raise UserError(
                f"{command[0]} is not on the PATH: run this on a machine that submits to SLURM, or leave "
                "hydra/launcher=slurm out."
            ) from error
        except subprocess.TimeoutExpired as error:
            text = "; its jobs may be queued: perfexp cancel ends them" if command[0] == "sbatch" else ""
            raise UserError(
                f"{command[0]} did not answer within {_COMMAND_SECONDS:g} s{text}; try again later."
            ) from error
        if done.returncode == 0:
            return done.stdout
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        is_last = attempt == _ATTEMPTS - 1 or command[0] == "sbatch"
        if is_last or not _RESTARTING.search(message):
            raise UserError(f"{command[0]} failed: {untrusted.printable(message)}")
        time.sleep(_PAUSE_SECONDS)
    raise AssertionError


def submit(script: str, options: Sequence[str]) -> str:
    """Submit a script and return the job's id; raises UserError if SLURM refuses it."""
    return call("sbatch", "--parsable", *options, text=script).strip().partition(";")[0]


def max_array_size() -> int:
    """Return the site's limit on the elements of an array."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", call("scontrol", "show", "config"), re.MULTILINE)
    return int(found[1]) if found else _MAX_ARRAY_SIZE


def cancel(name: str, jobs: Sequence[str]) -> None:
    """Cancel those of these jobs and elements of arrays that have a name; all of that name without a list."""
    for start in range(0, max(len(jobs), 1), _MOST_ARGUMENTS):
        call("scancel", f"--name={name}", f"--user={getpass.getuser()}", *jobs[start : start + _MOST_ARGUMENTS])


def nodes() -> list[Node]:
    """List the nodes of the cluster, once for each partition."""
    listed = call("sinfo", "--noheader", "--Node", "--format=%N|%P|%t|%f|%G")
    lines = (untrusted.printable(line).split("|") for line in listed.splitlines())
    return [
        Node(words[0], words[1].rstrip("*"), _state(words[2]), tuple(words[3].split(",")), words[4])
        for words in lines
        if len(words) == 5
    ]


def _state(text: str) -> str:
    """Return the state of a node without its mark; `*` marks one that does not respond."""
    return "down" if text.endswith("*") else text.rstrip("~#!%$@^-")


def requeue(job: str) -> None:
    """Queue a running job again; SLURM ends it."""
    call("scontrol", "requeue", job)


def queue() -> Queue:
    """List the jobs of this user, also those that have just ended.

    The answer is shared by the processes of the user on this machine for `QUEUE_SECONDS`.
    """
    place = hashlib.sha256(os.environ.get("SLURM_CONF", "").encode()).hexdigest()[:12]
    with locks.opened(f"slurm-queue-{place}") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if (recent := _recent(descriptor)) is not None:
            return recent
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        listed = call(
            *("squeue", "--noheader", "--array", "--states=all", f"--user={getpass.getuser()}"),
            "--format=%i|%T|%r|%N|%L|%e|%j",
        )
        jobs = [line.split("|", len(_FIELDS) - 1) for line in listed.splitlines()]
        content = {"monotonic": time.monotonic(), "at": at, "jobs": [job for job in jobs if len(job) == len(_FIELDS)]}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        return _queue_of(content)


def _recent(descriptor: int) -> Queue | None:
    try:
        content = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        age = time.monotonic() - content["monotonic"]
        return _queue_of(content) if 0 <= age < QUEUE_SECONDS else None  # it is negative after a restart
    except (ValueError, KeyError, TypeError):
        return None


def _queue_of(content: dict[str, Any]) -> Queue:
    jobs = (QueuedJob(**dict(zip(_FIELDS, map(untrusted.printable, job), strict=True))) for job in content["jobs"])
    return Queue(content["at"], {job.job: job for job in jobs})


def accounted(jobs: Collection[str], name: str) -> dict[str, QueuedJob]:
    """Return those of these jobs and elements that have a name, from the accounting; none on a site without one."""
    arrays = sorted({job.partition("_")[0] for job in jobs})
    batches = [arrays[start : start + _MOST_ARGUMENTS] for start in range(0, len(arrays), _MOST_ARGUMENTS)]
    form, lines, found = "--format=JobID,State,ExitCode,NodeList,End,JobName", list[str](), {}
    with suppress(UserError):
        for batch in batches:
            lines += call("sacct", "-nXP", f"--jobs={','.join(batch)}", form).splitlines()
    for line in lines:
        job, state, code, node, ended, job_name = (*map(untrusted.printable, line.split("|", 5)), *[""] * 5)[:6]
        if job_name != name:  # a cluster that was set up anew starts its numbers again
            continue
        state = state.split()[0] if state else ""  # "CANCELLED by 1000"
        reason = f"exit code {code}" if code not in ("", "0:0") else ""
        found[job] = QueuedJob(job, state, reason, node, name=name, ended=ended)
    return {job: found[job] for job in jobs if job in found}
