"""Worker: reads plan.yaml, measures, and appends to points.jsonl in its own process.

The parent starts it with `--what`, the kind of points to measure, or a question to answer. Progress
goes to the parent as events, results to points.jsonl. A worker for a cold start (`ttfp`, time to
first prediction) is a fresh process that times its own start, so this module imports little.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host import fork_server, lifeline
from perfexp.host.process import worker_command
from perfexp.measuring.profilers import place_of
from perfexp.measuring.verdicts import verdict, watching_the_host
from perfexp.models import Attention
from perfexp.plan import config, plan_file
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, Point, Series, Status, read_points
from perfexp.worker import points
from perfexp.worker.workbench import Workbench, report_failure

#: Functions that measure points with the whole procedure, by `--what`: trials of the largest batch,
#: timed calls, and layers that did not follow them in the same process.
_MEASURES = {
    "trials": points.try_batch,
    "timed": points.measure_points,
    "layers": points.dissect_points,
}
#: Questions about a plan: names of functions in `answers`.
_ANSWERS = ("algorithms", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a plan's points, or answer a question about the plan or the device.

    Args:
        argv: command-line arguments; None to take this process's own.

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
        plan = plan_file.load(paths.plan, arguments.plan_sha256).for_process(replicate)
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
                if _MEASURES[what](procedure, plan, paths, replicate, emit):  # all was timed
                    points.dissect_points(procedure, plan, paths, replicate, emit, is_followed=True)
    except Exception as error:
        return report_failure(error, emit)
    emit("finished")
    return 0


def _start_ranks(plan: config.Plan, arguments: argparse.Namespace, emit: Events) -> int:
    """Start a process for each device (a rank), wait for all of them, and return the exit code.

    Each rank is this program again, with `--ranks`. This process itself measures nothing.
    """
    from perfexp.measuring.ranks import start

    replicate = f"--replicate={arguments.replicate}"
    command = worker_command(
        str(arguments.directory), f"--plan-sha256={arguments.plan_sha256}", replicate
    )
    port = plan.gpu.get("port")
    if plan.nodes > 1:
        return start.run_on_nodes(
            command, nodes=plan.nodes, per_host=plan.devices, port=port, emit=emit
        )
    return start.run(command, size=plan.ranks, port=port, emit=emit)


def profile(plan: config.Plan, paths: RunPaths, number: int, emit: Events) -> None:
    """Run the plan's profile with this number, under a profiler that may have started this process.

    The outcome goes to the parent as an event. The profiler writes its files only after this
    process has ended, and then the parent records both.
    """
    keys = plan.profile_keys(read_points(paths.points))
    key, profiler = keys[number], config.build(plan.profiler)
    emit.point(key)
    bench = Workbench(plan, paths, emit)
    with bench.opened(profiled=True) as procedure:
        # imports the modes, which a cold start imports later
        from perfexp.measuring.profilers.passing import profile_point

        try:
            location = place_of(key, keys, paths.profile)
            observed = profile_point(procedure, key, profiler, location)
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            status, text = verdict(error, procedure.device)
            emit.block("failed", profile={"status": status.value, "error": text})
        else:
            emit.block(f"{profiler.name} writes", profile=observed)


def measure_cold_start(
    plan: config.Plan, paths: RunPaths, replicate: int, emit: Events, spawned_ns: int | None
) -> None:
    """Measure this process's time to its first prediction and append it as a point.

    The point has a series for each step, such as imports or weights. `main` calls this first in a
    fresh process.

    Args:
        spawned_ns: the parent's monotonic clock when it started this process; None if unknown.
    """
    watch = _StopWatch()
    key = next(
        key
        for key in plan.first_prediction_keys(read_points(paths.points))
        if key.replicate == replicate
    )
    if spawned_ns is not None:
        watch.seconds["process"] = (watch.last_ns - spawned_ns) * 1e-9
    points.begin(key, emit)
    point, bench = Point(key=key, status=Status.OK), Workbench(plan, paths, emit)
    with bench.sharing_host(), bench.turn():
        _time_start(bench, point, watch)


def _time_start(bench: Workbench, point: Point, watch: _StopWatch) -> None:
    """Time imports, device and first calls, and append the point; an error becomes its status."""
    plan, paths, emit, key = bench.plan, bench.paths, bench.emit, point.key
    with watching_the_host(point):
        watch.restart()
        config.locate(plan.model)
        watch.lap("imports")
        bench.find_device()
        watch.lap("context")
    # waiting for the device, to reserve it, is not part of a cold start
    with bench.reserved(bench.device), watching_the_host(point):
        watch.restart()
        bench.device.start()
        watch.lap("context")
        try:
            _time_first_calls(bench, key, watch)
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            point.status, point.error = verdict(error, bench.device)
        if not bench.device.is_lost():
            bench.require_same_environment()
    point.series = [
        Series(name=f"ttfp/{name}", samples=[seconds]) for name, seconds in watch.seconds.items()
    ]
    points.append(point, paths, emit)


def _time_first_calls(bench: Workbench, key: Key, watch: _StopWatch) -> None:
    """Load data and model, call the model twice, and end a lap after each step.

    Raises:
        UserError: a setting is wrong.
        Exception: any error in the model's code.
    """
    bench.open_data()
    watch.lap("data")
    bench.load_model()
    if bench.plan.infers_trained:
        bench.session.adopt(bench.trained_weights())
    watch.lap("weights")
    session, plan, size, batch_size = bench.session, bench.plan, key.input_size, key.batch_size
    with (
        config.build(plan.algorithm).applied(session),
        nullcontext() if plan.execution.attention is Attention.auto else bench.attention(),
        bench.data.open(
            session=session, input_size=size, batch_size=batch_size, training=False, seed=plan.seed
        ) as batches,
        session.inferring(),
    ):
        batch = batches.next()
        bench.device.synchronize()
        watch.lap("inputs")
        for call in ("first_call", "second_call"):
            try:
                session.forward(batch.inputs)
            except Exception:
                # repeats the failure, as Unsupported if the model can't take such inputs
                session.first_forward(batch)
                raise
            bench.device.synchronize()
            watch.lap(call)


class _StopWatch:
    """Stopwatch that splits time into laps, in seconds by name; laps of one name add up."""

    def __init__(self) -> None:
        self.last_ns = time.perf_counter_ns()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the lap `name`."""
        now = time.perf_counter_ns()
        self.seconds[name] = self.seconds.get(name, 0.0) + (now - self.last_ns) * 1e-9
        self.last_ns = now

    def restart(self) -> None:
        """Exclude the time since the last lap: the next lap starts now."""
        self.last_ns = time.perf_counter_ns()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with code 2 if it is wrong."""
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
    if any(
        not thread.daemon and thread is not threading.main_thread()
        for thread in threading.enumerate()
    ):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread of the model would keep this process alive
    sys.exit(code)
