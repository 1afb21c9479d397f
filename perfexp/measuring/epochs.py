"""Epochs: a whole training, with its passes over the data timed and everything else between them.

An epoch is one pass over the training data. Each pass is timed as one block of undisturbed steps;
evaluations, checkpoints and messages come after it. Losses recorded within a pass stay on the
device until the pass is over. A checkpoint is normally written between two passes. If the steps are
CUDA graphs on device-resident batches, the host and its disk are idle, so it is written during the
next pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from perfexp.data import Batches, Data
from perfexp.data.synthetic import on_device
from perfexp.devices import Device
from perfexp.errors import UserError
from perfexp.host.files import disk_error
from perfexp.measuring import training
from perfexp.measuring.modes import Step
from perfexp.measuring.modes.schedules import Rates
from perfexp.measuring.modes.train import Train
from perfexp.measuring.probes import EpochProbe, Probe, ProbeContext
from perfexp.models import Session, Trainer
from perfexp.records import diagnostics, metrics, units
from perfexp.records.paths import FINAL_WEIGHTS
from perfexp.records.quantities import (
    ACCURACY,
    BEST_ACCURACY,
    CHECKPOINT_SECONDS,
    EVALUATION_SECONDS,
    RUNTIME,
    TARGET_ACCURACY,
    TIME_TO_ACCURACY,
)
from perfexp.records.record import Epoch, Metric, Point, Series, Stop
from perfexp.statistics import estimators
from perfexp.timing import collecting
from perfexp.timing.conditions import Observer

#: Opens batches for training (or evaluation), in the random order of an epoch.
Open = Callable[[bool, int], AbstractContextManager[Batches]]


@dataclass(kw_only=True)
class EpochTraining:
    """Trains a model for whole passes over the data (epochs=N); `procedure` builds one per point.

    Attributes:
        point: gets the series, the epochs and the metrics.
        step: the training step, ready for its first call.
        count: number of the last epoch.
        open: opens an epoch's batches for training or evaluation.
        seed: seed for the model's random numbers.
        checkpoint: returns a checkpoint path, given its name (e.g. `best`); None to write no
            checkpoints.
        progress: called with a status line between passes, for example `epoch 3 of 90`.
        report: called after each epoch with a status line and the point.
        settings: epoch settings, for example how often to evaluate.
        probes: the user's probes.
    """

    point: Point
    step: Step
    session: Session
    device: Device
    data: Data
    count: int
    open: Open
    seed: int
    checkpoint: Callable[[str], Path] | None
    progress: Callable[[str], None]
    report: Callable[[str, Point], None]
    settings: Train
    probes: Collection[Probe] = ()
    #: Highest accuracy so far, and evaluations since then.
    _best: float | None = None
    _stale: int = 0
    #: Losses of the current epoch that are stored on the device (log_every).
    _losses: list[Any] = field(default_factory=list)

    def run(self) -> None:
        """Train, and add the time of every step and the figures of each pass to the point.

        During the run the step takes its batches from the training data, afterwards from its usual
        source.

        Raises:
            UserError: the data has no end or not the labels that a target accuracy needs, or the
                checkpoint to resume from has all epochs already.
        """
        trainer, usual_source = self.step.trainer, self.step.state.source
        observer = Observer(self.device)
        saved = trainer.saved if trainer else {}
        done = saved.get("epoch", 0)
        self._best, self._stale = saved.get("best_accuracy"), saved.get("stale", 0)
        if done >= self.count:
            raise UserError(
                f"The checkpoint has {done} epochs already, and epochs={self.count}: "
                "set more epochs."
            )
        if self.settings.target_accuracy is not None and not self._can_evaluate:
            reason = training.no_accuracy(self.session, self.data).reason
            raise UserError(f"mode.train.target_accuracy needs labels of the data: {reason}.")
        is_repeatable = bool(self.session.facts().get("deterministic"))
        steps, is_limiting = list[collecting.Samples](), True
        with ExitStack() as for_training, ExitStack() as self._for_evaluation:
            batches = for_training.enter_context(self.open(True, done))
            if batches.per_epoch is None:
                raise UserError(
                    f"epochs={self.count} needs data with an end, and this data source has none."
                )
            if self.settings.target_accuracy is not None and on_device(batches):
                batches.next()  # compiles and captures the preparation of a batch, untimed
            self._evaluation: training.Evaluation | None = None
            self._is_host_idle = on_device(batches) and "graph" in dict(self.step.segments)
            if self._can_evaluate:
                self._first_evaluation()
            rates = self.settings.rates(self.count, batches.per_epoch)
            if trainer:
                # a checkpoint must not be written during another point
                self._for_evaluation.callback(_finish_quietly, trainer)
                if self._is_host_idle and self.checkpoint is not None:
                    trainer.prepare_saving()
                trainer.begin(rates.factor, done * batches.per_epoch, self.seed)
            for number in range(done + 1, self.count + 1):
                self.progress(f"epoch {number} of {self.count}")
                if is_repeatable and number > done + 1:
                    # the order depends on the epoch alone, so a resumed training has the same order
                    for_training.close()
                    batches = for_training.enter_context(self.open(True, number - 1))
                self.step.state.source = batches.epoch().__next__
                with metrics.collecting() as custom:
                    with collecting.undisturbed():
                        step_seconds, pass_seconds, limits = collecting.whole_pass(
                            self._logging_call(), self.device
                        )
                    steps.append(step_seconds)
                    is_limiting &= limits
                    observer.block_ended("epoch", pass_seconds)
                    epoch = self._add_epoch(number, len(step_seconds), pass_seconds, rates)
                    is_over = self._finish_epoch(epoch, custom)
                if is_over:
                    break
        self.step.state.source = usual_source
        observer.add_to(self.point)
        if is_limiting:
            self.point.facts["bound_by"] = "gpu"
        self._add_series(np.concatenate(steps))

    def _logging_call(self) -> collecting.Call:
        """Return the step's call for one epoch; with `log_every` it stores every n-th loss.

        The losses stay on the device, because reading them would make each step wait.
        """
        self._losses, every, step, session = [], self.settings.log_every, self.step, self.session
        if every is None:
            return step.call
        count = 0

        def call() -> None:
            nonlocal count
            step.call()
            count += 1
            if count % every == 0:
                self._losses.append(session.held(step.state.loss))

        return call

    def _add_epoch(self, number: int, steps: int, seconds: float, rates: Rates) -> Epoch:
        """Add the figures of a pass that has just ended to the point, and return them.

        The loss is the mean of the stored losses, or the last step's loss.

        Args:
            number: number of the epoch, from 1.
            steps: steps in the pass.
            seconds: duration of the pass.
        """
        losses = self._losses or [self.step.state.loss]
        loss = float(np.mean(list(map(self.session.number, losses))))
        epoch = Epoch(
            number=number,
            seconds=seconds,
            samples_per_second=steps * self.step.batch_size / seconds,
            loss=loss if math.isfinite(loss) else None,
        )
        rate = self.settings.optimizer.get("lr")
        if self.step.trainer and rate is not None:
            epoch.learning_rate = rate * rates.factor(number * rates.per_epoch - 1)
        self.point.epochs.append(epoch)
        return epoch

    def _finish_epoch(self, epoch: Epoch, custom: Mapping[str, Metric]) -> bool:
        """Evaluate, save and report after an epoch, as the settings require.

        Returns:
            Whether the training is over: after the last epoch, or when the accuracy has not risen
            for `patience` evaluations.

        Args:
            custom: the epoch's custom metrics; user probes may add to them.
        """
        every, is_last = self.settings.eval_every, epoch.number == self.count
        if self._can_evaluate and (is_last or (every is not None and epoch.number % every == 0)):
            self._evaluate(epoch)
        self._run_epoch_probes(epoch)
        epoch.metrics = list(custom.values())
        is_stale = self.settings.patience is not None and self._stale >= self.settings.patience
        is_over = is_last or is_stale or self._has_reached(epoch)
        if self.checkpoint is not None:
            start = self.device.now_ns()
            try:
                self._save(epoch, self.checkpoint, is_over=is_over)
            except OSError as error:
                raise disk_error(error) from error
            epoch.checkpoint_seconds = (self.device.now_ns() - start) * 1e-9
        self.report(self._line(epoch, is_over=is_over), self.point)
        return is_over

    @property
    def _can_evaluate(self) -> bool:
        """Return whether there are labels, and this process's accuracy is needed."""
        is_needed = self.settings.target_accuracy is not None or not self.point.key.replicate
        return is_needed and training.can_evaluate(self.session, self.data)

    def _has_reached(self, epoch: Epoch) -> bool:
        """Return whether the epoch was evaluated and has the target accuracy."""
        target, accuracy = self.settings.target_accuracy, epoch.accuracy
        return target is not None and accuracy is not None and accuracy >= target

    def _first_evaluation(self) -> None:
        """Evaluate once, untimed, because a first evaluation loads kernels.

        A single batch is enough. With CUDA-graph steps on device-resident batches it is a full
        pass.
        """
        self.progress("first evaluation")
        if self._is_host_idle:
            self._opened_evaluation().accuracy()
            return
        # closed at once, or loader processes would prepare the rest of the pass during the first
        # epoch
        with self.open(False, 0) as batches, self.session.evaluating():
            for batch in islice(batches.epoch(), 1):
                self.session.forward(batch.inputs)

    def _opened_evaluation(self) -> training.Evaluation:
        """Return the evaluation; its data stays open until the training ends."""
        if self._evaluation is None:
            batches = self._for_evaluation.enter_context(self.open(False, 0))
            self._evaluation = training.Evaluation(self.session, batches, graphs=self._is_host_idle)
        return self._evaluation

    def _run_epoch_probes(self, epoch: Epoch) -> None:
        """Let the user's probes for epochs add their metrics."""
        context = ProbeContext(
            key=self.point.key, step=self.step, session=self.session, device=self.device
        )
        for probe in self.probes:
            if isinstance(probe, EpochProbe):
                probe.after_epoch(context, epoch)

    def _evaluate(self, epoch: Epoch) -> None:
        """Add the accuracy to the epoch, with averaged weights if the training averages them."""
        self.progress("accuracy")
        start, trainer = self.device.now_ns(), self.step.trainer
        with trainer.averaged() if trainer else nullcontext():
            epoch.accuracy = self._opened_evaluation().accuracy()
        epoch.evaluation_seconds = (self.device.now_ns() - start) * 1e-9
        if epoch.accuracy is not None and (self._best is None or epoch.accuracy > self._best):
            self._best, self._stale = epoch.accuracy, 0
        else:
            self._stale += 1

    def _save(self, epoch: Epoch, path: Callable[[str], Path], *, is_over: bool) -> None:
        """Write the epoch's checkpoints: `best`, `epoch_N`, and at the end the final weights.

        `best` has the highest accuracy; without any accuracy it has the last weights.

        Args:
            path: returns a checkpoint's path, given its name.
        """
        trainer, every = self.step.trainer, self.settings.save_every
        assert trainer is not None
        is_best = self._stale == 0 and (
            epoch.accuracy is not None or (is_over and self._best is None)
        )
        names = []
        if is_best:
            names.append("best")
        if every and epoch.number % every == 0:
            names.append(f"epoch_{epoch.number}")
        for name in names:
            facts = {"epoch": epoch.number, "best_accuracy": self._best, "stale": self._stale}
            trainer.save(path(name), facts, later=self._is_host_idle)
        if is_over:
            trainer.save_weights(path(FINAL_WEIGHTS), later=self._is_host_idle)
            trainer.finish()

    def _line(self, epoch: Epoch, *, is_over: bool) -> str:
        """Return the console line for an epoch: its figures, and about how much time is left."""
        mean_seconds = statistics.mean(finished.total_seconds for finished in self.point.epochs)
        left_seconds = mean_seconds * (self.count - epoch.number)
        loss = "not finite" if epoch.loss is None else f"{epoch.loss:.4g}"
        parts = [f"epoch {epoch.number} of {self.count}", f"loss {loss}"]
        if epoch.accuracy is not None:
            parts.append(f"accuracy {100 * epoch.accuracy:.2f} %")
        if epoch.learning_rate is not None:
            parts.append(f"learning rate {epoch.learning_rate:.3g}")
        parts.append(f"{epoch.samples_per_second:,.0f} samples/s")
        for metric in epoch.metrics:
            if metric.value is not None:
                parts.append(f"{metric.name.partition('/')[2]} {metric.value:.4g}")
        if not is_over:
            parts.append(f"about {units.format_seconds(left_seconds, 2)} left")
        elif left_seconds:
            parts.append(f"stopped early: best accuracy {100 * (self._best or 0):.2f} %")
        return ", ".join(parts)

    def _add_series(self, samples: collecting.Samples) -> None:
        """Add the series of steps and epochs to the point, and the metrics of the whole training.

        Args:
            samples: seconds of every step in all epochs, shape (steps,).
        """
        # the stopping rule did not choose these steps, so MSER-5 alone finds the warm-up
        warmup, point, epochs = estimators.mser5_cut(samples), self.point, self.point.epochs
        stop = Stop(
            reason="epochs",
            achieved=estimators.median_interval(samples[warmup:]).relative_half_width,
        )
        kind = "throughput" if self.device.asynchronous else "latency"  # nothing waits for a step
        point.series.append(Series(name=kind, samples=samples.tolist(), warmup=warmup, stop=stop))
        passes = [epoch.seconds for epoch in epochs]
        point.series.append(Series(name="epoch", samples=passes, stop=Stop(reason="epochs")))
        point.metrics.append(Metric.of(RUNTIME, sum(passes)))
        if (target := self.settings.target_accuracy) is not None:
            point.facts["seed"] = self.seed
            point.metrics.append(Metric.of(TARGET_ACCURACY, target))
            time = Metric.of(TIME_TO_ACCURACY, sum(passes))
            if not self._has_reached(epochs[-1]):
                time = Metric.of(TIME_TO_ACCURACY, None, reason=f"not in {len(passes)} epochs")
            point.metrics.append(time)
        evaluations = sum(epoch.evaluation_seconds for epoch in epochs)
        checkpoints = sum(epoch.checkpoint_seconds for epoch in epochs)
        for name, seconds in ((EVALUATION_SECONDS, evaluations), (CHECKPOINT_SECONDS, checkpoints)):
            if seconds:
                point.metrics.append(Metric.of(name, seconds))
        accuracies = [epoch.accuracy for epoch in epochs if epoch.accuracy is not None]
        if accuracies:
            point.metrics.append(Metric.of(ACCURACY, accuracies[-1]))
            point.metrics.append(Metric.of(BEST_ACCURACY, self._best))
            if not self.data.held_out:
                message = (
                    "there are no held-out images: the accuracy is that of the training images"
                )
                advice = "put the images into subfolders train and val"
                point.doubts.append(
                    diagnostics.make("data_incomplete", what=message, advice=advice)
                )
        elif self.data.labelled and not point.key.replicate:
            point.metrics.append(training.no_accuracy(self.session, self.data))


def _finish_quietly(trainer: Trainer) -> None:
    """Wait for a checkpoint, ignoring its errors: if the training failed, its own error counts."""
    with suppress(Exception):
        trainer.finish()
