"""Lines: parser for a line of an mmengine or mmcv training log, as text or JSON.

`logged.Log` reads a file with it, line by line. Times are in seconds per step.

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

import json
import math
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

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

    Args:
        whole: whether the line is complete; otherwise it may be cut off.
    """
    if position := _POSITION.search(text):
        return _of_position(position, text, whole=whole)
    if _STARTS.search(text):
        return Mark.START
    if _CHECKPOINT.search(text):
        return Mark.PAUSE
    for what, pattern in FAILURES.items():
        if pattern.search(text):
            return Failure(what, text.strip())
    return None


def of_json(line: str) -> Parsed | None:
    """Parse a JSON line, which begins with a brace; None if it is not about a training."""
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
