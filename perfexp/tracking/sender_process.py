"""Sender process: starts the process that sends to servers, and kills it at a deadline."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import replace

from perfexp.host.locks import LockTimeout
from perfexp.host.process import python_command
from perfexp.tracking.delivery import Delivery, TrackingFailed
from perfexp.tracking.store import mlflow_environment

#: The process answers so long before it would be killed: its message names the process that it waited for.
_MARGIN_SECONDS = 0.5
#: A killed process may take this long to vanish.
_END_SECONDS = 5.0
#: Limit of what the process answers: a link, or why there is none.
_MOST_BYTES = 65_536


class DeadlineMissed(TrackingFailed):
    """There was no answer before the deadline."""


class SenderProcess:
    """A process that sends; it stays for the next delivery, since importing MLflow takes seconds.

    It has a session of its own: Ctrl-C reaches it through this process only.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self._process = subprocess.Popen(
            python_command("perfexp.tracking.sender", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env=os.environ | mlflow_environment(),
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended by itself."""
        return self._process.poll() is not None

    def ask(self, line: bytes, deadline: float) -> bytes:
        """The process's answer to a line.

        Args:
            line: with its line break.
            deadline: on the clock `time.monotonic`.

        Raises:
            DeadlineMissed: there was none in time.
            TrackingFailed: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        source, sink = self._process.stdout.fileno(), self._process.stdin.fileno()
        os.set_blocking(sink, False)  # a process that hangs does not read
        rest, answer = memoryview(line), b""
        while not answer.endswith(b"\n"):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise DeadlineMissed
            readable, writable, _ = select.select([source], [sink] if rest else [], [], min(seconds, 60.0))
            try:
                if writable:
                    rest = rest[os.write(sink, rest) :]
                if readable and not (data := os.read(source, 65536)):
                    raise BrokenPipeError
            except BrokenPipeError as error:
                raise TrackingFailed(f"the sending process has ended: {self._last_line()}") from error
            answer += data if readable else b""
            if len(answer) > _MOST_BYTES:
                raise TrackingFailed("the server's answer is too long")
        return answer

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


#: The one of this process, once something was sent.
_sender: SenderProcess | None = None


def send(delivery: Delivery) -> str:
    """Have another process send a replay.

    Args:
        delivery: the replay, where it goes, and until when.

    Returns:
        How to look at it, for the console.

    Raises:
        DeadlineMissed: it takes longer; the process has been killed.
        LockTimeout: another process makes runs in the same database.
        TrackingFailed: it could not be sent.
    """
    global _sender
    if _sender is None or _sender.has_ended:
        end()
        _sender = SenderProcess()
    line = replace(delivery, deadline=delivery.deadline - _MARGIN_SECONDS).to_line()
    try:
        answer = json.loads(_sender.ask(line, delivery.deadline))
    except BaseException:  # a Ctrl-C, too: a late answer must not be taken for the next one
        end()
        raise
    if "link" in answer:
        return str(answer["link"])
    raise (LockTimeout if answer["is_late"] else TrackingFailed)(answer["error"])


@atexit.register
def end() -> None:
    """End the sending process, if there is one."""
    global _sender
    if _sender is not None:
        sender, _sender = _sender, None
        sender.kill()
