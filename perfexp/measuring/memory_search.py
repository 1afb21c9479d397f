"""Memory search: whether a batch fits, and which smaller batch fits after running out of memory."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import msgspec

from perfexp.errors import UserError
from perfexp.measuring import verdicts
from perfexp.modes import graphed
from perfexp.records.quantities import FITTING_BATCH
from perfexp.records.record import Key, Metric, Point, Status

if TYPE_CHECKING:
    from perfexp.measuring.procedure import Procedure

#: Two, because the optimizer holds its own tensors from the first step on.
_CALLS = 2


def add_batch_that_fits(procedure: Procedure, point: Point) -> None:
    """Add the largest smaller batch that fits to a point that ran out of memory."""
    fits = None
    if procedure.group.size > 1:
        reason: str | None = "not searched for with several ranks, which are out of step now"
    else:
        fits = _batch_that_fits(procedure, point.key)
        reason, text = None, f"A batch of {fits} fits."
        if not fits:
            reason, text = "not even one sample fits", "No smaller batch fits."
        point.error = f"{point.error} {text}"
    point.metrics.append(Metric.of(FITTING_BATCH, fits, reason=reason))


def _batch_that_fits(procedure: Procedure, key: Key) -> int | None:
    """Return the largest batch that fits among a half, a quarter, …; None if none does."""
    batch_size = key.batch_size // 2
    while batch_size:
        procedure.progress(f"does a batch of {batch_size} fit?")
        status = try_calls(procedure, msgspec.structs.replace(key, batch_size=batch_size)).status
        if status is not Status.OOM:
            return batch_size if status is Status.OK else None
        batch_size //= 2
    return None


def try_calls(procedure: Procedure, key: Key) -> Point:
    """Make a point's first calls; return a point with the outcome and the memory used."""
    point = Point(key=key, status=Status.OK)
    try:
        with procedure.step(key) as (step, batches):
            procedure.first_call(step, batches)
            if procedure.graph:
                step = graphed(step, procedure.session, constant=batches.constant)
            for _ in range(_CALLS):
                step.call()
            procedure.device.synchronize()
            point.metrics += procedure.device.memory()
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        point.status, point.error = verdicts.verdict(error, procedure.device)
    return point
