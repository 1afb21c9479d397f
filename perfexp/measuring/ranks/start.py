"""Start of a host's ranks with torch's elastic launcher, and reports about dead ranks.

The worker calls `run` for a plan with several devices and then only waits: each rank is a process
of its own (`worker/rank_process`). For several nodes, `nodes` calls `launch` on each.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from perfexp.errors import PerfexpError, UserError
from perfexp.measuring.ranks.meeting import pipe
from perfexp.records.messages import Events

#: Exit codes of the first rank if another rank has ended, or if a point's recorded error left the
#: ranks out of step. Any other code is a worker's exit code.
RANK_LOST, OUT_OF_STEP = 76, 75
#: Exit codes of the first rank after it reported its own error.
REPORTED = (PerfexpError.exit_code, UserError.exit_code)

#: Interval between the launcher's checks for ended ranks. Each check wakes it during timing.
_CHECK_SECONDS = 1.0


class FailedRank(NamedTuple):
    """A failed rank.

    Attributes:
        pid: process id.
        exitcode: exit code, or minus a signal number.
        error: a following rank's error: `message`, `status` of the point, and `timestamp`.
        node: name of the node if there are several.
    """

    pid: int
    exitcode: int
    error: dict[str, Any] | None = None
    node: str = ""

    def __str__(self) -> str:
        """Return, for example, `(process 7 on n1) was terminated by SIGKILL`."""
        on_node = f" on {self.node}" if self.node else ""
        return (
            f"(process {self.pid}{on_node}) was terminated by {signal.Signals(-self.exitcode).name}"
        )


def events_path(folder: Path) -> Path:
    """Return the path through which the first rank sends its events to the worker's parent."""
    return folder / "events"


@contextmanager
def folder_of(emit: Events) -> Iterator[Path]:
    """Yield a folder for the ranks' pipes, with a name for the worker's own pipe."""
    with tempfile.TemporaryDirectory(prefix="perfexp-ranks-") as name:
        events_path(Path(name)).symlink_to(f"/proc/{os.getpid()}/fd/{emit.descriptor}")
        yield Path(name)


def run(command: Sequence[str], *, size: int, port: int | None, emit: Events) -> int:
    """Start the ranks on a single host, wait until they end, and return the exit code.

    Args:
        command: command line for a rank, without the pipe folder. The environment sets its number,
            for example with the variable RANK.
        port: port on this host where the ranks connect; None for a free port.
        emit: pipe for the first rank's events and a final `finished` or `failed`.

    Raises:
        UserError: the port is in use.
    """
    if port is not None:
        refuse_busy(port)
    with folder_of(emit) as folder:
        for number in range(1, size):
            os.mkfifo(pipe(folder, number), 0o600)
        settings = {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"127.0.0.1:{port or 0}",
            "local_addr": "127.0.0.1",
        }
        return report(launch(command, folder, per_host=size, settings=settings), size, emit)


def launch(
    command: Sequence[str],
    folder: Path,
    *,
    per_host: int,
    settings: Mapping[str, Any],
    nodes: int = 1,
) -> dict[int, FailedRank]:
    """Start the ranks on this host, wait until they end, and return failed ranks by number.

    Args:
        command: command line for a rank, without the pipe folder.
        folder: pipe folder for this host's ranks.
        per_host: number of ranks to start.
        settings: arguments for torch's `LaunchConfig`, such as the launchers' meeting point.
        nodes: number of hosts.
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
        elastic_launch(launch_config, command[0])(
            *command[1:], f"--ranks={folder}", f"--parent={os.getpid()}"
        )
    except ChildFailedError as error:
        return {
            rank: FailedRank(end.pid, end.exitcode, end.error_file_data)
            for rank, end in error.failures.items()
        }
    return {}


def report(failures: Mapping[int, FailedRank], size: int, emit: Events) -> int:
    """Send the final event, naming the ranks that failed first, and return the exit code.

    Args:
        failures: failed ranks by number.
        size: number of ranks.
        emit: pipe for a final `finished` or `failed`; nothing is sent if rank 0 reported already.
    """
    first_code = failures[0].exitcode if 0 in failures else 0
    if first_code in REPORTED:
        return first_code
    if not failures or first_code == OUT_OF_STEP:
        emit("finished")
        return 0
    # the launcher sends SIGTERM to the others, and the first rank leaves if another is lost
    causes = {}
    for rank, end in failures.items():
        is_consequence = end.exitcode == -signal.SIGTERM or (rank, end.exitcode) == (0, RANK_LOST)
        if not is_consequence:
            causes[rank] = end
    causes = causes or dict(failures)
    killed = {rank: end for rank, end in causes.items() if end.exitcode < 0}
    # a library aborts when its peer is gone, so any other signal came first
    not_aborted = {rank: end for rank, end in killed.items() if end.exitcode != -signal.SIGABRT}
    killed = not_aborted or killed
    if killed:
        hint = ""
        if any(end.exitcode == -signal.SIGKILL for end in killed.values()):
            hint = "; the system may have run out of memory"
        who = " and ".join(f"rank {rank} of {size} {end}" for rank, end in killed.items())
        emit("failed", message=f"{who}{hint}; see details/run.log", status="killed")
    elif errors := [end.error for end in failures.values() if end.error and "status" in end.error]:
        error = min(errors, key=itemgetter("timestamp"))
        emit("failed", message=error["message"], status=error["status"])
    else:
        texts = [
            f"rank {rank} of {size} ended with code {causes[rank].exitcode}" for rank in causes
        ]
        codes = " and ".join(texts)
        emit("failed", message=f"{codes}; see details/run.log")
    return 1


def refuse_busy(port: int, host: str = "127.0.0.1") -> None:
    """Raise `UserError` if a port on this host is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"gpu.port={port} can't be used: {error.strerror}. Leave gpu.port out to take a "
                "free port."
            ) from error
