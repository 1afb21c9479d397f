"""Training log: the runs in an mmengine or mmcv log, as text or JSON, line by line.

`read` returns a `Log`; the package computes the speed from its last training. A log may hold
several runs (trainings and tests) one after the other. A training line has the mean time of the
steps since the previous line, in seconds per step.

Formats and their sources:

* mmengine ≥ 0.1, text: `mmengine/runner/log_processor.py`, `LogProcessor.get_log_after_iter`:
  `Iter(train) [ 50/160000]  lr: 1.0000e-02  eta: …  time: 0.5000  data_time: 0.0100  …` and
  `Epoch(train)  [1][ 50/372]  …`.
* mmengine, JSON lines: `mmengine/hooks/logger_hook.py` and `LocalVisBackend.add_scalars` in
  `mmengine/visualization/vis_backend.py`. `vis_data/scalars.json` and `vis_data/TIMESTAMP.json` are
  the same. Only training lines have `iter`, since version 0.7.4. In earlier versions only they have
  a learning rate, and `step` counts. With `log_with_hierarchy` names begin with `train/`.
* mmcv 0.x and 1.x, text: `mmcv/runner/hooks/logger/text.py`, `TextLoggerHook._log_info`: `Iter
  [50/160000]⇥lr: 1.000e-02, eta: …, time: 0.234, data_time: 0.012, …` and `Epoch [1][50/372]⇥…`.
  Versions around 1.0 write `Epoch(train) [1][50/372]⇥…`, and validations by iteration as `Iter
  [200/200]⇥lr: …, mIoU: …`.
* mmcv 0.x and 1.x, JSON: `_dump_log`: a line of facts, then `{"mode": "train", "epoch": …, "iter":
  …}`. Versions around 1.0 write this for validations too.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.report.speed.facts import Facts, Head

#: Maximum parsed length of a line. Steps and errors are at its beginning.
_LONGEST_LINE = 10_000
_NUMBER = r"[-+]?(?:\d{1,30}(?:[.,]\d{1,30})?(?:e[-+]?\d{1,4})?|nan\b|inf\b)"
_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_POSITION = re.compile(
    r"\b(?P<unit>Epoch|Iter)(?:\((?P<mode>\w+)\))?\s*(?:\[\s*(?P<epoch>\d{1,12})\]\s*)?"
    r"\[\s*(?P<iteration>\d{1,12})(?P<total>/\s*\d{1,12})?\]"
)
TIME = re.compile(
    rf"(?<![\w./])time:\s*({_NUMBER})"
    r"(?![.,]?\d|\s*(?:m?s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b)"
)
_LOSS = re.compile(rf"(?<![\w./-])[\w./-]*loss[\w./-]*:\s*({_NUMBER})", re.IGNORECASE)
#: Validation metrics, for example mIoU, aAcc, mDice or bbox_mAP.
_METRIC = re.compile(
    r"(?<![\w./-])[\w./-]*(?:IoU|Acc|Dice|mAP|Fscore|accuracy|Precision|Recall)[\w./-]*:\s*\d"
)
_STARTS = re.compile(r"(?:System environment|Environment info):\s*$")
_CHECKPOINT = re.compile(r"\bSaving checkpoint at \d")
#: Beginning of a logger line: date and time, in brackets or not.
DATED = re.compile(r"\[?(?:\d{4}[-/])?\d\d[-/]\d\d \d\d:\d\d:\d\d\b")
#: Lines about epochs or steps from other programs.
FOREIGN = re.compile(r"\bEpoch:? \[\d+/\d+\]")
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b"
#: Lines unique to mmengine, mmcv and packages based on them. Their other lines could come from any
#: logger.
OWN = re.compile(
    rf"{DATED.pattern}(?:,\d{{1,3}})? - (?:mm\w+ - {_LEVEL}|(?:[\w.-]+ - )?{_LEVEL} - "
    r"(?:Environment info:|"
    r"Distributed training:|Start running, host:))|System environment:\s*$"
)
#: Last line of a traceback.
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::|\s*$)")
_OUT_OF_MEMORY = (
    r"(?:CUDA|HIP)(?: error:)? out of memory|OutOfMemoryError|\bMemoryError\b|oom[-_]kill"
    r"|can(?:'t|not) allocate memory"
)
#: Lines about a failure by kind. If several kinds match, the first is reported.
FAILURES = {
    "out of memory": re.compile(_OUT_OF_MEMORY, re.IGNORECASE),
    "cancelled": re.compile(r"slurmstepd: .*\bCANCELLED\b"),
    "killed": re.compile(
        r"(?:^|\s)Killed(?:\s*$|\s{2,})|已杀死|Signal 9 \(SIGKILL\)|exitcode\s*:\s*-9\b"
    ),
    "a traceback": re.compile(r"Traceback \(most recent call last\):?\s*$"),  # no colon in Jupyter
}
#: Maximum length of lines and configurations. A file without line ends is not a log.
_LONGEST = 1_000_000
_CONFIG = re.compile(r"(?:^|\s)Config:\s*$")
_IGNORED = "Exception ignored in"


class Mark(Enum):
    """Meaning of a line that is not a step.

    START begins a run, and TEST belongs to a test. The time of a PAUSE (validation, checkpoint) is
    part of the next line's time. UNREADABLE looks like JSON, but is not.
    """

    START = auto()
    PAUSE = auto()
    TEST = auto()
    UNREADABLE = auto()


class LoggedStep(NamedTuple):
    """A training line: the steps since the previous line, or the last of them.

    Attributes:
        epoch: epoch number; None if the log only counts steps.
        iteration: number of the last step; in text by epoch, within the epoch.
        seconds: mean step time; nan if the line has no time.
        finite: whether all losses in the line are finite.
    """

    epoch: int | None
    iteration: int
    seconds: float
    finite: bool

    @property
    def position(self) -> tuple[int, int]:
        """Return a sort key for steps within a run."""
        return self.epoch or 0, self.iteration


class Failure(NamedTuple):
    """A line about a training's failure.

    Attributes:
        what: kind of failure, a key of `FAILURES`, for example `out of memory`.
        text: the line.
    """

    what: str
    text: str


#: A parsed line. A dictionary contains the facts at the head of mmcv's JSON.
Parsed = LoggedStep | Failure | dict[str, Any] | Mark


def plain(line: str) -> str:
    """Return a line without terminal colors, cut to the parsed length."""
    return _COLORS.sub("", line[:_LONGEST_LINE]).rstrip()


def of_text(text: str, *, whole: bool = True) -> Parsed | None:
    """Parse a line from `plain`; None if it is not about a training.

    `Log.take` sorts the result into its run.

    Args:
        whole: whether the line is complete; otherwise it may be cut off.
    """
    if position := _POSITION.search(text):
        return _of_position(position, text, whole=whole)
    if _STARTS.search(text):
        return Mark.START
    if _CHECKPOINT.search(text):
        return Mark.PAUSE
    for kind, pattern in FAILURES.items():
        if pattern.search(text):
            return Failure(kind, text.strip())
    return None


def of_json(line: str) -> Parsed | None:
    """Parse a JSON line, which begins with a brace; None if it is not about a training.

    `Log.take` sorts the result into its run.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return Mark.UNREADABLE
    if not isinstance(values, dict):
        return None
    mode, iteration = values.get("mode"), _whole(values.get("iter"))
    if mode is None and iteration is None:
        if "step" in values:
            if not values.keys() & {"lr", "base_lr", "train/lr", "train/base_lr"}:
                return Mark.PAUSE
            return _step_of_json(values, _whole(values["step"]))
        if values.keys() & {"env_info", "config", "exp_name"}:
            return values
        return None
    if mode not in (None, "train"):
        if mode == "test":
            return Mark.TEST
        return Mark.PAUSE
    if (
        mode == "train"
        and "time" not in values
        and not any("loss" in name.lower() for name in values)
    ):
        return Mark.PAUSE  # a validation; its `iter` counts its own batches
    return _step_of_json(values, iteration)


def _step_of_json(values: Mapping[str, Any], iteration: int | None) -> LoggedStep | None:
    """Return the step in a JSON line; None without an iteration, or from another program."""
    if iteration is None:
        return None
    if values.get("mode") is None and "time" in values and "data_time" not in values:
        return None  # from another program; its time may count from its start
    seconds = _real(values.get("time", values.get("train/time")))
    losses = [_real(value) for name, value in values.items() if "loss" in name.lower()]
    return LoggedStep(
        epoch=_whole(values.get("epoch")),
        iteration=iteration,
        seconds=math.nan if seconds is None else seconds,
        finite=all(loss is None or math.isfinite(loss) for loss in losses),
    )


def _of_position(position: re.Match[str], text: str, *, whole: bool) -> Parsed | None:
    """Parse a text line with a position such as `Iter(train) [ 50/160000]`.

    None if it is from another program or may be cut off.
    """
    mode = position["mode"]
    if mode is None and position["unit"] == "Epoch" and not position["epoch"]:
        return None  # `Epoch [1/50]` from other programs, with the time per epoch
    if mode == "test":
        return Mark.TEST
    if mode not in (None, "train"):
        return Mark.PAUSE
    if not position["total"]:
        return None
    time = TIME.search(text, position.end())
    if not whole and not (time and text[time.end() :].strip(".,")):
        return None  # the time may be cut off
    losses = [_number(match[1]) for match in _LOSS.finditer(text, position.end())]
    seconds = _number(time[1]) if time else math.nan
    if not time and not losses and _METRIC.search(text, position.end()):
        return Mark.PAUSE
    return LoggedStep(
        epoch=int(position["epoch"]) if position["epoch"] else None,
        iteration=int(position["iteration"]),
        seconds=seconds,
        finite=all(math.isfinite(loss) for loss in losses),
    )


def _number(text: str) -> float:
    """Parse a number with a decimal point or comma, depending on the language."""
    return float(text.replace(",", "."))


def _whole(value: object) -> int | None:
    """Return a whole number from 0; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def _real(value: object) -> float | None:
    """Return a number as float, infinite if it is too large; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


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

        A failure alone is enough, unless another program's logger wrote earlier lines. `read`
        refuses other files.
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
        """Add the next line, with its line end.

        `read` calls it for each line of the file.
        """
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
        """Add a text line's facts, a line of the configuration, or a traceback's last line.

        A configuration covers many lines: it ends with the next dated line.
        """
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
        """Add a step to its run; a step that counts from the start again begins a new run.

        Steps after a pause or an epoch's start are marked as `interrupted`.
        """
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
    """Yield facts from files next to a JSON log: mmengine's configuration, or the text log.

    A JSON log lacks most facts, but mmengine and mmcv write these files beside it.
    """
    log_folder = path.absolute().parent
    if log_folder.name == "vis_data":
        with suppress(OSError):
            config = foreign.read_bytes(log_folder / "config.py")[:_LONGEST]
            yield Head(config=config.decode(errors="replace")).facts()
        texts = [log_folder.parent / f"{log_folder.parent.name}.log"]
    else:
        texts = [path.with_suffix("")] if path.name.endswith(".log.json") else []
    for file in texts:
        if foreign.is_regular(file):
            with suppress(UserError):
                yield facts_of(read(file), file)
