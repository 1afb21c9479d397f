"""Ranks on all nodes of a SLURM job, started by torch's elastic launcher (gpu.nodes=N).

The worker (`run`) starts this module (`main`) on each node as an `srun` task. Standard input
contains its instructions, and it reports failed ranks on standard output. `srun` ends the tasks on
all nodes if any task fails.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from perfexp.errors import UserError
from perfexp.host import scheduler
from perfexp.host.installation import python_command
from perfexp.measuring.ranks import start
from perfexp.measuring.ranks.meeting import Meeting
from perfexp.records.messages import Events

#: Time between a launcher's report and its end, so that other nodes' launchers can report, too.
_REPORT_SECONDS = 3.0


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
    end: start.FailedRank


def run(
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
        start.refuse_busy(number, "")
    failures: dict[int, start.FailedRank] = {}
    with start.folder_of(emit) as folder:
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
    if code and all(end.exitcode == start.RANK_LOST for end in failures.values()):
        emit("failed", message=f"srun ended with code {code}; see details/run.log", status="killed")
        return 1
    return start.report(failures, nodes * per_host, emit)


def _run_tasks(instructions: Instructions, failures: dict[int, start.FailedRank]) -> int:
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
        *python_command("perfexp.measuring.ranks.nodes"),
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
) -> dict[int, start.FailedRank]:
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
    return start.launch(
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
