"""Logged: the speed of a training from a log of mmengine or mmcv."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from perfexp.errors import UserError
from perfexp.speed.facts import Facts
from perfexp.speed.lines import Step
from perfexp.speed.reading import Log, Run, read
from perfexp.speed.result import Mode, Speed
from perfexp.speed.steady import Steady, steady

_OPTIONS = {
    "model": "--model NAME",
    "batch_size": "--batch-size N",
    "num_gpus": "--gpus N",
    "precision": "--precision P",
}
#: Kinds of failures, of which the first that occurred is reported.
_WORST = ("out of memory", "cancelled", "killed", "a traceback")


def of_log(path: Path, options: Facts | None = None, *, mode: Mode | None = None, skip: int | None = None) -> Speed:
    """Return the speed of the last training in a log.

    images/s = batch size per GPU × GPUs / mean time of a step.

    Args:
        path: path of the log.
        options: facts from the command line, which override those of the log.
        mode: run mode; None to derive it from the number of GPUs.
        skip: first lines about steps to skip; None to skip until they are steady.

    Raises:
        UserError: the file is not a readable training log, a fact is missing, or no line is left after skipping.
    """
    log = read(path)
    if status := _why_unknown(log.run):
        raise UserError(f"{path}: {status}. Nothing is written.")
    facts = (options or Facts()).or_else(log.facts)
    if mode is Mode.sp and facts.num_gpus is None:
        facts.num_gpus = 1
    model, batch_size, num_gpus, precision = _complete(facts, path)
    if mode is Mode.sp and num_gpus > 1:
        raise UserError(
            f"{path}: run mode sp is for one GPU, the training used {num_gpus}. Set --run-mode mp or --gpus 1."
        )
    left = steady(log.run.steps, log.run.slower, skip)
    failure = _why_failed(log.run)
    if not failure and left.seconds is None:
        raise UserError(f"{path}: --skip {skip} leaves no usable line of {len(log.run.steps)}.")
    rate = batch_size * num_gpus / left.seconds if left.seconds else math.inf
    why = failure or ("" if math.isfinite(rate) else "the time of its steps is zero")
    return Speed(
        log_file=str(path.resolve()),
        model=model,
        mode=mode or Mode.of(num_gpus),
        num_gpus=num_gpus,
        batch_size=batch_size,
        precision=precision,
        images_per_second=0.0 if why else rate,
        failed=bool(why),
        remark="; ".join([why or _how(left, batch_size, num_gpus), *_omitted(log)]),
    )


def _complete(facts: Facts, path: Path) -> tuple[str, int, int, str]:
    """Return all facts, or raise UserError if one is missing."""
    model, batch_size, num_gpus, precision = facts.model, facts.batch_size, facts.num_gpus, facts.precision
    if model is None or batch_size is None or num_gpus is None or precision is None:
        missing = [option for name, option in _OPTIONS.items() if getattr(facts, name) is None]
        raise UserError(f"{path} lacks facts about the training; add {' '.join(missing)}.")
    return model, batch_size, num_gpus, precision


def _why_unknown(run: Run) -> str:
    """Return why a log has neither a speed nor a failure; empty if it has one."""
    if run.only_tests:
        return "only tests are logged, no training"
    if run.failures or not run.steps or not all(step.finite for step in run.steps):
        return ""
    if steady(run.steps, skip=0).seconds is not None:
        return ""
    wrapped = " (its lines are wrapped: write the log to a file, or to a wider terminal)" if run.times_apart else ""
    return f"no line about its steps has a usable time{wrapped}"


def _why_failed(run: Run) -> str:
    """Return why there is no figure; empty if there is one."""
    for what in _WORST:
        if failures := [failure for failure in run.failures if failure.what == what]:
            return f"{what}: {failures[-1].text}"
    if diverged := [step for step in run.steps if not step.finite]:
        return f"the loss is not finite, first at {_place(diverged[0])}"
    return "" if run.steps else "no steps of a training in it"


def _place(step: Step) -> str:
    epoch = "" if step.epoch is None else f"epoch {step.epoch}, "
    return f"{epoch}iteration {step.iteration}"


def _how(left: Steady, batch_size: int, num_gpus: int) -> str:
    """Return how the figure came about."""
    parts = [f"mean of {left.windows} lines, {left.seconds:.4g} s for a step of {batch_size} × {num_gpus} images"]
    if left.skipped:
        parts.append(f"the first {left.skipped} skipped")
    if left.interrupted:
        parts.append(f"{left.interrupted} left out that time a validation, a checkpoint or an epoch's start")
    if left.windows == 1 and not left.skipped:
        parts.append("with the warm-up in it")
    return ", ".join(parts)


def _omitted(log: Log) -> Iterator[str]:
    """Yield what was left out of a log: unreadable lines, and all trainings but the last."""
    if log.unreadable:
        yield f"{log.unreadable} line{'s' if log.unreadable > 1 else ''} left out that can't be read as JSON"
    if others := log.runs - bool(log.run.steps):
        yield f"the last of {others + 1} trainings in the log"
