"""Memory search: the batch size that fits where a point ran out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perfexp.measuring import verdicts
from perfexp.records.record import Key, Metric, Point, Status

if TYPE_CHECKING:
    from perfexp.measuring.procedure import Procedure


def add_batch_that_fits(procedure: Procedure, point: Point) -> None:
    """Add to a point that ran out of memory the largest smaller batch of which two calls fit."""
    fits = None
    if procedure.group.size > 1:
        reason: str | None = "not searched for with several ranks, which are out of step now"
    else:
        fits = _batch_that_fits(procedure, point.key)
        reason = None if fits else "not even one sample fits"
        point.error = f"{point.error} {f'A batch of {fits} fits.' if fits else 'No smaller batch fits.'}"
    point.metrics.append(Metric(name="batch_that_fits", value=fits, unit="1", reason=reason))


def _batch_that_fits(procedure: Procedure, key: Key) -> int | None:
    """Return the largest of half, a quarter, … of a batch of which two calls fit into memory; None if none does."""
    batch_size = key.batch_size // 2
    while batch_size:
        procedure.progress(f"does a batch of {batch_size} fit?")
        try:
            with procedure.step(msgspec.structs.replace(key, batch_size=batch_size)) as (step, batches):
                for _ in range(2):  # the optimizer holds tensors of its own from the first step on
                    procedure.first_call(step, batches)
            return batch_size
        except Exception as error:
            if verdicts.verdict(error, procedure.device)[0] is not Status.OOM:
                return None
        batch_size //= 2
    return None
