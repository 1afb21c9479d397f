"""Sweep runs on several GPUs of this machine, one process for each GPU (hydra/launcher=local).

A GPU gets the next run as soon as its process has ended.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from perfexp.devices import nvml
from perfexp.errors import PerfexpError, UserError
from perfexp.host import foreign
from perfexp.host.installation import python_command
from perfexp.plan.flags import PARENT
from perfexp.plan.schema import Cluster
from perfexp.records.analysis import Analysis
from perfexp.records.paths import SweepPaths
from perfexp.report.console import Console
from perfexp.run.cluster.element import Campaign, SweepElement, overrides_of
from perfexp.run.driver import Ended
from perfexp.run.job import exit_code, show_results
from perfexp.run.preparation import Assignment
from perfexp.run.sweep_run import SweepRun

#: Poll interval for ended processes.
_LOOK_SECONDS = 0.2
#: Time limit for processes to end after an interrupt: ending a worker and writing its record
#: take some seconds.
_END_SECONDS = 60.0
#: Bound on GPU indices if the driver lists no GPU.
_MOST_GPUS = 1024
#: Exit code if a tracker did not accept the record.
_NOT_SENT = 3


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One GPU.

    Attributes:
        visible: its entry in CUDA_VISIBLE_DEVICES.
        cores: CPU cores near it; empty if unknown.
    """

    visible: str
    cores: frozenset[int] = frozenset()


class LocalCampaign(Campaign):
    """Sweep runs on several GPUs.

    Args:
        launcher: node of hydra/launcher; raises UserError if a setting is out of range.
    """

    outlives = False

    def __init__(self, launcher: Mapping[str, Any]) -> None:
        super().__init__()
        self._slots = slots(launcher["gpus"])
        if not isinstance(launcher["exclusive"], bool):
            raise UserError(f"hydra.launcher.exclusive={launcher['exclusive']}: set true or false.")
        self._sharing = "turns" if launcher["exclusive"] else "together"

    def _run(
        self, assignment: Assignment, cluster: Cluster, command: Sequence[str]
    ) -> SweepElement:
        """Return a run of the sweep; raise `UserError` if it needs more than one GPU."""
        if assignment.plan.ranks > 1:
            raise UserError(
                "hydra/launcher=local measures each run on one GPU: leave gpu.count and gpu.nodes "
                "out."
            )
        overrides = [*overrides_of(command, sends=True), f"host_sharing={self._sharing}"]
        return SweepElement(assignment=assignment, overrides=overrides, cluster=cluster)

    def _measure(
        self, runs: list[SweepElement], sweep_run: SweepRun, console: Console, ended: Ended
    ) -> bool:
        """Measure all runs, and report each as its process ends; return True."""
        free, running = (
            list(self._slots),
            dict[subprocess.Popen[bytes], tuple[Slot, SweepElement]](),
        )
        sweep_run.paths.make_job_logs()
        sweep_run.announce()
        try:
            while runs or running:
                while runs and free:
                    slot, run = free.pop(0), runs.pop(0)
                    running[_start(slot, run, sweep_run.paths)] = slot, run
                    console.note(f"{run.assignment.name}: on GPU {slot.visible}")
                time.sleep(_LOOK_SECONDS)
                for process in list(running):
                    if process.poll() is None:
                        continue
                    slot, run = running.pop(process)
                    free.append(slot)
                    _collect(run, process.returncode, sweep_run.paths, console, ended)
        finally:
            _end(running)
        return True


def _start(slot: Slot, run: SweepElement, sweep: SweepPaths) -> subprocess.Popen[bytes]:
    """Start the process that measures a run on a GPU, on the CPU cores near it."""
    with _log(sweep, run.number, "out") as out, _log(sweep, run.number, "err") as err:
        process = subprocess.Popen(
            [*python_command("perfexp", *run.arguments(sweep)), f"{PARENT}={os.getpid()}"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": slot.visible},
            start_new_session=True,
        )
    if slot.cores:
        with suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(process.pid, slot.cores)
    return process


def slots(gpus: Any) -> list[Slot]:
    """Return the GPUs for `hydra.launcher.gpus`.

    Each has one process at a time.

    Args:
        gpus: `all` for all visible GPUs, N for the first N, or a list of indices such as [0,1].

    Raises:
        UserError: the value is wrong, or it is `all` and the driver lists no GPU.
    """
    boards = _boards()
    if gpus == "all":
        if not boards:
            raise UserError(
                "hydra.launcher.gpus=all: the NVIDIA driver lists no GPU here; set a number of "
                "processes."
            )
        return boards
    indices = range(gpus) if type(gpus) is int else gpus
    is_list = isinstance(indices, Sequence) and not isinstance(indices, str)
    if not (
        is_list
        and indices
        and all(type(index) is int and 0 <= index < _MOST_GPUS for index in indices)
    ):
        raise UserError(
            f"hydra.launcher.gpus={gpus}: set all, a number of GPUs, or a list of indices such as "
            "[0,1]."
        )
    if boards and max(indices) >= len(boards):
        raise UserError(
            f"hydra.launcher.gpus={gpus}: this machine has {len(boards)}, numbered from 0."
        )
    return [
        boards[index] if boards else Slot(visible=str(index)) for index in dict.fromkeys(indices)
    ]


def _boards() -> list[Slot]:
    """Return the visible NVIDIA GPUs in driver order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    boards = [Slot(visible=uuid, cores=_cores(bus)) for uuid, bus in nvml.places()]
    if visible is None:
        return boards
    by_name: dict[str, Slot] = {}
    for index, board in enumerate(boards):
        by_name[str(index)] = by_name[board.visible] = board
    names = filter(None, map(str.strip, visible.split(",")))
    return [by_name.get(name, Slot(visible=name)) for name in names]


def _cores(bus: str, root: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """Return the usable cores on a PCI device's NUMA node; empty if unknown.

    A process on distant cores would copy to its GPU more slowly.
    """
    near = set[int]()
    try:
        for part in (root / bus / "local_cpulist").read_text().split(","):
            first, _, last = part.partition("-")
            near.update(range(int(first), int(last or first) + 1))
        return frozenset(near & os.sched_getaffinity(0))
    except (OSError, ValueError, AttributeError):
        return frozenset()


def _log(sweep: SweepPaths, number: int, suffix: str) -> BinaryIO:
    """Open a run's log file in the sweep's folder; `suffix` is `out` or `err`."""
    return foreign.open_append(sweep.job_logs / f"{number}.{suffix}")


def _collect(
    run: SweepElement, code: int, sweep: SweepPaths, console: Console, ended: Ended
) -> None:
    """Report the record that a process has written.

    Without a new record, or if the exit code shows a failure that the record lacks, report the exit
    code.
    """
    assignment = run.assignment
    record = run.record() if run.version != run.earlier else None
    if record is None or (code not in (0, _NOT_SENT) and exit_code(record) == 0):
        log = sweep.job_logs / f"{run.number}.err"
        kind = UserError if code == UserError.exit_code else PerfexpError
        ended(assignment, kind(f"{assignment.name}: exit code {code}; see {log}"))
        return
    assignment.is_sent = code != _NOT_SENT
    show_results(Analysis.of(record), assignment, console)
    ended(assignment, record)


def _end(running: Iterable[subprocess.Popen[bytes]]) -> None:
    """Terminate processes that are still running, and wait up to 60 s for them.

    They get this time to write their records.
    """
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
