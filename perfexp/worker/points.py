"""Measure the points of a plan one after the other and append each result at once."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING

from perfexp import sweep
from perfexp.errors import UserError
from perfexp.plan import config
from perfexp.prediction import largest_batch
from perfexp.records.messages import UNTRAINED, Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import LARGEST, Key, Point, Status, missing, read_points, timed_key
from perfexp.worker import batch_trials, results

if TYPE_CHECKING:
    from perfexp.data import Data
    from perfexp.measuring.procedure import Procedure
    from perfexp.worker.peak_memory import MemoryGuard

#: Files that cannot be used, of which the console shows each.
_SHOWN_PROBLEMS = 20


def measure_points(procedure: Procedure, plan: config.Plan, paths: RunPaths, replicate: int, emit: Events) -> bool:
    """Measure the timed points of one replicate that have no result yet; return whether all of them were tried.

    If not, this process lost its device or its ranks are out of step after an error, and another process may go on.
    """
    chosen: sweep.Sweep = config.build(plan.sweep)
    guard = _memory_guard(procedure, plan) if getattr(chosen, "skip_oom", False) else None
    if replicate == 0:
        _report_problems(procedure.data, emit)
        procedure.begin()
    if plan.probes.ceilings and replicate == 0:
        procedure.ceilings = _ceilings(procedure, emit)
    keys = plan.fixed_keys(read_points(paths.points))
    procedure.anchors = sweep.anchors(list(dict.fromkeys((key.input_size, key.batch_size) for key in keys)))
    while left := _missing(plan.timed_keys(earlier := read_points(paths.points)), paths, replicate):  # it may go on
        order = sweep.order(left, replicate, plan.seed)
        for key in sorted(order, key=lambda key: plan.infers_trained and key.phase != "train"):
            results.begin(key, emit)
            # where a smaller point ran out of memory, this one would as well
            predicted = sweep.predicted_out_of_memory(key, read_points(paths.points) if chosen.skip_larger else [])
            if predicted is None and plan.infers_trained:
                predicted = _without_training(key, read_points(paths.points))
            if guard is not None and predicted is None:
                predicted = guard.refuse(key, read_points(paths.points))
            point = predicted or procedure.measure(key)
            if key not in keys and (before := sweep.shrunk(read_points(paths.points)).get(key)):
                point.facts["shrunk_from"] = before
            if plan.seeks_batch and (trials := largest_batch.trials_of(key, earlier)):
                batch_trials.add_trials(point, trials)
            results.append(point, paths, emit)
            out_of_step = procedure.group.size > 1 and predicted is None and point.status is not Status.OK
            if out_of_step or procedure.device.is_lost():
                return False
    return True


def _without_training(key: Key, results: Iterable[Point]) -> Point | None:
    """Return the failure of an inference without weights, since its training failed."""
    has_failed = any(point.key.phase == "train" and point.status is not Status.OK for point in results)
    if key.phase != "inference" or not has_failed:
        return None
    return Point(key=key, status=Status.FAILED, error=f"not tried: {UNTRAINED}")


def _report_problems(data: Data, emit: Events) -> None:
    """Report the files of the data that cannot be used, a line for each, the first ones on the console."""
    problems = list(getattr(data, "problems", ()))
    for number, problem in enumerate(problems):
        print(f"left out: {problem}")
        if number < _SHOWN_PROBLEMS:
            emit("block", text=f"left out: {problem}", is_result=True)
    if len(problems) > _SHOWN_PROBLEMS:
        emit("block", text=f"{len(problems) - _SHOWN_PROBLEMS} more in run.log", is_result=True)


def dissect_points(procedure: Procedure, plan: config.Plan, paths: RunPaths, replicate: int, emit: Events) -> None:
    """Measure the layers of the points that were timed, as points of their own."""
    from perfexp.measuring.layers_pass import dissect, not_tried  # with the layers, which timing does without

    timed_points = {point.key: point for point in read_points(paths.points)}
    is_first = True
    for key in _missing(plan.layer_keys(timed_points.values()), paths, replicate):
        results.begin(key, emit)
        timed = timed_points.get(timed_key(key))
        if timed and timed.status is Status.OK:
            point = dissect(procedure, key, timed, first=is_first)
            is_first = is_first and "layers" not in point.facts
        else:
            point = not_tried(key, timed)
        results.append(point, paths, emit)
        if procedure.device.is_lost():
            break


def _memory_guard(procedure: Procedure, plan: config.Plan) -> MemoryGuard:
    """Return the guard against points that exceed the memory; raises UserError for a device of unknown size."""
    from perfexp.worker.peak_memory import MemoryGuard  # with torch's stand-ins, which other sweeps do without

    facts = {**(plan.gpu.get("facts") or {}), **procedure.device.facts()}
    if not facts.get("memory_bytes"):
        raise UserError(f"sweep.skip_oom=true: the memory of {procedure.device.name} is unknown; leave it out.")
    if procedure.memory_trace is None:
        raise UserError("sweep.skip_oom=true: memory of several ranks is not traced; leave it out.")
    return MemoryGuard(procedure.memory_trace, int(facts["memory_bytes"]))


def _missing(keys: list[Key], paths: RunPaths, replicate: int) -> list[Key]:
    known = [key for key in missing(keys, paths.points) if key.batch_size != LARGEST]  # others wait for trials
    return [key for key in known if key.replicate == replicate]


def _ceilings(procedure: Procedure, emit: Events) -> dict[str, float]:
    emit("block", text="ceilings")
    try:
        from perfexp.probes.ceilings import ceilings  # with torch, which a scripted device does without

        return ceilings(procedure.device, procedure.session.formats)
    except Exception:  # the points' own times do not depend on it
        traceback.print_exc()
        return {}
