"""Start: ranks started by torch's elastic launcher, heard by this process, and named where one of them dies."""

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
from typing import Any, Protocol

from perfexp.errors import UserError
from perfexp.ranks.control_messages import pipe

#: Exit codes of the first rank: another rank has ended; or an error of a point, which is written down, left the ranks
#: out of step. Any other is that of a worker.
RANK_LOST, OUT_OF_STEP = 76, 75

#: How often the launcher looks whether a rank has ended: it is awake while calls are timed.
_LOOK_SECONDS = 1.0
_END = b'{"event": "end"}\n'


class Tell(Protocol):
    """Takes events (`perfexp.records.messages.Events`)."""

    def __call__(self, event: str, **details: Any) -> None:
        """Send one event.

        Args:
            event: its name.
            details: JSON values.
        """


def events_pipe(folder: Path) -> Path:
    """Where the pipe lies through which the ranks tell what goes on.

    Args:
        folder: of the ranks.
    """
    return folder / "events"


def run(command: Sequence[str], *, size: int, port: int | None, tell: Tell) -> int:
    """Start ranks and see them to their end.

    Args:
        command: of a rank; the folder of the pipes is added, and the environment says which rank it is.
        size: how many there are.
        port: of this host, through which they find one another; None for one that is free.
        tell: gets their events, and at last `finished`, or `failed` with the rank that did.

    Returns:
        Exit code of a worker.

    Raises:
        UserError: the port is in use.
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
        relay = _Relay(events_pipe(folder), tell)
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port or 0}",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=_LOOK_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )
        failures: Mapping[int, Any] = {}
        try:
            elastic_launch(launch, command[0])(*command[1:], f"--ranks={folder}")
        except ChildFailedError as error:
            failures = error.failures
        finally:
            relay.end()
    return _verdict(failures, relay, size, tell)


def _verdict(failures: Mapping[int, Any], relay: _Relay, size: int, tell: Tell) -> int:
    """What the ends of the ranks mean, told; returns the exit code."""
    if relay.exit_code is not None:  # the first rank has told why itself
        return relay.exit_code
    if not failures or (0 in failures and failures[0].exitcode == OUT_OF_STEP):
        tell("finished")
        return 0
    # the launcher ends the others by SIGTERM, and the first one leaves when it misses another
    consequences = ((0, RANK_LOST), *((rank, -signal.SIGTERM) for rank in failures))
    causes = {rank: each for rank, each in failures.items() if (rank, each.exitcode) not in consequences} or failures
    killed = [rank for rank in causes if causes[rank].exitcode < 0]
    # a library whose peer is gone may abort; what was not aborted went first
    killed = [rank for rank in killed if causes[rank].exitcode != -signal.SIGABRT] or killed
    if killed:
        names = {rank: signal.Signals(-causes[rank].exitcode).name for rank in killed}
        hint = "; the system may have run out of memory" if "SIGKILL" in names.values() else ""
        who = " and ".join(
            f"rank {rank} of {size} (process {causes[rank].pid}) was ended by {names[rank]}" for rank in killed
        )
        tell("failed", message=f"{who}{hint}; see run.log", status="killed")
    elif relay.told is not None:
        tell("failed", message=relay.told["message"], status=relay.told["status"])
    else:
        codes = " and ".join(f"rank {rank} of {size} ended with code {causes[rank].exitcode}" for rank in causes)
        tell("failed", message=f"{codes}; see run.log")
    return 1


class _Relay:
    """Passes on what the ranks tell, from a thread of its own.

    Args:
        path: of their pipe.
        tell: gets their events.

    Attributes:
        exit_code: of the first rank, if it told why it could not go on.
        told: what a rank that follows said of its own error.
    """

    def __init__(self, path: Path, tell: Tell) -> None:
        self.exit_code: int | None = None
        self.told: dict[str, Any] | None = None
        self._descriptor, self._tell = os.open(path, os.O_RDWR), tell  # with a writer there is never an end of file
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Everything has been told; returns when it has been passed on."""
        os.write(self._descriptor, _END)
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for line in file:
                if line == _END:
                    return
                with suppress(ValueError):  # of a rank that was ended while it wrote
                    self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "rank":
            self.told = self.told or event
            return
        if event["event"] in ("refused", "failed"):
            self.exit_code = int(event.get("exit_code", 1))
        self._tell(event.pop("event"), **event)


def _refuse_busy(port: int) -> None:
    """Raise where another process listens."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"gpu.port={port} can't be used: {error.strerror}. Leave it out, and a port that is free is taken."
            ) from error
