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
from perfexp.host import untrusted
from perfexp.speed.facts import Facts, Head
from perfexp.speed.lines import (
    Failure,
    Mark,
    Meta,
    Parsed,
    Step,
    Unreadable,
    has_time,
    is_exception,
    is_logged,
    of_json,
    of_text,
    plain,
)

#: Length to which lines and configurations are cut: a file without line ends is not a log.
_LONGEST = 1_000_000
#: Beginning of a line of the logger, which ends a configuration before it.
_LOGGED = re.compile(r"(?:\d{4}[-/])?\d\d[-/]\d\d \d\d:\d\d:\d\d\b")
_CONFIG = re.compile(r"(?:^|\s)Config:\s*$")
_IGNORED = "Exception ignored in"


@dataclass(kw_only=True)
class Run:
    """One training within a log.

    Attributes:
        steps: lines about its steps.
        interrupted: indices of those that time more than steps: the first after a validation, after a checkpoint and
            of an epoch.
        failures: reasons why it failed.
        head: facts before the first step.
        tests: whether a test was logged.
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
        return {number for number in self.interrupted if self._epoch(number) is None or lines[self._epoch(number)] > 1}

    def _epoch(self, number: int) -> int | None:
        return self.steps[number].epoch


@dataclass(frozen=True, kw_only=True)
class Log:
    """A training log.

    Attributes:
        run: the last training.
        facts: facts of the last training.
        runs: number of trainings with steps.
        unreadable: lines of a JSON log that are not JSON.
    """

    run: Run
    facts: Facts
    runs: int
    unreadable: int = 0


def read(path: Path) -> Log:
    """Read a log of mmengine or mmcv.

    Raises:
        UserError: the file can't be read or is not a training log.
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
            f"{path} is not a training log of mmengine or mmcv. Pass TIMESTAMP.log, vis_data/scalars.json or "
            "TIMESTAMP.log.json, or the folder of a perfexp run."
        )
    trained = [run for run in reader.runs if not run.only_tests] or reader.runs
    run = trained[-1]
    facts = run.head.facts()
    for more in _neighboring_facts(path):
        facts = facts.or_else(more)
    runs = reader.ended + sum(bool(run.steps) for run in reader.runs)
    return Log(run=run, facts=facts, runs=runs, unreadable=reader.unreadable if reader.is_json else 0)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file with any line ends and bytes.

    Raises:
        UserError: it is a folder, a pipe or a device.
    """
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
        runs: the last runs in their order.
        ended: number of trainings with steps before those.
        is_log: whether any line is about a training.
        is_json: whether a line of JSON is about a training.
        unreadable: lines that are neither JSON nor parsed text.
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
        """Add the next line."""
        if line.startswith("{"):
            parsed = of_json(line)
            if isinstance(parsed, Unreadable):
                self.unreadable += 1
                return
            self.is_json |= parsed is not None
            self.is_log |= parsed is not None
            if isinstance(parsed, Meta):
                self._begin()
                self.runs[-1].head.take_meta(parsed.facts)
                return
        else:
            text = plain(line)
            parsed = of_text(text, whole=line.endswith("\n"))
            ignored = isinstance(parsed, Failure) and self._before.startswith(_IGNORED)
            self._before = text
            if ignored:
                return
            self.is_log |= parsed is not None or is_logged(text) or bool(_CONFIG.search(text))
            self.unreadable += parsed is None and bool(text) and not self.runs[-1].failures
            self._take_head(text, parsed)
            self.runs[-1].times_apart += parsed is None and has_time(text)
        match parsed:
            case Step():
                self._take_step(parsed)
            case Failure():
                self._in_traceback = parsed.what == "a traceback"
                self.runs[-1].failures.append(parsed)
            case Mark.START:
                self._begin()
            case Mark.PAUSE:
                self._paused = True
            case Mark.TEST:
                self.runs[-1].tests = True

    def _take_head(self, text: str, parsed: Parsed | None) -> None:
        """Add facts, the configuration among them, and the end of a traceback."""
        if self._in_traceback and is_exception(text):
            self._in_traceback = False
            if parsed is None:
                self.runs[-1].failures.append(Failure(what="a traceback", text=text.strip()))
        if self._config is not None:
            if parsed is None and not _LOGGED.match(text) and len(self._config) < _LONGEST:
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
            return  # logged to the console and to the file
        # the count falls where another run begins
        if steps and step.position < steps[-1].position:
            if math.isnan(step.seconds):
                self._paused = True  # mmcv calls this validation training; the lines of a restart have times
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
        """Begin another run, unless this one is still empty."""
        self._paused = self._in_traceback = False
        if self.runs[-1] != Run():
            self._forget_all_but_the_last()
            self.runs.append(Run())

    def _forget_all_but_the_last(self) -> None:
        """Count the trainings before the last one and drop them: a log may restart at every line."""
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
        """Finish after the last line."""
        self._end_config()
