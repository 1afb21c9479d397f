"""Dissect: where the time of a point's call goes, layer by layer; in a process of its own, after it has been timed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from perfexp.algorithms.coverage import AlgorithmReport
from perfexp.algorithms.families import judge_forward
from perfexp.data import Batches
from perfexp.errors import PerfexpError, UserError
from perfexp.layers import LayerTimes, Pass
from perfexp.layers.table import Line, join
from perfexp.measure import graph_fallback, verdicts
from perfexp.measure.procedure import Procedure
from perfexp.modes import Step, graphed
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Key, Metric, Point, Status, timed_key
from perfexp.records.summary import first_interval
from perfexp.statistics.estimators import Interval
from perfexp.work import Work

#: The device works for so long on the calls before they are looked into, so that its clock is that of the timing.
_WARMUP_SECONDS = 0.15


def dissect(procedure: Procedure, key: Key, timed: Point | None, *, first: bool = True) -> Point:
    """The layers of a point as a point of their own; whatever goes wrong becomes its status.

    Args:
        procedure: everything that stays the same from point to point.
        key: of the layers.
        timed: the point that was timed, with whose time the sum is compared; None where there is none.
        first: whether no point was looked into in this process before.

    Raises:
        UserError: what the user asked for can't be done for any point.
    """
    point = Point(key=key, status=Status.OK, started=datetime.now(UTC).isoformat(timespec="milliseconds"))
    with verdicts.watching_the_host(point):
        try:
            _dissect(procedure, point, timed, first)
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            point.status, point.error = verdicts.verdict(error, procedure.device)
    return point


def not_tried(key: Key, timed: Point | None) -> Point:
    """The layers of a point that could not be timed: it would go wrong once more.

    Args:
        key: of the layers.
        timed: the point that was to be timed.
    """
    point = Point(key=key, status=Status.OK)
    _say_none(point, f"not tried: the call was not timed ({timed.status.value if timed else 'no result'})")
    return point


def _dissect(procedure: Procedure, point: Point, timed: Point | None, first: bool) -> None:
    session: Any = procedure.session
    clean = first_interval(timed, "device", "latency") if timed else None
    clean_seconds = clean.value if clean else None
    of_device = timed is not None and timed.find_series("device") is not None
    data_left_out = timed is not None and any(doubt.code == "data_left_out" for doubt in timed.doubts)
    if not hasattr(session, "module"):
        _say_none(point, "the model is scripted: it has no layers")
        return
    from perfexp.layers.profiling import profile_layers  # with torch, which a scripted model does without
    from perfexp.layers.stamps import stamp_layers

    with procedure.step(timed_key(point.key)) as (step, batches):
        procedure.first_call(step, batches)
        _warm_up(step.call, procedure)
        procedure.progress("layers")
        look: Callable[..., LayerTimes] = stamp_layers
        if procedure.device.asynchronous:
            by_graph = timed is not None and timed.facts.get("device_method") == "graph"
            capture = partial(_captured, procedure, step, batches) if by_graph else None
            look = partial(profile_layers, first=first, capture=capture)
        with ExitStack() as as_device_is:
            if data_left_out:
                as_device_is.enter_context(graph_fallback.on_held_batches(step, batches, session))
            changed = None
            if of_device:
                changed = as_device_is.enter_context(graph_fallback.without_waits(step, session, procedure.device))
            times = look(step, session.module, procedure.device, clean_seconds=clean_seconds)
        counted, why_not = _work(lambda: procedure.work(step, batches))
    if times.reason is not None:
        _say_none(point, times.reason)
        return
    lines = join(times, counted)
    if (report := procedure.algorithm.report()) is not None:
        _say_what_ran(point, lines, report)
    _tell(point, times, lines, clean)
    point.doubts += [diagnostics.make("data_left_out")] if data_left_out else []
    point.doubts += [] if changed is None else [diagnostics.make("waits_left_out", how=changed)]
    if why_not:
        point.metrics.append(Metric(name="layers/flops", value=None, unit="1", reason=why_not))


def _captured(procedure: Procedure, step: Step, batches: Batches) -> Step | None:
    """The step as its `device` was timed; None where it can't be captured this time."""
    procedure.progress("capturing a graph")
    try:
        return graphed(step, procedure.session, constant=batches.constant)
    except Exception:
        traceback.print_exc()
        if procedure.device.is_lost():
            raise
        return None


def _warm_up(call: Any, procedure: Procedure) -> None:
    began = procedure.device.now_ns()
    while (procedure.device.now_ns() - began) * 1e-9 < _WARMUP_SECONDS:
        call()
        procedure.device.synchronize()


def _work(count: Callable[[], Work | None]) -> tuple[Work | None, str | None]:
    """What each layer computes by definition, or why that is not known."""
    try:
        return count(), None
    except PerfexpError as error:
        return None, str(error)


def _say_what_ran(point: Point, lines: Sequence[Line], report: AlgorithmReport) -> None:
    """Of which algorithm the kernels of the convolutions' forward passes are, and that where it is another."""
    own: dict[str, list[Line]] = {}
    for line in lines:
        if line.key and line.key.path and line.key.which is Pass.forward and line.key.operation is None:
            own.setdefault(line.key.path, []).append(line)
    kernels = {path: [name for line in of_layer for name in line.kernels] for path, of_layer in own.items()}
    judged = judge_forward(report, kernels)
    ran = {layer.name: layer.passes[0].ran for layer in judged.layers if layer.passes}  # the first is forward
    for path, of_layer in own.items():
        for line in of_layer:
            line.ran = ran.get(path)
    for doubt in judged.doubts():
        if doubt.code == "algorithm_substituted":
            more = "; the layers' kernels show it: algorithm/flops_share, of what cuDNN was requested to run, does not"
            point.doubts.append(msgspec.structs.replace(doubt, message=doubt.message + more))


def _say_none(point: Point, reason: str) -> None:
    point.metrics.append(Metric(name="layers/closure", value=None, unit="1", reason=reason))


def _tell(point: Point, times: LayerTimes, lines: list[Line], clean: Interval | None) -> None:
    closure = times.closure
    point.facts["layers"] = {
        "method": times.method,
        "calls": times.calls,
        "starved": times.starved,
        "no_backward": times.no_backward,
        "own_seconds": times.own_seconds,
        "call_seconds": times.call_seconds,
        "lines": msgspec.to_builtins(lines),
    }
    point.doubts += [_with_uncertainty(doubt, times, clean) for doubt in times.doubts]
    reason = None if closure else "there is no time of the call to compare with"
    point.metrics += [
        Metric(name="layers/closure", value=closure.relative if closure else None, unit="1", reason=reason),
        Metric(name="layers/gap_share", value=closure.gap_share if closure else None, unit="1", reason=reason),
        Metric(
            name="layers/unattributed_share",
            value=closure.unattributed_share if closure else None,
            unit="1",
            reason=reason,
        ),
    ]


def _with_uncertainty(doubt: Diagnostic, times: LayerTimes, clean: Interval | None) -> Diagnostic:
    """The diagnostic, with the uncertainty of the call without profiling where that exceeds the tolerance."""
    half_width = clean.relative_half_width if clean else None
    tolerance = times.closure.tolerance if times.closure else 0.0
    if doubt.code != "layers_disagree" or half_width is None or half_width <= tolerance:
        return doubt
    message = f"{doubt.message}; the call without profiling itself is known to ±{half_width:.0%}"
    return msgspec.structs.replace(doubt, message=message)
