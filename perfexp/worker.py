"""Worker: plan.yaml → points.jsonl, in a fresh process; the only one that touches the device."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfexp import config, sweep
from perfexp.devices import lock
from perfexp.errors import PerfexpError, UserError
from perfexp.paths import RunPaths, append_line, disk_error, write_atomically
from perfexp.record import Doubt, Key, Point, Series, Status, missing, point_to_line, read_points, timed_key

if TYPE_CHECKING:
    from perfexp.algorithms import Algorithm
    from perfexp.data import Data
    from perfexp.devices import Device
    from perfexp.models import Session
    from perfexp.probes.energy import EnergyProcedure
    from perfexp.run import Procedure
    from perfexp.stopping import StoppingRule


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the points of a plan that have no result yet, or tell what this machine can measure with (`--probe`).

    Args:
        argv: command line without the program's name; the process's own if not given.

    Returns:
        Exit code: 0 when every point has its result, whatever that is.
    """
    arguments = _arguments(argv)
    # a profiler may start this process from a thread of its own, whose end would be taken for that of the parent
    if arguments.profile is None or os.getppid() == arguments.parent:
        _die_with_parent(arguments.parent)
    tell = Events(arguments.events_fd)
    if arguments.probe:
        from perfexp import survey

        survey.answer(arguments.gpu_index, tell)
        tell("finished")
        return 0
    paths = RunPaths(arguments.directory)
    try:
        plan = config.load(paths.plan, arguments.plan_sha256)
        if arguments.what == "layers":
            layers(plan, paths, arguments.replicate, tell)
        elif arguments.profile is not None:
            profile(plan, paths, arguments.profile, tell)
            return 0  # the profiler has still to write; when it has ended, so has the pass
        elif arguments.what == "ttfp":
            first_prediction(plan, paths, arguments.replicate, tell, arguments.spawned_ns)
        elif arguments.what == "algorithms":
            tell("algorithms", answer=algorithms(plan, paths, tell))
        else:
            measure(plan, paths, arguments.replicate, tell)
    except PerfexpError as error:
        tell("refused", message=str(error), exit_code=error.exit_code)
        _log_traceback()
        return error.exit_code
    except OSError as error:  # of writing results: what goes wrong with a point is the point's result
        failure = disk_error(error)
        tell("refused", message=str(failure), exit_code=failure.exit_code)
        _log_traceback()
        return failure.exit_code
    except Exception as error:  # outside of any point: loading the model, opening the device
        tell("failed", message=f"{type(error).__name__}: {error}".strip())
        _log_traceback()
        return 1
    tell("finished")
    return 0


def _log_traceback() -> None:
    """The story goes to run.log, unless the disk is full, which the parent has been told."""
    with suppress(OSError):
        traceback.print_exc()


class Events:
    """Tells the parent what goes on, as lines of JSON; silent where nobody listens.

    Args:
        descriptor: of a pipe, or None.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, event: str, **details: Any) -> None:
        """Send one event; never called while something is timed.

        Args:
            event: its name.
            details: JSON values.
        """
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps({"event": event, **details}).encode() + b"\n")
        except OSError:  # the parent is gone; so will this process be
            self._descriptor = None


def measure(plan: config.Plan, paths: RunPaths, replicate: int, tell: Events) -> None:
    """Measure the timed points of one replicate, each written down at once.

    Args:
        plan: what to measure.
        paths: of the run.
        replicate: number of this process.
        tell: where progress goes.
    """
    keys = [key for key in missing(plan.timed_keys(), paths.points) if key.replicate == replicate]
    skip_larger = config.build(plan.sweep).skip_larger

    def work(procedure: Procedure) -> None:
        procedure.begin()
        if plan.probes.ceilings:
            procedure.ceilings = _ceilings(procedure.session, procedure.device, tell)
        for key in sweep.order(keys, replicate, plan.seed):
            tell("point", key=_plain(key))
            known = read_points(paths.points) if skip_larger else []
            point = sweep.predicted_out_of_memory(key, known) or procedure.measure(key)
            append_line(paths.points, point_to_line(point))
            tell("done", key=_plain(key), status=point.status.value)
            if procedure.device.is_lost():  # another process may still be able to use it
                break

    _with_procedure(plan, paths, tell, work)


def layers(plan: config.Plan, paths: RunPaths, replicate: int, tell: Events) -> None:
    """Look into the calls of the points that have been timed, each written down at once as a point of its own.

    Args:
        plan: what to measure.
        paths: of the run.
        replicate: number of the process that timed them.
        tell: where progress goes.
    """
    keys = [key for key in missing(plan.layer_keys(), paths.points) if key.replicate == replicate]
    timed = {point.key: point for point in read_points(paths.points)}

    def work(procedure: Procedure) -> None:
        from perfexp.dissect import dissect, not_tried

        first = True
        for key in keys:
            tell("point", key=_plain(key))
            before = timed.get(timed_key(key))
            if before and before.status is Status.OK:
                point = dissect(procedure, key, before, first=first)
                first = first and "layers" not in point.facts
            else:
                point = not_tried(key, before)
            append_line(paths.points, point_to_line(point))
            tell("done", key=_plain(key), status=point.status.value)
            if procedure.device.is_lost():
                break

    _with_procedure(plan, paths, tell, work)


def profile(plan: config.Plan, paths: RunPaths, number: int, tell: Events) -> None:
    """Make the calls that a profiler looks at, and tell what was done; the parent writes it down.

    Args:
        plan: what to call.
        paths: of the run.
        number: of the profile, among those of the plan.
        tell: where it is told.
    """
    from perfexp.profilers import place_of

    keys = plan.profile_keys()
    key, profiler = keys[number], config.build(plan.profiler)
    tell("point", key=_plain(key))

    def work(procedure: Procedure) -> None:
        from perfexp.profilers.passing import look
        from perfexp.verdicts import verdict

        try:
            told = look(procedure, key, profiler, place_of(key, keys, paths.root))
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            status, text = verdict(error, procedure.device)
            tell("block", text="failed", profile={"status": status.value, "error": text})
        else:
            tell("block", text=f"{profiler.name} writes", profile=told)

    _with_procedure(plan, paths, tell, work, profiled=True)


def _with_procedure(
    plan: config.Plan,
    paths: RunPaths,
    tell: Events,
    work: Callable[[Procedure], None],
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
    from perfexp import environment

    tell("block", text="loading")
    device, data = config.build(plan.gpu), config.build(plan.data)
    with _alone(plan, paths, device, tell):
        device.start()
        session = _open(plan, device, data)
        if profiled and paths.environment.exists():
            _refuse_other_environment(paths, {**environment.collect(), "device": device.facts()})
        else:
            _write_environment(paths, device, session)
        algorithm = config.build(plan.algorithm)
        with algorithm.applied(session):
            gc.collect()
            gc.freeze()  # what is loaded by now stays: the collections before each timed block need not look at it
            work(_procedure(plan, session, device, data, algorithm, tell))


@contextmanager
def _alone(plan: config.Plan, paths: RunPaths, device: Device, tell: Events) -> Iterator[None]:
    """While entered, no other perfexp of this user measures on the device."""
    wait = plan.device_lock is config.DeviceLock.wait

    def waiting(owner: str) -> None:
        tell("block", text=f"waiting: {owner}", patient=True)

    with lock.held(device.lock_name, wait=wait, purpose=str(paths.root), waiting=waiting):
        tell("block", text="loading")
        yield


def _procedure(
    plan: config.Plan,
    session: Session,
    device: Device,
    data: Data,
    algorithm: Algorithm,
    tell: Events,
) -> Procedure:
    from perfexp.run import Procedure

    stopping = config.build(plan.stopping)
    return Procedure(
        session=session,
        device=device,
        data=data,
        modes={phase: config.build(getattr(plan.mode, phase)) for phase in plan.phases},
        stopping=stopping,
        algorithm=algorithm,
        percentiles=plan.percentiles,
        probes={name: config.build(node) for name, node in plan.probe.items()},
        epochs=plan.epochs,
        cache=plan.cache,
        graph=plan.execution.cuda_graph,
        counts_work=plan.probes.work,
        energy=_energy(plan.probes, device, stopping) if plan.probes.energy else None,
        peaks=(plan.gpu.get("facts") or {}).get("peak_flops_per_second") or {},
        seed=plan.seed,
        progress=lambda text: tell("block", text=text),
    )


def _ceilings(session: Session, device: Device, tell: Events) -> dict[str, float]:
    """Empty where they can't be measured."""
    tell("block", text="ceilings")
    try:
        from perfexp.probes.ceilings import ceilings

        return ceilings(device, session.precision)
    except Exception:  # a figure beside the others
        traceback.print_exc()
        return {}


def _energy(probes: config.Probes, device: Device, stopping: StoppingRule) -> EnergyProcedure:
    from perfexp.probes.energy import EnergyProcedure, rules_for

    rules = rules_for(window_seconds=probes.energy_seconds, epsilon=getattr(stopping, "epsilon", None))
    return EnergyProcedure(device=device, found=device.meters(), rules=rules)


def first_prediction(plan: config.Plan, paths: RunPaths, replicate: int, tell: Events, spawned_ns: int | None) -> None:
    """Time to first prediction of this process, in its parts; written as a point of its own.

    Args:
        plan: what to measure.
        paths: of the run.
        replicate: number of this process.
        tell: where it is told which point this is.
        spawned_ns: the parent's monotonic clock when it started this process.
    """
    from perfexp import environment
    from perfexp.verdicts import verdict

    key = next(key for key in plan.first_prediction_keys() if key.replicate == replicate)
    watch = _StopWatch()
    if spawned_ns is not None:
        watch.seconds["process"] = (watch.last_ns - spawned_ns) * 1e-9
    tell("point", key=_plain(key))
    watch.restart()
    config.locate(plan.model)
    watch.lap("imports")
    device = config.build(plan.gpu)
    watch.lap("context")
    point = Point(key=key, status=Status.OK)
    with _alone(plan, paths, device, tell):
        watch.restart()  # waiting for the device's lock is no part of a prediction
        device.start()
        watch.lap("context")
        try:
            _first_calls(plan, key, device, watch)
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            point.status, point.error = verdict(error, device)
        if not device.is_lost():
            _refuse_other_environment(paths, {**environment.collect(), "device": device.facts()})
    point.series = [Series(name=f"ttfp/{name}", samples=[seconds]) for name, seconds in watch.seconds.items()]
    append_line(paths.points, point_to_line(point))
    tell("done", key=_plain(key), status=point.status.value)


def _first_calls(plan: config.Plan, key: Key, device: Device, watch: _StopWatch) -> None:
    """From the data to the second call, each part a lap."""
    data = config.build(plan.data)
    watch.lap("data")
    session = _open(plan, device, data)
    watch.lap("weights")
    sizes = {"input_size": key.input_size, "batch_size": key.batch_size}
    with (
        config.build(plan.algorithm).applied(session),
        data.open(session=session, **sizes, training=False, seed=plan.seed) as batches,
        session.inferring(),
    ):
        batch = batches.next()
        device.synchronize()
        watch.lap("inputs")
        for call in ("first_call", "second_call"):
            session.forward(batch.inputs)
            device.synchronize()
            watch.lap(call)


def algorithms(plan: config.Plan, paths: RunPaths, tell: Events) -> dict[str, Any]:
    """By what the convolutions of the plan's model can be computed in its first point; nothing is measured.

    Args:
        plan: of a run.
        paths: of its folder.
        tell: where progress goes.

    Returns:
        What `perfexp.algorithms.survey.survey` does, and on which device and with what it was asked. JSON values.

    Raises:
        UserError: the model has no such layers, or something in the plan is wrong.
    """
    from perfexp.models.fake import FakeModel

    if config.locate(plan.model) is FakeModel:
        raise UserError(f"model={plan.model_name} is scripted: it has no layers. Choose a torch model.")
    config.build(plan.algorithm)  # what is wrong with it, it says itself
    keys, settings = plan.timed_keys(), plan.algorithm
    key = keys[0]
    device, data = config.build(plan.gpu), config.build(plan.data)
    # on a CPU nothing is computed that could disturb a measurement
    with _alone(plan, paths, device, tell) if device.asynchronous else nullcontext():
        device.start()
        session = _open(plan, device, data)
        from perfexp.algorithms.survey import survey

        found = survey(
            session,
            key,
            backend=settings.get("backend"),
            workspace_bytes=settings.get("workspace_bytes"),
            backward={name: settings[name] for name in ("backward_data", "backward_filter") if settings.get(name)},
            progress=lambda text: tell("block", text=text),
        )
    return {
        "model": plan.model_name,
        "device": {"kind": device.kind, "name": device.name},
        "phase": key.phase,
        "input_size": key.input_size,
        "batch_size": key.batch_size,
        "inputs": len({(each.input_size, each.batch_size) for each in keys}),
        "precision": session.facts()["precision"],
        "doubts": [_doubt(doubt) for doubt in session.doubts()],
        **found,
    }


class _StopWatch:
    """Splits the time since it was made into laps, seconds by name."""

    def __init__(self) -> None:
        self.last_ns = time.perf_counter_ns()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What has passed since the last lap; laps of one name add up."""
        now = time.perf_counter_ns()
        self.seconds[name] = self.seconds.get(name, 0.0) + (now - self.last_ns) * 1e-9
        self.last_ns = now

    def restart(self) -> None:
        """What has passed since the last lap belongs to none."""
        self.last_ns = time.perf_counter_ns()


def _open(plan: config.Plan, device: Device, data: Data) -> Session:
    """The plan's model, loaded on the device, with the classes of the data where its labels are real."""
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


def _write_environment(paths: RunPaths, device: Any, session: Any) -> None:
    """What is true when this process measures, and what is doubtful from its start; earlier doubts stay.

    Raises:
        UserError: the folder has points that were measured in another environment.
    """
    from perfexp import environment

    facts = {**environment.collect(), "device": device.facts(), "session": session.facts()}
    before = _refuse_other_environment(paths, facts)
    found = [_doubt(doubt) for doubt in (*device.doubts(), *session.doubts())]
    doubts = [*before, *(doubt for doubt in found if doubt not in before)]
    content = json.dumps({"environment": facts, "doubts": doubts}, indent=1, default=str)
    write_atomically(paths.environment, content.encode() + b"\n")


def _refuse_other_environment(paths: RunPaths, facts: dict[str, Any]) -> list[dict[str, str]]:
    """Compare with the environment of the points that are there already; returns the doubts of that.

    Raises:
        UserError: it is another one.
    """
    from perfexp import environment

    if not paths.environment.exists() or not read_points(paths.points):
        return []
    before = json.loads(paths.environment.read_bytes())
    changed = [f"{name}: {old} → {new}" for name, old, new in environment.differences(before["environment"], facts)]
    if changed:
        raise UserError(
            f"The points in {paths.root} were measured in another environment ({'; '.join(changed)}). "
            "Choose another output_dir: one record tells of one environment."
        )
    return list(before["doubts"])


def _doubt(doubt: Doubt) -> dict[str, str]:
    return {"code": doubt.code, "detail": doubt.detail, "remedy": doubt.remedy}


def _plain(key: Key) -> dict[str, Any]:
    return {name: getattr(key, name) for name in key.__struct_fields__}


def _die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process when its parent ends, however that does (Linux)."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent and _has_ended(parent):  # before this process came to here
        sys.exit(1)


def _has_ended(process: int) -> bool:
    """Whether a process is no more, or is only waited for by its parent (Linux)."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return True
    return state in (b"Z", b"X")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perfexp.worker", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="the run's folder with its plan.yaml")
    parser.add_argument("--plan-sha256", help="of plan.yaml, from the process that composed it")
    parser.add_argument("--probe", action="store_true", help="measure nothing: tell what this machine can measure with")
    parser.add_argument("--gpu-index", type=int, help="with --probe: the CUDA device whose clocks are tried")
    parser.add_argument("--what", choices=("timed", "layers", "ttfp", "algorithms"), default="timed")
    parser.add_argument("--profile", type=int, metavar="N", help="the profile of that number, and nothing else")
    parser.add_argument("--replicate", type=int, default=0)
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--parent", type=int, help="process that must not outlive this one")
    parser.add_argument("--spawned-ns", type=int, help="the parent's monotonic clock when it started this process")
    arguments = parser.parse_args(argv)
    if not arguments.probe and (arguments.directory is None or arguments.plan_sha256 is None):
        parser.error("a folder and --plan-sha256 are needed, or --probe")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
