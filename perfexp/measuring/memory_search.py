"""Memory search: whether a batch fits, and which smaller batch fits after running out of memory.

`procedure` searches after a point that ran out of memory; `worker.points` tries batches one by one
for `batch_size=max`.
"""

from __future__ import annotations

import traceback

import msgspec

from perfexp.errors import UserError
from perfexp.measuring import verdicts
from perfexp.measuring.context import Context
from perfexp.measuring.modes import graphed
from perfexp.records.quantities import FITTING_BATCH
from perfexp.records.record import Key, Metric, Point, Status

#: Calls after the first: two, because the optimizer holds its own tensors from the first step on.
_CALLS = 2


def add_batch_that_fits(context: Context, point: Point) -> None:
    """Add the largest smaller batch that fits to a point that ran out of memory."""
    fits = None
    if context.group.size > 1:
        reason: str | None = "not searched for with several ranks, which are out of step now"
    else:
        fits = _batch_that_fits(context, point.key)
        reason, text = None, f"A batch of {fits} fits."
        if not fits:
            reason, text = "not even one sample fits", "No smaller batch fits."
        point.error = f"{str(point.error).rstrip('.')}. {text}"
    point.metrics.append(Metric.of(FITTING_BATCH, fits, reason=reason))


def _batch_that_fits(context: Context, key: Key) -> int | None:
    """Return the largest batch that fits among a half, a quarter, …; None if none does."""
    batch_size = key.batch_size // 2
    while batch_size:
        context.progress(f"does a batch of {batch_size} fit?")
        tried = try_calls(context, msgspec.structs.replace(key, batch_size=batch_size))
        if tried.status is Status.OK:
            return batch_size
        batch_size //= 2
    return None


def try_calls(context: Context, key: Key) -> Point:
    """Make a point's first calls; return a point with the outcome and the memory used.

    Nothing is timed. An error becomes the status, `oom` if the memory is not enough.

    Raises:
        UserError: the plan is wrong.
    """
    point = Point(key=key, status=Status.OK)
    try:
        with context.device.memory_limited(), context.step(key) as (step, batches):
            context.first_call(step, batches)
            if context.graph:
                step = graphed(step, context.session, constant=batches.constant)
            for _ in range(_CALLS):
                step.call()
            context.device.synchronize()
            point.metrics += context.device.memory()
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        point.status, point.error = verdicts.verdict(error, context.device)
    return point
