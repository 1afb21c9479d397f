"""Call functions in a forked copy of this process, so that their side effects are discarded.

Counting a model's FLOPs and tracing its memory use this: both replace the model's tensors by
stand-ins, which must never reach the measured model.
"""

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

#: A call that takes longer, or a copy that idles longer, counts as hung: a lock that another
#: thread held at the fork stays locked, and pool threads do not exist in the copy.
_TIMEOUT_SECONDS, _IDLE_SECONDS = 600.0, 15.0
#: Longest time between closing the pipe and the end of the process.
_END_SECONDS = 2.0
#: Methods that transfer bytes. In a copy they raise, except on its pipe to the parent, which keeps
#: them as attributes of the object.
_TRANSFERS = {name: getattr(Connection, name) for name in ("_send", "_recv")}


class Ended(Exception):
    """The forked process ended or hung before it answered."""


class Forked:
    """A copy of this process as it is now, which calls one function until `close`.

    The copy has this process's memory but not its threads. Its standard streams are discarded. On
    Linux it ends with this process.

    Args:
        function: function to call in the copy; arguments and results are pickled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not hasattr(os, "fork"):
            raise Ended(f"{sys.platform} has no fork")
        self._connection, theirs = Pipe()
        for end in (self._connection, theirs):  # they must also work in a copy of a copy
            for name, method in _TRANSFERS.items():
                setattr(end, name, MethodType(method, end))
        arguments = function, theirs, self._connection, os.getpid()
        self._process = get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings(
            action="ignore", category=DeprecationWarning
        ):  # warns about threads; hangs raise `Ended`
            self._process.start()
        theirs.close()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function in the copy and return its result.

        Raises:
            Ended: the copy ended or hung.
            Exception: any exception of the function itself.
        """
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
        """Wait for an answer, up to 600 s in all and 15 s without any CPU time in the copy.

        Raises:
            Ended: the copy exceeds a limit, or has ended.
        """
        copy, start = psutil.Process(self._process.pid), time.monotonic()
        cpu_seconds, last_active = 0.0, start
        while not self._connection.poll(1.0):
            now, times = time.monotonic(), copy.cpu_times()
            busy = times.user + times.system
            if busy > cpu_seconds or copy.status() == psutil.STATUS_DISK_SLEEP:
                cpu_seconds, last_active = busy, now
            if now - start > _TIMEOUT_SECONDS:
                raise Ended(f"a forked process did not answer within {_TIMEOUT_SECONDS:.0f} s")
            if now - last_active > _IDLE_SECONDS:
                raise Ended(
                    "a forked process waits for what it has no copy of, such as a thread or "
                    "another process"
                )

    def _cause(self) -> str:
        """Return why the copy ended: its exit code, or the signal's name."""
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        return signal.Signals(-code).name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the copy."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve(
    function: Callable[..., Any], child_end: Connection, parent_end: Connection, parent: int
) -> None:
    """Call the function for each request, in the copy, until the other end of the pipe is closed.

    An answer is a pair: the exception that the function raised or None, and its result.

    Args:
        child_end: the copy's end of the pipe.
        parent_end: the parent's end, which the copy inherits and closes.
        parent: process id of the parent.
    """
    parent_end.close()
    _detach(parent, child_end)
    while True:
        try:
            arguments = child_end.recv()
        except EOFError:
            return
        error, result = None, None
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
        child_end.send((error, result))


def _detach(parent: int, child_end: Connection) -> None:
    """Detach this copy from the parent's streams, interrupts, connections and destructors.

    The copy still ends with the parent.

    Args:
        child_end: the copy's end of the pipe to the parent, which goes on working.
    """
    lifeline.die_with(parent)
    current_process().daemon = False  # a copy may make copies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in {0, 1, 2} - {child_end.fileno()}:  # the pipe has one if it was closed before
        os.dup2(nowhere, stream)
    # a copied connection, for example to a data-loader worker, is the parent's: using it raises
    for name in _TRANSFERS:
        setattr(Connection, name, _refuse)
    faulthandler.disable()  # its file reports crashes of the parent
    gc.disable()


def _refuse(*_: Any) -> None:
    """Replace a connection's transfer method in a copy."""
    raise RuntimeError("it uses processes that a copy can't share")
