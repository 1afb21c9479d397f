"""Rank: one of several processes that measure together; the first writes the record, the others follow it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfexp.errors import PerfexpError, RankLost, UserError
from perfexp.host.files import disk_error
from perfexp.plan import config, plan_file
from perfexp.ranks import Place, Shareable, start
from perfexp.ranks.control_messages import Follower, Leader, Worker
from perfexp.records.diagnostics import mixed_devices
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key
from perfexp.worker import points
from perfexp.worker.setup import (
    alone,
    applied,
    energy,
    open_session,
    plain_doubt,
    write_environment,
)

if TYPE_CHECKING:
    from perfexp.devices import Device
    from perfexp.measure.procedure import Procedure
    from perfexp.modes import Step

#: Of an error's text: a line of the pipe, escaped as JSON is, stays below 4096 bytes.
_MOST_BYTES = 600


def main(directory: Path, plan_sha256: str, replicate: int, folder: Path) -> int:
    """Be the rank that the environment says.

    Args:
        directory: the run's.
        plan_sha256: of its plan.yaml.
        replicate: number of this process.
        folder: where the ranks' pipes lie.

    Returns:
        Exit code for `perfexp.ranks.start`.
    """
    place = Place(number=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), folder=folder)
    tell, paths = Events(os.open(start.events_pipe(folder), os.O_WRONLY)), RunPaths(directory)
    plan = plan_file.load(paths.plan, plan_sha256)
    return _lead(plan, paths, replicate, place, tell) if place.leads else _follow(plan, paths, place, tell)


def _lead(plan: config.Plan, paths: RunPaths, replicate: int, place: Place, tell: Events) -> int:
    """Measure, with the others following."""
    crew = Leader(place)
    try:
        finished = _measure(plan, paths, replicate, place, crew, tell)
    except RankLost:
        return start.RANK_LOST
    except PerfexpError as error:
        tell("refused", message=_short(error), exit_code=error.exit_code)
        traceback.print_exc()
        return error.exit_code
    except BrokenPipeError:  # of a rank that has left
        traceback.print_exc()
        return start.RANK_LOST
    except OSError as error:
        failure = disk_error(error)
        tell("refused", message=_short(failure), exit_code=failure.exit_code)
        traceback.print_exc()
        return failure.exit_code
    except Exception as error:  # outside of any point
        traceback.print_exc()
        if crew.lost():
            return start.RANK_LOST
        tell("failed", message=_short(f"{type(error).__name__}: {error}".strip()))
        return 1
    return 0 if finished else start.OUT_OF_STEP


def _measure(plan: config.Plan, paths: RunPaths, replicate: int, place: Place, crew: Leader, tell: Events) -> bool:
    """Whether everything has been tried."""
    tell("block", text="loading")
    devices = _devices(plan, place.size)
    with ExitStack() as stack:
        for device in _distinct(devices):
            stack.enter_context(alone(plan, paths, device, tell))
        crew.begin()
        with _open(plan, place, devices[0], tell) as (procedure, worker, shared):
            told = worker.group.gather(_told(procedure.device))
            more = {"devices": [each["device"] for each in told], **shared}
            found = _of_all([each["doubts"] for each in told], more["devices"])
            write_environment(paths, procedure.device, procedure.session, found, ranks=more)
            procedure.crew, procedure.compares_alone = crew, plan.probes.scaling
            if plan.probes.energy:
                procedure.energy = energy(plan, devices[0], _meters(devices))
            crew.works_with(worker)
            finished = points.measure(procedure, plan, paths, replicate, tell)
            if finished:
                crew.end()
                worker.group.barrier()
            return finished


def _follow(plan: config.Plan, paths: RunPaths, place: Place, tell: Events) -> int:
    """Do what the first rank says."""
    from perfexp.measure.verdicts import verdict

    follower, device = Follower(place), None
    try:
        if not follower.wait():
            return 0
        device = config.build(_node(plan, place.number))
        with _open(plan, place, device, Events(None)) as (procedure, worker, _):
            worker.group.gather(_told(device))
            follower.follow(lambda key: _point(procedure, key), worker)
            worker.group.barrier()
    except Exception as error:
        traceback.print_exc()
        status, text = verdict(error, device) if device else ("failed", str(error))
        tell("rank", number=place.number, status=str(status), message=_short(f"{place}: {text}"))
        follower.linger()
        return 1
    follower.close()
    return 0


@contextmanager
def _open(
    plan: config.Plan, place: Place, device: Device, tell: Events
) -> Iterator[tuple[Procedure, Worker, dict[str, Any]]]:
    """The procedure of a rank, what it makes calls with, and what is to be recorded of how the ranks share them."""
    from perfexp.ranks.group import TorchGroup

    device.start()
    group, data = TorchGroup(place, device, plan.execution.threads), config.build(plan.data)
    session = open_session(plan, device, data)
    shared = group.facts()
    if "train" in plan.phases:
        if not isinstance(session, Shareable):
            raise UserError(f"model={plan.model_name} does not say how several ranks train it (`share`): gpu.count=1.")
        shared |= session.share(plan.execution.ddp)
    worker = Worker(session=session, device=device, group=group, number=place.number)
    with applied(plan, session, device, data, tell, seed=plan.seed + place.number, energy=None) as procedure:
        yield procedure, worker, shared


@contextmanager
def _point(procedure: Procedure, key: Key) -> Iterator[tuple[Step, Callable[[], object]]]:
    """See `perfexp.ranks.control_messages.Point`."""
    with procedure.step(key) as (step, batches):
        yield step, lambda: procedure.first_forward(batches)


def _devices(plan: config.Plan, size: int) -> list[Device]:
    """The devices of all ranks, from the plan's on.

    Raises:
        UserError: there are not so many.
    """
    found: list[Device] = []
    for number in range(size):
        try:
            found.append(config.build(_node(plan, number)))
        except UserError as error:
            raise _too_few(plan, size, found, str(error)) from error
    if len({device.kind for device in found}) > 1:
        raise _too_few(plan, size, [device for device in found if device.kind == found[0].kind])
    return found


def _too_few(plan: config.Plan, size: int, found: list[Device], why: str = "") -> UserError:
    names = ", ".join(sorted({device.name for device in found}))
    here = f"{len(found)} × {names}" if found else "none"
    wanted = f"gpu.count={size} asks for {size} devices from gpu.index={plan.gpu.get('index', 0)} on"
    return UserError(f"{wanted}; here: {here}. {why}".rstrip())


def _node(plan: config.Plan, number: int) -> dict[str, Any]:
    """The plan's device for a rank."""
    return {**plan.gpu, "index": int(plan.gpu.get("index", 0)) + number}


def _meters(devices: list[Device]) -> Any:
    from perfexp.meters import together

    return together([device.meters() for device in _distinct(devices)])


def _distinct(devices: list[Device]) -> list[Device]:
    """Each device once, in an order that does not depend on who counts them: two runs take their locks alike."""
    by_name = {str(each.lock_name): each for each in devices}
    return [by_name[name] for name in sorted(by_name)]


def _told(device: Device) -> dict[str, Any]:
    """What a rank tells the first one of its device."""
    doubts = [plain_doubt(doubt) for doubt in device.doubts()]
    return {"device": {"name": device.name, "identity": device.lock_name}, "doubts": doubts}


def _of_all(doubts: list[list[dict[str, str]]], devices: list[dict[str, str]]) -> list[dict[str, str]]:
    """Doubts of the other ranks' devices, and of all together."""
    found = [
        {**doubt, "detail": f"rank {n}: {doubt['detail']}"} for n, each in enumerate(doubts) if n for doubt in each
    ]
    names = sorted({device["name"] for device in devices})
    return [*found, plain_doubt(mixed_devices(names))] if len(names) > 1 else found


def _short(text: object) -> str:
    """What goes through the pipe of all ranks at once, unmixed (POSIX: PIPE_BUF)."""
    return str(text).encode()[:_MOST_BYTES].decode(errors="ignore")
