"""Measuring a plan's points in turn. Each result is appended to points.jsonl at once.

A point is one measurement: phase, input size, batch size, precision and replicate (its `Key`).
Points that have a result already are skipped, so a worker continues where another one ended. Timed
points come from `measure_points`, the layers of a point from `dissect_points`, and trials of the
largest batch from `try_batch`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.errors import Unsupported, UserError
from perfexp.host import fork_server
from perfexp.host.forked import Ended
from perfexp.plan import config, sweep
from perfexp.plan.largest_batch import SMALLEST, TRIALS, bracket, outcomes, trials_of
from perfexp.records import diagnostics, units
from perfexp.records.messages import UNTRAINED, Events
from perfexp.records.paths import RunPaths, append_line
from perfexp.records.quantities import ENERGY, PEAK_MEMORY, TOO_LARGE, TRIED_BATCHES
from perfexp.records.record import (
    LARGEST,
    Key,
    Metric,
    Point,
    Status,
    missing,
    point_to_line,
    read_points,
    timed_key,
    trial_key,
    tried_key,
)

if TYPE_CHECKING:
    from perfexp.data import Data
    from perfexp.measuring.procedure import Procedure
    from perfexp.worker.peak_memory import MemoryGuard

#: The clock before any user code was imported.
_CLOCK = time.perf_counter_ns
#: Modules that fork processes which never return to the worker's code.
_HARMLESS = ("multiprocessing.popen_fork", "subprocess")
#: Whether this process has begun a point.
_has_begun: list[bool] = []
#: Seconds from process start to first point, until that point has been appended; then empty.
_start_seconds: list[float] = []
#: Names of the modules that have forked this process since the point in progress began: two
#: processes cannot share a measurement.
_forks: list[str] = []
#: Reason for a point without energy in a sparse sweep.
_NO_ENERGY = "measured at other points (sweep.anchors) and predicted here"
#: Limit on unusable files that the console lists.
_SHOWN_PROBLEMS = 20


def measure_points(
    procedure: Procedure, plan: config.Plan, paths: RunPaths, replicate: int, emit: Events
) -> bool:
    """Measure a replicate's timed points that have no result yet.

    A replicate is one of the processes that repeat the plan's points. Points that are bound to fail
    are not measured but get a predicted failure.

    Args:
        replicate: number of this process; the first also measures idle power and ceilings.

    Returns:
        Whether all of them were tried. If not, this process lost its device, or its ranks are out
        of step after an error. Another process can continue.
    """
    chosen: sweep.Sweep = config.build(plan.sweep)
    guard = _memory_guard(procedure, plan) if getattr(chosen, "skip_oom", False) else None
    if replicate == 0:
        _report_problems(procedure.data, emit)
        procedure.begin()
    if plan.probes.ceilings and replicate == 0:
        procedure.ceilings = _ceilings(procedure, emit)
    keys, energy = plan.fixed_keys(read_points(paths.points)), procedure.energy
    procedure.anchors = plan.anchors(read_points(paths.points))
    while left := _missing(
        plan.timed_keys(earlier := read_points(paths.points)), paths, replicate
    ):  # results may add points
        order = sweep.order(left, replicate, plan.seed)
        # trainings first if their weights are used for inference
        for key in sorted(order, key=lambda key: plan.infers_trained and key.phase != "train"):
            results, predicted = read_points(paths.points), None
            if plan.is_sparse and key not in plan.timed_keys(results):
                continue  # the algorithm computes nothing of this model
            begin(key, emit)
            if chosen.skip_larger:  # if a smaller point ran out of memory, this one would, too
                predicted = sweep.predicted_out_of_memory(key, results)
            if plan.infers_trained:
                predicted = predicted or _without_training(key, results)
            if guard is not None:
                predicted = predicted or guard.refuse(key, results)
            is_with_energy = not plan.is_sparse or procedure.is_anchor(key)
            procedure.energy = energy if is_with_energy else None
            point = predicted or procedure.measure(key)
            # a point that was added after a larger batch ran out of memory names that batch
            if energy is not None and not is_with_energy:
                reason = _NO_ENERGY if energy.detected.meters else energy.detected.reason
                point.metrics.append(Metric.of(ENERGY, None, reason=reason))
            if key not in keys and (before := sweep.shrunk(results).get(key)):
                point.facts["shrunk_from"] = before
            if plan.seeks_batch and (trials := trials_of(key, earlier)):
                add_trials(point, trials)
            append(point, paths, emit)
            was_measured = predicted is None
            # after an error the ranks may be waiting in different calls
            is_out_of_step = (
                procedure.group.size > 1 and was_measured and point.status is not Status.OK
            )
            if is_out_of_step or procedure.device.is_lost():
                return False
    return True


def _without_training(key: Key, results: Iterable[Point]) -> Point | None:
    """Return a failure for an inference that lacks weights because its training failed.

    None if it can be measured.
    """
    has_failed = any(
        point.key.phase == "train" and point.status is not Status.OK for point in results
    )
    if key.phase != "inference" or not has_failed:
        return None
    return Point(key=key, status=Status.FAILED, error=f"not tried: {UNTRAINED}")


def _report_problems(data: Data, emit: Events) -> None:
    """Report unusable data files, e.g. with too few columns, one per line.

    The console shows only the first lines.
    """
    problems = list(getattr(data, "problems", ()))
    for number, problem in enumerate(problems):
        print(f"left out: {problem}")
        if number < _SHOWN_PROBLEMS:
            emit.block(f"left out: {problem}", is_result=True)
    if len(problems) > _SHOWN_PROBLEMS:
        emit.block(f"{len(problems) - _SHOWN_PROBLEMS} more in details/run.log", is_result=True)


def dissect_points(
    procedure: Procedure,
    plan: config.Plan,
    paths: RunPaths,
    replicate: int,
    emit: Events,
    *,
    is_followed: bool = False,
) -> None:
    """Measure the layers of timed points, as separate points.

    The process times nothing after them, because profilers slow it permanently. A point that has no
    layer times, because its own measurement failed, is appended as such. Stops early if the device
    is lost.

    Args:
        is_followed: whether a fresh process measures the layers that are still missing afterward.
            A point that runs out of memory here and the points after it are left to it.
    """
    timed_points = {point.key: point for point in read_points(paths.points)}
    left = _missing(plan.layer_keys(timed_points.values()), paths, replicate)
    if not left:
        return
    # imports the layers, which timing does not need
    from perfexp.measuring.layers_pass import dissect, not_tried

    is_first = True
    for key in left:
        begin(key, emit)
        timed = timed_points.get(timed_key(key))
        if timed and timed.status is Status.OK:
            point = dissect(procedure, key, timed, first=is_first)
            is_first = is_first and "layers" not in point.facts
            if is_followed and point.status is Status.OOM:
                emit("left")
                break
        else:
            point = not_tried(key, timed)
        append(point, paths, emit)
        if procedure.device.is_lost():
            break


def _memory_guard(procedure: Procedure, plan: config.Plan) -> MemoryGuard:
    """Return the guard that skips a point if its traced peak exceeds the device's memory.

    Raises:
        UserError: the memory size is unknown, or several ranks take part.
    """
    # imports torch's stand-ins, which other sweeps do not need
    from perfexp.worker.peak_memory import MemoryGuard

    facts = {**(plan.gpu.get("facts") or {}), **procedure.device.facts()}
    if not facts.get("memory_bytes"):
        raise UserError(
            f"sweep.skip_oom=true: the memory of {procedure.device.name} is unknown; leave it out."
        )
    if procedure.memory_trace is None:
        raise UserError("sweep.skip_oom=true: memory of several ranks is not traced; leave it out.")
    return MemoryGuard(procedure.memory_trace, int(facts["memory_bytes"]))


def _missing(keys: list[Key], paths: RunPaths, replicate: int) -> list[Key]:
    """Return this replicate's keys without a result, except those that wait for a batch search."""
    return [
        key
        for key in missing(keys, read_points(paths.points))
        if key.batch_size != LARGEST and key.replicate == replicate
    ]


def _ceilings(procedure: Procedure, emit: Events) -> dict[str, float]:
    """Measure the device's ceilings by name, in FLOP/s or bytes/s; empty if that fails."""
    emit.block("ceilings")
    try:
        # imports torch, which a scripted device does not need
        from perfexp.measuring.probes.ceilings import ceilings

        return ceilings(procedure.device, procedure.session.formats)
    except Exception:  # the points' own times do not depend on ceilings
        traceback.print_exc()
        return {}


def try_batch(
    procedure: Procedure, plan: config.Plan, paths: RunPaths, _replicate: int, emit: Events
) -> None:
    """Try the next batch size of a search for the largest (`batch_size=max`); append the result.

    The parent starts a fresh process for each trial, because running out of memory may leave a
    process unusable.

    Raises:
        UserError: the device's memory has no limit.
    """
    # imports the probes, which a cold start does not need
    from perfexp.measuring.memory_search import try_calls

    device = procedure.device
    capacity = device.facts().get("memory_bytes")
    if device.kind == "cpu" or not capacity:
        raise UserError(
            f"batch_size=max needs a device with a limited memory, not {device.name}: set "
            "batch_size=N."
        )
    key = tried_key(plan.trial_keys(read_points(paths.points))[0])
    if key.batch_size == LARGEST:
        emit.block("tracing the memory for the first batch to try")
        key = msgspec.structs.replace(key, batch_size=_first_batch(procedure, key, int(capacity)))
    # training follows the trials, and its weights take the same memory
    procedure.trained_weights = None
    begin(trial_key(key), emit)
    point = try_calls(procedure, key)
    point.key, point.facts["capacity_bytes"] = trial_key(key), capacity
    append(point, paths, emit)
    emit.block(f"{key}: {_outcome(point)}", is_result=True)


def _first_batch(procedure: Procedure, key: Key, capacity_bytes: int) -> int:
    """Return the largest batch that fits by its traced peak: starting there saves trials.

    If the model cannot be traced, return a small batch.
    """
    assert procedure.memory_trace is not None
    smallest = msgspec.structs.replace(key, batch_size=SMALLEST)
    try:
        return procedure.memory_trace(smallest, capacity_bytes) or 1
    except (UserError, Unsupported, Ended):
        return SMALLEST


def _outcome(point: Point) -> str:
    """Describe a trial's outcome for the console, for example `fits, peak 12 GB`."""
    if point.status is not Status.OK:
        return point.status.value
    used = point.metric(PEAK_MEMORY)
    if used is None or used.value is None:
        return "fits"
    return f"fits, peak {units.format_bytes(used.value)}"


def add_trials(point: Point, trials: Sequence[dict[str, Any]]) -> None:
    """Add a batch search's trials to the timed point with the largest batch.

    It gets the trials as facts, their number, and the smallest batch that failed. If larger batches
    remain untried, it gets a diagnostic.
    """
    point.facts[TRIALS] = list(trials)
    _, fails = bracket(outcomes(trials))
    failed = next((trial for trial in trials if trial["batch_size"] == fails), None)
    reason = None if failed else f"not reached in {len(trials)} trials"
    point.metrics += [
        Metric.of(TRIED_BATCHES, len(trials)),
        Metric.of(TOO_LARGE, fails if failed else None, reason=reason),
    ]
    if point.status is Status.OK and fails - point.key.batch_size > 1:
        beyond = f"{fails} does not" if failed else "no larger one was tried"
        point.doubts.append(
            diagnostics.make(
                "largest_batch_open", batch=point.key.batch_size, beyond=beyond, trials=len(trials)
            )
        )


def begin(key: Key, emit: Events) -> None:
    """Report that measuring a point begins. Earlier forks no longer count."""
    _forks.clear()
    if not _has_begun:
        _has_begun.append(True)
        _start_seconds.append(_age_seconds())
    emit.point(key)


def append(point: Point, paths: RunPaths, emit: Events) -> None:
    """Append a finished point to points.jsonl and report it to the parent.

    A point becomes failed if its code forked this process or replaced the clock, since its times
    are wrong then. A forked copy of this process ends here.
    """
    emit.end_copy()
    if fork_server.process_start is not None:
        point.facts["process_start"] = fork_server.process_start
    if _start_seconds:
        point.facts["start_seconds"] = round(_start_seconds.pop(), 3)
    if point.status is Status.OK and _forks:
        point.status = Status.FAILED
        point.error = (
            f"{_forks[0]} forked this process during the measurement, which two processes cannot "
            "share"
        )
    elif point.status is Status.OK and (time.perf_counter_ns is not _CLOCK or _took_no_time(point)):
        point.status = Status.FAILED
        point.error = "the clock stands still, or was replaced by the measured code"
    append_line(paths.points, point_to_line(point))
    emit.done(point.key, point.status.value)


def _age_seconds() -> float:
    """Return the seconds since this process was started or forked, to a kernel tick.

    They are 0 if unknown, without Linux's /proc.
    """
    try:
        # starttime in proc(5), in ticks since the system was booted
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        started = int(ticks) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def _took_no_time(point: Point) -> bool:
    """Return whether a series consists of zeros: the measured code has stopped the clock."""
    return any(
        not any(series.samples)
        for series in point.series
        if series.name in ("latency", "throughput")
    )


def _note_fork() -> None:
    """Note which module has forked this process; Python calls this in the parent after a fork."""
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    if caller not in _HARMLESS:
        _forks.append(caller)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_note_fork)
