"""Procedure: how a point is measured, from its first call to its last check. Start reading here.

The order ensures that no measurement disturbs an earlier measurement:

1. the first call, which chooses kernels and enters no statistics;
2. the undisturbed call times (`perfexp.measuring.times`) and the memory peak;
3. results that need a training or labels: losses, epoch time, accuracy;
4. further passes over the same call: loop energy, phases, probes, baselines, several ranks,
   algorithm proof, device time as a CUDA graph, device energy, work. Any of them may fail without
   affecting the others: its metric is then missing, with the reason.

Only the first process of a point does all this; later processes repeat the times, and compare with
the baselines.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from perfexp.convolution import AppliedAlgorithm
from perfexp.data import Batches
from perfexp.data.synthetic import on_device
from perfexp.devices import Cache
from perfexp.devices.meters import Reading
from perfexp.devices.meters.energy_metrics import another_pace
from perfexp.errors import RankLost, Unsupported, UserError, Waits
from perfexp.measuring import baselines, graph_fallback, memory_search, training, verdicts
from perfexp.measuring.context import Context, without_exit
from perfexp.measuring.epochs import EpochTraining
from perfexp.measuring.graph_fallback import on_held_batches, without_waits
from perfexp.measuring.modes import Step, graphed
from perfexp.measuring.modes.train import Train
from perfexp.measuring.probes import ProbeContext, work_rates
from perfexp.measuring.probes.energy import EnergyProcedure, Plateau, calls_per_unit
from perfexp.measuring.ranks import SETTLING_CALLS, joint
from perfexp.records import diagnostics, metrics, point_diagnostics
from perfexp.records.point_times import DEVICE_TIMES, first_median_interval, loop_interval
from perfexp.records.quantities import (
    EFFICIENCY,
    ENERGY,
    FINITE,
    FIRST_MEMORY,
    FLOPS,
    GRAPH_SECONDS,
    OUTPUT_ERROR,
    PEAK_MEMORY,
    RANKS_RATE,
)
from perfexp.records.record import Key, Metric, Point, Status, timestamp
from perfexp.timing import collecting

#: Minimum processes of a stopping rule that also times the call as a graph: `normal` has five.
_GRAPH_PROCESSES = 5
#: Number of calls under the user's probes.
_PROBED_CALLS = 3


@dataclass(kw_only=True)
class Procedure(Context):
    """Measures points one after the other, each in the order of the module's docstring.

    `worker.points` calls `begin` once and `measure` for each point.
    """

    def begin(self) -> None:
        """Measure the idle power before the first point, with the model loaded and idle."""
        if self.energy is not None:
            self.progress("idle power")
            try:
                self.energy.idle()
            except Exception:  # every point tries again and records the error
                traceback.print_exc()

    def measure(self, key: Key) -> Point:
        """Measure a point and return it with its series, metrics, facts and diagnostics.

        An error in the point becomes its status, for example `oom`.

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
        """Take all measurements of a point, in the order given in the module docstring.

        Any error ends the point; `measure` turns it into a status.
        """
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
            # before any further pass, which may need more memory
            point.metrics += [*self.device.memory(), *self.session.compilation()]
            # torch's search chooses other algorithms in each process, so each compares
            if point.key.replicate:
                self.run_for_algorithm(
                    point, "rivals", partial(_compare_baselines, self, point, step, batches)
                )
                _add_graph_time(self, point, step, batches)
                return
            if step.trains:
                training.add_figures(
                    point,
                    first_loss=first_loss,
                    last_loss=self.session.number(step.state.loss),
                    steps_per_epoch=self.steps_per_epoch(batches),
                )
            else:
                self.run_optional(point, FINITE, partial(self._check_outputs, point, step))
            if self.data.labelled and not step.trains:
                opened = partial(self._batches, point.key, training=False)
                training.add_accuracy(point, self.session, self.data, opened, self.progress)
            _make_further_passes(self, point, step, batches, plain_call)
        # after the step is closed, on the weights as they were loaded
        self.run_for_algorithm(point, "output_error", partial(self._measure_output_error, point))

    def _measure_warmup_memory(self, point: Point, step: Step) -> None:
        """Make another call, add the memory peak of the calls so far, then reset it.

        The first two calls choose kernels and create the optimizer state, so they can need more
        than later calls.
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
        """Train for `count` whole epochs, on newly opened batches, and add their figures.

        The batches of the first call can't serve: that call has prefetched from them.
        """

        def opened(training: bool, epoch: int) -> AbstractContextManager[Batches]:
            return self._batches(point.key, training=training, epoch=epoch)

        mode = self.modes["train"]
        settings = mode if isinstance(mode, Train) else Train(optimizer={})
        checkpoint = self.checkpoint
        if point.key.replicate or not settings.checkpoints:
            checkpoint = None
        EpochTraining(
            point=point,
            step=step,
            session=self.session,
            device=self.device,
            data=self.data,
            count=count,
            open=opened,
            seed=self.seed,
            checkpoint=checkpoint,
            progress=self.progress,
            report=self.report,
            settings=settings,
            probes=self.probes.values(),
        ).run()

    def _measure_output_error(self, point: Point, algorithm: AppliedAlgorithm) -> None:
        """Add the relative error of the algorithm's outputs; nothing if it computed no layer."""
        self.session.reset()
        with self._batches(point.key, training=False) as batches:
            error = algorithm.output_error(batches.next().inputs)
            point.metrics += [] if error is None else [error]

    def _close(self, point: Point, before: dict[str, Any]) -> None:
        """Add device memory and state; after an out-of-memory error, also the batch that fits.

        Args:
            before: device state when the point began.
        """
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


def _make_further_passes(
    context: Context, point: Point, step: Step, batches: Batches, plain_call: collecting.Call
) -> None:
    """Make the further passes over a call that has been timed, and add their results to the point.

    What a pass changes for good (a captured graph, diverged weights) comes after the passes that it
    would disturb.

    Args:
        step: the call, captured as a graph if the plan says so (execution.cuda_graph).
        plain_call: the call before its capture as a graph.
    """
    calls_per_epoch = context.steps_per_epoch(batches) if step.trains else None
    energy_parts = _measure_energy_in_two_parts(context, point, step, batches, calls_per_epoch)
    next_part_of_energy = partial(next, energy_parts, None)
    if context.energy is not None:
        context.run_optional(point, ENERGY, next_part_of_energy, together=True)
    context.run_for_algorithm(point, "launched_share", partial(verdicts.add_launched_share, point))
    if len(step.segments) > 1 and context.takes_call_times:
        context.times.phases(point, step, on_device=on_device(batches))
    _run_probes(context, point, step)
    # a capture may change how the optimizer counts, so the call itself is not timed after it
    context.run_for_algorithm(
        point, "rivals", partial(_compare_baselines, context, point, step, batches)
    )
    if context.group.size > 1:  # from here on the ranks' weights differ
        bursts = partial(
            joint.measure, point, step, context.group, compares_alone=context.compares_alone
        )
        context.run_optional(point, RANKS_RATE, bursts, together=True)
    elif context.compares_alone:
        reason = "this is one device alone"
        point.metrics.append(Metric.of(EFFICIENCY, None, reason=reason))
    context.run_for_algorithm(
        point, "proof", partial(verdicts.prove, point, plain_call), together=True
    )
    _add_graph_time(context, point, step, batches)
    if context.energy is not None:
        context.run_optional(point, ENERGY, next_part_of_energy, together=True)
    if context.checks_outputs:
        context.run_optional(
            point, OUTPUT_ERROR, partial(_compare_outputs, context, point, batches)
        )
    inputs = batches.next().inputs
    if (tokens := context.session.tokens(inputs)) is not None:
        work_rates.add_token_metrics(point, tokens, context.ceilings)
    if context.counts_work:  # last, because rates need every time
        context.run_optional(point, FLOPS, partial(_count_work, context, point, step, batches))


def _add_graph_time(context: Context, point: Point, step: Step, batches: Batches) -> None:
    """Add the call's device time as a CUDA graph, as a fallback or for comparison.

    The fallback is for calls that do not fit the launch queue. Later processes of a point make
    this pass, too.
    """
    capture = context.capture(step, batches)
    method = point.facts.get("device_method")
    if method == "queue" and _has_graph_time(context, point.key, batches):
        graphed_time = partial(context.times.add_graph_time, point, capture)
        context.run_optional(point, GRAPH_SECONDS, graphed_time)
    if method != "none":
        return
    if context.group.size > 1:  # other ranks can't follow a replay or an aborted call
        point.doubts.append(
            diagnostics.make(
                "device_missing",
                reason=f"{graph_fallback.TOO_LONG}, and calls of several ranks are not captured",
                advice=graph_fallback.COMPILE,
            )
        )
        return
    graph_fallback.add_device_time(point, step, batches, context.session, context.times, capture)


def _run_probes(context: Context, point: Point, step: Step) -> None:
    """Make a few calls inside all of the user's probes, which add metrics with `perfexp.metric`."""
    if not context.probes:
        return
    context.progress("probes")
    probe_context = ProbeContext(
        key=point.key, step=step, session=context.session, device=context.device
    )
    with ExitStack() as stack:
        for probe in context.probes.values():
            stack.enter_context(probe.around(probe_context))
        for _ in range(_PROBED_CALLS):
            step.call()
        context.device.synchronize()


def _compare_baselines(
    context: Context, point: Point, step: Step, batches: Batches, algorithm: AppliedAlgorithm
) -> None:
    """Time the whole call with the algorithm and with its baselines, in turns.

    Raises:
        Unsupported: other settings of the plan rule a comparison out.
    """
    if algorithm.baselines():
        if context.graph or context.cache is not Cache.warm or context.group.size > 1:
            raise Unsupported("baselines need one GPU, cache=warm and no execution.cuda_graph")
        baselines.judge(point, algorithm, step.call, context.device, context.capture(step, batches))


def _has_graph_time(context: Context, key: Key, batches: Batches) -> bool:
    """Return whether the call is also timed as a graph, for comparison.

    A replay must compute the same as the call, with caches in the same state.
    """
    can_replay = context.group.size == 1 and context.cache is Cache.warm and on_device(batches)
    is_wanted = (
        context.stopping.processes >= _GRAPH_PROCESSES
        and context.is_anchor(key)
        and not context.graph
    )
    return can_replay and is_wanted


def _compare_outputs(context: Context, point: Point, batches: Batches) -> None:
    """Compare the outputs with plain fp32 outputs (probes.correctness); see `correctness.add`."""
    from perfexp.measuring import correctness  # imports torch, which a scripted device doesn't

    correctness.add(context, point, batches)


def _count_work(context: Context, point: Point, step: Step, batches: Batches) -> None:
    """Add the call's work and the rates that follow; nothing for a scripted model."""
    counted = context.work(step, batches)
    if counted is not None:
        rates = context.peaks, context.ceilings, context.host_rate
        work_rates.add_work_metrics(point, counted, context.session.formats, *rates)


def _measure_energy_in_two_parts(
    context: Context, point: Point, step: Step, batches: Batches, calls_per_epoch: int | None
) -> Iterator[None]:
    """Add the energy per call in two parts, before and after the yield.

    The first part measures calls in a loop, before anything is captured: the device may wait for
    the host. If it does, the second part measures graph replays, which keep it busy. Then it adds
    all energy figures to the point.

    Args:
        point: a point with its whole call already timed.
        calls_per_epoch: training steps per epoch; None for endless data and for inference.

    Raises:
        Unsupported: the plan empties the caches before each call.
    """
    energy = context.energy
    if energy is None:
        return
    if context.cache is Cache.flush:
        raise Unsupported(
            "energy is measured on back-to-back calls, which cache=flush does not allow"
        )
    start = time.perf_counter_ns()
    loop = energy.plateau(step.call, context.times.worked_seconds(point))
    context.times.worked(point, (time.perf_counter_ns() - start) * 1e-9)
    yield
    queued: Plateau | Reading | None = None
    if loop is not None and context.is_anchor(point.key):
        if context.device.asynchronous:
            queued = _measure_replay_energy(context, energy, loop, point, step, batches)
        energy.rest()
    calls_per = calls_per_unit(
        images_per_call=point.key.batch_size * context.group.size,
        trains=step.trains,
        calls_per_epoch=calls_per_epoch,
    )
    energy.report(loop, calls_per, clean=loop_interval(point), queued=queued).add_to(point)


def _measure_replay_energy(
    context: Context,
    energy: EnergyProcedure,
    loop: Plateau,
    point: Point,
    step: Step,
    batches: Batches,
) -> Plateau | Reading | None:
    """Measure the power of graph replays of the call, which keep the device busy.

    Args:
        loop: energy of calls in a loop.

    Returns:
        None if the loop keeps the device busy as well. A reading with a reason if replays are not
            possible.
    """
    device, session = context.device, context.session
    device_seconds = first_median_interval(point, *DEVICE_TIMES)
    if device_seconds is not None and not another_pace(loop.call_seconds, device_seconds):
        return None
    if reason := _why_not_captured(context):
        return Reading(None, reason)
    if device_seconds is None:
        return Reading(None, "the call can't be captured, so the device's own pace is not known")
    context.progress("capturing a graph")
    try:
        with on_held_batches(step, batches, session), without_waits(step, session, device):
            return energy.plateau(graphed(step, session, constant=batches.constant).call)
    except Waits:
        return Reading(None, "the call synchronizes, so it can't be captured")
    except Exception as error:
        if device.is_lost() or isinstance(error, UserError):
            raise
        return Reading(None, verdicts.verdict(error, device)[1])


def _why_not_captured(context: Context) -> str:
    """Return why calls must not be captured; empty if they may be."""
    if context.group.size > 1:
        return "calls of several ranks are not captured"
    if context.graph:
        return "the call is a graph already"
    if context.cache is Cache.rotate:
        return "with cache=rotate calls are not captured"
    return ""
