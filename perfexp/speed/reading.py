"""The last run in a training log."""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.speed.facts import Facts, Head
from perfexp.speed.lines import (
    DATED,
    EXCEPTION,
    FOREIGN,
    OWN,
    TIME,
    Failure,
    Mark,
    Parsed,
    Step,
    of_json,
    of_text,
    plain,
)

#: Maximum length of lines and configurations. A file without line ends is not a log.
_LONGEST = 1_000_000
_CONFIG = re.compile(r"(?:^|\s)Config:\s*$")
_IGNORED = "Exception ignored in"


@dataclass(kw_only=True)
class Run:
    """A training within a log.

    Attributes:
        interrupted: indices of lines that time more than steps: the first after a validation, a
            checkpoint or an epoch's start.
        times_apart: number of lines that contain only a step time, for example because a terminal
            wrapped them.
    """

    steps: list[Step] = field(default_factory=list)
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
        is_own: whether any line is unique to mmengine and mmcv.
        is_json: whether any JSON line is about a training.
    """

    def __init__(self) -> None:
        self.run = Run()
        self.is_own = self.is_json = self._is_dated = False
        self.unreadable = 0
        self._trained: Run | None = None
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
    def last_training(self) -> Run:
        """Return the last run that is not a test, or the last run if all are tests."""
        if self._trained and self.run.only_tests:
            return self._trained
        return self.run

    @property
    def num_trainings(self) -> int:
        """Return the number of trainings with steps."""
        return self._ended + bool(self.run.steps)

    def take(self, line: str) -> None:
        """Add the next line."""
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
            case Step():
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

    def _take_step(self, step: Step) -> None:
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
        self._paused = self._in_traceback = False
        if self.run != Run():
            self._ended += bool(self.run.steps)
            if not self.run.only_tests:
                self._trained = self.run
            self.run = Run()

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
