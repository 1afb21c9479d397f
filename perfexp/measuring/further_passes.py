"""Further passes over a timed call: energy, phases, probes, baselines, ranks, proof, work."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from perfexp.algorithms import AppliedAlgorithm
from perfexp.data import Batches
from perfexp.data.synthetic import on_device
from perfexp.devices import Cache
from perfexp.errors import Unsupported
from perfexp.measuring import baselines, energy_pass, graph_fallback, verdicts
from perfexp.modes import Step
from perfexp.probes import ProbeContext, timing, work_rates
from perfexp.ranks import joint
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

if TYPE_CHECKING:
    from perfexp.measuring.procedure import Procedure

#: Minimum processes of a stopping rule that also times the call as a graph: `normal` has five.
_GRAPH_PROCESSES = 5
#: Number of calls under the user's probes.
_PROBED_CALLS = 3


def measure(
    procedure: Procedure, point: Point, step: Step, batches: Batches, plain_call: timing.Call
) -> None:
    """Make the further passes over a call that has been timed.

    Args:
        plain_call: the call before its capture as a graph.
    """
    epoch = procedure.steps_per_epoch(batches) if step.trains else None
    parts = energy_pass.in_two_parts(procedure, point, step, batches, epoch)
    next_part_of_energy = partial(next, parts, None)
    if procedure.energy is not None:
        procedure.run_optional(point, ENERGY, next_part_of_energy, together=True)
    procedure.run_for_algorithm(
        point, "launched_share", partial(verdicts.add_launched_share, point)
    )
    if len(step.segments) > 1 and procedure.takes_call_times:
        procedure.times.phases(point, step, on_device=on_device(batches))
    _run_probes(procedure, point, step)
    # a capture may change how the optimizer counts, so the call itself is not timed after it
    procedure.run_for_algorithm(
        point, "rivals", partial(_compare_baselines, procedure, point, step, batches)
    )
    if procedure.group.size > 1:  # from here on the ranks' weights differ
        bursts = partial(
            joint.measure, point, step, procedure.group, compares_alone=procedure.compares_alone
        )
        procedure.run_optional(point, RANKS_RATE, bursts, together=True)
    elif procedure.compares_alone:
        reason = "this is one device alone"
        point.metrics.append(Metric.of(EFFICIENCY, None, reason=reason))
    procedure.run_for_algorithm(
        point, "proof", partial(verdicts.prove, point, plain_call), together=True
    )
    add_graph_time(procedure, point, step, batches)
    if procedure.energy is not None:
        procedure.run_optional(point, ENERGY, next_part_of_energy, together=True)
    if procedure.checks_outputs:
        procedure.run_optional(
            point, OUTPUT_ERROR, partial(_check_outputs, procedure, point, batches)
        )
    inputs = batches.next().inputs
    if (tokens := procedure.session.tokens(inputs)) is not None:
        work_rates.add_token_metrics(point, tokens, procedure.ceilings)
    if procedure.counts_work:  # last, because rates need every time
        procedure.run_optional(point, FLOPS, partial(_count_work, procedure, point, step, batches))


def add_graph_time(procedure: Procedure, point: Point, step: Step, batches: Batches) -> None:
    """Add the call's device time as a graph, as a fallback or for comparison.

    The fallback is for calls that do not fit the launch queue.
    """
    capture = procedure.capture(step, batches)
    method = point.facts.get("device_method")
    if method == "queue" and _has_graph_time(procedure, point.key, batches):
        graphed_time = partial(procedure.times.add_graph_time, point, capture)
        procedure.run_optional(point, GRAPH_SECONDS, graphed_time)
    if method != "none":
        return
    if procedure.group.size > 1:  # other ranks can't follow a replay or an aborted call
        point.doubts.append(
            diagnostics.make(
                "device_missing",
                reason=f"{graph_fallback.TOO_LONG}, and calls of several ranks are not captured",
                advice=graph_fallback.COMPILE,
            )
        )
        return
    graph_fallback.add_device_time(
        point, step, batches, procedure.session, procedure.times, capture
    )


def _run_probes(procedure: Procedure, point: Point, step: Step) -> None:
    """Make a few calls under the user's probes."""
    if not procedure.probes:
        return
    procedure.progress("probes")
    context = ProbeContext(
        key=point.key, step=step, session=procedure.session, device=procedure.device
    )
    with ExitStack() as stack:
        for probe in procedure.probes.values():
            stack.enter_context(probe.around(context))
        for _ in range(_PROBED_CALLS):
            step.call()
        procedure.device.synchronize()


def _compare_baselines(
    procedure: Procedure, point: Point, step: Step, batches: Batches, algorithm: AppliedAlgorithm
) -> None:
    """Time the whole call with the algorithm and with its baselines, in turns."""
    if algorithm.baselines():
        if procedure.graph or procedure.cache is not Cache.warm or procedure.group.size > 1:
            raise Unsupported("baselines need one GPU, cache=warm and no execution.cuda_graph")
        baselines.judge(
            point, algorithm, step.call, procedure.device, procedure.capture(step, batches)
        )


def _has_graph_time(procedure: Procedure, key: Key, batches: Batches) -> bool:
    """Return whether the call is also timed as a graph, for comparison.

    A replay must compute the same as the call, with caches in the same state.
    """
    is_alone, can_replay = (
        procedure.group.size == 1,
        procedure.cache is Cache.warm and on_device(batches),
    )
    is_wanted = (
        procedure.stopping.processes >= _GRAPH_PROCESSES
        and procedure.is_anchor(key)
        and not procedure.graph
    )
    return is_alone and can_replay and is_wanted


def _check_outputs(procedure: Procedure, point: Point, batches: Batches) -> None:
    from perfexp.measuring import correctness  # imports torch, which a scripted device doesn't

    correctness.add(procedure, point, batches)


def _count_work(procedure: Procedure, point: Point, step: Step, batches: Batches) -> None:
    counted = procedure.work(step, batches)
    if counted is not None:
        rates = procedure.peaks, procedure.ceilings, procedure.host_rate
        work_rates.add_work_metrics(point, counted, procedure.session.formats, *rates)
