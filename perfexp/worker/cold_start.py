"""Cold start: time from process start to first prediction, split into laps."""

from __future__ import annotations

import time
import traceback
from contextlib import nullcontext

from perfexp.errors import UserError
from perfexp.measuring.verdicts import verdict, watching_the_host
from perfexp.models import Attention
from perfexp.plan import config
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, Point, Series, Status, read_points
from perfexp.worker.points import append, begin
from perfexp.worker.workbench import Workbench


def measure_cold_start(
    plan: config.Plan, paths: RunPaths, replicate: int, emit: Events, spawned_ns: int | None
) -> None:
    """Measure this process's time to its first prediction and append it as a point.

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
    begin(key, emit)
    point, bench = Point(key=key, status=Status.OK), Workbench(plan, paths, emit)
    with bench.sharing_host(), bench.turn():
        _measure(bench, point, watch)


def _measure(bench: Workbench, point: Point, watch: _StopWatch) -> None:
    plan, paths, emit, key = bench.plan, bench.paths, bench.emit, point.key
    with watching_the_host(point):
        watch.restart()
        config.locate(plan.model)
        watch.lap("imports")
        bench.find_device()
        watch.lap("context")
    # waiting for the device is not part of a cold start
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
    append(point, paths, emit)


def _time_first_calls(bench: Workbench, key: Key, watch: _StopWatch) -> None:
    """Load data and model, call the model twice, and end a lap after each step."""
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
    """Stopwatch that splits time into laps, in seconds by name."""

    def __init__(self) -> None:
        self.last_ns = time.perf_counter_ns()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the lap `name`."""
        now = time.perf_counter_ns()
        self.seconds[name] = self.seconds.get(name, 0.0) + (now - self.last_ns) * 1e-9
        self.last_ns = now

    def restart(self) -> None:
        """Exclude the time since the last lap."""
        self.last_ns = time.perf_counter_ns()
