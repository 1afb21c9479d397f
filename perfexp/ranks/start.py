"""Start the ranks with torch's elastic launcher, relay their events, and report which of them died."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.ranks.control_messages import pipe
from perfexp.records.messages import Events

#: Exit codes of the first rank where another rank has ended, or where the recorded error of a point left the ranks out
#: of step. Any other code is that of a worker.
RANK_LOST, OUT_OF_STEP = 76, 75

#: Interval of the launcher's checks for ranks that ended; each one wakes it while calls are timed.
_CHECK_SECONDS = 1.0
_END = b'{"event": "end"}\n'


def events_pipe(folder: Path) -> Path:
    """Return the path of the pipe through which the ranks send events."""
    return folder / "events"


def run(command: Sequence[str], *, size: int, port: int | None, emit: Events) -> int:
    """Start the ranks, wait until all have ended, and return the exit code of a worker.

    Raises `UserError` if the port is in use.

    Args:
        command: command of a rank, to which the folder of the pipes is added; the environment sets its number.
        port: port of this host at which the ranks connect; None for a free one.
        emit: receives the ranks' events, and at the end `finished`, or `failed` with the rank that failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if port is not None:
        _refuse_busy(port)
    with tempfile.TemporaryDirectory(prefix="perfexp-ranks-") as name:
        folder = Path(name)
        for path in (events_pipe(folder), *(pipe(folder, number) for number in range(1, size))):
            os.mkfifo(path, 0o600)
        relay = _Relay(events_pipe(folder), emit)
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port or 0}",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=_CHECK_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )
        failures: Mapping[int, Any] = {}
        try:
            elastic_launch(launch, command[0])(*command[1:], f"--ranks={folder}")
        except ChildFailedError as error:
            failures = error.failures
        finally:
            relay.end()
    return _report(failures, relay, size, emit)


def _report(failures: Mapping[int, Any], relay: _Relay, size: int, emit: Events) -> int:
    if relay.exit_code is not None:  # the first rank has reported the reason itself
        return relay.exit_code
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
        who = " and ".join(
            f"rank {rank} of {size} (process {causes[rank].pid}) was terminated by {names[rank]}" for rank in killed
        )
        emit("failed", message=f"{who}{hint}; see run.log", status="killed")
    elif relay.rank_error is not None:
        emit("failed", message=relay.rank_error["message"], status=relay.rank_error["status"])
    else:
        codes = " and ".join(f"rank {rank} of {size} ended with code {causes[rank].exitcode}" for rank in causes)
        emit("failed", message=f"{codes}; see run.log")
    return 1


class _Relay:
    """Passes the ranks' events on, in a thread of its own."""

    def __init__(self, path: Path, emit: Events) -> None:
        self.exit_code: int | None = None  # of the first rank, if it reported why it could not go on
        self.rank_error: dict[str, Any] | None = None  # the first that a rank which follows reported
        self._descriptor, self._emit = os.open(path, os.O_RDWR), emit  # its own writer: the pipe has no end of file
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Return when all events have been passed on."""
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

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "rank":
            self.rank_error = self.rank_error or event
            return
        if event["event"] in ("refused", "failed"):
            self.exit_code = int(event.get("exit_code", 1))
        self._emit(event.pop("event"), **event)


def _refuse_busy(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"gpu.port={port} can't be used: {error.strerror}. Leave gpu.port out to take a free port."
            ) from error
