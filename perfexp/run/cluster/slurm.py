"""Run SLURM's commands: submit, list, account for, requeue and cancel jobs.

No other module calls them, except `host.scheduler` inside a job.
"""

from __future__ import annotations

import getpass
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from perfexp.errors import UserError
from perfexp.host import foreign

#: Time between two squeue calls while waiting: all users share the controller.
QUEUE_SECONDS = 10.0
#: Time limit for one command; a restarting controller answers late.
_COMMAND_SECONDS = 60.0
#: Attempts while the controller restarts, and the pause between them.
_ATTEMPTS, _PAUSE_SECONDS = 4, 5.0
_RESTARTING = re.compile(
    r"Unable to contact|Connection refused|timed out|Zero Bytes|Socket timed out", re.I
)
#: SLURM's default array size limit.
_MAX_ARRAY_SIZE = 1001
#: States of unstarted jobs, then of started jobs. A held job needs its user.
PENDING_STATES = {
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "CONFIGURING",
    "RESV_DEL_HOLD",
}
RUNNING_STATES = {
    "RUNNING",
    "COMPLETING",
    "STAGE_OUT",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "RESIZING",
}
#: Start of the accounting query; the default would be midnight.
_OLDEST = "now-100days"


class QueuedJob(NamedTuple):
    """A job or array element, as squeue or sacct lists it.

    Attributes:
        job: id, for example `7_2`.
        state: state, for example `PENDING`.
        reason: why it waits or ended.
        node: node where it runs or ran.
        left: time until the job's limit, as SLURM prints it.
        ended: end in local time.
        name: name of the job, see `job_states.job_name`.
    """

    job: str
    state: str
    reason: str = ""
    node: str = ""
    left: str = ""
    ended: str = ""
    name: str = ""

    @property
    def is_pending(self) -> bool:
        """Return whether the job waits for its start or restart."""
        return self.state in PENDING_STATES

    @property
    def is_running(self) -> bool:
        """Return whether the job has started and has not ended."""
        return self.state in RUNNING_STATES

    @property
    def is_held_forever(self) -> bool:
        """Return whether the job waits for a job that has failed."""
        return self.is_pending and self.reason == "DependencyNeverSatisfied"


class Node(NamedTuple):
    """A node in a partition, with state, features and GRES as sinfo prints them."""

    name: str
    partition: str
    state: str
    features: tuple[str, ...]
    gres: str


def call(*command: str, text: str | None = None, seconds: float = _COMMAND_SECONDS) -> str:
    """Run a SLURM command and return its output.

    If the controller is unreachable, try again. sbatch is never repeated: SLURM may have queued its
    jobs.

    Args:
        text: standard input.
        seconds: time limit for one attempt.

    Raises:
        UserError: the command failed, with its message.
    """
    is_submission = command[0] == "sbatch"
    attempts = 1 if is_submission else _ATTEMPTS
    while True:
        try:
            done = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=seconds,
                start_new_session=is_submission,  # else Ctrl-C could lose submitted jobs
            )
        except FileNotFoundError as error:
            raise UserError(
                f"{command[0]} is not on the PATH: run this on a machine that submits to SLURM, or "
                "leave hydra/launcher=slurm out."
            ) from error
        except subprocess.TimeoutExpired as error:
            queued = (
                "; its jobs may be queued: perfexp cluster cancel ends them"
                if is_submission
                else ""
            )
            raise UserError(
                f"{command[0]} did not answer within {seconds:g} s{queued}; try again later."
            ) from error
        if done.returncode == 0:
            return done.stdout
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        attempts -= 1
        if not (attempts and _RESTARTING.search(message)):
            raise UserError(f"{command[0]} failed: {foreign.printable(message)}")
        time.sleep(_PAUSE_SECONDS)


def submit(script: str, options: Sequence[str]) -> str:
    """Submit a script and return the job id.

    Campaigns call it for each array.

    Raises:
        UserError: SLURM refuses the script.
    """
    return call("sbatch", "--parsable", *options, text=script).strip().partition(";")[0]


def max_array_size() -> int:
    """Return the site's array size limit.

    Larger groups of runs are submitted as several arrays.
    """
    match = re.search(
        r"^MaxArraySize\s*=\s*(\d+)", call("scontrol", "show", "config"), re.MULTILINE
    )
    if match:
        return int(match[1])
    return _MAX_ARRAY_SIZE


def cancel(name: str, jobs: Sequence[str]) -> None:
    """Cancel this user's jobs and array elements.

    `perfexp cluster cancel` calls it.

    Args:
        name: job name; jobs with another name are left alone.
        jobs: job ids; if empty, all of this user's jobs with the name.
    """
    call("scancel", f"--name={name}", f"--user={getpass.getuser()}", *jobs)


def nodes() -> list[Node]:
    """Return the nodes in the cluster, once for each partition.

    The cluster check counts those that fit a GPU kind.
    """
    listed = call("sinfo", "--noheader", "--Node", "--format=%N|%P|%t|%f|%G")
    lines = (foreign.printable(line).split("|") for line in listed.splitlines())
    return [
        Node(words[0], words[1].rstrip("*"), _state(words[2]), tuple(words[3].split(",")), words[4])
        for words in lines
        if len(words) == 5
    ]


def _state(text: str) -> str:
    """Return a node state without its mark.

    A node marked `*` does not respond and counts as down.
    """
    return "down" if text.endswith("*") else text.rstrip("~#!%$@^-")


def requeue(job: str) -> None:
    """Queue a running job again; SLURM ends it.

    An element does so at its time limit.
    """
    call("scontrol", "requeue", job)


def queue() -> dict[str, QueuedJob]:
    """Return this user's jobs by id, including recently ended jobs.

    It is much faster than the accounting, but forgets ended jobs soon.
    """
    listed = call(
        *("squeue", "--noheader", "--array", "--states=all", f"--user={getpass.getuser()}"),
        "--format=%i|%T|%r|%N|%L|%e|%j",
    )
    words = (foreign.printable(line).split("|", 6) for line in listed.splitlines())
    return {job[0]: QueuedJob(*job) for job in words if len(job) == len(QueuedJob._fields)}


def accounted(name: str) -> dict[str, QueuedJob]:
    """Return the jobs with a name by id, from the accounting; empty if the site has none.

    `job_states` asks for jobs that the queue does not list any more.
    """
    jobs: dict[str, QueuedJob] = {}
    with suppress(UserError):
        form = "--format=JobID,State,ExitCode,NodeList,End,JobName"
        for line in call(
            "sacct", "-nXP", f"--name={name}", f"--starttime={_OLDEST}", form
        ).splitlines():
            job, state, code, node, ended, name = foreign.printable(line).split("|", 5)
            reason = f"exit code {code}" if code not in ("", "0:0") else ""
            jobs[job] = QueuedJob(
                job, state.partition(" ")[0], reason, node, "", ended, name
            )  # such as "CANCELLED by 1000"
    return jobs
