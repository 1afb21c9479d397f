"""Launch: starts workers on a plan, waits for them, and gives every point a result, whatever becomes of a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perfexp.errors import PerfexpError, UserError
from perfexp.paths import RunPaths, append_line
from perfexp.record import Key, Point, Status, missing, point_to_line, read_points

#: So long a worker may take to end after it was asked to, before it is killed.
_GRACE_SECONDS = 5.0

Listener = Callable[[dict[str, Any]], None]


@dataclass(kw_only=True)
class Job:
    """What is to be measured, and how its workers are started.

    Attributes:
        paths: of the run; plan.yaml is there.
        plan_sha256: of plan.yaml.
        timed: points that are timed.
        first_predictions: points whose time to first prediction is taken, each in a process of its own.
        prefix: arguments before the worker's own (`nsys profile …`, `numactl …`).
        listener: gets the worker's events.
    """

    paths: RunPaths
    plan_sha256: str
    timed: Sequence[Key]
    first_predictions: Sequence[Key] = ()
    prefix: Sequence[str] = ()
    listener: Listener = field(default=lambda _: None)


class _Refused(PerfexpError):
    """The worker could not even begin; carries its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(job: Job) -> None:
    """Measure what has no result yet.

    Args:
        job: what and how.

    Raises:
        PerfexpError: the worker refused to begin; nothing was measured.
        KeyboardInterrupt: the run was interrupted. What is finished is in points.jsonl.
    """
    for replicate in sorted({key.replicate for key in job.timed}):
        timed = [key for key in job.timed if key.replicate == replicate]
        while left := missing(timed, job.paths.points):
            _one_worker(job, "timed", replicate, left)
        first = [key for key in job.first_predictions if key.replicate == replicate]
        while left := missing(first, job.paths.points):
            _one_worker(job, "ttfp", replicate, left)


def results(job: Job) -> list[Point]:
    """Every point's result so far, in the plan's order; `interrupted` where there is none.

    Args:
        job: what was to be measured.
    """
    found = {point.key: point for point in read_points(job.paths.points)}
    return [
        found.get(key) or Point(key=key, status=Status.INTERRUPTED, error="the run was interrupted")
        for key in (*job.timed, *job.first_predictions)
    ]


def _one_worker(job: Job, what: str, replicate: int, left: Sequence[Key]) -> None:
    """Start one worker and see it to its end; if it died, the point under way gets its status."""
    current: Key | None = None
    refusal: _Refused | None = None
    process, events = _start(job, what, replicate)
    try:
        with os.fdopen(events, "rb") as lines:
            for line in lines:
                event = json.loads(line)
                if event["event"] == "point":
                    current = msgspec.convert(event["key"], Key)
                elif event["event"] == "done":
                    current = None
                elif event["event"] == "refused":
                    refusal = _Refused(event["message"], event["exit_code"])
                job.listener(event)
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    if refusal is not None:
        raise refusal
    if code == 0:
        still = missing(left, job.paths.points)
        if len(still) == len(left):
            _give_up(job.paths, still, Status.FAILED, "the worker ended without a result; see run.log")
    else:
        status, text = _death(code)
        # a worker that dies before its first point would die again: nothing of this replicate can be measured
        _give_up(job.paths, [current] if current else left, status, text)


def _start(job: Job, what: str, replicate: int) -> tuple[subprocess.Popen[bytes], int]:
    """A worker, and the descriptor on which its events arrive."""
    receive, send = os.pipe()
    command = [
        *job.prefix,
        sys.executable,
        "-m",
        "perfexp.worker",
        str(job.paths.root),
        f"--plan-sha256={job.plan_sha256}",
        f"--what={what}",
        f"--replicate={replicate}",
        f"--events-fd={send}",
        f"--parent={os.getpid()}",
    ]
    try:
        with job.paths.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [*command, f"--spawned-ns={time.perf_counter_ns()}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[send],
                start_new_session=True,
            )
    except OSError as error:
        os.close(receive)
        raise UserError(f"The worker can't be started ({command[0]}): {error.strerror}.") from error
    finally:
        os.close(send)
    return process, receive


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _death(code: int) -> tuple[Status, str]:
    """What a worker's return code says of the point under way."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return Status.KILLED, f"the worker was ended by {name}{hint}; see run.log"
    return Status.FAILED, f"the worker ended with code {code}; see run.log"


def _give_up(paths: RunPaths, keys: Iterable[Key], status: Status, text: str) -> None:
    for key in keys:
        append_line(paths.points, point_to_line(Point(key=key, status=status, error=text)))
