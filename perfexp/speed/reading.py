"""Reading: a training log from its first line to its last, of which the last run counts."""

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
from perfexp.host import untrusted
from perfexp.speed.facts import Facts, Head
from perfexp.speed.lines import (
    Failure,
    Mark,
    Meta,
    Said,
    Step,
    Unreadable,
    has_time,
    is_exception,
    is_logged,
    of_json,
    of_text,
    plain,
)

#: Longer lines, and longer configurations, are cut: a file without line ends is no log.
_LONGEST = 1_000_000
#: Where a line of the logger begins, and with it a configuration before it ends.
_LOGGED = re.compile(r"(?:\d{4}[-/])?\d\d[-/]\d\d \d\d:\d\d:\d\d\b")
_CONFIG = re.compile(r"(?:^|\s)Config:\s*$")
_IGNORED = "Exception ignored in"


@dataclass(kw_only=True)
class Run:
    """One training within a log.

    Attributes:
        steps: its lines about training.
        interrupted: numbers of those that time more than steps: the first after a validation, after a checkpoint and
            of an epoch.
        failures: why it ended, if it ended badly.
        head: what was said before the first step.
        tests: whether a test was logged.
        times_apart: lines with a time of a step that say nothing else, as where a terminal wrapped them.
    """

    steps: list[Step] = field(default_factory=list)
    interrupted: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    head: Head = field(default_factory=Head)
    tests: bool = False
    times_apart: int = 0

    @property
    def only_tests(self) -> bool:
        """Whether nothing was trained, and nothing was meant to be."""
        return self.tests and not self.steps and not self.failures

    @property
    def slower(self) -> set[int]:
        """Those of `interrupted` to leave out: the only line of an epoch stays, as its clock started with the epoch."""
        lines = Counter(step.epoch for step in self.steps)
        return {number for number in self.interrupted if self._epoch(number) is None or lines[self._epoch(number)] > 1}

    def _epoch(self, number: int) -> int | None:
        return self.steps[number].epoch


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a log says.

    Attributes:
        run: the last training in it.
        facts: of that.
        runs: how many trainings with steps there are.
        unreadable: how many lines of a log of JSON are none.
    """

    run: Run
    facts: Facts
    runs: int
    unreadable: int = 0


def read(path: Path) -> Log:
    """Read a log of mmengine or mmcv.

    Args:
        path: of the file.

    Raises:
        UserError: it can't be read, or nothing in it is of a training.
    """
    reader = _Reader()
    try:
        for line in _lines(path):
            reader.take(line)
        reader.end()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}.") from error
    if not reader.is_log:
        raise UserError(
            f"{path} is no training log: no line of it is one of mmengine or mmcv. Name TIMESTAMP.log, "
            "vis_data/scalars.json or TIMESTAMP.log.json, or a run's folder of perfexp."
        )
    trained = [run for run in reader.runs if not run.only_tests] or reader.runs
    run = trained[-1]
    facts = run.head.facts()
    for neighbour in _neighbours(path):
        facts = facts.or_else(neighbour)
    runs = reader.ended + sum(bool(run.steps) for run in reader.runs)
    return Log(run=run, facts=facts, runs=runs, unreadable=reader.unreadable if reader.is_json else 0)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file, whatever ends them and whatever bytes are in it.

    Raises:
        UserError: it is no file, but a folder, a pipe or a device.
    """
    if not path.is_file():
        raise UserError(f"{path} is no file." if path.exists() else f"{path} does not exist.")
    with path.open("rb") as file:
        start = file.read(2)
    wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell redirects
    with path.open(encoding="utf-16" if wide else "utf-8-sig", errors="replace") as text:
        yield from iter(lambda: text.readline(_LONGEST), "")


def _neighbours(path: Path) -> Iterator[Facts]:
    """What is known beside a log of JSON: the configuration that mmengine writes there, and the text log."""
    here = path.absolute().parent
    if here.name == "vis_data":
        with suppress(OSError):
            config = untrusted.read_bytes(here / "config.py")[:_LONGEST]
            yield Head(config=config.decode(errors="replace")).facts()
        texts = [here.parent / f"{here.parent.name}.log"]
    else:
        texts = [path.with_suffix("")] if path.name.endswith(".log.json") else []
    for file in texts:
        if untrusted.is_regular(file):
            with suppress(UserError):
                yield read(file).facts


class _Reader:
    """Sorts the lines of a log into runs.

    Attributes:
        runs: the last ones, in their order.
        ended: number of trainings with steps before those.
        is_log: whether any line is of a training.
        is_json: whether a line of JSON is.
        unreadable: how many lines are neither JSON nor text that says something.
    """

    def __init__(self) -> None:
        self.runs, self.ended = [Run()], 0
        self.is_log = self.is_json = False
        self.unreadable = 0
        self._config: list[str] | None = None
        self._paused = False
        self._in_traceback = False
        self._before = ""

    def take(self, line: str) -> None:
        """Take in the next line."""
        if line.startswith("{"):
            said = of_json(line)
            if isinstance(said, Unreadable):
                self.unreadable += 1
                return
            self.is_json |= said is not None
            self.is_log |= said is not None
            if isinstance(said, Meta):
                self._begin()
                self.runs[-1].head.take_meta(said.facts)
                return
        else:
            text = plain(line)
            said = of_text(text, whole=line.endswith("\n"))
            ignored = isinstance(said, Failure) and self._before.startswith(_IGNORED)
            self._before = text
            if ignored:
                return
            self.is_log |= said is not None or is_logged(text) or bool(_CONFIG.search(text))
            self.unreadable += said is None and bool(text) and not self.runs[-1].failures
            self._take_head(text, said)
            self.runs[-1].times_apart += said is None and has_time(text)
        match said:
            case Step():
                self._take_step(said)
            case Failure():
                self._in_traceback = said.what == "a traceback"
                self.runs[-1].failures.append(said)
            case Mark.START:
                self._begin()
            case Mark.PAUSE:
                self._paused = True
            case Mark.TEST:
                self.runs[-1].tests = True

    def _take_head(self, text: str, said: Said | None) -> None:
        """Facts, the configuration among them, and what a traceback ends with."""
        if self._in_traceback and is_exception(text):
            self._in_traceback = False
            if said is None:
                self.runs[-1].failures.append(Failure(what="a traceback", text=text.strip()))
        if self._config is not None:
            if said is None and not _LOGGED.match(text) and len(self._config) < _LONGEST:
                self._config.append(text)
                return
            self._end_config()
        if _CONFIG.search(text):
            run = self.runs[-1]
            if run.steps or run.failures:
                self._begin()
            self._config = []
        else:
            self.runs[-1].head.take(text)

    def _take_step(self, step: Step) -> None:
        steps = self.runs[-1].steps
        if steps and step.position == steps[-1].position:
            return  # a line twice: one of the console, one of the file
        if steps and step.position < steps[-1].position:
            if math.isnan(step.seconds):
                self._paused = True  # a validation that mmcv calls training; a restart has times
                return
            head = self.runs[-1].head
            self._begin()
            self.runs[-1].head = head
        run = self.runs[-1]
        if run.steps and (self._paused or step.epoch != run.steps[-1].epoch):
            run.interrupted.add(len(run.steps))
        self._paused = False
        run.steps.append(step)

    def _begin(self) -> None:
        """Another run, unless nothing has been said of this one."""
        self._paused = self._in_traceback = False
        if self.runs[-1] != Run():
            self._forget_all_but_the_last()
            self.runs.append(Run())

    def _forget_all_but_the_last(self) -> None:
        """A log may begin again at every line: of the trainings before the last one, only their number counts."""
        self.ended += sum(bool(run.steps) for run in self.runs[:-1])
        trained = [run for run in self.runs[:-1] if not run.only_tests]
        if self.runs[-1].only_tests and trained:
            self.ended -= bool(trained[-1].steps)
            self.runs = [trained[-1], self.runs[-1]]
        else:
            self.runs = self.runs[-1:]

    def _end_config(self) -> None:
        if self._config is not None:
            self.runs[-1].head.config = "\n".join(self._config)
            self._config = None

    def end(self) -> None:
        """There are no more lines."""
        self._end_config()
