"""Rank process: one of several processes with a device each that measure together.

Rank 0 leads: it decides which call comes next and writes all results; the others follow its control
messages and make the same calls. torch's elastic launcher (`measuring/ranks/start`) starts the
ranks of a host, and the exit codes here are for it.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.devices import Device
from perfexp.devices.meters import combine
from perfexp.doctor import environment
from perfexp.errors import PerfexpError, RankLost, UserError
from perfexp.host.files import write_atomically
from perfexp.measuring.ranks import Place, Shareable, start
from perfexp.measuring.ranks.control_messages import Follower, Leader, Member
from perfexp.measuring.verdicts import verdict
from perfexp.plan import config, plan_file
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.messages import Events, cut
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key
from perfexp.worker.points import measure_points
from perfexp.worker.workbench import Workbench, node_diagnostics, report_failure

if TYPE_CHECKING:
    from perfexp.measuring.modes import Step
    from perfexp.measuring.procedure import Procedure

#: Longest error text in JSON: SLURM forwards whole lines only up to 1,024 bytes.
_MOST_BYTES = 700


def main(directory: Path, plan_sha256: str, replicate: int, folder: Path) -> int:
    """Run the rank that torch's launcher set in the environment.

    Args:
        directory: the run's folder.
        plan_sha256: hash of plan.yaml.
        replicate: number of the process group, among those that repeat the points.
        folder: folder of the pipes between this host's ranks.

    Returns:
        An exit code for `perfexp.measuring.ranks.start`.
    """
    number, size, per_host = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    place = Place(number=number, size=size, folder=folder, per_host=per_host)
    paths = RunPaths(directory)
    plan = plan_file.load(paths.plan, plan_sha256)
    if place.number == 0:
        emit = Events(os.open(start.events_path(folder), os.O_WRONLY))
        return _lead(Workbench(plan, paths, emit), replicate, place)
    return _follow(Workbench(plan, paths, Events(None)), place)


def _lead(bench: Workbench, replicate: int, place: Place) -> int:
    """Measure as rank 0 and return the exit code: 0, `RANK_LOST`, `OUT_OF_STEP`, or an error's."""
    leader = Leader(place)
    try:
        is_finished = _measure_as_leader(bench, replicate, place, leader)
    except RankLost:
        return start.RANK_LOST
    except Exception as error:
        # outside any point, losing another rank looks like an error in this rank
        is_foreign = not isinstance(error, PerfexpError | OSError) and leader.lost()
        if is_foreign or isinstance(error, ConnectionError):  # another rank has left
            traceback.print_exc()
            return start.RANK_LOST
        return report_failure(error, bench.emit)
    if is_finished:
        return 0
    return start.OUT_OF_STEP


def _measure_as_leader(bench: Workbench, replicate: int, place: Place, leader: Leader) -> bool:
    """Reserve this host's devices, form the group, and measure the replicate's points.

    Returns:
        Whether all points were tried; see `measure_points`.
    """
    bench.emit.block("loading")
    devices = _devices(bench.plan, place.per_host)
    bench.device = devices[0]
    bench.open_data()
    bench.check()
    with _reserved(bench, devices):
        if place.size > place.per_host:
            bench.emit.block("waiting for the devices of the other nodes", patient=True)
        leader.begin()
        member, shared = _join(bench, place)
        with bench.procedure() as procedure:
            reports = member.group.gather(_describe_rank(bench, place))
            facts = {
                "devices": [report["device"] for report in reports],
                **shared,
                **_host_facts(reports),
            }
            doubts = _rank_diagnostics([report["doubts"] for report in reports], facts["devices"])
            doubts += _host_differences([report["host"] for report in reports])
            bench.write_environment(doubts, ranks=facts)
            procedure.group = leader
            if bench.plan.probes.energy:
                procedure.energy = bench.energy_of(
                    combine([device.meters() for device in _distinct(devices)])
                )
            leader.works_with(member)
            is_finished = measure_points(procedure, bench.plan, bench.paths, replicate, bench.emit)
            if is_finished:
                leader.end()
                member.group.barrier()
            return is_finished


def _follow(bench: Workbench, place: Place) -> int:
    """Follow rank 0's control messages until it ends; return the exit code, 1 after an error.

    An error goes to torch's launcher through the launcher's error file. On another host than rank
    0's, the first rank reserves the devices of that host.
    """
    follower, has_device = Follower(place), False
    try:
        devices: Sequence[Device] = []
        if place.leads_other_host:
            if (first := follower.host_of_first()) is None:
                return 0
            # in tests two nodes may be the same machine, with its devices already reserved
            devices = _devices(bench.plan, place.per_host) if first != socket.gethostname() else []
        with _reserved(bench, devices):
            if place.leads_other_host:
                follower.answer_reserved()
            if not follower.wait():
                return 0
            bench.device = config.build(_device_node(bench.plan, place.local))
            has_device = True
            bench.open_data()
            member, _ = _join(bench, place)
            with bench.procedure() as procedure:
                procedure.seed += place.number
                member.group.gather(_describe_rank(bench, place))
                follower.follow(lambda key: _prepared_point(procedure, key), member)
                member.group.barrier()
    except Exception as error:
        traceback.print_exc()
        status, text = verdict(error, bench.device) if has_device else ("failed", str(error))
        message = cut(f"{place}: {text}", _MOST_BYTES)
        content = {
            "message": message,
            "status": str(status),
            "timestamp": datetime.now(UTC).timestamp(),
        }
        write_atomically(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), json.dumps(content).encode())
        follower.linger()
        return 1
    follower.close()
    return 0


def _join(bench: Workbench, place: Place) -> tuple[Member, dict[str, Any]]:
    """Start the device and load the model, both in the group of all ranks.

    Args:
        place: this rank's number, and how many ranks there are.

    Returns:
        The group member, and facts about how the ranks share work.

    Raises:
        UserError: the model cannot be trained by several ranks.
    """
    # imports torch, which the workbench loads with the model
    from perfexp.measuring.ranks.group import TorchGroup

    plan = bench.plan
    bench.device.start()
    group = TorchGroup(place, bench.device, plan.execution.threads)
    bench.load_model()
    shared = group.facts()
    if "train" in plan.phases:
        if not isinstance(bench.session, Shareable):
            raise UserError(
                f"model={plan.model_name} can't be trained by several ranks (no `share`); set "
                "gpu.count=1."
            )
        shared |= bench.session.share(plan.execution.ddp)
    return Member(session=bench.session, device=bench.device, group=group, place=place), shared


@contextmanager
def _prepared_point(procedure: Procedure, key: Key) -> Iterator[tuple[Step, Callable[[], object]]]:
    """Yield a follower's step for a point, and the function that makes its first call."""
    with procedure.step(key) as (step, batches):
        yield step, lambda: procedure.first_forward(batches)


@contextmanager
def _reserved(bench: Workbench, devices: Sequence[Device]) -> Iterator[None]:
    """Reserve the devices inside the `with` block, so that no other perfexp process uses them."""
    with ExitStack() as stack:
        for device in _distinct(devices):
            stack.enter_context(bench.reserved(device))
        yield


def _devices(plan: config.Plan, size: int) -> list[Device]:
    """Build the devices for this host's ranks, starting with the plan's device, without using them.

    The first rank on a host reserves all its devices.

    Args:
        size: number of ranks on this host.

    Raises:
        UserError: there are not enough devices of the same kind.
    """
    devices: list[Device] = []
    failure = None
    try:
        for number in range(size):
            devices.append(config.build(_device_node(plan, number)))
        usable = [device for device in devices if device.kind == devices[0].kind]
    except UserError as error:
        usable, failure = devices, error
    if len(usable) == size:
        return usable
    names = ", ".join(sorted({device.name for device in usable}))
    usable_text = f"{len(usable)} × {names}" if usable else "none"
    requirement = (
        f"gpu.count={size} needs {size} devices from gpu.index={plan.gpu.get('index', 0)} on"
    )
    raise UserError(f"{requirement}; here: {usable_text}. {failure or ''}".rstrip()) from failure


def _device_node(plan: config.Plan, number: int) -> dict[str, Any]:
    """Return the plan's device configuration for a rank, by its number on the host."""
    return {**plan.gpu, "index": int(plan.gpu.get("index", 0)) + number}


def _distinct(devices: Sequence[Device]) -> list[Device]:
    """Return each device once, sorted by lock name.

    Two runs that take locks in the same order cannot block each other.
    """
    by_name = {str(device.lock_name): device for device in devices}
    return [by_name[name] for name in sorted(by_name)]


def _describe_rank(bench: Workbench, place: Place) -> dict[str, Any]:
    """Return this rank's device and diagnostics, which rank 0 gathers from all ranks.

    With several hosts, the first rank on each host also returns its environment as `host`; it is
    None for all other ranks.
    """
    device = bench.device
    report: dict[str, Any] = {
        "device": {"name": device.name, "identity": device.lock_name},
        "host": None,
    }
    doubts = device.doubts()
    if place.size > place.per_host and place.local == 0:
        report["host"] = facts = bench.facts()
        doubts = [*doubts, *(node_diagnostics(facts) if place.number else [])]
    return {**report, "doubts": doubts}


def _host_facts(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts that can differ between hosts, as `hosts`; empty for a single host.

    Args:
        reports: each rank's `_describe_rank`.
    """
    hosts = []
    for report in reports:
        if facts := report["host"]:
            job = facts["job"] or {}
            names = ("host", "os", "kernel", "python", "cpu", "memory_bytes", "device")
            host = {name: facts[name] for name in names}
            hosts.append(host | {"node": job.get("node"), "others": job.get("others")})
    if not hosts:
        return {}
    return {"hosts": hosts}


def _host_differences(hosts: Sequence[dict[str, Any] | None]) -> list[Diagnostic]:
    """Return a diagnostic if hosts differ in software or hardware from the first host.

    Args:
        hosts: each rank's environment; None for ranks that are not the first on their host.
    """
    first, *others = list(filter(None, hosts)) or [{}]
    changes = [
        f"{name}: {old} and {new} on {facts['host']}"
        for facts in others
        for name, old, new in environment.differences(first, facts)
        if name != "device.uuid"
    ]
    if not changes:
        return []
    return [
        diagnostics.make(
            "mixed_devices",
            what="nodes, at the pace of the slowest",
            changes="; ".join(changes),
        )
    ]


def _rank_diagnostics(
    of_ranks: list[list[Diagnostic]], devices: list[dict[str, str]]
) -> list[Diagnostic]:
    """Return the other ranks' diagnostics, with their rank, and one if device models differ.

    The workbench adds rank 0's own diagnostics.

    Args:
        of_ranks: each rank's diagnostics.
        devices: each rank's device, with its `name`.
    """
    of_others = [
        msgspec.structs.replace(item, message=f"rank {number}: {item.message}")
        for number, of_rank in enumerate(of_ranks)
        for item in of_rank
        if number
    ]
    names = sorted({device["name"] for device in devices})
    if len(names) < 2:
        return of_others
    changed_part = "devices, at the pace of the slowest"
    return [
        *of_others,
        diagnostics.make("mixed_devices", what=changed_part, changes=", ".join(names)),
    ]
