"""Worker processes: start one, read its events, and end it with everything that it started.

An event is a JSON object on one line of a pipe, such as `{"event": "block", "text": …}`. The
supervisor of a run (`run.supervisor`), queries about a machine (`run.worker_query`) and the
comparison of two functions (`run.callable_judge`) use `WorkerProcess`.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from perfexp.errors import PerfexpError, UserError
from perfexp.host import foreign, fork_server, interrupts
from perfexp.host.files import disk_error
from perfexp.host.installation import python_command

#: Time limit for a process to end after SIGTERM, and again after SIGKILL.
_GRACE_SECONDS = 5.0
#: Time limit for a worker to end after its last event.
_EXIT_SECONDS = 60.0
#: Longest event; epochs and profiles are a few kilobytes.
_MAX_EVENT_BYTES = 64 << 20
#: Poll interval on systems without pidfd_open.
_POLL_SECONDS = 1.0

Event = dict[str, Any]


def worker_command(*arguments: str) -> list[str]:
    """Return the command that starts a worker with these arguments."""
    return python_command("perfexp.worker.entry", *arguments)


class _EventFields(msgspec.Struct):
    """Fields that every event may have; each kind has more.

    Attributes:
        patient: whether any silence is allowed after this event, for example during a long
            compilation.
        text: status line for the user.
    """

    event: str
    patient: bool = False
    text: str = ""


class MessageError(Exception):
    """Raised if a worker sent something other than an event.

    Measured code may write into any pipe.
    """


class SilenceError(Exception):
    """Raised if a worker sent no event for too long.

    Args:
        seconds: length of the silence.
        finished: whether it had sent its last event.
    """

    def __init__(self, seconds: float, *, finished: bool) -> None:
        super().__init__(f"no event for {seconds:g} s")
        self.seconds, self.finished = seconds, finished


class WorkerProcess:
    """A worker in its own session; its events arrive through a pipe as JSON lines.

    If possible it is forked, which saves the imports. Otherwise it is a new interpreter.

    Args:
        command: command line; arguments for the pipe and the parent are added, and for a new
            interpreter its start time.
        log: output file.
        imports: modules that a forked worker finds imported. None never forks: the command is run
            as it is, for example another program.

    Raises:
        UserError: the worker cannot be started.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, imports: Sequence[str] | None = None
    ) -> None:
        self._process: subprocess.Popen[bytes] | fork_server.ForkedProcess
        self._events, send = os.pipe()
        try:
            with foreign.open_append(log) as file:
                file.write(f"$ {shlex.join(command)}\n".encode())
                file.flush()
                forked = None if imports is None else self._forked(command, imports, file, send)
                self._process = forked or self._started(command, file, send)
        except OSError as error:
            os.close(self._events)
            if not log.parent.is_dir():
                raise disk_error(error) from error
            raise UserError(
                f"The worker can't be started ({command[0]}): {error.strerror}."
            ) from error
        except BaseException:
            os.close(self._events)
            raise
        finally:
            os.close(send)

    @staticmethod
    def _forked(
        command: Sequence[str], imports: Sequence[str], log: IO[bytes], send: int
    ) -> fork_server.ForkedProcess | None:
        """Fork the worker from the fork server.

        Return None, with the reason in the log, if it must be a new interpreter.

        Args:
            command: command of a new interpreter; its module and arguments are run.
            send: descriptor of the pipe for the worker's events.
        """
        module, *arguments = command[command.index("-m") + 1 :]
        try:
            return fork_server.fork(module, arguments, imports, log=log.fileno(), events=send)
        except fork_server.Unforkable as reason:
            log.write(f"started as a new interpreter: {reason}\n".encode())
            log.flush()
            return None

    @staticmethod
    def _started(command: Sequence[str], log: IO[bytes], send: int) -> subprocess.Popen[bytes]:
        """Start the worker as a new interpreter, in its own session."""
        python_options = [
            f"--events-fd={send}",
            f"--parent={os.getpid()}",
            f"--spawned-ns={time.perf_counter_ns()}",
        ]
        return subprocess.Popen(
            [*command, *python_options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[send],
            start_new_session=True,
        )

    def events(self, silence_seconds: float | None) -> Iterator[Event]:
        """Yield events until the worker has ended, without polling.

        After an event with `patient` set, any silence is allowed. After `finished`, only a short
        silence is. `run.worker_query.listen` passes them on to the progress display.

        Args:
            silence_seconds: longest time without an event; None for no limit.

        Raises:
            SilenceError: the worker was silent for longer.
            MessageError: the worker sent something other than an event.
            KeyboardInterrupt: a held interrupt came.
        """
        limit, finished, incomplete = silence_seconds, False, b""
        while (data := self._read(limit, finished=finished)) is not None:
            *lines, incomplete = (incomplete + data).split(b"\n")
            if len(incomplete) > _MAX_EVENT_BYTES:
                raise MessageError("a message without an end")
            for line in lines:
                try:
                    msgspec.json.decode(line, type=_EventFields)
                    event = json.loads(line)
                except foreign.DECODING_ERRORS as error:
                    raise MessageError(str(error)) from error
                limit = None if event.get("patient") else silence_seconds
                if finished := event["event"] == "finished":
                    limit = _EXIT_SECONDS
                yield event

    def end(self) -> int:
        """End the worker and everything that it started: SIGTERM, then SIGKILL after 5 s.

        `run.worker_query.listen` calls it after the last event, or after an error.

        Returns:
            Exit code, or minus the signal number.

        Raises:
            PerfexpError: the worker cannot be ended.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            # a stopped process cannot end
            others = self.send_signals(number, signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
            alive = psutil.wait_procs(others, timeout=_GRACE_SECONDS)[1]
            if self._process.poll() is not None and not alive:
                break
        os.close(self._events)
        if self._process.poll() is None:
            raise PerfexpError(
                f"The worker (process {self._process.pid}) cannot be ended: it hangs in the "
                "kernel, perhaps in the device's driver. Nothing more can be measured there until "
                "that is fixed."
            )
        return self._process.returncode or 0

    def send_signals(self, *numbers: int) -> list[psutil.Process]:
        """Send signals to the worker and to everything that it started.

        The comparison of two functions stops one side while it measures the other.

        Returns:
            The processes other than the worker.
        """
        others = self._others()
        targets: list[subprocess.Popen[bytes] | fork_server.ForkedProcess | psutil.Process] = [
            self._process,
            *others,
        ]
        for target in targets:
            with suppress(psutil.Error, ProcessLookupError):
                for number in numbers:
                    target.send_signal(number)
        return others

    def _read(self, limit: float | None, *, finished: bool) -> bytes | None:
        """Return new bytes from the pipe; None once the process has ended and everything was read.

        Args:
            limit: longest wait in seconds; None for no limit.

        Raises:
            SilenceError: nothing came within the limit.
            KeyboardInterrupt: a held interrupt came.
        """
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            ended = self._wait(None if deadline is None else deadline - time.monotonic())
            interrupts.check()
            if select.select([self._events], [], [], 0)[0]:
                data = os.read(self._events, 65536)
                if data or ended:
                    return data or None
            elif ended:
                return None
            if deadline is not None and time.monotonic() >= deadline:
                raise SilenceError(limit or 0.0, finished=finished)

    def _wait(self, seconds: float | None) -> bool:
        """Wait until there is data or an interrupt, the process has ended, or the seconds are over.

        Return whether the process has ended.
        """
        sources = [self._events, *interrupts.descriptors()]
        timeout = None if seconds is None else max(seconds, 0.0)
        if not hasattr(os, "pidfd_open"):
            slice_seconds = _POLL_SECONDS if timeout is None else min(timeout, _POLL_SECONDS)
            select.select(sources, [], [], slice_seconds)
            return self._process.poll() is not None
        if self._process.poll() is not None:
            return True
        if isinstance(self._process, fork_server.ForkedProcess):
            pidfd = os.dup(self._process.pidfd)
        else:
            pidfd = os.pidfd_open(self._process.pid)
        try:
            return pidfd in select.select([*sources, pidfd], [], [], timeout)[0]
        finally:
            os.close(pidfd)

    def _others(self) -> list[psutil.Process]:
        """Return the worker's descendants and the rest of its session, without the worker.

        Some of them may outlive the worker.
        """
        processes: set[psutil.Process] = set()
        with suppress(psutil.Error):
            processes.update(psutil.Process(self._process.pid).children(recursive=True))
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self._process.pid:
                    processes.add(process)
        return [process for process in processes if process.pid != self._process.pid]
