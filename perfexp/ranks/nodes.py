"""Nodes: the ranks of one training on all nodes of a SLURM job, started on each by torch's elastic launcher.

The worker starts one task of `srun` per node, this module, whose standard input has its instructions. It reports the
ranks that failed on its standard output. `srun` ends the tasks of all nodes when one of them fails.
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
from perfexp.ranks import start
from perfexp.ranks.meeting import Meeting
from perfexp.records.messages import Events

#: Time between the report of a launcher and its end, in which those of other nodes find out about their own ranks.
_REPORT_SECONDS = 3.0


class Instructions(msgspec.Struct, kw_only=True):
    """What the launchers of all nodes have to know.

    Attributes:
        command: command of a rank.
        folder: folder of the pipes on the first node, to whose worker the first rank sends its events.
        port: port of the first node at which the launchers meet.
        messages_port: port of the first node at which the first rank listens.
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
    """A rank that failed, as its node's launcher reports it."""

    rank: int
    end: start.Ended


def run(
    command: Sequence[str], *, nodes: int, per_host: int, port: int | None, emit: Events
) -> int:
    """Start the ranks on all nodes of this job, wait until all have ended, and return the exit code of a worker.

    Raises `UserError` if this process is not in a job of that many nodes, or if the port is in use.

    Args:
        command: command of a rank; the environment sets its number.
        port: first of two ports of this node at which the ranks connect; None for free ones.
        emit: pipe to which the first rank sends its events, and which gets `finished` at the end, or `failed`.
    """
    scheduler.require_nodes(nodes)
    ports = _free_ports() if port is None else (port, port + 1)
    for number in ports if port is not None else ():
        start.refuse_busy(number, "")
    failures: dict[int, start.Ended] = {}
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
        code = _start(instructions, failures)
    if code and all(end.exitcode == start.RANK_LOST for end in failures.values()):
        emit("failed", message=f"srun ended with code {code}; see run.log", status="killed")
        return 1
    return start.report(failures, nodes * per_host, emit)


def _start(instructions: Instructions, failures: dict[int, start.Ended]) -> int:
    """Run a task on each node, take its reports, and return the exit code of srun."""
    command = [
        *(
            "srun",
            f"--nodes={instructions.nodes}",
            f"--ntasks={instructions.nodes}",
            "--ntasks-per-node=1",
        ),
        *("--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=none"),
        *python_command("perfexp.ranks.nodes"),
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
            process.stdin.write(
                msgspec.json.encode(instructions) + b"\n"
            )  # it stays open: a task ends with it
        for line in process.stdout:
            with suppress(msgspec.DecodeError):  # the prolog of a site may write there, too
                report = msgspec.json.decode(line, type=_Report)
                failures[report.rank] = report.end
        return process.wait()


def _free_ports() -> tuple[int, int]:
    """Return two ports of this host that are free now."""
    with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def main() -> int:
    """Be the launcher of a node: start its ranks and report those that fail."""
    instructions = msgspec.json.decode(sys.stdin.buffer.readline(), type=Instructions)
    threading.Thread(target=_end_with_input, daemon=True).start()
    node, host = int(os.environ["SLURM_NODEID"]), os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    with tempfile.TemporaryDirectory(prefix="perfexp-ranks-") as name:
        folder = Path(
            name if node else instructions.folder
        )  # the first rank's events go to the worker
        failures = _launch(instructions, folder, node, host)
    for rank, end in failures.items():  # SLURM passes on whole lines of up to 1,024 bytes
        print(json.dumps({"rank": rank, "end": end._replace(node=scheduler.node())}), flush=True)
    if failures:
        time.sleep(_REPORT_SECONDS)
    return 1 if failures else 0


def _launch(
    instructions: Instructions, folder: Path, node: int, host: str
) -> dict[int, start.Ended]:
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
    """End this process as SLURM would when the worker, which holds the other end of its input, is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
