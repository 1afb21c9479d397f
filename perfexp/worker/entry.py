"""Worker: reads plan.yaml, measures, and appends to points.jsonl in its own process."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host import fork_server, lifeline
from perfexp.host.process import worker_command
from perfexp.measuring.profilers import place_of
from perfexp.measuring.verdicts import verdict
from perfexp.plan import config, plan_file
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import read_points
from perfexp.worker import points
from perfexp.worker.cold_start import measure_cold_start
from perfexp.worker.workbench import Workbench, report_failure

#: Functions that measure with the whole procedure, by kind of point.
_MEASURES = {
    "trials": points.try_batch,
    "timed": points.measure_points,
    "layers": points.dissect_points,
}
#: Questions about a plan: names of functions in `answers`.
_ANSWERS = ("algorithms", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a plan's points, or answer a question about the plan or the device.

    Returns:
        The exit code: 0 unless an error ended the work. A failed point is a result, not an error.
    """
    arguments = _arguments(argv)
    fork_server.process_start = fork_server.process_start or "fresh"
    if argv is None:
        del sys.argv[1:]  # a model's module may parse arguments
    # a profiler may start this process from a short-lived thread; its end is not the parent's end
    if arguments.parent is not None and (
        arguments.profile is None or os.getppid() == arguments.parent
    ):
        lifeline.die_with(arguments.parent)
    if arguments.ranks is not None:
        # imports the control messages, which a cold start does not need
        from perfexp.worker import rank_process

        code = rank_process.main(
            arguments.directory, arguments.plan_sha256, arguments.replicate, arguments.ranks
        )
        sys.stderr.flush()
        os._exit(code)  # a normal exit waits for the other ranks, which may have ended
    emit, what, replicate = Events(arguments.events_fd), arguments.what, arguments.replicate
    try:
        if what == "survey":
            from perfexp.worker import answers  # imports the meters' libraries

            answers.survey(arguments.gpu_index, emit)
            emit("finished")
            return 0
        paths = RunPaths(arguments.directory)
        plan = plan_file.load(paths.plan, arguments.plan_sha256).of_process(replicate)
        if arguments.profile is not None:
            profile(plan, paths, arguments.profile, emit)
            return 0  # the pass ends when the profiler has written its files and exits
        if what == "timed" and plan.ranks > 1:
            return _start_ranks(plan, arguments, emit)
        if what == "ttfp":
            measure_cold_start(plan, paths, replicate, emit, arguments.spawned_ns)
        elif what in _ANSWERS:
            from perfexp.worker import answers

            emit("part", name=what, answer=getattr(answers, what)(plan, paths, emit))
        else:
            bench = Workbench(plan, paths, emit)
            with bench.opened() as procedure:
                _MEASURES[what](procedure, plan, paths, replicate, emit)
    except Exception as error:
        return report_failure(error, emit)
    emit("finished")
    return 0


def _start_ranks(plan: config.Plan, arguments: argparse.Namespace, emit: Events) -> int:
    from perfexp.measuring.ranks import nodes, start

    replicate = f"--replicate={arguments.replicate}"
    command = worker_command(
        str(arguments.directory), f"--plan-sha256={arguments.plan_sha256}", replicate
    )
    port = plan.gpu.get("port")
    if plan.nodes > 1:
        return nodes.run(command, nodes=plan.nodes, per_host=plan.devices, port=port, emit=emit)
    return start.run(command, size=plan.ranks, port=port, emit=emit)


def profile(plan: config.Plan, paths: RunPaths, number: int, emit: Events) -> None:
    """Run profile `number` of the plan and send its outcome to the parent, which records it."""
    keys = plan.profile_keys(read_points(paths.points))
    key, profiler = keys[number], config.build(plan.profiler)
    emit.point(key)
    bench = Workbench(plan, paths, emit)
    with bench.opened(profiled=True) as procedure:
        from perfexp.measuring.profilers.passing import (
            look,  # imports the modes, which a cold start imports later
        )

        try:
            observed = look(procedure, key, profiler, place_of(key, keys, paths.profile))
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            status, text = verdict(error, procedure.device)
            emit.block("failed", profile={"status": status.value, "error": text})
        else:
            emit.block(f"{profiler.name} writes", profile=observed)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perfexp.worker", description=__doc__)
    parser.add_argument(
        "directory", type=Path, nargs="?", help="folder of the run, with its plan.yaml"
    )
    parser.add_argument(
        "--plan-sha256", help="hash of plan.yaml, from the process that composed it"
    )
    parser.add_argument(
        "--gpu-index", type=int, help="with --what=survey: CUDA device whose clocks are tried"
    )
    parser.add_argument(
        "--what", choices=(*_MEASURES, "ttfp", *_ANSWERS, "survey"), default="timed"
    )
    parser.add_argument(
        "--profile", type=int, metavar="N", help="make only the profile of this number"
    )
    parser.add_argument("--replicate", type=int, default=0)
    parser.add_argument(
        "--ranks", type=Path, metavar="DIR", help="be one of several ranks, with their pipes in DIR"
    )
    parser.add_argument("--events-fd", type=int)
    parser.add_argument("--parent", type=int, help="process that this one must not outlive")
    parser.add_argument(
        "--spawned-ns", type=int, help="the parent's monotonic clock when it started this process"
    )
    arguments = parser.parse_args(argv)
    if arguments.what != "survey" and (
        arguments.directory is None or arguments.plan_sha256 is None
    ):
        parser.error("pass the run's folder and --plan-sha256, or --what=survey")
    return arguments


if __name__ == "__main__":
    code = main()
    if any(not one.daemon and one is not threading.main_thread() for one in threading.enumerate()):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread of the model would keep this process alive
    sys.exit(code)
