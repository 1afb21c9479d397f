"""Energy pass: energy per call, in the loop and, if that is slower, with the device kept busy."""

from __future__ import annotations

import time
from collections.abc import Iterator

from perfexp.data import Batches
from perfexp.devices import Cache
from perfexp.devices.meters import Reading
from perfexp.devices.meters.energy_metrics import another_pace
from perfexp.errors import Unsupported, UserError, Waits
from perfexp.measuring import verdicts
from perfexp.measuring.context import Context
from perfexp.measuring.graph_fallback import on_held_batches, without_waits
from perfexp.measuring.modes import Step, graphed
from perfexp.measuring.probes.energy import EnergyProcedure, Plateau, calls_per_unit
from perfexp.records.point_times import DEVICE_TIMES, first_median_interval, loop_interval
from perfexp.records.record import Point


def in_two_parts(
    context: Context, point: Point, step: Step, batches: Batches, calls_per_epoch: int | None
) -> Iterator[None]:
    """Add the energy per call in two parts, before and after the yield.

    The first part measures the loop, before anything is captured.

    Args:
        point: a point with its whole call already timed.
        calls_per_epoch: None for endless data.
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
            queued = _queued(context, energy, loop, point, step, batches)
        energy.rest()
    calls_per = calls_per_unit(
        images_per_call=point.key.batch_size * context.group.size,
        trains=step.trains,
        calls_per_epoch=calls_per_epoch,
    )
    energy.report(loop, calls_per, clean=loop_interval(point), queued=queued).add_to(point)


def _queued(
    context: Context,
    energy: EnergyProcedure,
    loop: Plateau,
    point: Point,
    step: Step,
    batches: Batches,
) -> Plateau | Reading | None:
    """Measure graph replays of the call, which keep the device busy.

    Returns:
        None if the loop keeps the device busy as well. A reading with a reason if replays are not
            possible.
    """
    device, session, own = (
        context.device,
        context.session,
        first_median_interval(point, *DEVICE_TIMES),
    )
    if own is not None and not another_pace(loop.call_seconds, own):
        return None
    if reason := _not_captured(context):
        return Reading(None, reason)
    if own is None:
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


def _not_captured(context: Context) -> str:
    """Return why calls must not be captured; empty if they may be."""
    if context.group.size > 1:
        return "calls of several ranks are not captured"
    if context.graph:
        return "the call is a graph already"
    if context.cache is Cache.rotate:
        return "with cache=rotate calls are not captured"
    return ""
