"""Run progress, drawn only when a worker event arrives: nothing runs here while calls are timed.

The parent process passes the worker's messages on (`run.job`). They arrive between blocks of timed
calls, so drawing costs the measurement nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import rich.console
import rich.progress
from rich.table import Column, Table
from rich.text import Text

from perfexp.records import units
from perfexp.records.record import Status
from perfexp.records.subject import one_line

#: Length of `^C`.
_ECHO = 2


class Whole:
    """Progress of a whole sweep.

    The remaining time follows from the mean duration of the measured runs.

    Args:
        total: number of runs; None if unknown.
        noun: word for a run, or `process` if the parts are processes of the same runs.
        clock: returns seconds from any start.
    """

    def __init__(
        self, total: int | None, *, noun: str = "run", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.number = total, 0
        self._noun, self._clock, self._name = noun, clock, ""
        self._start, self._is_measured = clock(), False
        #: Whether the current run differs from the previous processes' run.
        self.is_another = True
        #: Durations of the measured runs.
        self.seconds: list[float] = []
        #: Estimated duration of a run, used until the first run has been measured.
        self.estimated_seconds: float | None = None

    def begin(self, number: int, name: str) -> None:
        """Start run `number`, counted from 1, which ends the previous run.

        Sweeps call it for each run, also for runs that are complete already, and again for each
        further process of a run, which goes on.
        """
        now = self._clock()
        self.is_another = (number, name) != (self.number, self._name)
        if not self.is_another:
            return
        if self._is_measured:  # runs that were complete before, or refused, do not count
            self.seconds.append(now - self._start)
        self.number, self._name, self._start, self._is_measured = number, name, now, False

    def measure(self) -> None:
        """Mark the current run as having something to measure."""
        self._is_measured = True

    @property
    def counts_runs(self) -> bool:
        """Return whether it counts runs, not processes that each measure part of a run."""
        return self._noun == "run"

    @property
    def text(self) -> str:
        """Return the current run's position and name, e.g. `run 3 of 110: NAME`."""
        position = f"{self._noun} {self.number}"
        if self.total:
            position += f" of {self.total}"
        return f"{position}: {self._name}"

    @property
    def left_text(self) -> str:
        """Return the sweep's estimated remaining time in words; empty if unknown.

        The estimate before the first measured run comes from the plan.
        """
        seconds = self.estimated_seconds
        if self.seconds:
            seconds = sum(self.seconds) / len(self.seconds)
        if self.total is None or seconds is None:
            return ""
        under_way = max(seconds - (self._clock() - self._start), 0.0)
        return _left(under_way + seconds * (self.total - self.number))


class Progress:
    """Progress display for a worker's events, which arrive between timed blocks.

    On a terminal a bar is drawn only when an event arrives: no thread refreshes it. Elsewhere
    (`plain`) each finished point is a line. With `quiet` only the cause of a wait is printed, on
    `err`.

    Args:
        console: rich console for the bar and lines, on stdout.
        err: rich console on stderr.
        clock: returns seconds from any start.
        whole: the sweep that the run belongs to, which has a bar of its own; None outside a sweep.
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
        #: Estimate at the time `_updated`; None if unknown.
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
        """Note that a worker runs.

        The parent calls it when it starts a worker, which then loads the model.

        Args:
            total: number of points.
            finished: points that already have a result.
        """
        self._total, self._finished = total, finished
        self._draw("loading")

    def added(self) -> None:
        """Count a further point, which the results called for."""
        self._total += 1

    def begun(self) -> None:
        """Note that measuring begins.

        Without a bar, print a line when another run of a sweep begins. The parent calls it when a
        worker sends its first point.
        """
        if self._whole:
            self._whole.measure()
        if self._whole and self._whole.is_another and self._plain and not self._quiet:
            self._print(", ".join(filter(None, (self._whole.text, self._whole.left_text))))

    def remaining(self, seconds: float | None) -> None:
        """Set the estimated seconds from now to the end of the run; None if unknown."""
        self._left_seconds, self._updated = seconds, self._clock()

    def point(self, key_text: str) -> None:
        """Show that a point begins."""
        self._key = key_text
        self._draw(key_text)

    def epochs(self, done: int, total: int, figures: str, left_seconds: float | None) -> None:
        """Show finished epochs in a second bar, with the last epoch's figures.

        It is drawn with the next event.
        """
        if self._epochs is None:
            self._epochs = self._bar.add_task("", total=total, what="", left="")
        self._update(self._epochs, total, done, figures, _left(left_seconds or 0.0))

    def block(self, text: str) -> None:
        """Show what is timed next within the current point."""
        self._draw(": ".join(filter(None, (self._key, text))))

    def waiting(self, text: str) -> None:
        """Show why the worker waits for another process, without a remaining time."""
        self._left_seconds = None
        self._draw(text)
        if self._plain:
            self._print(text)

    def result(self, text: str) -> None:
        """Print a partial result for the current point; the line stays on the console."""
        self.block(text if self._epochs is None else "")
        if not self._quiet:
            self._print(text)

    def done(self, status: str, result: str) -> None:
        """Show that the current point is done, with its time.

        Failure reasons are printed later, below the results.
        """
        self._finished += 1
        if self._epochs is not None:
            self._bar.remove_task(self._epochs)
            self._epochs = None
        self._draw(self._key)
        if self._whole is not None and self._whole.counts_runs and self._total == 1:
            return  # the run has its own line
        if status != Status.OK:
            result = status
        elif not self._plain:
            return
        if not self._quiet:
            self._print(f"[{self._finished}/{self._total}] {self._key}: {result or status}")

    @property
    def left_text(self) -> str:
        """Return the run's estimated remaining time in words; empty if unknown or exceeded."""
        if self._left_seconds is None:
            return ""
        return _left(self._left_seconds - (self._clock() - self._updated))

    def _draw(self, status: str) -> None:
        """Draw the sweep's bar, if any, and the run's bar with the current activity."""
        if self._whole and self._of_whole is not None:
            self._update(
                self._of_whole,
                self._whole.total,
                self._whole.number - 1,
                self._whole.text,
                self._whole.left_text,
            )
        self._update(self._task, self._total, self._finished, status, self.left_text)
        self._bar.refresh()

    def _update(
        self, task: rich.progress.TaskID, total: int | None, completed: int, status: str, left: str
    ) -> None:
        """Set what one of the bars shows, to be drawn on the next refresh."""
        self._bar.update(task, total=total, completed=completed, what=one_line(status), left=left)

    def _print(self, line: str) -> None:
        """Print a line that stays above the bar, on stderr if quiet."""
        console = self._err if self._quiet else self._console
        console.print(Text(one_line(line)), soft_wrap=True)


def _left(seconds: float) -> str:
    """Return a remaining time in words, for example `about 3 min 20 s left`; empty from 0 down."""
    if seconds > 0:
        return f"about {units.format_seconds(seconds, 2)} left"
    return ""


class _Bar(rich.progress.Progress):
    """A bar that leaves room at the right for the `^C` that a terminal echoes.

    If the echo wrapped to another line, a line of the bar would stay on the screen.
    """

    def __init__(self, *columns: rich.progress.ProgressColumn, **options: Any) -> None:
        self._shown_on = options["console"]
        super().__init__(*columns, **options)

    def make_tasks_table(self, tasks: Iterable[rich.progress.Task]) -> Table:
        """Return the bar's table, narrower than the console."""
        table = super().make_tasks_table(tasks)
        table.width = self._shown_on.width - _ECHO
        return table


def _bar(
    console: rich.console.Console, clock: Callable[[], float], *, disable: bool
) -> rich.progress.Progress:
    """Return a bar that draws only on `refresh` and disappears at the end.

    It shows finished and all points, the current activity and the remaining time.
    """
    status_column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return _Bar(
        rich.progress.BarColumn(bar_width=20),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[what]}", markup=False, table_column=status_column),
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
