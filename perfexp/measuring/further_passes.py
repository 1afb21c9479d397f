"""Further passes over a timed call: energy, phases, probes, baselines, ranks, proof, work.

`procedure` calls `measure` once a point's series are complete. A pass that fails leaves its metric
missing, with the reason, and affects no other pass. The order matters: what a pass changes for good
(a captured graph, diverged weights) comes after the passes that it would disturb.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from perfexp.convolution import AppliedAlgorithm
from perfexp.data import Batches
from perfexp.data.synthetic import on_device
from perfexp.devices import Cache
from perfexp.devices.meters import Reading
from perfexp.devices.meters.energy_metrics import another_pace
from perfexp.errors import Unsupported, UserError, Waits
from perfexp.measuring import baselines, graph_fallback, verdicts
from perfexp.measuring.context import Context
from perfexp.measuring.graph_fallback import on_held_batches, without_waits
from perfexp.measuring.modes import Step, graphed
from perfexp.measuring.probes import ProbeContext, work_rates
from perfexp.measuring.probes.energy import EnergyProcedure, Plateau, calls_per_unit
from perfexp.measuring.ranks import joint
from perfexp.records import diagnostics
from perfexp.records.point_times import DEVICE_TIMES, first_median_interval, loop_interval
from perfexp.records.quantities import (
    EFFICIENCY,
    ENERGY,
    FLOPS,
    GRAPH_SECONDS,
    OUTPUT_ERROR,
    RANKS_RATE,
)
from perfexp.records.record import Key, Metric, Point
from perfexp.timing import collecting

#: Minimum processes of a stopping rule that also times the call as a graph: `normal` has five.
_GRAPH_PROCESSES = 5
#: Number of calls under the user's probes.
_PROBED_CALLS = 3


def measure(
    context: Context, point: Point, step: Step, batches: Batches, plain_call: collecting.Call
) -> None:
    """Make the further passes over a call that has been timed, and add their results to the point.

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
    add_graph_time(context, point, step, batches)
    if context.energy is not None:
        context.run_optional(point, ENERGY, next_part_of_energy, together=True)
    if context.checks_outputs:
        context.run_optional(point, OUTPUT_ERROR, partial(_check_outputs, context, point, batches))
    inputs = batches.next().inputs
    if (tokens := context.session.tokens(inputs)) is not None:
        work_rates.add_token_metrics(point, tokens, context.ceilings)
    if context.counts_work:  # last, because rates need every time
        context.run_optional(point, FLOPS, partial(_count_work, context, point, step, batches))


def add_graph_time(context: Context, point: Point, step: Step, batches: Batches) -> None:
    """Add the call's device time as a CUDA graph, as a fallback or for comparison.

    The fallback is for calls that do not fit the launch queue. Later processes of a point make only
    this pass.
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


def _check_outputs(context: Context, point: Point, batches: Batches) -> None:
    """Compare the outputs with plain fp32 outputs; see `correctness.add`."""
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
        loop: the same calls in a loop.

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
