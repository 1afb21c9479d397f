"""Trials whether a batch fits, for batch_size=max: one in each process, so that none finds another's remains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.errors import Unsupported, UserError
from perfexp.host.forked import Ended
from perfexp.plan import config
from perfexp.prediction.largest_batch import SMALLEST, TRIALS, bracket, outcomes
from perfexp.records import diagnostics, units
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.quantities import PEAK_MEMORY, TOO_LARGE, TRIED_BATCHES
from perfexp.records.record import LARGEST, Key, Metric, Point, Status, read_points, trial_key, tried_key
from perfexp.worker.results import append, begin

if TYPE_CHECKING:
    from perfexp.measuring.procedure import Procedure


def try_batch(procedure: Procedure, plan: config.Plan, paths: RunPaths, _replicate: int, emit: Events) -> None:
    """Try the batch that is due next and append the result.

    Raises UserError for a device whose memory has no limit.
    """
    from perfexp.measuring.memory_search import try_calls  # with the probes, which a cold start does without

    device = procedure.device
    capacity = device.facts().get("memory_bytes")
    if device.kind == "cpu" or not capacity:
        raise UserError(f"batch_size=max needs a device with a limited memory, not {device.name}: set batch_size=N.")
    key = tried_key(plan.trial_keys(read_points(paths.points))[0])
    if key.batch_size == LARGEST:
        emit("block", text="tracing the memory for the first batch to try")
        key = msgspec.structs.replace(key, batch_size=_traced(procedure, key, int(capacity)))
    procedure.trained_weights = None  # the training comes after the trials, and its weights take the same memory
    begin(trial_key(key), emit)
    point = try_calls(procedure, key)
    point.key, point.facts["capacity_bytes"] = trial_key(key), capacity
    append(point, paths, emit)
    emit("block", text=f"{key}: {_outcome(point)}", is_result=True)


def _traced(procedure: Procedure, key: Key, capacity_bytes: int) -> int:
    """Return the largest batch whose traced peak fits, which saves trials; a small one for other models."""
    assert procedure.memory_trace is not None
    try:
        return procedure.memory_trace(msgspec.structs.replace(key, batch_size=SMALLEST), capacity_bytes) or 1
    except (UserError, Unsupported, Ended):
        return SMALLEST


def _outcome(point: Point) -> str:
    if point.status is not Status.OK:
        return point.status.value
    used = point.metric(PEAK_MEMORY)
    return "fits" if used is None or used.value is None else f"fits, peak {units.format_bytes(used.value)}"


def add_trials(point: Point, trials: Sequence[dict[str, Any]]) -> None:
    """Add the trials of its batch to a timed point: as facts, their number, and the smallest batch that did not fit."""
    point.facts[TRIALS] = list(trials)
    _, fails = bracket(outcomes(trials))
    failed = next((one for one in trials if one["batch_size"] == fails), None)
    reason = None if failed else f"not reached in {len(trials)} trials"
    point.metrics += [
        Metric.of(TRIED_BATCHES, len(trials)),
        Metric.of(TOO_LARGE, fails if failed else None, reason=reason),
    ]
    if point.status is Status.OK and fails - point.key.batch_size > 1:
        beyond = f"{fails} does not" if failed else "no larger one was tried"
        point.doubts.append(
            diagnostics.make("largest_batch_open", batch=point.key.batch_size, beyond=beyond, trials=len(trials))
        )
