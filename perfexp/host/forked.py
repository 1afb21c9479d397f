"""Call functions in a forked copy of this process, whose changes are thrown away."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, Pipe
from types import MethodType
from typing import Any, Self

import psutil

from perfexp.host import lifeline

#: Time after which a call is taken for a hang, and time without any work of the copy's: a lock that another thread held
#: at the fork stays locked, and threads of a pool are not there.
_TIMEOUT_SECONDS, _IDLE_SECONDS = 600.0, 15.0
#: Time that a process takes at most from closing its pipe to its end.
_END_SECONDS = 2.0
#: What a connection does with its bytes, which is refused to those that a copy has not made.
_TRANSFERS = {name: getattr(Connection, name) for name in ("_send", "_recv")}


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
        self._connection, theirs = Pipe()
        for end in (self._connection, theirs):  # they work in a copy of a copy, too
            for name, method in _TRANSFERS.items():
                setattr(end, name, MethodType(method, end))
        arguments = function, theirs, self._connection, os.getpid()
        self._process = get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings(
            action="ignore", category=DeprecationWarning
        ):  # of threads, see `Ended`
            self._process.start()
        theirs.close()

    def __call__(self, *arguments: Any) -> Any:
        """Make a call in the copy and return its result; raises the call's own error, or `Ended`."""
        try:
            self._connection.send(arguments)
            self._wait()
            error, result = self._connection.recv()
        except (EOFError, OSError) as broken:
            self._process.join(_END_SECONDS)
            raise Ended(f"a forked process ended ({self._cause()})") from broken
        if error is not None:
            raise error
        return result

    def _wait(self) -> None:
        """Wait for an answer; raises `Ended` if the copy works for too long, or on nothing."""
        copy, begun = psutil.Process(self._process.pid), time.monotonic()
        worked, since = 0.0, begun
        while not self._connection.poll(1.0):
            now, times = time.monotonic(), copy.cpu_times()
            if times.user + times.system > worked or copy.status() == psutil.STATUS_DISK_SLEEP:
                worked, since = times.user + times.system, now
            if now - begun > _TIMEOUT_SECONDS:
                raise Ended(f"a forked process did not answer within {_TIMEOUT_SECONDS:.0f} s")
            if now - since > _IDLE_SECONDS:
                raise Ended(
                    "a forked process waits for what it has no copy of, such as a thread or another process"
                )

    def _cause(self) -> str:
        code = self._process.exitcode
        return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the copy."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve(function: Callable[..., Any], own: Connection, theirs: Connection, parent: int) -> None:
    """Answer calls until the other end of the pipe is closed."""
    theirs.close()
    _detach(parent, own)
    while True:
        try:
            arguments = own.recv()
        except EOFError:
            return
        error, result = None, None
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
        own.send((error, result))


def _detach(parent: int, own: Connection) -> None:
    """Give up the parent's belongings: its life, its terminal, its streams, and the order of its destructors."""
    lifeline.die_with(parent)
    current_process().daemon = False  # a copy may make copies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in {0, 1, 2} - {own.fileno()}:  # the pipe has one of these if it was closed
        os.dup2(nowhere, stream)
    for name in (
        _TRANSFERS
    ):  # the parent's processes, such as those of a data loader, are not this process's
        setattr(Connection, name, _refuse)
    faulthandler.disable()  # its file reports crashes of the parent
    gc.disable()


def _refuse(*_: Any) -> None:
    raise RuntimeError("it uses processes that a copy can't share")
