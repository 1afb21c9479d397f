"""Console: what perfexp prints, namely headers, progress, results, warnings and errors.

Each command has one `Console`. On a terminal it prints tables and colors, elsewhere plain lines.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import rich.console
from rich.padding import Padding
from rich.text import Text

from perfexp.host.credentials import mask
from perfexp.host.foreign import printable
from perfexp.records import sweep_summary, units
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.grid import Commands, Grid, Section
from perfexp.records.quantities import time_title
from perfexp.records.record import Key
from perfexp.records.remarks import Raised, failures, raised_diagnostics
from perfexp.records.rows import Row
from perfexp.records.subject import distinguishing, headline, label, one_line, subject
from perfexp.records.sweep_record import Sweep
from perfexp.records.wording import median_text
from perfexp.report.progress import Progress, Whole
from perfexp.report.sections import NOT_MEASURED, brief, of_sweep, sections

#: Width for files and pipes, whose lines are not broken. `COLUMNS` is ignored, because a parent
#: with readline exports it.
_ENDLESS = 10_000
#: Prose width in files.
_PAGE = 100
#: Colors for lines that begin with a severity.
_STYLES = {"error": "red", "warning": "yellow"}


class Console:
    """Reports on stdout, errors on stderr.

    Lines are plain (no colors, no bar) if stdout is not a terminal, if `NO_COLOR` is set, or if
    `quiet` is set.

    Args:
        quiet: print only results, errors, warnings, failures and paths.
        verbose: print all sections, instead of the short answer and the first warning.
        out: replacement for stdout.
        err: replacement for stderr.
        width: terminal width, in characters.
        page: width for prose, if it differs from the table width.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
        width: int | None = None,
        page: int | None = None,
    ) -> None:
        out, err = out or sys.stdout, err or sys.stderr
        self.quiet, self._verbose, self._page = quiet, verbose, page
        self._headed: str | None = None
        terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self.plain = quiet or not terminal or bool(os.environ.get("NO_COLOR"))
        if not terminal:
            width = width or _ENDLESS
        self._out = _stream(out, plain=self.plain, width=width)
        err_width = None if err.isatty() else _ENDLESS
        self._err = _stream(err, plain=bool(os.environ.get("NO_COLOR")), width=err_width)

    def header(
        self,
        plan: Mapping[str, Any],
        environment: Mapping[str, Any],
        *,
        points: str,
        seconds: float | None,
        keys: Sequence[Key] = (),
    ) -> None:
        """Print a run's subject, its points and the estimated duration.

        A run prints it before it measures.

        Args:
            points: the number of points, in words.
            seconds: estimated duration; None if unknown.
        """
        if not self.quiet:
            self._headed = headline(subject(plan, environment), keys)
            self._line(self._headed, style="bold")
            self._line(f"{points}, {_how_long(seconds)}", indent=2)

    def sweep_header(self, sweep: Sweep, *, points: str, seconds: float | None) -> None:
        """Print a sweep's size, the points per run and the estimated duration.

        Args:
            points: the number of points per run, in words.
            seconds: estimated duration for all runs; None if unknown.
        """
        if not self.quiet:
            self._line(f"sweep over {one_line(sweep.name)}", style="bold")
            runs = "runs"
            if sweep.jobs:
                runs = units.counted(sweep.jobs, "run")
            self._line(f"{runs} of {points}, {_how_long(seconds)}", indent=2)

    def note(self, message: str) -> None:
        """Print a line, also with `quiet`."""
        self._line(message)

    def progress(
        self, clock: Callable[[], float] = time.monotonic, whole: Whole | None = None
    ) -> Progress:
        """Return a context manager that shows one run's events as a bar or as lines.

        Args:
            whole: the sweep that the run belongs to, if any.
        """
        return Progress(
            self._out, self._err, plain=self.plain, quiet=self.quiet, clock=clock, whole=whole
        )

    def show(self, analysis: Analysis, folder: Path, *, tracking: str | None = None) -> None:
        """Print a run's results, its folder, and how to find it in the tracking store.

        Args:
            folder: the run's folder.
            tracking: console lines of the tracking store, if the run was sent.
        """
        self._place(folder, self.results(analysis), tracking)

    def show_in_sweep(
        self, analysis: Analysis, folder: Path, *, number: int, runs: int | None, name: str
    ) -> None:
        """Print one sweep run's results: a single line, or everything if verbose or quiet.

        Args:
            number: the run's position in its sweep, from 1.
            runs: number of runs in the sweep; None if unknown.
        """
        if self._verbose or self.quiet:
            self.show(analysis, folder)
        else:
            position = f"{number}/{runs}" if runs else str(number)
            result = sweep_summary.in_a_line(analysis)
            self._line(f"[{position}] {one_line(name)}: {result}")

    def results(self, analysis: Analysis) -> int:
        """Print a run's results with its errors, warnings and failures.

        `show` calls it; `perfexp.measure` uses it for the text of a record.

        Returns:
            Number of warnings left out.
        """
        if self._verbose and not self.quiet:
            self.show_sections(sections(analysis))
            return 0
        raised = raised_diagnostics(analysis)
        if self.quiet:
            self._result_lines(analysis.rows)
        else:
            self.show_sections(brief(analysis))
            if len(analysis.rows) == 1:  # its label is in the title
                raised = [Raised(diagnostics=item.diagnostics[:1]) for item in raised]
        more = self._raised(raised)
        self.show_lines(NOT_MEASURED, failures(analysis.record), style="red")
        return more

    def show_sweep(
        self, sweep_analysis: SweepAnalysis, folder: Path | None, *, tracking: str | None = None
    ) -> None:
        """Print a sweep's results, one line per run.

        Args:
            folder: the sweep's folder; None if there is none.
            tracking: console lines of the tracking store, if the sweep was sent.
        """
        self.show_sections(of_sweep(sweep_analysis, is_brief=not self._verbose))
        more = self._raised(sweep_summary.raised(sweep_analysis))
        self.show_lines(NOT_MEASURED, sweep_summary.child_failures(sweep_analysis), style="red")
        if folder:
            self._place(folder, more, tracking)

    def show_grid(self, title: str, grid: Grid | None, *, not_measured: Sequence[str] = ()) -> None:
        """Print a table below its title, at most as wide as the terminal, and failures below it.

        Args:
            grid: the table; None if there is nothing to show but failures.
            not_measured: a line for each failure.
        """
        self.show_sections([Section(one_line(title), grid or ())])
        self.show_lines(NOT_MEASURED, not_measured, style="red")

    def show_lines(
        self, title: str, lines: Sequence[str], *, style: str = "", indent: int = 2
    ) -> None:
        """Print a title and lines below it. Without lines, print nothing.

        Lines that begin with a severity, such as `warning:`, have its color.
        """
        if lines and title:
            self._line(title, style=f"bold {style}".strip())
        for line in filter(None, lines):
            color = _STYLES.get(line.partition(":")[0], "")
            words = "".join(letter if letter.isprintable() else " " for letter in line.strip())
            self._line(words, style=color, indent=indent + len(line) - len(line.lstrip()))

    def error(self, message: str) -> None:
        """Print an error on stderr."""
        self._alert("error", "red", message)

    def warning(self, message: str) -> None:
        """Print a warning on stderr."""
        self._alert("warning", "yellow", message)

    def _alert(self, severity: str, color: str, message: str) -> None:
        """Print a message on stderr behind its severity, without credentials."""
        lines = "\n".join(map(one_line, mask(message).splitlines()))
        self._err.print(Text.assemble((f"{severity}: ", f"bold {color}"), lines), soft_wrap=True)

    def show_sections(self, parts: Iterable[Section]) -> None:
        """Print sections. The first title is left out if a header has already printed it.

        Commands that show other documents than runs, such as comparisons, call it directly.
        """
        for number, (title, content) in enumerate(parts):
            if not number and title == self._headed:
                title = ""
            if isinstance(content, Commands):
                self._line(title, style="bold")
                for line in content:  # not broken, so that a terminal copies it whole
                    self._out.print(Text(f"  {printable(line)}"), soft_wrap=True)
            elif isinstance(content, Grid):
                if title:
                    self._line(title, style="bold")
                self._grid(content)
            else:
                style = ""
                if title == NOT_MEASURED:
                    style = "red"
                self.show_lines(title, content or [""], style=style)

    def _result_lines(self, rows: Sequence[Row]) -> None:
        """Print a line with the time of each point, as `quiet` shows them."""
        fields = distinguishing(row.key for row in rows)
        for row in rows:
            if row.time:
                self._line(
                    f"{label(row.key, fields)}: {time_title(row.time_kind)} {median_text(row)}"
                )

    def _raised(self, diagnostics: Sequence[Raised]) -> int:
        """Print errors, and the first warning with its help; print all if quiet or verbose.

        Returns:
            Number of warnings left out.
        """
        errors, warnings = list[Raised](), list[Raised]()
        for raised in diagnostics:
            if raised.worst.severity == "error":
                errors.append(raised)
            elif not raised.worst.is_note:
                warnings.append(raised)
        most = 1
        if self.quiet or self._verbose:
            most = len(warnings)
        for raised in (*errors, *warnings[:most]):
            self.show_lines("", raised.lines, indent=0)
        return len(warnings[most:])

    def _grid(self, grid: Grid) -> None:
        """Print a table, as several tables if it is wider than the terminal, and its notes."""
        width = self._out.width - 2
        for part in grid.parts(width):
            if not part.columns:
                continue
            for line in part.text(width):
                line.plain = printable(line.plain)
                self._out.print(Padding(line, (0, 0, 0, 2), expand=False))
        for note in grid.notes:
            self._line(note, indent=2)

    def _line(self, text: str, *, style: str = "", indent: int = 0) -> None:
        """Print a line that may wrap, in a rich style, indented by terminal cells."""
        words = Text(printable(text), style=style, overflow="fold")
        self._out.print(Padding(words, (0, 0, 0, indent), expand=False), width=self._page)

    def _place(self, folder: Path, more: int, tracking: str | None) -> None:
        """Print the folder with the command that shows more, and the tracking links.

        Lines are not broken, so that a terminal copies them whole.
        """
        text = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
        command = "perfexp show -v"
        if Path(text).parts[:1] != ("outputs",):  # without a folder, it shows the last run there
            command += f" {shlex.quote(text)}"
        text += os.sep
        if not (self.quiet or self._verbose):
            text += f"  {command}"
            if more:
                text += f" ({units.counted(more, 'more warning')})"
        for line in [text, *map(one_line, (tracking or "").splitlines())]:
            self._out.print(Text(printable(line).rstrip()), soft_wrap=True)


def lines_of(show: Callable[[Console], object]) -> list[str]:
    """Return what a function prints on a console, as plain lines.

    Prose is at most 100 characters wide; tables are not cut. A record's text form in Python
    (`print(record)`) comes from it.
    """
    out = io.StringIO()
    show(Console(out=out, page=_PAGE))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _how_long(seconds: float | None) -> str:
    """Return an estimated duration as part of a header."""
    if seconds is None:
        return "duration unknown"
    return f"measuring takes about {units.format_seconds(seconds, 2)}, more if calls are slow"


def _stream(stream: TextIO, *, plain: bool, width: int | None) -> rich.console.Console:
    """Return a rich console that leaves texts unchanged. Unencodable characters become `?`."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    look: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
    if plain:
        look |= {"color_system": None, "force_terminal": False}
    return rich.console.Console(file=stream, width=width, **look)
