"""Training: whole passes over the data, and the figures of a training beside its times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from perfexp.data import Batches
from perfexp.devices import Device
from perfexp.errors import UserError
from perfexp.measure import verdicts
from perfexp.modes import Step
from perfexp.probes import timing
from perfexp.probes.conditions import Observer
from perfexp.records import diagnostics
from perfexp.records.record import Metric, Point, Series, Stop
from perfexp.statistics import estimators


def run_epochs(
    point: Point, step: Step, batches: Batches, device: Device, count: int, progress: Callable[[str], None]
) -> None:
    """Add the time of every step in whole passes over the data, and the runtime of each pass.

    Args:
        batches: batches opened for these passes, which the step takes for as long as they last.
        count: number of passes.
        progress: called with a status line between passes.

    Raises:
        UserError: the data has no end.
    """
    if batches.per_epoch is None:
        raise UserError("epochs=N needs data with an end: set data.num_samples, or data=images.")
    usual, steps, epoch_seconds, observer = step.state.source, [], [], Observer(device)
    for epoch in range(count):
        progress(f"epoch {epoch + 1} of {count}")
        step.state.source = batches.epoch().__next__
        with timing.undisturbed():
            seconds, whole = timing.whole_pass(step.call, device)
        steps.append(seconds)
        epoch_seconds.append(whole)
        observer.block_ended("epoch", whole)
    step.state.source = usual
    observer.add_to(point)
    samples = np.concatenate(steps)
    # the stopping rule did not choose these steps, so MSER-5 alone finds the warm-up
    warmup = estimators.mser5_cut(samples)
    stop = Stop(reason="epochs", achieved=estimators.median_interval(samples[warmup:]).relative_half_width)
    kind = "throughput" if device.asynchronous else "latency"  # nothing waits for a step
    point.series.append(Series(name=kind, samples=samples.tolist(), warmup=warmup, stop=stop))
    point.series.append(Series(name="epoch", samples=epoch_seconds, stop=Stop(reason="epochs")))
    point.metrics.append(Metric(name="total_runtime_seconds", value=sum(epoch_seconds), unit="seconds"))


def add_figures(point: Point, *, first_loss: float | None, last_loss: float, steps_per_epoch: int | None) -> None:
    """Add the losses of the first and last step, and the seconds of an epoch.

    Args:
        steps_per_epoch: None where the data has no end.
    """
    not_finite = {}
    for which, loss in (("first", first_loss), ("last", last_loss)):
        is_finite = loss is not None and np.isfinite(loss)
        reason = None if is_finite else f"the loss is {loss}"
        metric = Metric(name=f"train/loss_{which}", value=loss if is_finite else None, unit="1", reason=reason)
        point.metrics.append(metric)
        if loss is not None and not is_finite:
            not_finite[which] = loss
    if not_finite:
        which, loss = next(iter(not_finite.items()))
        point.doubts.append(diagnostics.make("loss_not_finite", which=which, loss=loss))
    point.metrics.append(verdicts.epoch_metric(point, steps_per_epoch))
