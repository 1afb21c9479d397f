"""Reading: the last run of a training log."""

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

#: Length to which lines and configurations are cut: a file without line ends is not a log.
_LONGEST = 1_000_000
_CONFIG = re.compile(r"(?:^|\s)Config:\s*$")
_IGNORED = "Exception ignored in"


@dataclass(kw_only=True)
class Run:
    """One training within a log.

    Attributes:
        interrupted: indices of lines that time more than steps: the first after a validation or checkpoint, and of an
            epoch.
        times_apart: lines with nothing but the time of a step, as where a terminal wrapped them.
    """

    steps: list[Step] = field(default_factory=list)
    interrupted: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    head: Head = field(default_factory=Head)
    tests: bool = False
    times_apart: int = 0

    @property
    def only_tests(self) -> bool:
        """Whether the run was not a training."""
        return self.tests and not self.steps and not self.failures

    @property
    def slower(self) -> set[int]:
        """Lines of `interrupted` to leave out; the only line of an epoch stays, because its clock starts with it."""
        lines = Counter(step.epoch for step in self.steps)
        epochs = {number: self.steps[number].epoch for number in self.interrupted}
        return {number for number, epoch in epochs.items() if epoch is None or lines[epoch] > 1}


def read(path: Path) -> Log:
    """Read a log of mmengine or mmcv; raises UserError if it can't be read or is not a training log."""
    log = Log()
    try:
        for line in _lines(path):
            log.take(line)
        log.end()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}.") from error
    if not log.is_log:
        raise UserError(
            f"{path} is not a training log of mmengine or mmcv: no line has the time of a step. Pass "
            "TIMESTAMP.log, vis_data/scalars.json or TIMESTAMP.log.json, or the folder of a perfexp run."
        )
    return log


def facts_of(log: Log, path: Path) -> Facts:
    """Return the facts of the last training, in its log or beside it."""
    facts = log.last_training.head.facts()
    for more in _neighboring_facts(path):
        facts = facts.or_else(more)
    return facts


class Log:
    """A training log: its lines, sorted into runs, of which only the last ones stay in memory.

    Attributes:
        is_own: whether any line is one that only mmengine and mmcv write.
        is_json: whether any line of JSON is about a training.
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
        """Whether the file is a log; a failure alone is one unless another program's logger wrote lines before."""
        run = self.last_training
        return self.is_own or bool(run.steps or run.tests or (run.failures and not self._is_dated))

    @property
    def last_training(self) -> Run:
        """The last run that is not a test, or the last one if all are."""
        return self._trained if self._trained and self.run.only_tests else self.run

    @property
    def num_trainings(self) -> int:
        """Number of trainings with steps."""
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
            return  # logged to the console and to the file
        # the count falls where another run begins
        if steps and step.position < steps[-1].position:
            if math.isnan(step.seconds):
                self._paused = (
                    True  # mmcv calls this validation training; the lines of a restart have times
                )
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
            self._trained = self._trained if self.run.only_tests else self.run
            self.run = Run()

    def end(self) -> None:
        """End the configuration, if one is being read: another line or the end of the log follows."""
        if self._config is not None:
            self.run.head.config = "\n".join(self._config)
            self.is_own |= " = dict(" in self.run.head.config
            self._config = None


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file with any line ends and bytes; raises UserError for a folder, pipe or device."""
    if not path.is_file():
        raise UserError(f"{path} is not a file." if path.exists() else f"{path} does not exist.")
    with path.open("rb") as file:
        start = file.read(2)
    wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell redirects
    with path.open(encoding="utf-16" if wide else "utf-8-sig", errors="replace") as text:
        yield from iter(lambda: text.readline(_LONGEST), "")


def _neighboring_facts(path: Path) -> Iterator[Facts]:
    """Yield the facts beside a JSON log: those of the configuration that mmengine writes, and of the text log."""
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
