"""Training speed from an mmengine or mmcv log, by the mean time of its steady steps.

A log may hold several runs (trainings and tests) one after the other; the last training counts.
Each training line has the mean time of the steps since the previous line. The first lines contain
the warm-up and are skipped.
"""

from __future__ import annotations

import bisect
import codecs
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.report.speed.facts import Facts, Head
from perfexp.report.speed.lines import (
    DATED,
    EXCEPTION,
    FAILURES,
    FOREIGN,
    OWN,
    TIME,
    Failure,
    LoggedStep,
    Mark,
    Parsed,
    of_json,
    of_text,
    plain,
)
from perfexp.report.speed.result import Mode, Speed
from perfexp.statistics import estimators

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
    """Return why a training failed, as the remark; empty if it did not."""
    for what in FAILURES:
        if failures := [failure for failure in run.failures if failure.what == what]:
            return f"{what}: {failures[-1].text}"
    if diverged := [step for step in run.steps if not step.finite]:
        where = f"iteration {diverged[0].iteration}"
        if diverged[0].epoch is not None:
            where = f"epoch {diverged[0].epoch}, {where}"
        return f"the loss is not finite, first at {where}"
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
    skipped, because it contains the warm-up, unless it is the only line.

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


#: Maximum length of lines and configurations. A file without line ends is not a log.
_LONGEST = 1_000_000
_CONFIG = re.compile(r"(?:^|\s)Config:\s*$")
_IGNORED = "Exception ignored in"


@dataclass(kw_only=True)
class LoggedTraining:
    """A run within a log, a training or a test.

    Attributes:
        steps: training lines.
        interrupted: indices of lines that time more than steps: the first after a validation, a
            checkpoint or an epoch's start.
        failures: lines about a failure.
        head: facts at the beginning.
        tests: whether any line belongs to a test or validation.
        times_apart: number of lines that contain only a step time, for example because a terminal
            wrapped them.
    """

    steps: list[LoggedStep] = field(default_factory=list)
    interrupted: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    head: Head = field(default_factory=Head)
    tests: bool = False
    times_apart: int = 0

    @property
    def only_tests(self) -> bool:
        """Return whether the run was not a training."""
        return self.tests and not self.steps and not self.failures

    @property
    def slower(self) -> set[int]:
        """Return the `interrupted` lines to leave out.

        An epoch's only line stays, because its clock starts with the line.
        """
        lines = Counter(step.epoch for step in self.steps)
        epochs = {number: self.steps[number].epoch for number in self.interrupted}
        return {number for number, epoch in epochs.items() if epoch is None or lines[epoch] > 1}


def read(path: Path) -> Log:
    """Read an mmengine or mmcv log.

    Raises `UserError` if it is unreadable or not a training log.
    """
    log = Log()
    try:
        for line in _lines(path):
            log.take(line)
        log.end()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}.") from error
    if not log.is_log:
        raise UserError(
            f"{path} is not a training log of mmengine or mmcv: no line has the time of a step. "
            "Pass TIMESTAMP.log, vis_data/scalars.json or TIMESTAMP.log.json, or the folder of a "
            "perfexp run."
        )
    return log


def facts_of(log: Log, path: Path) -> Facts:
    """Return facts about the last training, from its log or neighboring files."""
    facts = log.last_training.head.facts()
    for more in _neighboring_facts(path):
        facts = facts.or_else(more)
    return facts


class Log:
    """A training log: its lines, sorted into runs. Only the last runs stay in memory.

    Attributes:
        run: the run that the latest line belongs to.
        unreadable: number of lines that could not be read as JSON or are about no training.
        is_own: whether any line is unique to mmengine and mmcv.
        is_json: whether any JSON line is about a training.
    """

    def __init__(self) -> None:
        self.run = LoggedTraining()
        self.is_own = self.is_json = self._is_dated = False
        self.unreadable = 0
        self._trained: LoggedTraining | None = None
        self._ended = 0
        self._config: list[str] | None = None
        self._paused = self._in_traceback = False
        self._before = ""

    @property
    def is_log(self) -> bool:
        """Return whether the file is a log.

        A failure alone is enough, unless another program's logger wrote earlier lines.
        """
        run = self.last_training
        return self.is_own or bool(run.steps or run.tests or (run.failures and not self._is_dated))

    @property
    def last_training(self) -> LoggedTraining:
        """Return the last run that is not a test, or the last run if all are tests."""
        if self._trained and self.run.only_tests:
            return self._trained
        return self.run

    @property
    def num_trainings(self) -> int:
        """Return the number of trainings with steps."""
        return self._ended + bool(self.run.steps)

    def take(self, line: str) -> None:
        """Add the next line, with its line end."""
        if line.startswith("{"):
            parsed = of_json(line)
            self.is_json |= parsed not in (None, Mark.UNREADABLE)
            self.is_own |= isinstance(parsed, dict) and "env_info" in parsed
        else:
            text = plain(line)
            parsed = of_text(text, whole=line.endswith("\n"))
            ignored = isinstance(parsed, Failure) and self._before.startswith(_IGNORED)
            self._before = text
            if ignored:
                return
            self.is_own |= bool(OWN.match(text))
            self._is_dated |= bool(DATED.match(text) or FOREIGN.search(text))
            self.unreadable += parsed is None and bool(text) and not self.run.failures
            self._take_head(text, parsed)
            self.run.times_apart += parsed is None and bool(TIME.search(text))
        match parsed:
            case LoggedStep():
                self._take_step(parsed)
            case Failure():
                self._in_traceback = parsed.what == "a traceback"
                self.run.failures.append(parsed)
            case dict():
                self._begin()
                self.run.head.take_meta(parsed)
            case Mark.START:
                self._begin()
            case Mark.PAUSE:
                self._paused = self.run.tests = True
            case Mark.TEST:
                self.run.tests = True
            case Mark.UNREADABLE:
                self.unreadable += 1

    def _take_head(self, text: str, parsed: Parsed | None) -> None:
        """Add a text line's facts, a line of the configuration, or a traceback's last line."""
        if self._in_traceback and EXCEPTION.match(text):
            self._in_traceback = False
            if parsed is None:
                self.run.failures.append(Failure("a traceback", text.strip()))
        if self._config is not None:
            if parsed is None and not DATED.match(text) and len(self._config) < _LONGEST:
                self._config.append(text)
                return
            self.end()
        if _CONFIG.search(text):
            if self.run.steps or self.run.failures:
                self._begin()
            self._config = []
        else:
            self.run.head.take(text)

    def _take_step(self, step: LoggedStep) -> None:
        """Add a step to its run; a step that counts from the start again begins a new run."""
        steps = self.run.steps
        if steps and step.position == steps[-1].position:
            return  # logged to console and file
        # the count falls when another run begins
        if steps and step.position < steps[-1].position:
            if math.isnan(step.seconds):
                # mmcv labels this validation as training; lines after a restart have times
                self._paused = True
                return
            head = self.run.head
            self._begin()
            self.run.head = head
        steps = self.run.steps
        if steps and (self._paused or step.epoch != steps[-1].epoch):
            self.run.interrupted.add(len(steps))
        self._paused = False
        steps.append(step)

    def _begin(self) -> None:
        """Begin a new run, unless the current run has no lines yet."""
        self._paused = self._in_traceback = False
        if self.run != LoggedTraining():
            self._ended += bool(self.run.steps)
            if not self.run.only_tests:
                self._trained = self.run
            self.run = LoggedTraining()

    def end(self) -> None:
        """Finish the configuration being read, if any: another line or the log's end follows."""
        if self._config is not None:
            self.run.head.config = "\n".join(self._config)
            self.is_own |= " = dict(" in self.run.head.config
            self._config = None


def _lines(path: Path) -> Iterator[str]:
    """Yield a text file's lines, with any line ends and bytes.

    Raises `UserError` for a folder, pipe or device.
    """
    if not path.is_file():
        if path.exists():
            raise UserError(f"{path} is not a file.")
        raise UserError(f"{path} does not exist.")
    with path.open("rb") as file:
        start = file.read(2)
    wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # PowerShell redirects like this
    with path.open(encoding="utf-16" if wide else "utf-8-sig", errors="replace") as text:
        yield from iter(lambda: text.readline(_LONGEST), "")


def _neighboring_facts(path: Path) -> Iterator[Facts]:
    """Yield facts from files next to a JSON log: mmengine's configuration, or the text log."""
    here = path.absolute().parent
    if here.name == "vis_data":
        with suppress(OSError):
            config = foreign.read_bytes(here / "config.py")[:_LONGEST]
            yield Head(config=config.decode(errors="replace")).facts()
        texts = [here.parent / f"{here.parent.name}.log"]
    else:
        texts = [path.with_suffix("")] if path.name.endswith(".log.json") else []
    for file in texts:
        if foreign.is_regular(file):
            with suppress(UserError):
                yield facts_of(read(file), file)
