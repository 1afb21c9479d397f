"""Start the ranks of a host, relay their events, and report which of them died.

Only the ranks import torch, at the same time. The launcher waits without polling: it sleeps while calls are timed.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from perfexp.errors import UserError
from perfexp.ranks.meeting import pipe
from perfexp.records.messages import Events

#: Exit codes of the first rank where another rank has ended, or where the recorded error of a point left the ranks out
#: of step. Any other code is that of a worker.
RANK_LOST, OUT_OF_STEP = 76, 75

#: Time after a failure in which the other ranks may end by themselves: the rank that caused it may take longer to end
#: than one that lost its connection to it.
_AFTERMATH_SECONDS = 1.0
#: Limit on the end of a rank after SIGTERM.
_GRACE_SECONDS = 10.0
#: Environment variables of a rank, unless they are set: an error of NCCL's background thread ends its process.
_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
_END = b'{"event": "end"}\n'
_PREFIX = "perfexp-ranks-"


class Ended(NamedTuple):
    """A rank that failed: its process, its exit code or minus the number of a signal, and its node among several."""

    pid: int
    exitcode: int
    node: str = ""


class Outcome:
    """What the ranks report of themselves; it passes their other events on."""

    def __init__(self, emit: Events) -> None:
        self.exit_code: int | None = None  # of the first rank, if it reported why it could not go on
        self.rank_error: dict[str, Any] | None = None  # the first that a rank which follows reported
        self._emit = emit

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event."""
        if event["event"] == "rank":
            self.rank_error = self.rank_error or event
            return
        if event["event"] in ("refused", "failed"):
            self.exit_code = int(event.get("exit_code", 1))
        self._emit(event.pop("event"), **event)


def events_pipe(folder: Path) -> Path:
    """Return the path of the pipe through which the ranks send events."""
    return folder / "events"


def run(command: Sequence[str], *, size: int, port: int | None, emit: Events) -> int:
    """Start the ranks of one host, wait until all have ended, and return the exit code of a worker.

    Raises `UserError` if the port is in use.

    Args:
        command: command of a rank, to which the folder of the pipes is added; the environment sets its number.
        port: port of this host at which the ranks connect; None for a free one.
        emit: receives the ranks' events, and at the end `finished`, or `failed` with the rank that failed.
    """
    outcome = Outcome(emit)
    with cleaning_up_on_sigterm(), _reserved(port) as reserved, tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        for number in range(1, size):
            os.mkfifo(pipe(folder, number), 0o600)
        with Relay(folder, outcome.take):
            failures = launch(command, folder, per_host=size, host="127.0.0.1", port=reserved)
    return report(failures, outcome, size, emit)


def launch(
    command: Sequence[str], folder: Path, *, per_host: int, host: str, port: int, node: int = 0, nodes: int = 1
) -> dict[int, Ended]:
    """Start the ranks of this host, wait until they have ended, and return those that failed.

    After a failure the other ranks are terminated; their ends are not failures.

    Args:
        folder: folder of the pipes of this host's ranks.
        host: address at which torch's ranks meet, with its `port`.
        node: number of this host among the `nodes`.
    """
    command = [*command, f"--ranks={folder}", f"--parent={os.getpid()}"]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with _Ends(processes) as ends:
        try:
            for local in range(per_host):
                number = node * per_host + local
                variables = {"RANK": number, "WORLD_SIZE": nodes * per_host, "MASTER_ADDR": host, "MASTER_PORT": port}
                variables |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host}
                own = {name: str(value) for name, value in variables.items()}
                processes[number] = subprocess.Popen(command, env={**_DEFAULTS, **os.environ, **own})
            ended = set(ends.first())
        finally:
            _terminate(processes.values())
    failed = sorted(number for number in ended if processes[number].returncode)
    return {number: Ended(processes[number].pid, processes[number].returncode) for number in failed}


class _Ends:
    """The ends of ranks as they come, waited for by a thread each; a signal to this process interrupts the wait."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self._processes, self._threads = processes, list[threading.Thread]()
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._receive, self._send = os.pipe()
        os.set_blocking(self._send, False)
        self._before = signal.set_wakeup_fd(self._send)  # a signal just before the wait would not end it
        return self

    def __exit__(self, *failure: object) -> None:
        for thread in self._threads:
            thread.join()
        signal.set_wakeup_fd(self._before)
        os.close(self._receive)
        os.close(self._send)

    def first(self) -> Iterator[int]:
        """Yield the ranks that end by themselves: all, or those that do so shortly after the first failure."""
        for number in self._processes:
            self._threads.append(threading.Thread(target=self._wait, args=(number,), daemon=True))
            self._threads[-1].start()
        deadline = None
        for _ in self._processes:
            while self._numbers.empty():
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                if not select.select([self._receive], [], [], left)[0]:
                    return
                os.read(self._receive, 1)
            yield (number := self._numbers.get())
            if self._processes[number].returncode and deadline is None:
                deadline = time.monotonic() + _AFTERMATH_SECONDS

    def _wait(self, number: int) -> None:
        self._processes[number].wait()
        self._numbers.put(number)
        os.write(self._send, b"\0")


def _terminate(processes: Collection[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Terminated(BaseException):
    """SIGTERM has come."""


@contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """While entered, SIGTERM leaves this block as an error does, then ends this process, so that nothing is left."""

    def leave(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def report(failures: Mapping[int, Ended], outcome: Outcome, size: int, emit: Events) -> int:
    """Send the event of the end, with the ranks that failed first, and return the exit code of a worker."""
    if outcome.exit_code is not None:  # the first rank has reported the reason itself
        return outcome.exit_code
    if not failures or (0 in failures and failures[0].exitcode == OUT_OF_STEP):
        emit("finished")
        return 0
    # the launcher terminates the others by SIGTERM, and the first rank leaves when another is lost
    consequences = ((0, RANK_LOST), *((rank, -signal.SIGTERM) for rank in failures))
    causes = {rank: end for rank, end in failures.items() if (rank, end.exitcode) not in consequences} or failures
    killed = [rank for rank in causes if causes[rank].exitcode < 0]
    # a library aborts when its peer is gone, so any other signal came first
    killed = [rank for rank in killed if causes[rank].exitcode != -signal.SIGABRT] or killed
    if killed:
        names = {rank: signal.Signals(-causes[rank].exitcode).name for rank in killed}
        hint = "; the system may have run out of memory" if "SIGKILL" in names.values() else ""
        places = {rank: f" on {causes[rank].node}" if causes[rank].node else "" for rank in killed}
        who = " and ".join(
            f"rank {rank} of {size} (process {causes[rank].pid}{places[rank]}) was terminated by {names[rank]}"
            for rank in killed
        )
        emit("failed", message=f"{who}{hint}; see run.log", status="killed")
    elif outcome.rank_error is not None:
        emit("failed", message=outcome.rank_error["message"], status=outcome.rank_error["status"])
    else:
        codes = " and ".join(f"rank {rank} of {size} ended with code {causes[rank].exitcode}" for rank in causes)
        emit("failed", message=f"{codes}; see run.log")
    return 1


class Relay:
    """While entered, passes on the events that ranks of this host write into a pipe, in a thread of its own."""

    def __init__(self, folder: Path, take: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._take = events_pipe(folder), take

    def __enter__(self) -> None:
        os.mkfifo(self._path, 0o600)
        self._descriptor = os.open(self._path, os.O_RDWR)  # its own writer: the pipe has no end of file
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __exit__(self, *failure: object) -> None:
        os.write(self._descriptor, _END)
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for line in file:
                if line == _END:
                    return
                with suppress(ValueError):  # a rank was terminated while it wrote
                    self._take(json.loads(line))


def refuse_busy(port: int) -> None:
    """Raise `UserError` if a port of this host is in use."""
    with _reserved(port):
        return


@contextmanager
def _reserved(port: int | None) -> Iterator[int]:
    """While entered, no other program gets a port of this host; gives its number, a free one for None.

    The socket does not listen, so the first rank can listen at the same port. Raises `UserError` if it is in use.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("", port or 0))
        except OSError as error:
            raise UserError(
                f"gpu.port={port} can't be used: {error.strerror}. Leave gpu.port out to take a free port."
            ) from error
        yield int(holder.getsockname()[1])
