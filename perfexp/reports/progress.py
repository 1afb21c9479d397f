"""Progress of a run, drawn only when a worker sends an event: nothing runs in this process while a call is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

import rich.console
import rich.progress
from rich.table import Column
from rich.text import Text

from perfexp.records import units
from perfexp.records.record import Status
from perfexp.summaries.subject import one_line


class Whole:
    """Progress of a sweep of `total` runs; the time left follows from the mean of the runs that have been measured."""

    def __init__(
        self, total: int | None, *, noun: str = "run", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.number = total, 0
        self._noun, self._clock, self._name = noun, clock, ""
        self._start, self._is_measured = clock(), False
        #: Whether the current run is not that of the processes before.
        self.is_another = True
        self.seconds: list[float] = []  # of the runs that have been measured
        #: Estimate for one run, used until one has been measured.
        self.estimated_seconds: float | None = None

    def begin(self, number: int, name: str) -> None:
        """Start the run with this number, from 1, which ends the one before."""
        now = self._clock()
        self.is_another = (number, name) != (self.number, self._name)
        if self._is_measured:  # a run that was complete, or is refused, does not count
            self.seconds.append(now - self._start)
        self.number, self._name, self._start, self._is_measured = number, name, now, False

    def measure(self) -> None:
        """Mark the current run as one with something to measure."""
        self._is_measured = True

    @property
    def counts_runs(self) -> bool:
        """Whether it is made of runs, and not of processes that measure some of a run."""
        return self._noun == "run"

    @property
    def text(self) -> str:
        """`run 3 of 110: NAME`."""
        return (
            f"{self._noun} {self.number}{f' of {self.total}' if self.total else ''}: {self._name}"
        )

    @property
    def left_text(self) -> str:
        """Estimated time for the rest; empty if unknown."""
        seconds = sum(self.seconds) / len(self.seconds) if self.seconds else self.estimated_seconds
        if self.total is None or seconds is None:
            return ""
        under_way = max(seconds - (self._clock() - self._start), 0.0)
        return _left(under_way + seconds * (self.total - self.number))


class Progress:
    """Follows a worker's events, which arrive between timed blocks.

    On a terminal a bar is drawn when an event arrives, and only then: no thread refreshes it. Elsewhere (`plain`) each
    finished point is a line; with `quiet` only the cause of a wait is one, on `err`.
    """

    def __init__(
        self,
        console: rich.console.Console,
        err: rich.console.Console,
        *,
        plain: bool,
        quiet: bool,
        clock: Callable[[], float],
        whole: Whole | None,
    ) -> None:
        self._console, self._err, self._plain, self._quiet = console, err, plain, quiet
        self._clock, self._whole = clock, whole
        self._total = self._finished = 0
        self._key = ""
        self._left_seconds: float | None = None
        self._updated = clock()
        self._bar = _bar(console, clock, disable=plain or quiet)
        self._of_whole = self._bar.add_task("", total=None, what="", left="") if whole else None
        self._task = self._bar.add_task("", total=None, what="starting", left="")
        self._epochs: rich.progress.TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:
            self._bar.stop()

    def started(self, total: int, finished: int = 0) -> None:
        """A worker runs; of `total` points some are `finished` from the start."""
        self._total, self._finished = total, finished
        self._draw("loading")

    def begun(self) -> None:
        """A measurement of the run begins: without a bar, a line names the run of a sweep if it is another one."""
        if self._whole:
            self._whole.measure()
        if self._whole and self._whole.is_another and self._plain and not self._quiet:
            self._print(", ".join(filter(None, (self._whole.text, self._whole.left_text))))

    def remaining(self, seconds: float | None) -> None:
        """Set the estimated seconds from now to the end of the run; None if unknown."""
        self._left_seconds, self._updated = seconds, self._clock()

    def point(self, key_text: str) -> None:
        """A point begins."""
        self._key = key_text
        self._draw(key_text)

    def epochs(self, done: int, total: int, figures: str, left_seconds: float | None) -> None:
        """Epochs of the current point are done: they have a bar of their own, with the figures of the last one.

        It is drawn with the next event.
        """
        if self._epochs is None:
            self._epochs = self._bar.add_task("", total=total, what="", left="")
        self._update(
            self._epochs, total, done, figures, "" if left_seconds is None else _left(left_seconds)
        )

    def block(self, text: str) -> None:
        """A block of a point begins; the text names what it times."""
        self._draw(": ".join(filter(None, (self._key, text))))

    def waiting(self, text: str) -> None:
        """The worker waits for another process; the text names the cause, and no time is left that would count down."""
        self._left_seconds = None
        self._draw(text)
        if self._plain:
            self._print(text)

    def result(self, text: str) -> None:
        """A part of the current point has a result, which stays on the console as a line."""
        self.block(text if self._epochs is None else "")
        if not self._quiet:
            self._print(text)

    def done(self, status: str, result: str) -> None:
        """The current point is done; the result is its time. The reasons of others stand below the results."""
        self._finished += 1
        if self._epochs is not None:
            self._bar.remove_task(self._epochs)
            self._epochs = None
        self._draw(self._key)
        is_all_of_a_run = (
            self._whole is not None and self._whole.counts_runs and self._total == 1
        )  # has its own line
        if self._quiet or not (self._plain or status != Status.OK) or is_all_of_a_run:
            return
        ending = result if status == Status.OK else ""
        self._print(f"[{self._finished}/{self._total}] {self._key}: {ending or status}")

    @property
    def left_text(self) -> str:
        """Estimated time for the rest of the run; empty if unknown, or exceeded."""
        return (
            ""
            if self._left_seconds is None
            else _left(self._left_seconds - (self._clock() - self._updated))
        )

    def _draw(self, what: str) -> None:
        if self._whole and self._of_whole is not None:
            self._update(
                self._of_whole,
                self._whole.total,
                self._whole.number - 1,
                self._whole.text,
                self._whole.left_text,
            )
        self._update(self._task, self._total, self._finished, what, self.left_text)
        self._bar.refresh()

    def _update(
        self, task: rich.progress.TaskID, total: int | None, completed: int, what: str, left: str
    ) -> None:
        self._bar.update(task, total=total, completed=completed, what=one_line(what), left=left)

    def _print(self, line: str) -> None:
        (self._err if self._quiet else self._console).print(Text(one_line(line)), soft_wrap=True)


def _left(seconds: float) -> str:
    return f"about {units.format_seconds(seconds, 2)} left" if seconds > 0 else ""


def _bar(
    console: rich.console.Console, clock: Callable[[], float], *, disable: bool
) -> rich.progress.Progress:
    """A bar that disappears at the end and draws itself only on `refresh`."""
    what = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return rich.progress.Progress(
        rich.progress.BarColumn(bar_width=20),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[what]}", markup=False, table_column=what),
        rich.progress.TextColumn("{task.fields[left]}", markup=False, justify="right"),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        get_time=clock,
        disable=disable,
        expand=True,
    )
