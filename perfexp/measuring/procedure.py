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

import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from perfexp.algorithms import AppliedAlgorithm
from perfexp.data import Batches, Data
from perfexp.data.synthetic import Rotating, on_device
from perfexp.devices import Cache, Device
from perfexp.errors import RankLost, Unsupported, UserError
from perfexp.host import host_turns
from perfexp.measuring import further_passes, memory_search, training, verdicts
from perfexp.measuring.epochs import Epochs
from perfexp.measuring.times import Times
from perfexp.models import Session
from perfexp.modes import Mode, Step, graphed
from perfexp.modes.train import Train
from perfexp.probes import Probe, timing
from perfexp.probes.energy import EnergyProcedure
from perfexp.ranks import SETTLING_CALLS, ProcessGroup
from perfexp.records import diagnostics, disturbances, metrics
from perfexp.records.quantities import FINITE, FIRST_MEMORY, PEAK_MEMORY
from perfexp.records.record import Key, Metric, Point, Status, timestamp
from perfexp.stopping import StoppingRule
from perfexp.sweep import Size
from perfexp.work import Work

#: Seed distance between the shuffles of two epochs: no two runs with small seeds share an order.
_SEEDS_PER_EPOCH = 1_000_003


@dataclass(kw_only=True)
class Procedure:
    """Measures points one after the other, and holds everything that they share.

    Attributes:
        session: the loaded model.
        modes: kind of call by phase.
        stopping: rule that ends each series.
        algorithm: algorithm applied to the model; None for torch's own choice.
        attention: attention backend applied to the model, or a record of torch's choice.
        percentiles: latency percentiles to report, in percent.
        probes: the user's probes by name.
        epochs: full passes over the training data; None if the stopping rule sets the step count.
        cache: state of the device's caches at the start of a call.
        graph: whether calls are captured and launched as a CUDA graph (execution.cuda_graph).
        takes_call_times: whether latency, device time and phases are measured in addition to the
            rate (probes.call_times).
        reads_load: whether clock and power are read while the device works (probes.loaded_clock).
        counts_work: whether a call's MACs, FLOPs and bytes are counted (probes.work).
        checks_outputs: whether outputs are compared with plain fp32 outputs (probes.correctness).
        peaks: data-sheet FLOP/s by data type; None for a device without a data sheet.
        energy: measures call energy (probes.energy), or None.
        anchors: (size, batch size) pairs that also get the extra passes: CUDA-graph time, and
            energy with the device kept busy. None means every point.
        ceilings: highest rates that the device reached (probes.ceilings), or None.
        seed: seed for data and shuffling.
        group: the process group of all ranks; the current rank measures.
        compares_alone: whether all ranks together are compared with a single rank (probes.scaling).
        checkpoint: returns the path of a training checkpoint, given its name (e.g. `best`).
        trained_weights: weights file to measure inference with; None for the loaded weights.
        memory_trace: traced peak of a point in bytes, or the largest batch for a memory size; None
            if not needed.
        turn: context that keeps a sweep's other runs off the host.
        progress: called with a status line between timed blocks.
        report: called after each epoch with a status line and the epoch's point.
    """

    session: Session
    device: Device
    data: Data
    modes: dict[str, Mode]
    stopping: StoppingRule
    algorithm: AppliedAlgorithm | None = None
    attention: AppliedAlgorithm | None = None
    percentiles: Sequence[float] = (50.0, 95.0, 99.0)
    probes: dict[str, Probe] = field(default_factory=dict)
    epochs: int | None = None
    cache: Cache = Cache.warm
    graph: bool = False
    takes_call_times: bool = True
    reads_load: bool = True
    counts_work: bool = False
    checks_outputs: bool = False
    peaks: Mapping[str, float | None] | None = field(default_factory=dict)
    energy: EnergyProcedure | None = None
    anchors: Collection[tuple[Size, int]] | None = None
    ceilings: Mapping[str, float] | None = None
    seed: int = 0
    group: ProcessGroup = field(default_factory=ProcessGroup)
    compares_alone: bool = False
    checkpoint: Callable[[str], Path] | None = None
    trained_weights: Path | None = None
    memory_trace: Callable[..., Any] | None = None
    turn: host_turns.Turn = host_turns.free
    progress: Callable[[str], None] = lambda _: None
    report: Callable[[str, Point], None] = lambda _, __: None

    def __post_init__(self) -> None:
        self.times = Times(
            device=self.device,
            stopping=self.stopping,
            percentiles=self.percentiles,
            cache=self.cache,
            progress=self.progress,
            takes_call_times=self.takes_call_times,
            reads_load=self.reads_load,
        )

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
                    _without_exit(partial(self._measure, point))
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

    def is_anchor(self, key: Key) -> bool:
        """Return whether a point gets the extra passes."""
        return self.anchors is None or (key.input_size, key.batch_size) in self.anchors

    def run_optional(
        self, point: Point, metric: str, action: Callable[[], None], *, together: bool = False
    ) -> None:
        """Run a step after the timing; if it fails, record its metric as missing.

        Args:
            metric: metric that is missing if the step fails, for example `algorithm/proof`.
            together: whether all ranks run the step. A failure then leaves the ranks out of step,
                so it is raised.
        """
        self.progress(metric.rpartition("/")[2])
        try:
            _without_exit(action)
        except Exception as error:
            # a wrong plan affects all points; on a lost device or with ranks out of step nothing
            # can follow
            out_of_step = together and self.group.size > 1 and not isinstance(error, Unsupported)
            if isinstance(error, UserError) or out_of_step or self.device.is_lost():
                raise
            _, text = verdicts.verdict(error, self.device)
            point.metrics.append(Metric.of(metric, None, reason=text))

    def run_for_algorithm(
        self,
        point: Point,
        figure: str,
        action: Callable[[AppliedAlgorithm], None],
        *,
        together: bool = False,
    ) -> None:
        """Run an optional step with what is applied; do nothing for torch's own choice."""
        for applied in self._applied:
            if applied.is_forced:
                self.run_optional(
                    point, f"{applied.group}/{figure}", partial(action, applied), together=together
                )

    @property
    def _applied(self) -> list[AppliedAlgorithm]:
        return [one for one in (self.algorithm, self.attention) if one is not None]

    @contextmanager
    def step(self, key: Key) -> Iterator[tuple[Step, Batches]]:
        """Yield a point's call with the loaded weights restored and the memory peak reset."""
        self.group.open(key)
        for applied in self._applied:
            applied.begin_point()
        self.session.reset()
        if self.trained_weights is not None and key.phase == "inference":
            self.session.adopt(self.trained_weights)
        self.device.reset_peak_memory()
        mode = self.modes[key.phase]
        with self._batches(key, training=key.phase == "train") as batches:
            self.progress("first call")
            step = mode.prepare(session=self.session, batches=batches, batch_size=key.batch_size)
            with step.active():
                yield self.group.joined(step), batches
        self.group.close()

    @contextmanager
    def _batches(self, key: Key, *, training: bool, epoch: int = 0) -> Iterator[Batches]:
        # synthetic inputs stay the same: a graph may have captured them
        seed = self.seed + (_SEEDS_PER_EPOCH * epoch if self.data.labelled else 0)
        opened = self.data.open(
            session=self.session,
            input_size=key.input_size,
            batch_size=key.batch_size,
            training=training,
            seed=seed,
        )
        with opened as batches:
            rotate = self.cache is Cache.rotate and batches.constant
            yield Rotating(batches, self.session, self.device.cache_bytes) if rotate else batches

    def first_call(self, step: Step, batches: Batches) -> float | None:
        """Make a size's first call, outside all statistics; return the first training loss."""
        self.group.first()
        self.first_forward(batches)
        step.call()
        self.device.synchronize()
        if self.attention is not None:
            self.attention.report()  # the backends are settled for further calls
        if not step.trains:
            return None
        return self.session.number(step.state.loss)

    def first_forward(self, batches: Batches) -> None:
        """Make a size's first forward pass."""
        self.session.first_forward(batches.next())
        for applied in self._applied:
            applied.begin_call()

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

    def capture(self, step: Step, batches: Batches) -> timing.Capture:
        """Return a function that captures the call as a single launch."""
        return lambda: graphed(step, self.session, constant=batches.constant).call

    def steps_per_epoch(self, batches: Batches) -> int | None:
        """Return the steps in which all ranks together see the data once; None for endless data."""
        if batches.per_epoch is None:
            return None
        return math.ceil(batches.per_epoch / self.group.size)

    def _report_algorithm(self, point: Point) -> None:
        """Add which algorithms computed the first call; later calls of the same size keep them."""
        for applied in self._applied:
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
        Epochs(
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

    @cached_property
    def host_rate(self) -> float | None:
        """Return the FLOP/s of a matrix product on the CPU; None for other devices."""
        if self.device.identifier != "cpu":
            return None
        from perfexp.probes.ceilings import (
            host_flops_per_second,
        )  # imports torch, which a scripted device does not need

        return host_flops_per_second(self.session.formats.products)

    def work(self, step: Step, batches: Batches) -> Work | None:
        """Count a call's analytic work.

        The count uses torch's own convolutions, because an algorithm may multiply in its own way.

        Raises:
            Unsupported: the model can't be traced.
        """
        inputs = batches.next().inputs
        count = partial(self.session.work, inputs, training=step.trains)
        for applied in self._applied:
            if applied.is_forced:
                count = partial(applied.run_baseline, "default", count)
        return count()

    def _close(self, point: Point, before: dict[str, Any]) -> None:
        """Add device memory and state; after an out-of-memory error, also the batch that fits."""
        # a failed point has no peak yet, and an unsupported one did not compute
        if point.status is not Status.UNSUPPORTED and point.metric(PEAK_MEMORY) is None:
            point.metrics += self.device.memory()
        after = self.device.state()
        point.facts |= {"device_before": before, "device_after": after}
        if point.status is Status.OK:
            point.doubts += disturbances.judge(before, after, point.facts)
            verdicts.add_cycles(point)
        if point.status is Status.OOM:
            memory_search.add_batch_that_fits(self, point)


def _without_exit(action: Callable[[], None]) -> None:
    """Run an action, and turn `sys.exit` in the model's code into an error.

    Raises:
        RuntimeError: the model's code would have ended the process.
    """
    try:
        action()
    except SystemExit as end:
        raise RuntimeError(f"the model's code called sys.exit({end.code!r})") from end
