"""Console: headers, progress and results; tables and colors on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import msgspec
import rich.console
from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from perfexp.comparison import sweep_verdicts
from perfexp.host.credentials import mask
from perfexp.host.untrusted import printable
from perfexp.records import units
from perfexp.records.cold_starts import first_predictions
from perfexp.records.paths import CHECKPOINTS, RunPaths, is_own_place
from perfexp.records.quantities import time_title
from perfexp.records.record import Record
from perfexp.records.summary import Row, requested_percentiles, rows
from perfexp.records.sweep_record import Sweep
from perfexp.reports import overview
from perfexp.reports.progress import Progress, Whole
from perfexp.summaries import profile_summary, sweep_summary
from perfexp.summaries.grid import Grid
from perfexp.summaries.remarks import Raised, failures, raised_diagnostics, scaling_lines
from perfexp.summaries.subject import distinguishing, label, one_line, shape, subject, varying
from perfexp.summaries.wording import first_prediction_text, median_text
from perfexp.tables import convolutions, layer_tables

#: Width for files and pipes: their lines are not broken. COLUMNS does not count: a parent with readline exports it.
_ENDLESS = 10_000
#: Width of the prose in a file.
_PAGE = 100
#: Width of tables of many metrics, which no terminal would have room for.
_MOST_WIDTH = 80
#: Colors of lines that begin with a severity.
_STYLES = {"error": "red", "warning": "yellow"}
#: Title of lines that begin with a status: failed, unsupported, oom, ….
_NOT_MEASURED = "not measured"


class Console:
    """Reports on stdout, errors on stderr; the arguments may replace the streams and the terminal's width.

    Lines are plain (no colors, no bar, no drawn lines) if stdout is not a terminal, with `NO_COLOR`, and with quiet,
    which leaves out everything but results, errors, warnings, failures and paths. Verbose adds the metrics and notes
    that are in report.md otherwise. `page` is the width of lines of prose, if it is not that of the tables.
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
        self._out = _stream(out, plain=self.plain, width=width if width or terminal else _ENDLESS)
        self._err = _stream(err, plain=bool(os.environ.get("NO_COLOR")), width=None if err.isatty() else _ENDLESS)

    def header(
        self, plan: Mapping[str, Any], environment: Mapping[str, Any], *, points: str, seconds: float | None
    ) -> None:
        """Print the subject of a run, its device if it is known, and its estimated duration, None if it is not."""
        if self.quiet:
            return
        about = subject(plan, environment)
        self._headed = str(about)
        self._line(self._headed, style="bold")
        if about.device:
            self._line(f"on {about.device}", indent=2)
        self._line(f"{points}, {_how_long(seconds)}", indent=2)

    def sweep_header(self, sweep: Sweep, *, points: str, seconds: float | None) -> None:
        """Print the size of a sweep, with the points of a run, and the estimated duration of all, None if unknown."""
        if self.quiet:
            return
        self._line(f"sweep over {one_line(sweep.name)}", style="bold")
        runs = units.counted(sweep.jobs, "run") if sweep.jobs else "runs"
        self._line(f"{runs} of {points}, {_how_long(seconds)}", indent=2)

    def note(self, message: str) -> None:
        """Print a line above the results."""
        self._line(message)

    def progress(self, clock: Callable[[], float] = time.monotonic, whole: Whole | None = None) -> Progress:
        """Return a bar or lines for the events of one run, as a context manager; `whole` is its sweep."""
        return Progress(self._out, self._err, plain=self.plain, quiet=self.quiet, clock=clock, whole=whole)

    def show(self, record: Record, folder: Path, *, tracking: str | None = None) -> None:
        """Print the results of a run, the files in its folder, and the lines that lead to it in the tracking store."""
        self.results(record, report="report.md" if RunPaths(folder).report.is_file() else "")
        self._to_copy("to profile the marked call", profile_summary.commands(record))
        self._to_copy("files", [f"{folder}{os.sep}"])
        # a record alone may have been copied to the folder
        paths = [one.path for one in record.artifacts if os.path.lexists(folder / one.path)]
        own = filter(is_own_place, sorted(RunPaths(folder).claimed()))
        paths += [name for name in own if name.startswith(f"{CHECKPOINTS}/") and os.path.lexists(folder / name)]
        names = ", ".join(f"{path} (images/s as JSON)" if path.endswith("_speed") else path for path in paths)
        if names and not self.quiet:
            self._line(names, indent=2)
        self._to_copy("tracking", [one_line(line) for line in (tracking or "").splitlines()])

    def show_in_sweep(self, record: Record, folder: Path, *, number: int, runs: int | None, name: str) -> None:
        """Print the results of a run of a sweep, whose table follows: in a line, but all of them if verbose or quiet.

        Args:
            number: position of the run in its sweep, from 1.
            runs: how many runs the sweep has; None if unknown.
        """
        if self._verbose or self.quiet:
            self.show(record, folder)
        else:
            self._line(f"[{number}{f'/{runs}' if runs else ''}] {one_line(name)}: {sweep_summary.in_a_line(record)}")

    def results(self, record: Record, *, report: str = "") -> None:
        """Print the results of a run with its errors, warnings and failures.

        Args:
            report: where notes and all metrics are: `report.md`, or `below` in its own lines; empty without that file.
        """
        table = rows(record)
        if self.quiet:
            self._result_lines(table)
        else:
            self._tables(record, table, report)
        self._raised(raised_diagnostics(record, table), report)
        self._section(_NOT_MEASURED, failures(record), style="red")

    def show_sweep(
        self, sweep: Sweep, folder: Path | None, records: Sequence[Record], *, tracking: str | None = None
    ) -> None:
        """Print the results of a sweep, a line for each run; `folder` is None if it left none."""
        self._line(sweep_summary.headline(sweep), style="bold")
        if same := sweep_summary.setting(records):
            self._line(same, indent=2)
        verdicts = sweep_verdicts.of_sweep(sweep, records)
        if sweep.children:
            self._grid(sweep_summary.runs(sweep, records, verdicts.title, verdicts.ratios))
        for line in [*verdicts.notes, *verdicts.fastest]:
            self._line(line, indent=2)
        self._raised(sweep_summary.raised(sweep, records))
        self._section(_NOT_MEASURED, sweep_summary.child_failures(sweep, records), style="red")
        if folder:
            self._to_copy("files", [f"{folder}{os.sep}"])
        self._to_copy("tracking", [one_line(line) for line in (tracking or "").splitlines()])

    def has_room(self, grid: Grid) -> bool:
        """Whether a table fits the terminal with each of its rows on one line."""
        return grid.whole_width <= self._out.width - 2

    def show_grid(
        self,
        title: str,
        grid: Grid | None,
        *,
        above: Sequence[str] = (),
        not_measured: Sequence[str] = (),
        width: int | None = None,
    ) -> None:
        """Print any table below its title and lines, at most as wide as the terminal, and failures below it."""
        self._line(one_line(title), style="bold")
        for line in above:
            self._line(one_line(line), indent=2)
        if grid:
            self._grid(grid, width)
        self._section(_NOT_MEASURED, not_measured, style="red")

    def show_lines(self, title: str, lines: Sequence[str]) -> None:
        """Print a title and lines below it."""
        self._section(title, lines)

    def error(self, message: str) -> None:
        """Print an error on stderr."""
        self._alert("error", "red", message)

    def warning(self, message: str) -> None:
        """Print a warning on stderr."""
        self._alert("warning", "yellow", message)

    def _alert(self, severity: str, color: str, message: str) -> None:
        lines = "\n".join(map(one_line, mask(message).splitlines()))
        self._err.print(Text.assemble((f"{severity}: ", f"bold {color}"), lines), soft_wrap=True)

    def _tables(self, record: Record, rows: Sequence[Row], report: str) -> None:
        about = subject(record.plan, record.environment)
        if self._headed != str(about):
            self._line(str(about), style="bold")
        ranks = f"; {scope}" if (scope := overview.scope_of_ranks(record, rows)) else ""
        same = shape(row.key for row in rows)
        self._line(f"{same} on {about.device or 'an unknown device'}{ranks}".lstrip(), indent=2)
        if rows:
            self._grid(overview.points(rows, requested_percentiles(record)))
        self._section("scaling with the input size", scaling_lines(rows))
        self._section("convolutions", convolutions.sentences(record))
        self._section("ranks", overview.ranks(record))
        metrics = overview.metrics(record, rows, is_brief=not self._verbose, report=report)
        for title, grid, width in (
            ("across processes", overview.processes(rows), None),
            ("phases", overview.phases(record, rows), None),
            ("other metrics", metrics, _MOST_WIDTH),
        ):
            if grid:  # one figure a line is better than several tables
                is_listed = len(grid.lines) == 1 and grid.whole_width > min(self._out.width, width or _ENDLESS) - 2
                self.show_grid(title, grid.transposed() if is_listed else grid, width=width)
        firsts = first_predictions(record)
        points = [*(first.key for first in firsts), *(msgspec.structs.replace(row.key, phase="ttfp") for row in rows)]
        fields = varying(points)
        parts = [[label(first.key, fields), *first_prediction_text(first).split("; ")] for first in firsts]
        self._section("cold start", list(chain(*parts)))
        if table := layer_tables.table(record):
            self.show_grid(f"layers: {table[0]}", table[1])
        self._section("profile", profile_summary.sentences(record))
        for title, grid in profile_summary.tables(record):
            self.show_grid(title, grid)

    def _result_lines(self, rows: Sequence[Row]) -> None:
        fields = distinguishing(row.key for row in rows)
        for row in rows:
            if row.time:
                self._line(f"{label(row.key, fields)}: {time_title(row.time_kind)} {median_text(row)}")

    def _raised(self, diagnostics: Sequence[Raised], report: str = "") -> None:
        """Print errors and warnings with their help, and the notes so, too, or their codes and where they are."""
        for raised in diagnostics:
            if self._verbose or not raised.worst.is_note:
                self._diagnostics(raised.lines)
        notes = dict.fromkeys(raised.worst.code for raised in diagnostics if raised.worst.is_note)
        if notes and not self.quiet and not self._verbose:
            self._line(f"notes: {', '.join(notes)} ({report or 'perfexp show DIR -v'})")

    def _diagnostics(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._line(one_line(line), style=_STYLES.get(line.partition(":")[0], ""), indent=_indent(line))

    def _section(self, title: str, lines: Sequence[str], style: str = "") -> None:
        """Print a title and lines below it; nothing without lines."""
        if lines:
            self._line(title, style=f"bold {style}".strip())
        for line in filter(None, lines):
            self._line(one_line(line), indent=2 + _indent(line))

    def _grid(self, grid: Grid, width: int | None = None) -> None:
        width = min(self._out.width, width or _ENDLESS) - 2
        for part in grid.parts(width):
            if self.plain:
                for line in part.text(width) if part.columns else ():
                    self._line(line, indent=2, width=self._out.width)
            elif part.columns:
                self._out.print(Padding(_table(part, width), (0, 0, 0, 2), expand=False))
        for note in grid.notes:
            self._line(note, indent=2)

    def _line(self, text: str, *, style: str = "", indent: int = 0, width: int | None = None) -> None:
        words = Text(printable(text), style=style, overflow="fold")
        self._out.print(Padding(words, (0, 0, 0, indent), expand=False), width=width or self._page)

    def _to_copy(self, title: str, lines: Sequence[str]) -> None:
        """Print paths and links: no line is broken, so that a terminal copies it whole; nothing without lines."""
        if lines:
            self._line(title, style="bold")
        for line in lines:
            self._out.print(Text(f"  {printable(line)}"), soft_wrap=True)


def lines_of(show: Callable[[Console], object]) -> list[str]:
    """Return what a function prints on a console, as plain lines: prose of at most 100 characters, and whole tables."""
    out = io.StringIO()
    show(Console(out=out, page=_PAGE))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _how_long(seconds: float | None) -> str:
    if seconds is None:
        return "duration unknown"
    return f"measuring takes about {units.format_seconds(seconds, 2)}, more if calls are slow"


def _table(grid: Grid, width: int) -> Table:
    """A grid as rich draws it, `GAP` cells between columns: figures flush right and whole, prose flush left."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False)
    fits = grid.least_width <= width
    for column, cells in zip(grid.columns, grid.widths(width), strict=True):
        justify: rich.console.JustifyMethod = "left" if column.prose else "right"
        title = Text(column.title, style="bold")
        table.add_column(title, justify=justify, width=cells if fits else None, overflow="fold")
    styles = zip(*(column.styles for column in grid.columns), strict=True)
    for line, of_line in zip(grid.lines, styles, strict=True):
        table.add_row(*(Text(printable(cell), style) for cell, style in zip(line, of_line, strict=True)))
    return table


def _stream(stream: TextIO, *, plain: bool, width: int | None) -> rich.console.Console:
    """A rich console that leaves texts as they are; characters that the stream cannot encode become `?`."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return rich.console.Console(
        file=stream,
        width=width,
        color_system=None if plain else "auto",
        force_terminal=False if plain else None,
        markup=False,
        highlight=False,
        emoji=False,
    )
