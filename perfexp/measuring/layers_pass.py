"""Layers pass: a point's call time layer by layer, after all timing in its process.

The result is a point of its own; its facts hold a line for each layer and pass (forward,
backward). `worker.points` calls `dissect` for each timed point (probes.layers). The module
`layers` explains the terms.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from perfexp.convolution import families
from perfexp.convolution.coverage import AlgorithmReport
from perfexp.data import Batches
from perfexp.errors import PerfexpError, UserError
from perfexp.measuring import graph_fallback, verdicts
from perfexp.measuring.context import Context
from perfexp.measuring.layers import LayerTimes, Pass
from perfexp.measuring.layers.table import Line, join
from perfexp.measuring.modes import Step, graphed
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import DEVICE_TIMES, first_median_interval, first_series
from perfexp.records.quantities import CLOSURE, GAP_SHARE, LAYER_FLOPS, UNATTRIBUTED
from perfexp.records.record import Key, Metric, Point, Status, timed_key, timestamp
from perfexp.statistics.estimators import Interval

#: Seconds of calls before the profiling, to bring the device to its clock during the timing.
_WARMUP_SECONDS = 0.15


def dissect(context: Context, key: Key, timed: Point | None, *, first: bool = True) -> Point:
    """Measure a point's layers and return them as a separate point; an error becomes its status.

    Args:
        key: key of the layers point.
        timed: the timed point, for comparison with the layer sum; None if there is none.
        first: whether this process has not profiled a point before; the first profile is slow.

    Raises:
        UserError: the plan asks for something that no point can do.
    """
    point = Point(key=key, status=Status.OK, started=timestamp())
    with verdicts.watching_the_host(point):
        try:
            _dissect(context, point, timed, first)
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            point.status, point.error = verdicts.verdict(error, context.device)
    return point


def not_tried(key: Key, timed: Point | None) -> Point:
    """Return a layers point for a call that could not be timed: profiling it would fail again."""
    point = Point(key=key, status=Status.OK)
    outcome = timed.status.value if timed else "no result"
    _add_reason(point, f"not tried: the call was not timed ({outcome})")
    return point


def _dissect(context: Context, point: Point, timed: Point | None, first: bool) -> None:
    """Profile the layers of a point's call and add them, or the reason why there are none.

    The call is the same as for the timed point's device time: captured as a graph, without
    synchronization or on batches that are on the device already, if that was.

    Args:
        point: the layers point to add to.
        timed: the timed point; None if there is none.
        first: whether this is the process's first profile.
    """
    session: Any = context.session
    if not hasattr(session, "module"):
        _add_reason(point, "the model is scripted: it has no layers")
        return
    if context.device.kind == "mps":
        _add_reason(
            point, "the layers of Apple's GPU have no times: the host only enqueues their work"
        )
        return
    unprofiled = first_median_interval(timed, *DEVICE_TIMES, "latency") if timed else None
    has_device_time = timed is not None and first_series(timed, *DEVICE_TIMES) is not None
    data_left_out = timed is not None and graph_fallback.HELD in timed.doubts
    from perfexp.measuring.layers.profiling import (
        profile_layers,  # imports torch, which a scripted model does not need
        stamp_layers,
    )

    with context.step(timed_key(point.key)) as (step, batches):
        context.first_call(step, batches)
        _warm_up(step.call, context)
        context.progress("layers")
        profile: Callable[..., LayerTimes] = stamp_layers
        if context.device.asynchronous:
            # a call that was timed as a graph is profiled as a graph
            is_graph = timed is not None and timed.facts.get("device_method") == "graph"
            capture = partial(_captured, context, step, batches) if is_graph else None
            profile = partial(profile_layers, first=first, capture=capture)
        with ExitStack() as stack:  # the same call as for the device time
            if data_left_out:
                stack.enter_context(graph_fallback.on_held_batches(step, batches, session))
            change = None
            if has_device_time:
                change = stack.enter_context(
                    graph_fallback.without_waits(step, session, context.device)
                )
            clean_seconds = unprofiled.value if unprofiled else None
            times = profile(step, session.module, context.device, clean_seconds=clean_seconds)
        work, why_no_work = None, None
        try:
            work = context.work(step, batches)
        except PerfexpError as error:
            why_no_work = str(error)
    if times.reason is not None:
        _add_reason(point, times.reason)
        return
    lines = join(times, work)
    if context.algorithm is not None:
        _add_kernels_that_ran(point, lines, context.algorithm.report())
    if context.device.kind == "cuda":
        _add_own_choice(lines)
    _add_times(point, times, lines, unprofiled)
    if data_left_out:
        point.doubts.append(graph_fallback.HELD)
    if change is not None:
        how = f"one that does not synchronize, {change}"
        point.doubts.append(diagnostics.make("device_leaves_out", how=how))
    if why_no_work:
        point.metrics.append(Metric.of(LAYER_FLOPS, None, reason=why_no_work))


def _captured(context: Context, step: Step, batches: Batches) -> Step | None:
    """Return the step as a graph, as `device` was timed; None if the capture fails this time."""
    context.progress("capturing a graph")
    try:
        return graphed(step, context.session, constant=batches.constant)
    except Exception:
        traceback.print_exc()
        if context.device.is_lost():
            raise
        return None


def _warm_up(call: Callable[[], object], context: Context) -> None:
    """Make calls for `_WARMUP_SECONDS`."""
    start_ns = context.device.now_ns()
    while (context.device.now_ns() - start_ns) * 1e-9 < _WARMUP_SECONDS:
        call()
        context.device.synchronize()


def _add_kernels_that_ran(point: Point, lines: Sequence[Line], report: AlgorithmReport) -> None:
    """Add the algorithm that each convolution's forward pass ran, as its kernels show.

    A diagnostic is added if that is not the requested algorithm.

    Args:
        lines: the layer lines; `ran` is set in those of convolutions.
        report: the algorithm requested for each layer.
    """
    forward: dict[str, list[Line]] = {}
    for line in lines:
        if (
            line.key
            and line.key.path
            and line.key.which is Pass.forward
            and line.key.operation is None
        ):
            forward.setdefault(line.key.path, []).append(line)
    kernels: dict[str, list[str]] = {}
    for path, of_layer in forward.items():
        kernels[path] = [name for line in of_layer for name in line.kernels]
    judged = families.judge_forward(report, kernels)
    # the first pass is forward
    ran = {layer.name: layer.passes[0].ran for layer in judged.layers if layer.passes}
    for path, of_layer in forward.items():
        for line in of_layer:
            line.ran = ran.get(path)
    for item in judged.doubts():
        if diagnostics.has([item], "algorithm_substituted"):
            note = (
                "; seen in the layers' kernels, which algorithm/flops_share does not count: it "
                "counts cuDNN's calls"
            )
            point.doubts.append(msgspec.structs.replace(item, message=item.message + note))


def _add_own_choice(lines: Sequence[Line]) -> None:
    """Set the algorithm that torch chose for a convolution's forward pass, from its kernels."""
    for line in lines:
        if line.convolution and line.ran is None and line.key and line.key.which is Pass.forward:
            line.ran = families.forward_algorithm(line.kernels)


def _add_reason(point: Point, reason: str) -> None:
    """Add why there are no layer times, as the reason of a missing metric."""
    point.metrics.append(Metric.of(CLOSURE, None, reason=reason))


def _add_times(
    point: Point, times: LayerTimes, lines: list[Line], unprofiled: Interval | None
) -> None:
    """Add the layer lines as facts, and metrics for how well their sum matches the call.

    Args:
        unprofiled: seconds of the call without profiling, with their interval; None if unknown.
    """
    point.facts["layers"] = {
        "method": times.method,
        "calls": times.calls,
        "starved": times.starved,
        "no_backward": times.no_backward,
        "own_seconds": times.own_seconds,
        "call_seconds": times.call_seconds,
        "lines": msgspec.to_builtins(lines),
    }
    point.doubts += [_with_uncertainty(item, times, unprofiled) for item in times.doubts]
    closure = times.closure
    if closure is None:
        reason = "there is no time of the call to compare with"
        for name in (CLOSURE, GAP_SHARE, UNATTRIBUTED):
            point.metrics.append(Metric.of(name, None, reason=reason))
        return
    point.metrics += [
        Metric.of(CLOSURE, closure.relative),
        Metric.of(GAP_SHARE, closure.gap_share),
        Metric.of(UNATTRIBUTED, closure.unattributed_share),
    ]


def _with_uncertainty(
    item: Diagnostic, times: LayerTimes, unprofiled: Interval | None
) -> Diagnostic:
    """Add the uncertainty of the unprofiled call time to a layers disagreement, if it matters."""
    half_width = unprofiled.relative_half_width if unprofiled else None
    tolerance = times.closure.tolerance if times.closure else 0.0
    if (
        not diagnostics.has([item], "layers_disagree")
        or half_width is None
        or half_width <= tolerance
    ):
        return item
    note = f"; the call without profiling is itself known to ±{half_width:.0%}"
    return msgspec.structs.replace(item, message=item.message + note)
