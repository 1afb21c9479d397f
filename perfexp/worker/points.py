"""Timed: the points of a plan that are timed, one after the other, each written down at once."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from perfexp import sweep
from perfexp.plan import config
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths, append_line
from perfexp.records.record import Status, missing, point_to_line, read_points

if TYPE_CHECKING:
    from perfexp.devices import Device
    from perfexp.measure.procedure import Procedure
    from perfexp.models import Session


def measure(procedure: Procedure, plan: config.Plan, paths: RunPaths, replicate: int, tell: Events) -> bool:
    """Measure what has no result yet of one replicate.

    Args:
        procedure: that measures.
        plan: what to measure.
        paths: of the run.
        replicate: its number.
        tell: where progress goes.

    Returns:
        Whether everything has been tried; otherwise another process may still be able to go on: this one lost the
        device, or is one of several ranks that are out of step after an error.
    """
    keys = [key for key in missing(plan.timed_keys(), paths.points) if key.replicate == replicate]
    skip_larger = config.build(plan.sweep).skip_larger
    procedure.begin()
    if plan.probes.ceilings:
        procedure.ceilings = _ceilings(procedure.session, procedure.device, tell)
    for key in sweep.order(keys, replicate, plan.seed):
        tell.point(key)
        known = read_points(paths.points) if skip_larger else []
        predicted = sweep.predicted_out_of_memory(key, known)
        point = predicted or procedure.measure(key)
        append_line(paths.points, point_to_line(point))
        tell.done(key, point.status.value)
        out_of_step = procedure.crew.size > 1 and predicted is None and point.status is not Status.OK
        if out_of_step or procedure.device.is_lost():
            return False
    return True


def _ceilings(session: Session, device: Device, tell: Events) -> dict[str, float]:
    """Empty where they can't be measured."""
    tell("block", text="ceilings")
    try:
        from perfexp.probes.ceilings import ceilings

        return ceilings(device, session.precision)
    except Exception:  # a figure beside the others
        traceback.print_exc()
        return {}
