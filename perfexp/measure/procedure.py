"""Run: the measuring procedure of one point, from the first call to its doubts. Start reading here."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from perfexp.algorithms import Algorithm
from perfexp.algorithms.default import Default
from perfexp.data import Batches, Data
from perfexp.data.rotating import Rotating, on_device
from perfexp.devices import Cache, Device
from perfexp.errors import RankLost, Unsupported, UserError
from perfexp.measure import baselines, graph_fallback, training, verdicts
from perfexp.measure.times import Times
from perfexp.models import Session
from perfexp.modes import Mode, Step, graphed
from perfexp.probes import Probe, ProbeContext, timing, work_rates
from perfexp.probes.energy import EnergyProcedure
from perfexp.ranks import SETTLING_CALLS, Alone, Crew, joint
from perfexp.records import diagnostics, disturbances, metrics
from perfexp.records.record import Key, Metric, Point, Status
from perfexp.records.summary import loop_interval
from perfexp.stopping import StoppingRule
from perfexp.work import Work

#: Calls under the eyes of the probes.
_PROBED_CALLS = 3


@dataclass(kw_only=True)
class Procedure:
    """What stays the same from point to point.

    Attributes:
        session: the loaded model.
        device: where it runs.
        data: where its inputs come from.
        modes: by phase.
        stopping: when enough has been measured.
        algorithm: that has been applied to the model.
        percentiles: that the latency is asked for.
        probes: by name.
        epochs: whole passes over the data in training, or None for as many steps as the stopping rule wants.
        cache: what a call finds in the device's caches.
        graph: whether calls are captured and launched as one (execution.cuda_graph).
        counts_work: whether MACs, FLOPs and bytes of the call are counted (probes.work).
        peaks: FLOP/s of the device's data sheet by data type; None for a device that has no such sheet.
        energy: measures that of a call (probes.energy), or None.
        ceilings: rates that the device reaches at best (probes.ceilings), or None.
        seed: of data and shuffling.
        progress: told what comes next, between timed blocks.
        crew: the other ranks, where there are several.
        compares_alone: whether several ranks are compared with one (probes.scaling).
    """

    session: Session
    device: Device
    data: Data
    modes: dict[str, Mode]
    stopping: StoppingRule
    algorithm: Algorithm = field(default_factory=Default)
    percentiles: Sequence[float] = (50.0, 95.0, 99.0)
    probes: dict[str, Probe] = field(default_factory=dict)
    epochs: int | None = None
    cache: Cache = Cache.warm
    graph: bool = False
    counts_work: bool = False
    peaks: Mapping[str, float | None] | None = field(default_factory=dict)
    energy: EnergyProcedure | None = None
    ceilings: Mapping[str, float] | None = None
    seed: int = 0
    crew: Crew = field(default_factory=Alone)
    compares_alone: bool = False
    progress: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._times = Times(
            device=self.device,
            stopping=self.stopping,
            percentiles=self.percentiles,
            cache=self.cache,
            progress=self.progress,
        )

    def begin(self) -> None:
        """What is measured once, before the first point, with everything loaded and nothing running."""
        if self.energy is not None:
            self.progress("idle power")
            try:
                self.energy.idle()
            except Exception:  # it is asked for again, and told, with each point
                traceback.print_exc()

    def measure(self, key: Key) -> Point:
        """Measure one point; whatever goes wrong with it becomes its status.

        Args:
            key: which point.

        Raises:
            UserError: what the user asked for can't be done for any point.
        """
        point = Point(key=key, status=Status.OK, started=datetime.now(UTC).isoformat(timespec="milliseconds"))
        several = self.crew.size > 1
        point.facts |= {"world_size": self.crew.size} if several else {}
        with verdicts.watching_the_host(point, of_ranks=several):
            self._measure_or_say_why(point)
        return point

    def _measure_or_say_why(self, point: Point) -> None:
        """Measure a point, or put what went wrong into it."""
        before = self.device.state()
        with metrics.collecting() as custom:
            try:
                self._measure(point)
            except UserError:
                raise
            except Exception as error:
                traceback.print_exc()
                if self.crew.size > 1 and self.crew.lost():
                    raise RankLost("another rank is no more") from error
                point.status, point.error = verdicts.verdict(error, self.device)
        point.metrics += custom.values()
        if not self.device.is_lost():
            self._close(point, before)

    def _close(self, point: Point, before: dict[str, Any]) -> None:
        """What the device says after a point; where its memory ran out, what it would be enough for."""
        if point.status is not Status.UNSUPPORTED and point.metric("memory/peak_bytes") is None:
            point.metrics += self.device.memory()
        after = self.device.state()
        point.facts |= {"device_before": before, "device_after": after}
        if point.status is Status.OK:
            point.doubts += disturbances.judge_device(before, after)
            verdicts.add_cycles(point, before, after)
        if point.status is Status.OOM:
            self._add_batch_that_fits(point)

    def _add_batch_that_fits(self, point: Point) -> None:
        if self.crew.size > 1:
            reason = "not sought with several ranks: they are not in step any more"
            point.metrics.append(Metric(name="batch_that_fits", value=None, unit="1", reason=reason))
            return
        fits = self._batch_that_fits(point.key)
        point.error = f"{point.error} {f'A batch of {fits} fits.' if fits else 'No smaller batch fits.'}"
        none_fits = None if fits else "not even one sample fits"
        point.metrics.append(Metric(name="batch_that_fits", value=fits, unit="1", reason=none_fits))

    def _batch_that_fits(self, key: Key) -> int | None:
        """The largest half, quarter, … of a batch of which two calls do not run out of memory; None if none does."""
        batch_size = key.batch_size // 2
        while batch_size:
            self.progress(f"does a batch of {batch_size} fit?")
            try:
                with self.step(msgspec.structs.replace(key, batch_size=batch_size)) as (step, batches):
                    for _ in range(2):  # the optimizer keeps its own tensors from the first step on
                        self.first_call(step, batches)
                return batch_size
            except Exception as error:
                if verdicts.verdict(error, self.device)[0] is not Status.OOM:
                    return None
            batch_size //= 2
        return None

    @contextmanager
    def step(self, key: Key) -> Iterator[tuple[Step, Batches]]:
        """The call of a point, on weights as they were loaded and with its memory counted from here.

        Args:
            key: of the point.
        """
        self.crew.open(key)
        self.algorithm.forget()
        self.session.reset()
        self.device.reset_peak_memory()
        mode = self.modes[key.phase]
        with self._batches(key, training=key.phase == "train") as batches:
            self.progress("first call")
            step = mode.prepare(session=self.session, batches=batches, batch_size=key.batch_size)
            with step.active():
                yield self.crew.joined(step), batches
        self.crew.close()

    def _measure(self, point: Point) -> None:
        with self.step(point.key) as (step, batches):
            first_loss = self.first_call(step, batches)
            self._report_algorithm(point)
            plain = step.call
            if self.graph:
                step = graphed(step, self.session, constant=batches.constant)
            self._warm_memory(point, step)
            self._settle(step)
            if step.trains and self.epochs:
                with self._batches(point.key, training=True) as anew:
                    training.run_epochs(point, step, anew, self.device, self.epochs, self.progress)
            else:
                self._times.whole(point, step.call)
            threads = self.session.facts().get("threads", 0)
            verdicts.judge_loader(point, self.device, workers=self.data.workers, threads=threads)
            point.metrics += self.device.memory()  # before whatever is not the call that was timed
            if step.trains:
                last_loss, steps = self.session.number(step.state.loss), self._steps_per_epoch(batches)
                training.add_figures(point, first_loss=first_loss, last_loss=last_loss, steps_per_epoch=steps)
            if self.data.labelled and (self.epochs or not step.trains):
                self._accuracy(point)  # before the passes below, which train on
            if self.energy is not None:
                measuring = partial(self._energy, point, step, batches, self.energy)
                self._aside(point, "energy/per_call_joules", measuring, "joules", together=True)
            self._of_algorithm(point, "launched_share", partial(self._launched_share, point))
            if len(step.segments) > 1:
                self._times.phases(point, step, held=on_device(batches))
            self._probe(point, step)
            # a capture may change how the optimizer counts: no time of the call itself comes after it
            self._of_algorithm(point, "rivals", partial(self._rivals, point, step, batches))
            if self.crew.size > 1:  # from here on the ranks' weights differ
                stretches = partial(self._ranks, point, step)
                self._aside(point, "ranks/samples_per_second", stretches, "samples/s", together=True)
            self._of_algorithm(point, "proof", partial(verdicts.prove, point, self.algorithm, plain), together=True)
            if point.facts.get("device_method") == "none":
                graph_fallback.add_device_time(
                    point,
                    step,
                    batches,
                    session=self.session,
                    times=self._times,
                    capture=self._capture(step, batches),
                    several_ranks=self.crew.size > 1,
                )
            if self.counts_work:  # when every time is there
                self._aside(point, "work/flops", partial(self._work, point, step, batches))
        self._of_algorithm(point, "output_error", partial(self._output_error, point))

    def _report_algorithm(self, point: Point) -> None:
        """By what the convolutions of the first call were computed; it is decided once for each shape."""
        report = self.algorithm.report()
        if report is None:
            return
        point.metrics += report.metrics()
        point.facts["algorithm"] = report.facts()
        point.doubts += report.doubts()

    def _of_algorithm(self, point: Point, figure: str, action: Callable[[], None], *, together: bool = False) -> None:
        """`_aside` on a point of an algorithm."""
        if "algorithm" in point.facts:
            self._aside(point, f"algorithm/{figure}", action, together=together)

    def _aside(
        self, point: Point, metric: str, action: Callable[[], None], unit: str = "1", *, together: bool = False
    ) -> None:
        """Work after everything has been timed: what goes wrong costs this figure only.

        Unless it was done together with other ranks: then they wait for what has not been done.
        """
        self.progress(metric.rpartition("/")[2])
        try:
            action()
        except Exception as error:
            out_of_step = together and self.crew.size > 1 and not isinstance(error, Unsupported)
            if isinstance(error, UserError) or out_of_step or self.device.is_lost():
                raise
            _, text = verdicts.verdict(error, self.device)
            point.metrics.append(Metric(name=metric, value=None, unit=unit, reason=text))

    def _ranks(self, point: Point, step: Step) -> None:
        """What the ranks do together."""
        joint.measure(point, step, self.crew, compares_alone=self.compares_alone)

    def _energy(self, point: Point, step: Step, batches: Batches, energy: EnergyProcedure) -> None:
        """The energy of a call, in a window of its own."""
        if self.cache is Cache.flush:
            raise Unsupported("energy is that of calls which follow one another: it has no cache=flush")
        calls = self._steps_per_epoch(batches) if step.trains else None
        start = time.perf_counter_ns()
        measured = energy.measure(
            step.call,
            images_per_call=point.key.batch_size * self.crew.size,
            trains=step.trains,
            calls_per_epoch=calls,
            clean=loop_interval(point),
            worked_seconds=self._times.worked_seconds(point),
        )
        measured.add_to(point)
        self._times.worked(point, (time.perf_counter_ns() - start) * 1e-9)

    def _work(self, point: Point, step: Step, batches: Batches) -> None:
        """What the call takes by definition, whatever computes it."""
        counted = self.work(step, batches)
        if counted is not None:
            work_rates.add(point, counted, self.peaks, self.ceilings)

    def work(self, step: Step, batches: Batches) -> Work | None:
        """What a call takes by definition: by torch's own convolutions, since an algorithm multiplies in its own way.

        Args:
            step: of the point.
            batches: likewise.

        Raises:
            Unsupported: the model can't be followed.
        """
        inputs = batches.next().inputs
        return self.algorithm.instead("default", lambda: self.session.work(inputs, training=step.trains))

    def _launched_share(self, point: Point) -> None:
        share = self.algorithm.launched_share()
        point.metrics += [share] if share else []

    def _output_error(self, point: Point) -> None:
        """By how much the algorithm changes what the model computes, on weights as they were loaded."""
        self.session.reset()
        with self._batches(point.key, training=False) as batches:
            error = self.algorithm.output_error(batches.next().inputs)
        point.metrics += [error] if error else []

    def _rivals(self, point: Point, step: Step, batches: Batches) -> None:
        """The whole call by the algorithm and by its rivals, in the same minute."""
        if not self.algorithm.rivals():
            return
        if self.graph or self.cache is not Cache.warm or self.crew.size > 1:
            raise Unsupported("rivals are compared on one card, without execution.cuda_graph and with cache=warm")

        baselines.judge(point, self.algorithm, step.call, self.device, self._capture(step, batches))

    def _capture(self, step: Step, batches: Batches) -> timing.Capture:
        return lambda: graphed(step, self.session, constant=batches.constant).call

    def _warm_memory(self, point: Point, step: Step) -> None:
        """The peak of the first calls, which choose kernels and make the optimizer's state; later peaks count anew."""
        step.call()
        self.device.synchronize()
        peak = next((metric for metric in self.device.memory() if metric.name == "memory/peak_bytes"), None)
        if peak is not None:
            point.metrics.append(msgspec.structs.replace(peak, name="memory/warmup_peak_bytes"))
        self.device.reset_peak_memory(give_back=False)

    def _settle(self, step: Step) -> None:
        """Calls after which a training that is shared waits for the device no more; they show in no time."""
        if self.crew.size > 1 and step.trains and self.device.asynchronous:
            for _ in range(SETTLING_CALLS):
                step.call()
            self.device.synchronize()

    @contextmanager
    def _batches(self, key: Key, *, training: bool) -> Iterator[Batches]:
        opened = self.data.open(
            session=self.session,
            input_size=key.input_size,
            batch_size=key.batch_size,
            training=training,
            seed=self.seed,
        )
        with opened as batches:
            rotate = self.cache is Cache.rotate and batches.constant
            yield Rotating(batches, self.session, self.device.cache_bytes) if rotate else batches

    def first_call(self, step: Step, batches: Batches) -> float | None:
        """The first call of a size, outside of every statistic; returns the first loss in training.

        Args:
            step: of the point.
            batches: likewise.
        """
        self.crew.first()
        self.first_forward(batches)
        step.call()
        self.device.synchronize()
        return self.session.number(step.state.loss) if step.trains else None

    def first_forward(self, batches: Batches) -> None:
        """A forward pass of a size for the first time.

        Args:
            batches: of the point.
        """
        self.session.first_forward(batches.next())
        self.algorithm.recount()

    def _steps_per_epoch(self, batches: Batches) -> int | None:
        """Steps in which all ranks together see the data once; None where it has no end."""
        return None if batches.per_epoch is None else math.ceil(batches.per_epoch / self.crew.size)

    def _accuracy(self, point: Point) -> None:
        """Top-1 accuracy over one pass of the evaluation data; not timed."""
        if self.data.num_classes != self.session.num_classes:
            reason = f"the model tells {self.session.num_classes} classes apart, the labels {self.data.num_classes}"
            point.metrics.append(Metric(name="accuracy", value=None, unit="1", reason=reason))
            return
        self.progress("accuracy")
        key, right, total = point.key, 0, 0
        with self._batches(key, training=False) as batches, self.session.inferring():
            for batch in batches.epoch():
                good, count = self.session.correct(self.session.forward(batch.inputs), batch.targets)
                right, total = right + good, total + count
        point.metrics.append(Metric(name="accuracy", value=right / total if total else None, unit="1"))
        if key.phase == "train" and not self.data.held_out:
            point.doubts.append(diagnostics.make("accuracy_of_training_data"))

    def _probe(self, point: Point, step: Step) -> None:
        """A few calls under the eyes of the probes, after the timing."""
        if not self.probes:
            return
        self.progress("probes")
        context = ProbeContext(key=point.key, step=step, session=self.session, device=self.device)
        with ExitStack() as stack:
            for probe in self.probes.values():
                stack.enter_context(probe.around(context))
            for _ in range(_PROBED_CALLS):
                step.call()
            self.device.synchronize()
