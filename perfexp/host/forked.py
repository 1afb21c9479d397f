"""Call functions in a forked copy of this process, whose changes are thrown away."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any, Self

import psutil

from perfexp.host import lifeline

#: Time after which a call is taken for a hang, and time without any work of the copy's: a lock that another thread held
#: at the fork stays locked, and threads of a pool are not there.
_TIMEOUT_SECONDS, _IDLE_SECONDS = 600.0, 15.0
#: Time that a process takes at most from closing its pipe to its end.
_END_SECONDS = 2.0


class Ended(Exception):
    """Raised if the forked process ends or hangs before it has answered."""


class Forked:
    """A copy of this process as it is now, which makes calls of one function until `close`.

    The copy has this process's memory but not its threads. Its standard streams are discarded, and it ends with this
    process (Linux).

    Args:
        function: called in the copy; arguments and results are pickled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not hasattr(os, "fork"):
            raise Ended(f"{sys.platform} has no fork")
        self._connection, theirs = map(_above_streams, Pipe())
        parent = os.getpid()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads, see `Ended`
            self._process = os.fork()
        if self._process == 0:
            try:
                self._connection.close()
                _detach(parent)
                _serve(function, theirs)
            finally:  # without the exit handlers of this process, and whatever a call raised
                os._exit(0)
        theirs.close()

    def __call__(self, *arguments: Any) -> Any:
        """Make a call in the copy and return its result; raises the call's own error, or `Ended`."""
        try:
            self._connection.send(arguments)
            self._wait()
            error, result = self._connection.recv()
        except (EOFError, OSError) as broken:
            status = self.close(patience_seconds=_END_SECONDS)
            raise Ended(f"a forked process ended ({_cause(status)})") from broken
        if error is not None:
            raise error
        return result

    def _wait(self) -> None:
        """Wait for an answer; raises `Ended` if the copy works for too long, or on nothing."""
        copy, begun = psutil.Process(self._process), time.monotonic()
        worked, since = 0.0, begun
        while not self._connection.poll(1.0):
            now, times = time.monotonic(), copy.cpu_times()
            if times.user + times.system > worked or copy.status() == psutil.STATUS_DISK_SLEEP:
                worked, since = times.user + times.system, now
            if now - begun > _TIMEOUT_SECONDS:
                raise Ended(f"a forked process did not answer within {_TIMEOUT_SECONDS:.0f} s")
            if now - since > _IDLE_SECONDS:
                raise Ended("a forked process waits for what it has no copy of, such as a thread or another process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self, *, patience_seconds: float = 0.0) -> int:
        """End the copy, after some time for its own end, and return its wait status; 0 if it was closed before."""
        self._connection.close()
        process, self._process = self._process, 0
        if not process:
            return 0
        deadline = time.monotonic() + patience_seconds
        try:
            while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
            if ended == (0, 0):
                os.kill(process, signal.SIGKILL)
                ended = os.waitpid(process, 0)
        except ChildProcessError:  # a model has this process ignore its children, or has taken the status
            return 0
        return ended[1]


class _End(Connection):
    """An end of the pipe between a process and its copy, which works where other connections are refused."""

    _send, _recv = Connection._send, Connection._recv  # type: ignore[attr-defined]


def _above_streams(end: Connection) -> _End:
    """Move a pipe's end above the standard streams, which may be closed: the copy replaces them."""
    with end:
        return _End(fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _cause(status: int) -> str:
    return signal.Signals(status & 0x7F).name if status & 0x7F else f"exit code {status >> 8}"


def _detach(parent: int) -> None:
    """Give up the parent's belongings: its life, its terminal, its streams, and the order of its destructors."""
    lifeline.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    for name in ("_send", "_recv"):  # the parent's processes, such as those of a data loader, are not this process's
        setattr(Connection, name, _refuse)
    faulthandler.disable()  # its file reports crashes of the parent
    gc.disable()


def _refuse(*_: Any) -> None:
    raise RuntimeError("it uses processes that a copy can't share")


def _serve(function: Callable[..., Any], connection: Connection) -> None:
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        error, result = None, None
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
        connection.send((error, result))
