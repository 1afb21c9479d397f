"""Opening: what a worker has open while it measures: the device to itself, the model, the algorithm, the procedure."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.devices import lock
from perfexp.errors import UserError
from perfexp.host import gpu_sheets
from perfexp.host.files import write_atomically
from perfexp.plan import config
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import read_points

if TYPE_CHECKING:
    from perfexp.algorithms import Algorithm
    from perfexp.data import Data
    from perfexp.devices import Device
    from perfexp.measure.procedure import Procedure
    from perfexp.meters import Found
    from perfexp.models import Session
    from perfexp.probes.energy import EnergyProcedure

#: Who waits for a device is reminded of it this often.
_REPORT_SECONDS = 60.0


def with_procedure(
    plan: config.Plan,
    paths: RunPaths,
    tell: Events,
    work: Callable[[Procedure], object],
    *,
    profiled: bool = False,
) -> None:
    """With the model loaded, the algorithm applied and the device to itself.

    Args:
        plan: what to measure.
        paths: of the run.
        tell: where progress goes.
        work: what is done then.
        profiled: whether somebody looks on: what the device says of itself then is not written down.
    """
    from perfexp.diagnosis import environment

    tell("block", text="loading")
    device, data = config.build(plan.gpu), config.build(plan.data)
    with alone(plan, paths, device, tell):
        device.start()
        session = open_session(plan, device, data)
        if profiled and paths.environment.exists():
            refuse_other_environment(paths, {**environment.collect(), "device": device.facts()})
        else:
            write_environment(paths, device, session)
        with applied(plan, session, device, data, tell) as procedure:
            work(procedure)


@contextmanager
def alone(plan: config.Plan, paths: RunPaths, device: Device, tell: Events) -> Iterator[None]:
    """While entered, no other perfexp of this user measures on the device.

    Args:
        plan: what to measure.
        paths: of the run.
        device: on which.
        tell: where it is told who has it.

    Raises:
        UserError: another process has it, and this one is not to wait.
    """
    wait = plan.device_lock is config.DeviceLock.wait
    with ExitStack() as stack:
        with ExitStack() as reporting:

            def waiting(owner: str) -> None:
                reporting.enter_context(_reported(owner, tell))

            stack.enter_context(lock.held(device.lock_name, wait=wait, purpose=str(paths.root), waiting=waiting))
        tell("block", text="loading")
        device.settle()
        yield


@contextmanager
def _reported(owner: str, tell: Events) -> Iterator[None]:
    """While entered, report at once and every minute who has the device: a job that is silent looks hung."""
    got_it = threading.Event()

    def report() -> None:
        for minutes in count():
            so_far = f" (for {minutes} min; Ctrl-C stops)" if minutes else ""
            tell("block", text=f"waiting for the device{so_far}: {owner}", patient=True)
            if got_it.wait(_REPORT_SECONDS):
                return

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        got_it.set()
        thread.join()


@contextmanager
def applied(
    plan: config.Plan, session: Session, device: Device, data: Data, tell: Events, **more: Any
) -> Iterator[Procedure]:
    """While entered, the model computes by the plan's algorithm; gives the procedure that measures it.

    Args:
        plan: what to measure.
        session: the loaded model.
        device: where.
        data: where the inputs come from.
        tell: where progress goes.
        more: settings of the procedure that do not follow from these.
    """
    algorithm = config.build(plan.algorithm)
    with algorithm.applied(session):
        gc.collect()
        gc.freeze()  # what is loaded by now stays: the collections before each timed block need not look at it
        yield _procedure(plan, session, device, data, algorithm, tell, **more)


def _procedure(
    plan: config.Plan,
    session: Session,
    device: Device,
    data: Data,
    algorithm: Algorithm,
    tell: Events,
    **more: Any,
) -> Procedure:
    from perfexp.measure.procedure import Procedure

    settings: dict[str, Any] = {
        "session": session,
        "device": device,
        "data": data,
        "modes": {phase: config.build(getattr(plan.mode, phase)) for phase in plan.phases},
        "stopping": config.build(plan.stopping),
        "algorithm": algorithm,
        "percentiles": plan.percentiles,
        "probes": {name: config.build(node) for name, node in plan.probe.items()},
        "epochs": plan.epochs,
        "cache": plan.cache,
        "graph": plan.execution.cuda_graph,
        "counts_work": plan.probes.work,
        "peaks": _peaks(plan, device),
        "seed": plan.seed,
        "progress": lambda text: tell("block", text=text),
    }
    if plan.probes.energy and "energy" not in more:
        settings["energy"] = energy(plan, device, device.meters())
    return Procedure(**settings | more)


def _peaks(plan: config.Plan, device: Device) -> Mapping[str, float | None] | None:
    """FLOP/s of the device's data sheet by data type; None for a CPU without one, which has no such sheet.

    Where the plan leaves the device open, its sheet is that of conf/gpu which matches its name.
    """
    facts = gpu_sheets.GpuFacts.of_node(plan.gpu.get("facts"))
    if plan.gpu_name == "auto" and device.kind != "cpu":
        files = gpu_sheets.read(plan.config_dirs())
        if name := gpu_sheets.matching(files, device.name):
            facts = files[name].facts
    return facts.peak_flops_per_second or (None if device.kind == "cpu" else {})


def energy(plan: config.Plan, device: Device, found: Found) -> EnergyProcedure:
    """What measures the energy of calls as the plan wants it.

    Args:
        plan: what to measure.
        device: that works.
        found: its meters, or those of all ranks.
    """
    from perfexp.probes.energy import EnergyProcedure, rules_for

    epsilon = getattr(config.build(plan.stopping), "epsilon", None)
    rules = rules_for(window_seconds=plan.probes.energy_seconds, epsilon=epsilon)
    return EnergyProcedure(device=device, found=found, rules=rules)


def open_session(plan: config.Plan, device: Device, data: Data) -> Session:
    """The plan's model, loaded on the device, with the classes of the data where its labels are real.

    Args:
        plan: what to measure.
        device: where.
        data: where the inputs come from.

    Raises:
        UserError: the data lacks something, or the model can't be loaded.
    """
    from perfexp.data import check

    check(data)
    session: Session = _model(plan).open(
        device=device,
        precision=plan.precision,
        execution=plan.execution,
        num_classes=data.num_classes if data.labelled else None,
        seed=plan.seed,
    )
    return session


def _model(plan: config.Plan) -> Any:
    """The plan's model; a bare torch module of the user's is wrapped."""
    built = config.build(plan.model)
    if hasattr(built, "open"):
        return built
    from perfexp.models.module import adapt

    return adapt(built, plan.model_name)


def write_environment(
    paths: RunPaths, device: Any, session: Any, doubts: Sequence[Diagnostic] = (), **more: Any
) -> None:
    """Write the facts of this process and its diagnostics; earlier diagnostics stay.

    Args:
        paths: of the run.
        device: that it measures.
        session: the loaded model.
        doubts: diagnostics besides those of the device and the session.
        more: facts, JSON values.

    Raises:
        UserError: the folder has points that were measured in another environment.
    """
    from perfexp.diagnosis import environment

    facts = {**environment.collect(), "device": device.facts(), "session": session.facts(), **more}
    before = refuse_other_environment(paths, facts)
    found = [*device.doubts(), *session.doubts(), *doubts]
    every = [*before, *(doubt for doubt in found if doubt not in before)]
    content = json.dumps({"environment": facts, "doubts": msgspec.to_builtins(every)}, indent=1, default=str)
    write_atomically(paths.environment, content.encode() + b"\n")


def refuse_other_environment(paths: RunPaths, facts: dict[str, Any]) -> list[Diagnostic]:
    """Compare with the environment of the points that are there already; return its diagnostics.

    Args:
        paths: of the run.
        facts: of the environment now.

    Raises:
        UserError: it is another one.
    """
    from perfexp.diagnosis import environment

    if not paths.environment.exists() or not read_points(paths.points):
        return []
    before, doubts = environment.load(paths.environment)
    changed = [f"{name}: {old} → {new}" for name, old, new in environment.differences(before, facts)]
    if changed:
        raise UserError(
            f"The points in {paths.root} were measured in another environment ({'; '.join(changed)}). "
            "Choose another output_dir: one record tells of one environment."
        )
    return doubts
