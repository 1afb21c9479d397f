"""First prediction: how long a fresh process takes until it has one, in its parts."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

from perfexp.errors import UserError
from perfexp.plan import config
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths, append_line
from perfexp.records.record import Key, Point, Series, Status, point_to_line
from perfexp.worker import setup

if TYPE_CHECKING:
    from perfexp.devices import Device


def first_prediction(plan: config.Plan, paths: RunPaths, replicate: int, tell: Events, spawned_ns: int | None) -> None:
    """Time to first prediction of this process, in its parts; written as a point of its own.

    Args:
        plan: what to measure.
        paths: of the run.
        replicate: number of this process.
        tell: where it is told which point this is.
        spawned_ns: the parent's monotonic clock when it started this process.
    """
    from perfexp.diagnosis import environment
    from perfexp.measure.verdicts import verdict, watching_the_host

    key = next(key for key in plan.first_prediction_keys() if key.replicate == replicate)
    watch = _StopWatch()
    if spawned_ns is not None:
        watch.seconds["process"] = (watch.last_ns - spawned_ns) * 1e-9
    tell.point(key)
    point = Point(key=key, status=Status.OK)
    with watching_the_host(point):
        watch.restart()
        config.locate(plan.model)
        watch.lap("imports")
        device = config.build(plan.gpu)
        watch.lap("context")
    # waiting for the device is no part of a prediction
    with setup.alone(plan, paths, device, tell), watching_the_host(point):
        watch.restart()
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
            setup.refuse_other_environment(paths, {**environment.collect(), "device": device.facts()})
    point.series = [Series(name=f"ttfp/{name}", samples=[seconds]) for name, seconds in watch.seconds.items()]
    append_line(paths.points, point_to_line(point))
    tell.done(key, point.status.value)


def _first_calls(plan: config.Plan, key: Key, device: Device, watch: _StopWatch) -> None:
    """From the data to the second call, each part a lap."""
    data = config.build(plan.data)
    watch.lap("data")
    session = setup.open_session(plan, device, data)
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
            try:
                session.forward(batch.inputs)
            except Exception:
                session.first_forward(batch)  # says so where the model can't take such inputs
                raise
            device.synchronize()
            watch.lap(call)


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
