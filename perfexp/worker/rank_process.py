"""Rank: one of several processes that measure together; the first writes the record and the others follow it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.devices import Device
from perfexp.errors import PerfexpError, RankLost, UserError
from perfexp.measuring.verdicts import verdict
from perfexp.meters import together
from perfexp.plan import config, plan_file
from perfexp.ranks import Place, Shareable, start
from perfexp.ranks.control_messages import Follower, Leader, Member
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key
from perfexp.worker.points import measure_points
from perfexp.worker.workbench import Workbench, report_failure

if TYPE_CHECKING:
    from perfexp.measuring.procedure import Procedure
    from perfexp.modes import Step

#: Length of an error's text. The line of JSON stays below 4096 bytes (POSIX: PIPE_BUF) and reaches the pipe whole.
_MOST_BYTES = 600


def main(directory: Path, plan_sha256: str, replicate: int, folder: Path) -> int:
    """Be the rank that torch's launcher set in the environment; return an exit code for `perfexp.ranks.start`."""
    place = Place(number=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), folder=folder)
    emit, paths = Events(os.open(start.events_pipe(folder), os.O_WRONLY)), RunPaths(directory)
    plan = plan_file.load(paths.plan, plan_sha256)
    if place.number == 0:
        return _lead(Workbench(plan, paths, emit), replicate, place)
    return _follow(Workbench(plan, paths, Events(None)), place, emit)


def _lead(bench: Workbench, replicate: int, place: Place) -> int:
    leader = Leader(place)
    try:
        is_finished = _measure(bench, replicate, place, leader)
    except RankLost:
        return start.RANK_LOST
    except Exception as error:
        # outside of any point, the loss of another rank looks like an error of this one
        is_foreign = not isinstance(error, PerfexpError | OSError) and leader.lost()
        if is_foreign or isinstance(error, BrokenPipeError):  # of a rank that has left
            traceback.print_exc()
            return start.RANK_LOST
        return report_failure(error, bench.emit, most_bytes=_MOST_BYTES)
    return 0 if is_finished else start.OUT_OF_STEP


def _measure(bench: Workbench, replicate: int, place: Place, leader: Leader) -> bool:
    bench.emit("block", text="loading")
    devices = _devices(bench.plan, place.size)
    bench.device = devices[0]
    with ExitStack() as stack:
        for device in _distinct(devices):
            stack.enter_context(bench.reserved(device))
        leader.begin()
        member, shared = _join(bench, place)
        with bench.procedure(seed=bench.plan.seed, energy=None) as procedure:
            reports = member.group.gather(_report(bench.device))
            facts = {"devices": [report["device"] for report in reports], **shared}
            of_devices = msgspec.convert([report["doubts"] for report in reports], list[list[Diagnostic]])
            bench.write_environment(_of_all(of_devices, facts["devices"]), ranks=facts)
            procedure.group, procedure.compares_alone = leader, bench.plan.probes.scaling
            if bench.plan.probes.energy:
                procedure.energy = bench.energy_of(together([device.meters() for device in _distinct(devices)]))
            leader.works_with(member)
            is_finished = measure_points(procedure, bench.plan, bench.paths, replicate, bench.emit)
            if is_finished:
                leader.end()
                member.group.barrier()
            return is_finished


def _follow(bench: Workbench, place: Place, emit: Events) -> int:
    follower, has_device = Follower(place), False
    try:
        if not follower.wait():
            return 0
        bench.device = config.build(_node(bench.plan, place.number))
        has_device = True
        member, _ = _join(bench, place)
        with bench.procedure(seed=bench.plan.seed + place.number, energy=None) as procedure:
            member.group.gather(_report(bench.device))
            follower.follow(lambda key: _point(procedure, key), member)
            member.group.barrier()
    except Exception as error:
        traceback.print_exc()
        status, text = verdict(error, bench.device) if has_device else ("failed", str(error))
        message = f"{place}: {text}".encode()[:_MOST_BYTES].decode(errors="ignore")
        emit("rank", number=place.number, status=str(status), message=message)
        follower.linger()
        return 1
    follower.close()
    return 0


def _join(bench: Workbench, place: Place) -> tuple[Member, dict[str, Any]]:
    """Load the model in the group of all ranks; return the group's member and the facts of how ranks share work."""
    from perfexp.ranks.group import TorchGroup  # with torch, which the workbench loads with the model

    plan = bench.plan
    bench.device.start()
    group = TorchGroup(place, bench.device, plan.execution.threads)
    bench.open_data()
    bench.load_model()
    shared = group.facts()
    if "train" in plan.phases:
        if not isinstance(bench.session, Shareable):
            raise UserError(f"model={plan.model_name} can't be trained by several ranks (no `share`); set gpu.count=1.")
        shared |= bench.session.share(plan.execution.ddp)
    return Member(session=bench.session, device=bench.device, group=group, number=place.number), shared


@contextmanager
def _point(procedure: Procedure, key: Key) -> Iterator[tuple[Step, Callable[[], object]]]:
    with procedure.step(key) as (step, batches):
        yield step, lambda: procedure.first_forward(batches)


def _devices(plan: config.Plan, size: int) -> list[Device]:
    """Build the devices of all ranks, from the plan's device on; raises UserError unless there are enough of a kind."""
    devices: list[Device] = []
    failure = None
    try:
        for number in range(size):
            devices.append(config.build(_node(plan, number)))
        usable = [device for device in devices if device.kind == devices[0].kind]
    except UserError as error:
        usable, failure = devices, error
    if len(usable) == size:
        return usable
    names = ", ".join(sorted({device.name for device in usable}))
    here = f"{len(usable)} × {names}" if usable else "none"
    wanted = f"gpu.count={size} needs {size} devices from gpu.index={plan.gpu.get('index', 0)} on"
    raise UserError(f"{wanted}; here: {here}. {failure or ''}".rstrip()) from failure


def _node(plan: config.Plan, number: int) -> dict[str, Any]:
    return {**plan.gpu, "index": int(plan.gpu.get("index", 0)) + number}


def _distinct(devices: Sequence[Device]) -> list[Device]:
    """Return every device once, sorted by lock: two runs that take locks in one order can't block each other."""
    by_name = {str(device.lock_name): device for device in devices}
    return [by_name[name] for name in sorted(by_name)]


def _report(device: Device) -> dict[str, Any]:
    about = {"name": device.name, "identity": device.lock_name}
    return {"device": about, "doubts": msgspec.to_builtins(device.doubts())}


def _of_all(of_devices: list[list[Diagnostic]], devices: list[dict[str, str]]) -> list[Diagnostic]:
    of_others = [
        msgspec.structs.replace(item, message=f"rank {number}: {item.message}")
        for number, of_rank in enumerate(of_devices)
        for item in of_rank
        if number
    ]
    names = sorted({device["name"] for device in devices})
    return [*of_others, diagnostics.make("mixed_devices", devices=", ".join(names))] if len(names) > 1 else of_others
