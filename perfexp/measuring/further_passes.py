"""Further passes over a timed call: energy, phases, probes, baselines, ranks, proof, work."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from perfexp.convolution import AppliedAlgorithm
from perfexp.data import Batches
from perfexp.data.synthetic import on_device
from perfexp.devices import Cache
from perfexp.errors import Unsupported
from perfexp.measuring import baselines, energy_pass, graph_fallback, verdicts
from perfexp.measuring.context import Context
from perfexp.measuring.modes import Step
from perfexp.measuring.probes import ProbeContext, work_rates
from perfexp.measuring.ranks import joint
from perfexp.records import diagnostics
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
    """Make the further passes over a call that has been timed.

    Args:
        plain_call: the call before its capture as a graph.
    """
    epoch = context.steps_per_epoch(batches) if step.trains else None
    parts = energy_pass.in_two_parts(context, point, step, batches, epoch)
    next_part_of_energy = partial(next, parts, None)
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
    """Add the call's device time as a graph, as a fallback or for comparison.

    The fallback is for calls that do not fit the launch queue.
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
    """Make a few calls under the user's probes."""
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
    """Time the whole call with the algorithm and with its baselines, in turns."""
    if algorithm.baselines():
        if context.graph or context.cache is not Cache.warm or context.group.size > 1:
            raise Unsupported("baselines need one GPU, cache=warm and no execution.cuda_graph")
        baselines.judge(point, algorithm, step.call, context.device, context.capture(step, batches))


def _has_graph_time(context: Context, key: Key, batches: Batches) -> bool:
    """Return whether the call is also timed as a graph, for comparison.

    A replay must compute the same as the call, with caches in the same state.
    """
    is_alone, can_replay = (
        context.group.size == 1,
        context.cache is Cache.warm and on_device(batches),
    )
    is_wanted = (
        context.stopping.processes >= _GRAPH_PROCESSES
        and context.is_anchor(key)
        and not context.graph
    )
    return is_alone and can_replay and is_wanted


def _check_outputs(context: Context, point: Point, batches: Batches) -> None:
    from perfexp.measuring import correctness  # imports torch, which a scripted device doesn't

    correctness.add(context, point, batches)


def _count_work(context: Context, point: Point, step: Step, batches: Batches) -> None:
    counted = context.work(step, batches)
    if counted is not None:
        rates = context.peaks, context.ceilings, context.host_rate
        work_rates.add_work_metrics(point, counted, context.session.formats, *rates)
