"""Worker: read plan.yaml and append to points.jsonl in a process of its own, the only one that touches the device."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import Unsupported, UserError
from perfexp.host import fork_server, lifeline
from perfexp.host.process import worker_command
from perfexp.measuring.verdicts import verdict
from perfexp.plan import config, plan_file
from perfexp.profilers import place_of
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import read_points
from perfexp.worker import batch_trials, points
from perfexp.worker.cold_start import measure_cold_start
from perfexp.worker.workbench import Workbench, report_failure

#: Points that a worker measures with the whole procedure.
_MEASURES = {"trials": batch_trials.try_batch, "timed": points.measure_points, "layers": points.dissect_points}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the points of a plan, or report this machine's capabilities; returns 0 if every point has a result."""
    arguments = _arguments(argv)
    fork_server.process_start = fork_server.process_start or "fresh"
    if argv is None:
        del sys.argv[1:]  # a model's module may parse its own
    # a profiler may start this process from a short-lived thread, whose end would pass for the parent's
    if arguments.parent is not None and (arguments.profile is None or os.getppid() == arguments.parent):
        lifeline.die_with(arguments.parent)
    if arguments.ranks is not None:
        from perfexp.worker import rank_process  # with the control messages, which a cold start does without

        code = rank_process.main(arguments.directory, arguments.plan_sha256, arguments.replicate, arguments.ranks)
        sys.stderr.flush()
        os._exit(code)  # the usual end waits for the other ranks, one of which may have ended
    emit = Events(arguments.events_fd)
    if arguments.probe:
        from perfexp.orchestration import capabilities  # with the meters' libraries

        capabilities.answer(arguments.gpu_index, emit)
        emit("finished")
        return 0
    paths, replicate = RunPaths(arguments.directory), arguments.replicate
    try:
        plan = plan_file.load(paths.plan, arguments.plan_sha256)
        if arguments.profile is not None:
            profile(plan, paths, arguments.profile, emit)
            return 0  # the pass ends when the profiler has written its files and exits
        if arguments.what == "timed" and plan.ranks > 1:
            return _start_ranks(plan, arguments, emit)
        if arguments.what == "ttfp":
            measure_cold_start(plan, paths, replicate, emit, arguments.spawned_ns)
        elif arguments.what == "algorithms":
            emit("algorithms", answer=algorithms(plan, paths, emit))
        elif arguments.what == "memory":
            emit("memory", answer=peak_memory(plan, paths, emit))
        else:
            measure = _MEASURES[arguments.what]
            bench = Workbench(plan, paths, emit)
            with bench.sharing_host(), bench.opened() as procedure:
                measure(procedure, plan, paths, replicate, emit)
    except Exception as error:
        return report_failure(error, emit)
    emit("finished")
    return 0


def _start_ranks(plan: config.Plan, arguments: argparse.Namespace, emit: Events) -> int:
    from perfexp.ranks import nodes, start

    replicate = f"--replicate={arguments.replicate}"
    command = worker_command(str(arguments.directory), f"--plan-sha256={arguments.plan_sha256}", replicate)
    port = plan.gpu.get("port")
    if plan.nodes > 1:
        return nodes.run(command, nodes=plan.nodes, per_host=plan.devices, port=port, emit=emit)
    return start.run(command, size=plan.ranks, port=port, emit=emit)


def profile(plan: config.Plan, paths: RunPaths, number: int, emit: Events) -> None:
    """Make the calls that the plan's profile of a number observes and send what was done; the parent records it."""
    keys = plan.profile_keys(read_points(paths.points))
    key, profiler = keys[number], config.build(plan.profiler)
    emit.point(key)
    bench = Workbench(plan, paths, emit)
    with bench.sharing_host(), bench.opened(profiled=True) as procedure:
        from perfexp.profilers.passing import look  # with the modes, which a cold start loads when it needs them

        try:
            observed = look(procedure, key, profiler, place_of(key, keys, paths.root))
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            status, text = verdict(error, procedure.device)
            emit("block", text="failed", profile={"status": status.value, "error": text})
        else:
            emit("block", text=f"{profiler.name} writes", profile=observed)


def algorithms(plan: config.Plan, paths: RunPaths, emit: Events) -> dict[str, Any]:
    """Find the algorithms that can compute the convolutions of the plan's first point, without measuring them.

    Returns the result of `perfexp.algorithms.layer_support.survey`, the device, and the settings, as JSON values.
    """
    from perfexp.models.fake import FakeModel  # of tests, and of no cold start of a torch model

    if config.locate(plan.model) is FakeModel:
        raise UserError(f"model={plan.model_name} is scripted and has no layers. Choose a torch model.")
    config.build(plan.algorithm)  # raises if its settings are wrong
    keys, settings = plan.timed_keys(), plan.algorithm
    key, bench = keys[0], Workbench(plan, paths, emit)
    bench.find_device()
    bench.open_data()
    # on a CPU this computes nothing that could disturb another measurement
    with bench.reserved(bench.device) if bench.device.asynchronous else nullcontext():
        bench.device.start()
        bench.load_model()
        from perfexp.algorithms.layer_support import survey  # with torch

        support = survey(
            bench.session,
            key,
            backend=settings.get("backend"),
            workspace_bytes=settings.get("workspace_bytes"),
            backward={name: settings[name] for name in ("backward_data", "backward_filter") if settings.get(name)},
            progress=lambda text: emit("block", text=text),
        )
    session = bench.session.facts()
    return {
        "model": plan.model_name,
        "device": {**bench.device.facts(), "kind": bench.device.kind, "name": bench.device.name},
        "phase": key.phase,
        "input_size": key.input_size,
        "batch_size": key.batch_size,
        "inputs": len({(key.input_size, key.batch_size) for key in keys}),
        "precision": session["precision"],
        "session": session,
        "doubts": msgspec.to_builtins(bench.session.doubts()),
        **support,
    }


def peak_memory(plan: config.Plan, paths: RunPaths, emit: Events) -> dict[str, Any]:
    """Trace the peak memory of the plan's points without a device; a point that cannot be traced has a reason.

    Unknown workspaces of convolutions are measured if the plan's device is present, which is reserved from then on.
    """
    from perfexp.worker.peak_memory import MemoryTrace, workspaces_of  # with torch

    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        bench = Workbench(plan, paths, emit)
        workspaces = workspaces_of(
            plan, stack=stack, reserved=bench.reserved, progress=lambda text: emit("block", text=text)
        )
        trace = MemoryTrace(plan, workspaces)
        for key in dict.fromkeys(key for key in plan.timed_keys() if not key.replicate):
            emit("block", text=f"tracing {key}")
            try:
                points.append(trace.report(key))
            except Unsupported as error:
                points.append({"key": msgspec.to_builtins(key), "reason": str(error)})
    return {"model": plan.model_name, "points": points}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perfexp.worker", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="folder of the run, with its plan.yaml")
    parser.add_argument("--plan-sha256", help="hash of plan.yaml, from the process that composed it")
    parser.add_argument("--probe", action="store_true", help="report this machine's measuring capabilities and exit")
    parser.add_argument("--gpu-index", type=int, help="with --probe: CUDA device whose clocks are tried")
    choices = (*_MEASURES, "ttfp", "algorithms", "memory")
    parser.add_argument("--what", choices=choices, default="timed")
    parser.add_argument("--profile", type=int, metavar="N", help="make only the profile of this number")
    parser.add_argument("--replicate", type=int, default=0)
    parser.add_argument("--ranks", type=Path, metavar="DIR", help="be one of several ranks, with their pipes in DIR")
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--parent", type=int, help="process that this one must not outlive")
    parser.add_argument("--spawned-ns", type=int, help="the parent's monotonic clock when it started this process")
    arguments = parser.parse_args(argv)
    if not arguments.probe and (arguments.directory is None or arguments.plan_sha256 is None):
        parser.error("pass the run's folder and --plan-sha256, or --probe")
    return arguments


if __name__ == "__main__":
    code = main()
    if any(not one.daemon and one is not threading.main_thread() for one in threading.enumerate()):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread of the model would keep this process alive
    sys.exit(code)
