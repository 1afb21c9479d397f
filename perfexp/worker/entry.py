"""Worker: plan.yaml → points.jsonl, in a fresh process; the only one that touches the device."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfexp.errors import PerfexpError, UserError
from perfexp.host import lifeline
from perfexp.host.files import disk_error
from perfexp.host.process import worker_command
from perfexp.plan import config, plan_file
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths, append_line
from perfexp.records.record import Status, missing, point_to_line, read_points, timed_key
from perfexp.worker import points
from perfexp.worker.cold_start import first_prediction
from perfexp.worker.setup import alone, open_session, plain_doubt, with_procedure

if TYPE_CHECKING:
    from perfexp.measure.procedure import Procedure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the points of a plan that have no result yet, or tell what this machine can measure with (`--probe`).

    Args:
        argv: command line without the program's name; the process's own if not given.

    Returns:
        Exit code: 0 when every point has its result, whatever that is.
    """
    arguments = _arguments(argv)
    # a profiler may start this process from a thread of its own, whose end would be taken for that of the parent
    if arguments.parent is not None and (arguments.profile is None or os.getppid() == arguments.parent):
        lifeline.die_with(arguments.parent)
    if arguments.ranks is not None:
        from perfexp.worker import rank_process

        code = rank_process.main(arguments.directory, arguments.plan_sha256, arguments.replicate, arguments.ranks)
        sys.stderr.flush()
        os._exit(code)  # the usual end would wait for the other ranks, of which one may have ended
    tell = Events(arguments.events_fd)
    if arguments.probe:
        from perfexp.orchestration import capabilities

        capabilities.answer(arguments.gpu_index, tell)
        tell("finished")
        return 0
    paths = RunPaths(arguments.directory)
    try:
        plan = plan_file.load(paths.plan, arguments.plan_sha256)
        if arguments.what == "layers":
            layers(plan, paths, arguments.replicate, tell)
        elif arguments.profile is not None:
            profile(plan, paths, arguments.profile, tell)
            return 0  # the profiler has still to write; when it has ended, so has the pass
        elif arguments.what == "ttfp":
            first_prediction(plan, paths, arguments.replicate, tell, arguments.spawned_ns)
        elif arguments.what == "algorithms":
            tell("algorithms", answer=algorithms(plan, paths, tell))
        elif plan.ranks > 1:
            return ranks(plan, arguments, tell)
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


def measure(plan: config.Plan, paths: RunPaths, replicate: int, tell: Events) -> None:
    """Measure the timed points of one replicate, each written down at once.

    Args:
        plan: what to measure.
        paths: of the run.
        replicate: number of this process.
        tell: where progress goes.
    """
    with_procedure(plan, paths, tell, lambda procedure: points.measure(procedure, plan, paths, replicate, tell))


def ranks(plan: config.Plan, arguments: argparse.Namespace, tell: Events) -> int:
    """Have processes measure that work together, with a device each; returns the exit code.

    Args:
        plan: what to measure.
        arguments: of this process.
        tell: where progress goes.
    """
    from perfexp.ranks import start

    command = worker_command(
        str(arguments.directory),
        *(f"--plan-sha256={arguments.plan_sha256}", f"--replicate={arguments.replicate}", f"--parent={os.getpid()}"),
    )
    return start.run(command, size=plan.ranks, port=plan.gpu.get("port"), tell=tell)


def layers(plan: config.Plan, paths: RunPaths, replicate: int, tell: Events) -> None:
    """Look into the calls of the points that have been timed, each written down at once as a point of its own.

    Args:
        plan: what to measure.
        paths: of the run.
        replicate: number of the process that timed them.
        tell: where progress goes.
    """
    keys = [key for key in missing(plan.layer_keys(), paths.points) if key.replicate == replicate]
    known = {point.key: point for point in read_points(paths.points)}

    def work(procedure: Procedure) -> None:
        from perfexp.measure.layers_pass import dissect, not_tried

        first = True
        for key in keys:
            tell.point(key)
            before = known.get(timed_key(key))
            if before and before.status is Status.OK:
                point = dissect(procedure, key, before, first=first)
                first = first and "layers" not in point.facts
            else:
                point = not_tried(key, before)
            append_line(paths.points, point_to_line(point))
            tell.done(key, point.status.value)
            if procedure.device.is_lost():
                break

    with_procedure(plan, paths, tell, work)


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
    tell.point(key)

    def work(procedure: Procedure) -> None:
        from perfexp.measure.verdicts import verdict
        from perfexp.profilers.passing import look

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

    with_procedure(plan, paths, tell, work, profiled=True)


def algorithms(plan: config.Plan, paths: RunPaths, tell: Events) -> dict[str, Any]:
    """By what the convolutions of the plan's model can be computed in its first point; nothing is measured.

    Args:
        plan: of a run.
        paths: of its folder.
        tell: where progress goes.

    Returns:
        The result of `perfexp.algorithms.layer_support.survey`, the device, and the settings. JSON values.

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
    with alone(plan, paths, device, tell) if device.asynchronous else nullcontext():
        device.start()
        session = open_session(plan, device, data)
        from perfexp.algorithms.layer_support import survey

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
        "doubts": [plain_doubt(doubt) for doubt in session.doubts()],
        **found,
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perfexp.worker", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="the run's folder with its plan.yaml")
    parser.add_argument("--plan-sha256", help="of plan.yaml, from the process that composed it")
    parser.add_argument("--probe", action="store_true", help="measure nothing: tell what this machine can measure with")
    parser.add_argument("--gpu-index", type=int, help="with --probe: the CUDA device whose clocks are tried")
    parser.add_argument("--what", choices=("timed", "layers", "ttfp", "algorithms"), default="timed")
    parser.add_argument("--profile", type=int, metavar="N", help="the profile of that number, and nothing else")
    parser.add_argument("--replicate", type=int, default=0)
    parser.add_argument("--ranks", type=Path, metavar="DIR", help="one of several ranks, whose pipes lie there")
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--parent", type=int, help="process that must not outlive this one")
    parser.add_argument("--spawned-ns", type=int, help="the parent's monotonic clock when it started this process")
    arguments = parser.parse_args(argv)
    if not arguments.probe and (arguments.directory is None or arguments.plan_sha256 is None):
        parser.error("a folder and --plan-sha256 are needed, or --probe")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
