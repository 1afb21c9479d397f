"""Start the ranks of a host with torch's elastic launcher, relay their events, and report which of them died."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from perfexp.errors import UserError
from perfexp.host.process import MessageError
from perfexp.ranks.meeting import pipe
from perfexp.records import messages
from perfexp.records.messages import Events

#: Exit codes of the first rank where another rank has ended, or where the recorded error of a point left the ranks out
#: of step. Any other code is that of a worker.
RANK_LOST, OUT_OF_STEP = 76, 75

#: Interval of the launcher's checks for ranks that ended; each one wakes it while calls are timed.
_CHECK_SECONDS = 1.0
_END = b'{"event": "end"}\n'


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
    if port is not None:
        refuse_busy(port)
    outcome = Outcome(emit)
    with tempfile.TemporaryDirectory(prefix="perfexp-ranks-") as name:
        folder = Path(name)
        for number in range(1, size):
            os.mkfifo(pipe(folder, number), 0o600)
        with Relay(folder, outcome.take):
            settings = {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port or 0}", "local_addr": "127.0.0.1"}
            failures = launch(command, folder, per_host=size, settings=settings)
    return report(failures, outcome, size, emit)


def launch(
    command: Sequence[str], folder: Path, *, per_host: int, settings: Mapping[str, Any], nodes: int = 1
) -> dict[int, Ended]:
    """Start the ranks of this host, wait until they have ended, and return those that failed.

    Args:
        folder: folder of the pipes of this host's ranks.
        settings: how the launchers of all nodes meet, for torch's `LaunchConfig`.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch_config = LaunchConfig(
        **{"run_id": uuid.uuid4().hex, **settings},
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=per_host,
        max_restarts=0,
        monitor_interval=_CHECK_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    try:
        elastic_launch(launch_config, command[0])(*command[1:], f"--ranks={folder}", f"--parent={os.getpid()}")
    except ChildFailedError as error:
        return {rank: Ended(end.pid, end.exitcode) for rank, end in error.failures.items()}
    return {}


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
                with suppress(ValueError, RecursionError, MessageError):  # a rank was terminated while it wrote
                    event = json.loads(line)
                    messages.check(event)
                    self._take(event)


def refuse_busy(port: int, host: str = "127.0.0.1") -> None:
    """Raise `UserError` if a port of this host is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"gpu.port={port} can't be used: {error.strerror}. Leave gpu.port out to take a free port."
            ) from error
