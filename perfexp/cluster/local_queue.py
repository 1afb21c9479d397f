"""Local queue: the runs of a sweep on several GPUs of this machine, one process for each GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from perfexp.cli.flags import PARENT
from perfexp.cli.overrides import quoted
from perfexp.cluster import element
from perfexp.cluster.campaign import Ended, Version, enter_finished, version
from perfexp.devices import nvml
from perfexp.errors import PerfexpError, UserError
from perfexp.host import credentials, untrusted
from perfexp.host.installation import python_command
from perfexp.orchestration.job import exit_code, show_results
from perfexp.orchestration.preparation import Assignment
from perfexp.orchestration.sweep_run import SweepRun
from perfexp.plan.schema import Cluster
from perfexp.records.record import Record
from perfexp.reports.console import Console

#: Interval at which ended processes are noticed.
_LOOK_SECONDS = 0.2
#: Limit on the end of the processes after an interrupt: a worker and its record take some seconds.
_END_SECONDS = 60.0
#: Bound on the numbers of GPUs where the driver lists none.
_MOST_GPUS = 1024
#: Exit code of a process whose record a tracker did not accept.
_NOT_SENT = 3


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One GPU: its entry of CUDA_VISIBLE_DEVICES, and the cores near it, empty if unknown."""

    visible: str
    cores: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"GPU {self.visible}"


@dataclass(kw_only=True)
class _Process:
    slot: Slot
    assignment: Assignment
    popen: subprocess.Popen[bytes]
    earlier: Version


class LocalCampaign:
    """Runs of a sweep on several GPUs, by the launcher's node; raises UserError for settings out of range."""

    outlives = False

    def __init__(self, launcher: Mapping[str, Any]) -> None:
        self._slots = slots(launcher["gpus"])
        if not isinstance(launcher["exclusive"], bool):
            raise UserError(f"hydra.launcher.exclusive={launcher['exclusive']}: set true or false.")
        self._sharing = "turns" if launcher["exclusive"] else "together"
        self._runs: list[tuple[Assignment, Sequence[str]]] = []

    def add(self, assignment: Assignment, cluster: Cluster, command: Sequence[str]) -> None:
        """Take a run of the sweep; raises UserError if it needs several GPUs."""
        if assignment.plan.ranks > 1:
            raise UserError("hydra/launcher=local measures each run on one GPU: leave gpu.count and gpu.nodes out.")
        if assignment.overwrites:
            raise UserError("--overwrite is not for hydra/launcher=local: choose another output_dir=DIR.")
        if any(credentials.is_masked(text) for text in command):
            raise UserError("A credential is not passed on to other processes: set it in the environment instead.")
        self._runs.append((assignment, command))

    def measure(self, sweep_run: SweepRun, console: Console, ended: Ended) -> bool:
        """Measure every run that is not finished; `ended` is called with each that has ended."""
        sweep_run.expect([assignment for assignment, _ in self._runs])
        unfinished = enter_finished([assignment for assignment, _ in self._runs], console, ended)
        numbers = {assignment.number for assignment in unfinished}
        waiting = [run for run in self._runs if run[0].number in numbers]
        free, running = list(self._slots), list[_Process]()
        sweep_run.paths.make_job_logs()
        sweep_run.announce()
        try:
            while waiting or running:
                while waiting and free:
                    running.append(self._start(free.pop(0), *waiting.pop(0), sweep_run, console))
                time.sleep(_LOOK_SECONDS)
                for process in [process for process in running if process.popen.poll() is not None]:
                    running.remove(process)
                    free.append(process.slot)
                    _collect(process, sweep_run, console, ended)
        finally:
            _end(running)
        return True

    def _start(
        self, slot: Slot, assignment: Assignment, command: Sequence[str], sweep_run: SweepRun, console: Console
    ) -> _Process:
        number, earlier = assignment.number - 1, version(assignment)
        overrides = [
            *element.overrides_of(command, sends=True),
            f"output_dir={quoted(str(assignment.folder.absolute()))}",
            f"host_sharing={self._sharing}",
        ]
        arguments = element.arguments(sweep_run.paths, number, overrides)
        with _log(sweep_run, number, "out") as out, _log(sweep_run, number, "err") as err:
            popen = subprocess.Popen(
                [*python_command("perfexp", *arguments), f"{PARENT}={os.getpid()}"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": slot.visible},
                start_new_session=True,
            )
        if slot.cores:
            with suppress(OSError):  # a container may forbid it
                os.sched_setaffinity(popen.pid, slot.cores)
        console.note(f"{assignment.name}: on {slot}")
        return _Process(slot=slot, assignment=assignment, popen=popen, earlier=earlier)


def slots(gpus: Any) -> list[Slot]:
    """Return the GPUs of `hydra.launcher.gpus`: all visible ones, the first N, or those of a list of indices.

    Raises UserError for another value, and for all if the driver lists none.
    """
    boards = _boards()
    if gpus == "all":
        if not boards:
            raise UserError("hydra.launcher.gpus=all: the NVIDIA driver lists no GPU here; set a number of processes.")
        return boards
    if isinstance(gpus, int) and not isinstance(gpus, bool) and gpus > 0:
        if boards and gpus > len(boards):
            raise UserError(f"hydra.launcher.gpus={gpus}: this machine has {len(boards)}.")
        return (boards or [Slot(visible=str(index)) for index in range(gpus)])[:gpus]
    is_list = isinstance(gpus, Sequence) and not isinstance(gpus, str)
    if is_list and gpus and all(type(index) is int and 0 <= index < _MOST_GPUS for index in gpus):
        if boards and max(gpus) >= len(boards):
            raise UserError(f"hydra.launcher.gpus={list(gpus)}: this machine has {len(boards)}, numbered from 0.")
        return [boards[index] if boards else Slot(visible=str(index)) for index in dict.fromkeys(gpus)]
    raise UserError(f"hydra.launcher.gpus={gpus}: set all, a number of GPUs, or a list of indices such as [0,1].")


def _boards() -> list[Slot]:
    """List the visible boards of the NVIDIA driver, in its order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    boards = [Slot(visible=uuid, cores=_cores(bus)) for uuid, bus in nvml.places()]
    if visible is None:
        return boards
    by_name = {str(index): board for index, board in enumerate(boards)} | {board.visible: board for board in boards}
    return [by_name.get(name.strip(), Slot(visible=name.strip())) for name in visible.split(",") if name.strip()]


def _cores(bus: str, root: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """Return the cores of the NUMA node of a device on the PCI bus, as far as this process may use them."""
    try:
        text = (root / bus / "local_cpulist").read_text().strip()
        near = {core for part in text.split(",") for core in _range(part)}
        return frozenset(near & os.sched_getaffinity(0))
    except (OSError, ValueError, AttributeError):
        return frozenset()


def _range(part: str) -> Iterator[int]:
    first, _, last = part.partition("-")
    yield from range(int(first), int(last or first) + 1)


def _log(sweep_run: SweepRun, number: int, suffix: str) -> BinaryIO:
    return untrusted.open_append(sweep_run.paths.job_logs / f"{number}.{suffix}")


def _collect(process: _Process, sweep_run: SweepRun, console: Console, ended: Ended) -> None:
    """Enter the record that a process has written, or its exit code if that is another failure than the record's."""
    assignment, code = process.assignment, process.popen.returncode
    record = None
    with suppress(UserError):
        record = Record.load(assignment.folder) if version(assignment) != process.earlier else None
    if record is None or (code not in (0, _NOT_SENT) and exit_code(record) == 0):
        log = sweep_run.paths.job_logs / f"{assignment.number - 1}.err"
        kind = UserError if code == UserError.exit_code else PerfexpError
        ended(assignment, kind(f"{assignment.name}: exit code {code}; see {log}"))
        return
    assignment.is_sent = code != _NOT_SENT
    show_results(record, assignment, console)
    ended(assignment, record)


def _end(running: Sequence[_Process]) -> None:
    """Interrupt processes that are still running, which write their records, and wait for them."""
    for process in running:
        with suppress(ProcessLookupError):
            process.popen.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    for process in running:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
