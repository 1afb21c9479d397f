"""Procedure: how a point is measured, from its first call to its last check. Start reading here.

The order ensures that no measurement disturbs an earlier measurement:

1. the first call, which chooses kernels and enters no statistics;
2. the undisturbed call times (`perfexp.measuring.times`) and the memory peak;
3. results that need a training or labels: losses, epoch time, accuracy;
4. further passes over the same call: loop energy, phases, probes, baselines, several ranks,
   algorithm proof, device time as a CUDA graph, device energy, work. Any of them may fail without
   affecting the others.

Only the first process of a point does all this; later processes repeat the times.
"""

from __future__ import annotations

import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from perfexp.convolution import AppliedAlgorithm
from perfexp.data import Batches
from perfexp.data.synthetic import on_device
from perfexp.errors import RankLost, UserError
from perfexp.measuring import further_passes, memory_search, training, verdicts
from perfexp.measuring.context import Context, without_exit
from perfexp.measuring.epochs import EpochTraining
from perfexp.measuring.modes import Step, graphed
from perfexp.measuring.modes.train import Train
from perfexp.measuring.ranks import SETTLING_CALLS
from perfexp.records import diagnostics, metrics, point_diagnostics
from perfexp.records.quantities import FINITE, FIRST_MEMORY, PEAK_MEMORY
from perfexp.records.record import Key, Point, Status, timestamp


@dataclass(kw_only=True)
class Procedure(Context):
    """Measures points one after the other, each in the order of the module's docstring."""

    def begin(self) -> None:
        """Measure the idle power before the first point, with everything loaded and idle."""
        if self.energy is not None:
            self.progress("idle power")
            try:
                self.energy.idle()
            except Exception:  # every point tries again and records the error
                traceback.print_exc()

    def measure(self, key: Key) -> Point:
        """Measure a point; an error in the point becomes its status.

        Raises:
            UserError: the plan asks for something that no point can do.
            RankLost: another rank has ended.
        """
        point = Point(key=key, status=Status.OK, started=timestamp())
        has_ranks = self.group.size > 1
        if has_ranks:
            point.facts["world_size"] = self.group.size
        with verdicts.watching_the_host(point, of_ranks=has_ranks):
            before = self.device.state()
            with metrics.collecting() as custom:
                try:
                    without_exit(partial(self._measure, point))
                except UserError:
                    raise
                except Exception as error:
                    traceback.print_exc()
                    if has_ranks and self.group.lost():
                        raise RankLost("another rank has ended") from error
                    point.status, point.error = verdicts.verdict(error, self.device)
            point.metrics += custom.values()
            if not self.device.is_lost():
                self._close(point, before)
        return point

    def _measure(self, point: Point) -> None:
        """Take all measurements of a point, in the order given in the module docstring."""
        with self.step(point.key) as (step, batches):
            first_loss = self.first_call(step, batches)
            self._report_algorithm(point)
            plain_call = step.call
            if self.graph:
                step = graphed(step, self.session, constant=batches.constant)
            self._measure_warmup_memory(point, step)
            self._settle(step)
            with self.turn():
                if step.trains and self.epochs:
                    self._train(point, step, self.epochs)
                else:
                    self.times.whole(point, step.call, on_device=on_device(batches))
            self.session.check_call(step.state.outputs, is_constant=batches.constant)
            if self.session.changes_inputs:
                point.doubts.append(diagnostics.make("inputs_changed"))
            if changes := self.session.changed_settings():
                point.doubts.append(
                    diagnostics.make("settings_changed", changes=f"the model changed {changes}")
                )
            threads = self.session.facts().get("threads", 0)
            verdicts.judge_loader(point, self.device, workers=self.data.workers, threads=threads)
            point.metrics += [
                *self.device.memory(),
                *self.session.compilation(),
            ]  # before any further pass
            if point.key.replicate:
                further_passes.add_graph_time(self, point, step, batches)
                return
            if step.trains:
                last_loss, steps = (
                    self.session.number(step.state.loss),
                    self.steps_per_epoch(batches),
                )
                training.add_figures(
                    point, first_loss=first_loss, last_loss=last_loss, steps_per_epoch=steps
                )
            else:
                self.run_optional(point, FINITE, partial(self._check_outputs, point, step))
            if self.data.labelled and not step.trains:
                opened = partial(self._batches, point.key, training=False)
                training.add_accuracy(point, self.session, self.data, opened, self.progress)
            further_passes.measure(self, point, step, batches, plain_call)
        # after the step is closed, on the weights as they were loaded
        self.run_for_algorithm(point, "output_error", partial(self._measure_output_error, point))

    def _measure_warmup_memory(self, point: Point, step: Step) -> None:
        """Add the memory peak of the first calls, then reset it.

        These calls choose kernels and create the optimizer state, so they can need more than later
        calls.
        """
        step.call()
        self.device.synchronize()
        peak = next((metric for metric in self.device.memory() if metric.name == PEAK_MEMORY), None)
        if peak is not None:
            point.metrics.append(msgspec.structs.replace(peak, name=FIRST_MEMORY))
        self.device.reset_peak_memory(give_back=False)

    def _settle(self, step: Step) -> None:
        """Make the calls that multi-rank training needs before it stops waiting for the device."""
        if self.group.size > 1 and step.trains and self.device.asynchronous:
            for _ in range(SETTLING_CALLS):
                step.call()
            self.device.synchronize()

    def _report_algorithm(self, point: Point) -> None:
        """Add which algorithms computed the first call; later calls of the same size keep them."""
        for applied in self.applied:
            report = applied.report()
            if applied.is_forced or report.layers:
                point.metrics += report.metrics()
                point.facts[applied.group] = report.facts()
                point.doubts += report.doubts()

    def _check_outputs(self, point: Point, step: Step) -> None:
        """Check the last call's outputs for infinities and NaN: they can change its speed."""
        if not self.session.is_finite(step.state.outputs):
            point.doubts.append(
                diagnostics.make(
                    "not_finite", what="the outputs of the last call contain infinities or NaN"
                )
            )

    def _train(self, point: Point, step: Step, count: int) -> None:
        """Train for whole epochs, on newly opened batches.

        The batches of the first call can't serve: that call has prefetched from them.
        """

        def opened(training: bool, epoch: int) -> AbstractContextManager[Batches]:
            return self._batches(point.key, training=training, epoch=epoch)

        mode = self.modes["train"]
        settings = mode if isinstance(mode, Train) else Train(optimizer={})
        EpochTraining(
            point=point,
            step=step,
            session=self.session,
            device=self.device,
            data=self.data,
            count=count,
            open=opened,
            seed=self.seed,
            checkpoint=self.checkpoint
            if settings.checkpoints and not point.key.replicate
            else None,
            progress=self.progress,
            report=self.report,
            settings=settings,
            probes=self.probes.values(),
        ).run()

    def _measure_output_error(self, point: Point, algorithm: AppliedAlgorithm) -> None:
        self.session.reset()
        with self._batches(point.key, training=False) as batches:
            error = algorithm.output_error(batches.next().inputs)
            point.metrics += [] if error is None else [error]

    def _close(self, point: Point, before: dict[str, Any]) -> None:
        """Add device memory and state; after an out-of-memory error, also the batch that fits."""
        # a failed point has no peak yet, and an unsupported one did not compute
        if point.status is not Status.UNSUPPORTED and point.metric(PEAK_MEMORY) is None:
            point.metrics += self.device.memory()
        after = self.device.state()
        point.facts |= {"device_before": before, "device_after": after}
        if point.status is Status.OK:
            point.doubts += point_diagnostics.judge(before, after, point.facts)
            verdicts.add_cycles(point)
        if point.status is Status.OOM:
            memory_search.add_batch_that_fits(self, point)
