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
import numpy as np

from perfexp import doubts, environment, metrics, rivals, stats, verdicts
from perfexp.algorithms import Algorithm
from perfexp.algorithms.default import Default
from perfexp.data import Batches, Data
from perfexp.data.rotating import Rotating
from perfexp.devices import Cache, Device
from perfexp.errors import RankLost, Unsupported, UserError
from perfexp.models import Session
from perfexp.modes import Mode, Step, graphed
from perfexp.probes import Probe, ProbeContext, queue, timing, work
from perfexp.probes.energy import EnergyProcedure
from perfexp.ranks import Alone, Crew, joint
from perfexp.record import Key, Metric, Point, Series, Status, Stop
from perfexp.stopping import StoppingRule
from perfexp.summary import first_median
from perfexp.work import Work

#: The sum of a call's phases may differ from the whole call by this fraction before the point says so.
_PHASES_TOLERANCE = 0.05
#: A device that has been idle for so long is no longer warm.
_COOLING_SECONDS = 1.0
#: Calls under the eyes of the probes.
_PROBED_CALLS = 3


class _Counted:
    """A call that counts how often it is called."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self.calls = call, 0

    def __call__(self) -> None:
        self._call()
        self.calls += 1


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
        peaks: FLOP/s of the device's data sheet by data type.
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
    peaks: Mapping[str, float | None] = field(default_factory=dict)
    energy: EnergyProcedure | None = None
    ceilings: Mapping[str, float] | None = None
    seed: int = 0
    crew: Crew = field(default_factory=Alone)
    compares_alone: bool = False
    progress: Callable[[str], None] = lambda _: None
    _last: tuple[Key, float, int] | None = None

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
        start, others = time.perf_counter_ns(), environment.other_cpu_seconds(of_ranks=several)
        before = self.device.state()
        with metrics.collecting() as custom:
            try:
                self._measure(point)
            except UserError:
                raise
            except Exception as error:
                traceback.print_exc()
                if several and self.crew.lost():
                    raise RankLost("another rank is no more") from error
                point.status, point.error = verdicts.verdict(error, self.device)
        point.metrics += custom.values()
        if not self.device.is_lost():
            self._close(point, before)
        point.wall_seconds = (time.perf_counter_ns() - start) * 1e-9
        other_cores = (environment.other_cpu_seconds(of_ranks=several) - others) / point.wall_seconds
        point.facts["other_cpu_cores"] = round(other_cores, 3)
        if point.status is Status.OK and other_cores > doubts.BUSY_SHARE * environment.cores():
            point.doubts.append(doubts.busy_host(other_cores, environment.cores()))
        return point

    def _close(self, point: Point, before: dict[str, Any]) -> None:
        """What the device says after a point; where its memory ran out, what it would be enough for."""
        if point.status is not Status.UNSUPPORTED and point.metric("memory/peak_bytes") is None:
            point.metrics += self.device.memory()
        after = self.device.state()
        point.facts |= {"device_before": before, "device_after": after}
        if point.status is Status.OK:
            point.doubts += doubts.of_device(before, after)
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
            if step.trains and self.epochs:
                self._epochs(point, step)
            else:
                self._times(point, step)
            point.metrics += self.device.memory()  # before whatever is not the call that was timed
            if step.trains:
                self._training_figures(point, step, batches, first_loss)
            if self.data.labelled and (self.epochs or not step.trains):
                self._accuracy(point)  # before the passes below, which train on
            if self.energy is not None:
                measuring = partial(self._energy, point, step, batches, self.energy)
                self._aside(point, "energy/per_call_joules", measuring, "joules", together=True)
            self._of_algorithm(point, "rivals", partial(self._rivals, point, step, batches))
            if len(step.segments) > 1:
                self._phases(point, step, held=batches.constant or isinstance(batches, Rotating))
            self._probe(point, step)
            if self.crew.size > 1:  # from here on the ranks' weights differ
                stretches = partial(self._ranks, point, step)
                self._aside(point, "ranks/samples_per_second", stretches, "samples/s", together=True)
            self._of_algorithm(point, "proof", partial(verdicts.prove, point, self.algorithm, plain), together=True)
            if point.facts.get("device_method") == "none":
                self._device_time_by_graph(point, step, batches)
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
        clean = first_median(point, "throughput" if self.device.asynchronous else "latency")
        start = time.perf_counter_ns()
        measured = energy.measure(
            step.call,
            images_per_call=point.key.batch_size * self.crew.size,
            trains=step.trains,
            calls_per_epoch=calls,
            clean_seconds=clean,
        )
        measured.add_to(point)
        end = time.perf_counter_ns()  # the device has worked all the while
        self._last = (point.key, verdicts.device_seconds(point) + (end - start) * 1e-9, end)

    def _work(self, point: Point, step: Step, batches: Batches) -> None:
        """What the call takes by definition, whatever computes it."""
        counted = self.work(step, batches)
        if counted is not None:
            work.add(point, counted, self.peaks, self.ceilings)

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

        def capture() -> timing.Call:
            return graphed(step, self.session, constant=batches.constant).call

        rivals.judge(point, self.algorithm, step.call, self.device, capture)

    def _warm_memory(self, point: Point, step: Step) -> None:
        """The peak of the first calls, which choose kernels and make the optimizer's state; later peaks count anew."""
        step.call()
        self.device.synchronize()
        peak = next((metric for metric in self.device.memory() if metric.name == "memory/peak_bytes"), None)
        if peak is not None:
            point.metrics.append(msgspec.structs.replace(peak, name="memory/warmup_peak_bytes"))
        self.device.reset_peak_memory(give_back=False)

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

    def _times(self, point: Point, step: Step) -> None:
        """The undisturbed call: one time on a synchronous device, three on an asynchronous one."""
        if self.device.asynchronous:
            self._asynchronous_times(point, step)
        else:
            self._synchronous_time(point, step)

    def _synchronous_time(self, point: Point, step: Step) -> None:
        self.progress("latency")
        monitor = self.stopping.begin(percentiles=self.percentiles)
        point.series.append(timing.series("latency", timing.HostChain(step.call, self.device, self._flush()), monitor))

    def _asynchronous_times(self, point: Point, step: Step) -> None:
        counted = _Counted(step.call)
        k, chunk, call_seconds = queue.fit(counted, self.device, self._flush())
        if self.cache is not Cache.flush:  # a loop with something between its calls is not the loop that is meant
            host = queue.issue_seconds(counted, self.device, chunk * k) if chunk else None
            reason = None if chunk else "a call does not fit into the device's queue, and the host waits for room"
            point.metrics.append(Metric(name="loop/host_seconds", value=host, unit="seconds", reason=reason))
            self.progress("throughput")
            loop = queue.Loop(step.call, self.device, k)
            self._take(point, "throughput", loop, k, busy_seconds=counted.calls * call_seconds)
        self.progress("latency")
        latency = timing.Latency(step.call, self.device, self._flush())
        self._take(point, "latency", latency, percentiles=self.percentiles)
        point.facts["device_method"] = "queue" if chunk else "none"
        if chunk:
            self._device_time(point, step.call, k, chunk)

    def _take(
        self,
        point: Point,
        name: str,
        block: Callable[[int], timing.Samples],
        k: int = 1,
        percentiles: Sequence[float] = (),
        busy_seconds: float = 0.0,
    ) -> Series:
        """A series until the stopping rule has enough; the blocks before it, and other calls, have warmed it up."""
        busy_seconds += self._carried_seconds(point.key) + verdicts.busy_seconds(point)
        monitor = self.stopping.begin(calls_per_sample=k, percentiles=percentiles, busy_seconds=busy_seconds)
        series = timing.series(name, block, monitor, k)
        point.series.append(series)
        self._last = (point.key, verdicts.device_seconds(point), time.perf_counter_ns())
        return series

    def _carried_seconds(self, key: Key) -> float:
        """For how long the device has worked on the point before, if that was of the same kind and has just ended."""
        if self._last is None:
            return 0.0
        before, busy_seconds, ended_ns = self._last
        alike = before != key and msgspec.structs.replace(before, input_size=key.input_size) == key
        idle_seconds = (time.perf_counter_ns() - ended_ns) * 1e-9
        return busy_seconds if alike and idle_seconds < _COOLING_SECONDS else 0.0

    def _device_time(self, point: Point, call: timing.Call, k: int, chunk: int) -> None:
        """The device's own time, and what it says of the loop."""
        self.progress("device time")
        device, flush = self.device, self._flush()
        held = queue.Chain(call, device, chunk, k, flush=flush)
        series = self._take(point, "device", held, k)
        verdicts.judge_bound(point)
        if held.held.starved:
            point.doubts.append(doubts.queue_starved(held.held.starved))
        if flush is not None and series.measured:
            uncertain_seconds = device.event_tick_seconds + device.record_seconds
            doubt = doubts.below_resolution(float(np.median(series.measured)), uncertain_seconds)
            point.doubts += [doubt] if doubt else []

    def _device_time_by_graph(self, point: Point, step: Step, batches: Batches) -> None:
        """The device's time of a call that its queue does not take: as one launch, if it can be captured."""
        if self.crew.size > 1:  # a replay, or a call that is broken off, is nothing that others could follow
            point.doubts.append(doubts.queue_exceeded("calls of several ranks are not captured"))
            return
        waits = self.device.waits_inside(step.call)
        self.progress("capturing a graph")
        try:
            if self.cache is Cache.rotate:
                raise Unsupported("a graph always reads the same inputs, which cache=rotate does not want")
            call = graphed(step, self.session, constant=batches.constant).call
            k, chunk, *_ = queue.fit(call, self.device, self._flush())
            if not chunk:
                raise Unsupported("neither does the queue take the call as a graph")
        except Exception as error:
            if self.device.is_lost():
                raise
            status, text = verdicts.verdict(error, self.device)  # what has been measured stays, whatever it is
            reason = "the memory is not enough for its graph" if status is Status.OOM else text
            point.doubts.append(doubts.synchronising(reason) if waits else doubts.queue_exceeded(reason))
            return
        self._device_time(point, call, k, chunk)
        point.facts["device_method"] = "graph"

    def _flush(self) -> timing.Call | None:
        return self.device.flush_cache if self.cache is Cache.flush else None

    def _epochs(self, point: Point, step: Step) -> None:
        """Whole passes over the data: every step's time, and the runtime of each pass."""
        assert self.epochs is not None
        usual, steps, epoch_seconds = step.state.source, [], []
        # from data opened anew: what the first call left prefetched would be drained in the first pass
        with self._batches(point.key, training=True) as batches:
            if batches.per_epoch is None:
                raise UserError("epochs=N needs data with an end: give data.num_samples, or data=images.")
            for epoch in range(self.epochs):
                self.progress(f"epoch {epoch + 1} of {self.epochs}")
                step.state.source = batches.epoch().__next__
                with timing.undisturbed():
                    seconds, whole = timing.whole_pass(step.call, self.device)
                steps.append(seconds)
                epoch_seconds.append(whole)
        step.state.source = usual
        everything = np.concatenate(steps)
        # the stopping rule did not choose these steps, so the first ones are warm-up by the rule of MSER-5 alone
        warmup = stats.mser5_cut(everything)
        stop = Stop(reason="epochs", achieved=stats.median_interval(everything[warmup:]).relative_half_width)
        kind = "throughput" if self.device.asynchronous else "latency"  # nothing waits for a step
        point.series.append(Series(name=kind, samples=everything.tolist(), warmup=warmup, stop=stop))
        point.series.append(Series(name="epoch", samples=epoch_seconds, stop=Stop(reason="epochs")))
        point.metrics.append(Metric(name="total_runtime_seconds", value=sum(epoch_seconds), unit="seconds"))

    def _phases(self, point: Point, step: Step, *, held: bool) -> None:
        """The call's parts, from a pass of their own; their sum has to be the whole call.

        With data that is on the device already they are the device's times, as `device` is; with data that comes from
        elsewhere the waiting for it is a part.
        """
        self.progress("phases")
        chunk = 0
        if held and self.device.asynchronous:
            chunk = queue.samples_in_queue(queue.Segments(step.segments, self.device).once, self.device)
        block = queue.Segments(step.segments, self.device, chunk)
        sums, warmup, stop = timing.collect(block, self.stopping.begin(busy_seconds=verdicts.busy_seconds(point)))
        for name, seconds in block.parts().items():
            point.series.append(Series(name=f"phase/{name}", samples=seconds.tolist(), warmup=warmup, stop=stop))
        data = point.find_series("phase/data")
        if data is not None:
            share = sum(data.measured) / float(sums[warmup:].sum())
            point.metrics.append(Metric(name="data_share", value=share, unit="1"))
        names = ("device", "throughput", "latency") if chunk else ("throughput", "latency")
        whole = next((series for name in names if (series := point.find_series(name)) and series.measured), None)
        if whole is None or self.cache is Cache.flush:  # the phases follow one another, with warm caches
            return
        ratio = float(np.median(sums[warmup:])) / stats.median_interval(whole.measured).value
        point.metrics.append(Metric(name="phases_over_whole", value=ratio, unit="1"))
        if abs(ratio - 1) > _PHASES_TOLERANCE:
            point.doubts.append(doubts.phases_disagree(ratio))

    def _training_figures(self, point: Point, step: Step, batches: Batches, first_loss: float | None) -> None:
        last = self.session.number(step.state.loss)
        for name, loss in (("loss_first", first_loss), ("loss_last", last)):
            finite = loss is not None and np.isfinite(loss)
            reason = None if finite else f"the loss is {loss}"
            point.metrics.append(Metric(name=f"train/{name}", value=loss if finite else None, unit="1", reason=reason))
        if not np.isfinite(last):
            point.doubts.append(doubts.loss_not_finite(last))
        point.metrics.append(verdicts.epoch_metric(point, self._steps_per_epoch(batches)))

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
            point.doubts.append(doubts.accuracy_of_training_data())

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
