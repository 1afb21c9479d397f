"""Start of ranks with torch's elastic launcher, on one host or several, and reports on dead ranks.

The worker calls `run` for a plan with several devices and then only waits: each rank is a process
of its own (`worker/rank_process`).

With gpu.nodes=N the worker calls `run_on_nodes`, which starts this module (`main`) on each node of
a SLURM job as an `srun` task. Standard input contains its instructions, and it reports failed ranks
on standard output. `srun` ends the tasks on all nodes if any task fails.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from perfexp.errors import PerfexpError, UserError
from perfexp.host import scheduler
from perfexp.host.installation import python_command
from perfexp.measuring.ranks.control_messages import Meeting, pipe
from perfexp.records.messages import Events

#: Exit codes of the first rank if another rank has ended, or if a point's recorded error left the
#: ranks out of step. Any other code is a worker's exit code.
RANK_LOST, OUT_OF_STEP = 76, 75
#: Exit codes of the first rank after it reported its own error.
REPORTED = (PerfexpError.exit_code, UserError.exit_code)

#: Interval between the launcher's checks for ended ranks. Each check wakes it during timing.
_CHECK_SECONDS = 1.0
#: Time between a launcher's report and its end, so that other nodes' launchers can report, too.
_REPORT_SECONDS = 3.0


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


class Instructions(msgspec.Struct, kw_only=True):
    """Instructions for the launchers on all nodes.

    Attributes:
        command: command line for a rank.
        folder: pipe folder on the first node. The first rank sends its events to the worker there.
        nodes: number of nodes.
        per_host: number of ranks on each node.
        run_id: name of this start, which torch's launchers compare.
        port: port on the first node where the launchers meet.
        messages_port: port on the first node where the first rank listens.
        secret: text that each rank must send when it connects.
    """

    command: list[str]
    folder: str
    nodes: int
    per_host: int
    run_id: str
    port: int
    messages_port: int
    secret: str


class _Report(msgspec.Struct):
    """A failed rank, as reported by its node's launcher."""

    rank: int
    end: FailedRank


def run_on_nodes(
    command: Sequence[str], *, nodes: int, per_host: int, port: int | None, emit: Events
) -> int:
    """Start ranks on all nodes of this job, wait until they end, and return the exit code.

    Args:
        command: command line for a rank; the environment sets its number.
        port: first of two ports on this node where the ranks connect; None for free ports.
        emit: pipe for the first rank's events and a final `finished` or `failed`.

    Raises:
        UserError: this process is not in a job with that many nodes, or the port is in use.
    """
    scheduler.require_nodes(nodes)
    ports = _free_ports() if port is None else (port, port + 1)
    for number in ports if port is not None else ():
        refuse_busy(number, "")
    failures: dict[int, FailedRank] = {}
    with folder_of(emit) as folder:
        instructions = Instructions(
            command=list(command),
            folder=str(folder),
            nodes=nodes,
            per_host=per_host,
            run_id=uuid.uuid4().hex,
            port=ports[0],
            messages_port=ports[1],
            secret=secrets.token_hex(16),
        )
        code = _run_tasks(instructions, failures)
    if code and all(end.exitcode == RANK_LOST for end in failures.values()):
        emit("failed", message=f"srun ended with code {code}; see details/run.log", status="killed")
        return 1
    return report(failures, nodes * per_host, emit)


def _run_tasks(instructions: Instructions, failures: dict[int, FailedRank]) -> int:
    """Run a task on each node, collect its reports, and return srun's exit code.

    Args:
        failures: failed ranks; those that tasks report are added.

    Raises:
        UserError: there is no srun.
    """
    command = [
        "srun",
        f"--nodes={instructions.nodes}",
        f"--ntasks={instructions.nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        "--mpi=none",
        *python_command("perfexp.measuring.ranks.start"),
    ]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
    except FileNotFoundError as error:
        raise UserError(
            "srun is not on the PATH of this job, and gpu.nodes starts a task on each node."
        ) from error
    with process:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # srun reports why it ended
            # stdin stays open, because tasks end when it closes
            process.stdin.write(msgspec.json.encode(instructions) + b"\n")
        for line in process.stdout:
            with suppress(msgspec.DecodeError):  # a site's prolog may write there, too
                report = msgspec.json.decode(line, type=_Report)
                failures[report.rank] = report.end
        return process.wait()


def _free_ports() -> tuple[int, int]:
    """Return two ports on this host that are currently free."""
    with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def main() -> int:
    """Launch a node's ranks, wait until they end, and report failed ranks: an srun task.

    Returns:
        The exit code, 1 if a rank failed.
    """
    instructions = msgspec.json.decode(sys.stdin.buffer.readline(), type=Instructions)
    threading.Thread(target=_end_with_input, daemon=True).start()
    node, host = int(os.environ["SLURM_NODEID"]), os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    with tempfile.TemporaryDirectory(prefix="perfexp-ranks-") as name:
        # the first rank's events go to the worker
        folder = Path(name if node else instructions.folder)
        failures = _launch(instructions, folder, node, host)
    for rank, end in failures.items():  # SLURM keeps lines up to 1,024 bytes whole
        print(json.dumps({"rank": rank, "end": end._replace(node=scheduler.node())}), flush=True)
    if failures:
        time.sleep(_REPORT_SECONDS)
        return 1
    return 0


def _launch(
    instructions: Instructions, folder: Path, node: int, host: str
) -> dict[int, FailedRank]:
    """Start this node's ranks, wait until they end, and return the failed ones by rank.

    Args:
        folder: pipe folder for this node's ranks.
        node: number of this node in the job, from 0.
        host: address of the first node.
    """
    Meeting(host=host, port=instructions.messages_port, secret=instructions.secret).write(folder)
    name = f"[{host}]" if ":" in host else host
    settings = {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{name}:{instructions.port}",
        "rdzv_configs": {"rank": node},
        "run_id": instructions.run_id,
    }
    return launch(
        instructions.command,
        folder,
        per_host=instructions.per_host,
        settings=settings,
        nodes=instructions.nodes,
    )


def _end_with_input() -> None:
    """End this process as SLURM would once the worker, at the other end of its input, is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
