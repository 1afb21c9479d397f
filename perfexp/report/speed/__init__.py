"""Speed files: a training's images/s as JSON, from a run's record or an mmengine or mmcv log.

`perfexp speed` and `perfexp train-speed` write them. The format is given: other tools read it. The
speed from a log (`of_log`) is computed here, by the mean time of its steady steps; `result` has
the speeds in a record.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perfexp.errors import UserError
from perfexp.report.speed.facts import Facts
from perfexp.report.speed.result import Mode, Speed, of_record
from perfexp.report.speed.training_log import (
    FAILURES,
    Log,
    LoggedStep,
    LoggedTraining,
    facts_of,
    read,
)
from perfexp.statistics import estimators

__all__ = ["Facts", "Mode", "Speed", "of_log", "of_record"]

#: Options of `perfexp speed` for facts that a log lacks.
_OPTIONS = {
    "model": "--model NAME",
    "batch_size": "--batch-size N",
    "num_gpus": "--gpus N",
    "precision": "--precision P",
}
#: Minimum lines for finding the end of the warm-up.
_LEAST_WINDOWS = 4
#: Samples per mean in MSER-5.
_BATCH = 5
#: Longest plausible step time.
_LONGEST_SECONDS = 1e9


class SteadyStepTime(NamedTuple):
    """Mean step time, and how many lines it uses.

    Attributes:
        seconds: mean step time; None if unknown.
        windows: number of averaged lines.
        skipped: number of lines skipped at the start.
        interrupted: number of lines left out in between.
    """

    seconds: float | None
    windows: int
    skipped: int
    interrupted: int


def of_log(
    path: Path, options: Facts | None = None, *, mode: Mode | None = None, skip: int | None = None
) -> Speed:
    """Return the speed of the last training in a log, for `perfexp speed LOG`.

    It is batch size per GPU × GPUs / mean step time. A failed training has the speed 0.

    Args:
        options: facts from the command line, which override facts in the log.
        mode: run mode; None to derive it from the number of GPUs.
        skip: number of leading step lines to skip; None to skip until they are steady.

    Raises:
        UserError: the file is not a readable training log, a fact is missing, or no line is left
            after skipping.
    """
    log = read(path)
    run = log.last_training
    if status := _why_unknown(run, is_own=log.is_own):
        raise UserError(f"{path}: {status}. Nothing is written.")
    facts = (options or Facts()).or_else(facts_of(log, path))
    # run mode sp means a single GPU, so the log need not say it
    if mode is Mode.sp and facts.num_gpus is None:
        facts.num_gpus = 1
    if missing := [option for name, option in _OPTIONS.items() if getattr(facts, name) is None]:
        raise UserError(f"{path} lacks facts about the training; add {' '.join(missing)}.")
    model, batch_size, num_gpus, precision = (getattr(facts, name) for name in _OPTIONS)
    if mode is Mode.sp and num_gpus > 1:
        used = f"{path}: run mode sp is for one GPU, the training used {num_gpus}"
        raise UserError(f"{used}. Set --run-mode mp or --gpus 1.")
    step_time = steady(run.steps, run.slower, skip)
    why = _why_failed(run)
    if not why and step_time.seconds is None:
        raise UserError(f"{path}: --skip {skip} leaves no usable line of {len(run.steps)}.")
    rate = batch_size * num_gpus / step_time.seconds if step_time.seconds else math.inf
    if not why and not math.isfinite(rate):
        why = "the time of its steps is zero"
    return Speed(
        log_file=str(path.resolve()),
        model=model,
        mode=mode or Mode.of(num_gpus),
        num_gpus=num_gpus,
        batch_size=batch_size,
        precision=precision,
        images_per_second=0.0 if why else rate,
        failed=bool(why),
        remark="; ".join([why or _how(step_time, batch_size, num_gpus), *_omitted(log)]),
    )


def _why_unknown(run: LoggedTraining, *, is_own: bool) -> str:
    """Return why a log shows neither a speed nor a failure; empty if it shows either.

    Steps without a time may belong to another program (`is_own` is False), and so may failures.
    """
    if run.only_tests:
        return "only tests, validations or checkpoints are logged, no steps of a training"
    has_failed = run.failures or not run.steps or not all(step.finite for step in run.steps)
    if (has_failed and (is_own or not run.steps)) or steady(run.steps, skip=0).seconds is not None:
        return ""
    why = "no line about its steps has a usable time"
    if run.times_apart:
        why += " (its lines are wrapped: write the log to a file, or to a wider terminal)"
    return why


def _why_failed(run: LoggedTraining) -> str:
    """Return why a training failed, as the remark; empty if it did not.

    Failures come first by the order of `FAILURES`, then a loss that is not finite.
    """
    for kind in FAILURES:
        if failures := [failure for failure in run.failures if failure.what == kind]:
            return f"{kind}: {failures[-1].text}"
    if diverged := [step for step in run.steps if not step.finite]:
        position = f"iteration {diverged[0].iteration}"
        if diverged[0].epoch is not None:
            position = f"epoch {diverged[0].epoch}, {position}"
        return f"the loss is not finite, first at {position}"
    if run.steps:
        return ""
    return "no steps of a training in it"


def _how(time: SteadyStepTime, batch_size: int, num_gpus: int) -> str:
    """Return how a speed was computed, as the remark: lines used, step time, lines left out."""
    parts = [
        f"mean of {time.windows} lines, {time.seconds:.4g} s for a step of {batch_size} × "
        f"{num_gpus} images"
    ]
    if time.skipped:
        parts.append(f"the first {time.skipped} skipped")
    if time.interrupted:
        parts.append(
            f"{time.interrupted} left out that time a validation, a checkpoint or an epoch's start"
        )
    if time.windows == 1 and not time.skipped:
        parts.append("with the warm-up in it")
    return ", ".join(parts)


def _omitted(log: Log) -> Iterator[str]:
    """Yield remarks on unreadable lines and earlier trainings, which the speed leaves out."""
    if log.is_json and log.unreadable:
        lines = "line"
        if log.unreadable > 1:
            lines = "lines"
        yield f"{log.unreadable} {lines} left out that can't be read as JSON"
    if others := log.num_trainings - bool(log.last_training.steps):
        yield f"the last of {others + 1} trainings in the log"


def steady(
    steps: Sequence[LoggedStep], interrupted: Collection[int] = (), skip: int | None = None
) -> SteadyStepTime:
    """Skip lines until steps are steady, or the first `skip`, and return the mean of the rest.

    Lines without a time are left out. So are interrupted lines, which time more than steps, if
    there are others.

    The cut comes from MSER (`estimators.mser5_cut`), applied to lines instead of means of five
    samples, because a line is already a mean. MSER also cuts rare slow lines in steady training.
    The cut is therefore shortened to the first lines, as long as their median differs from the
    later lines' median by more than 3.5 standard errors. With fewer than four lines the first is
    skipped, because it contains the warm-up, unless it is the only line. The mean of these lines
    gives the speed.

    Args:
        interrupted: indices of lines that time more than steps.
        skip: number of lines to skip; None to skip until the steps are steady.
    """
    timed = []
    for index, step in enumerate(steps):
        if 0 <= step.seconds < _LONGEST_SECONDS and index >= (skip or 0):
            timed.append(index)
    used = [index for index in timed if index not in interrupted] or timed
    times = [steps[index].seconds for index in used]
    cut = 0
    if skip is None:
        cut = _cut(times)
    seconds = math.fsum(times[cut:]) / len(times[cut:]) if times else None
    return SteadyStepTime(
        seconds=seconds,
        windows=len(times) - cut,
        skipped=cut if skip is None else min(skip, len(steps)),
        interrupted=len(timed) - len(used),
    )


def _cut(times: Sequence[float]) -> int:
    """Return the number of lines at the start that are not steady, as `steady` explains.

    Args:
        times: seconds per step of each line.
    """
    if len(times) < _LEAST_WINDOWS:
        return int(len(times) > 1)
    cut = estimators.mser5_cut(np.repeat(times, _BATCH)) // _BATCH
    before, after = times[:cut], np.asarray(times[cut:], dtype=np.float64)
    limits = estimators.transient_limits(np.arange(1, cut + 1), after)
    differs = np.abs(_running_medians(before) - np.median(after)) > limits
    if differs.any():
        return int(np.flatnonzero(differs)[-1]) + 1
    return 0


def _running_medians(values: Sequence[float]) -> estimators.Samples:
    """Return the median of the first value, of the first two values, and so on."""
    ordered: list[float] = []
    medians = np.empty(len(values))
    for count, value in enumerate(values, 1):
        bisect.insort(ordered, value)
        medians[count - 1] = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return medians
