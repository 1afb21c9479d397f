"""Console: what is about to be measured and what came out: tables and colours on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import rich.console
from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from perfexp import units
from perfexp.record import Record, Status, Sweep
from perfexp.sinks import overview
from perfexp.sinks.grid import Grid
from perfexp.sinks.progress import Progress
from perfexp.sinks.remarks import failures, raised_doubts
from perfexp.sinks.subject import label, one_line, subject, varying
from perfexp.sinks.sweeps import child_failures, runs
from perfexp.sinks.wording import first_prediction_text, median_text
from perfexp.summary import Row, first_predictions, requested_percentiles, rows

#: A file or a pipe has no edge: its lines are not broken.
_ENDLESS = 10_000


class Console:
    """Reports on stdout, errors on stderr.

    Lines are plain (no colours, no bar, no lines drawn) where stdout is no terminal, with `NO_COLOR`, and with quiet.

    Args:
        quiet: only results, doubts, failures and where the files are.
        out: instead of stdout.
        err: instead of stderr.
        width: instead of the terminal's.
    """

    def __init__(
        self, *, quiet: bool = False, out: TextIO | None = None, err: TextIO | None = None, width: int | None = None
    ) -> None:
        out, err = out or sys.stdout, err or sys.stderr
        self.quiet = quiet
        terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self.plain = quiet or not terminal or bool(os.environ.get("NO_COLOR"))
        self._out = _stream(out, plain=self.plain, width=width if width or terminal else _ENDLESS)
        self._err = _stream(err, plain=bool(os.environ.get("NO_COLOR")), width=None if err.isatty() else _ENDLESS)

    def header(
        self, plan: Mapping[str, Any], *, points: int, device: str | None, longest_seconds: float | None
    ) -> None:
        """What is about to be measured.

        Args:
            plan: the resolved configuration.
            points: how many points it has.
            device: the device's name, or None where only the job finds it.
            longest_seconds: how long the measurement takes at the most, or None where that is not known.
        """
        if self.quiet:
            return
        time = f"at most {units.format_seconds(longest_seconds, 2)}" if longest_seconds is not None else "time unknown"
        self._line(str(subject(plan)), style="bold")
        self._line(f"on {one_line(device) if device else 'the device that the job finds'}", indent=2)
        self._line(f"{points} point{'' if points == 1 else 's'}, {time}", indent=2)

    def progress(self) -> Progress:
        """A bar or lines for the events of one run; to be entered."""
        return Progress(self._out, plain=self.plain, quiet=self.quiet)

    def show(self, record: Record, folder: Path, *, tracking: str | None = None) -> None:
        """What a run measured.

        Args:
            record: finished, whatever its status.
            folder: where its files are.
            tracking: how to look at it in the tracker, if it was sent to one.
        """
        known = rows(record)
        if self.quiet:
            self._result_lines(known)
        else:
            self._tables(record, known)
        self._remarks(record, known)
        names = ", ".join(artifact.path for artifact in record.artifacts)
        self._section("files", [f"{folder}{os.sep}", *([names] if names and not self.quiet else [])])
        self._tracking(tracking)

    def show_sweep(self, sweep: Sweep, folder: Path, records: Sequence[Record], *, tracking: str | None = None) -> None:
        """What the runs of a sweep measured, a line each.

        Args:
            sweep: its summary.
            folder: where its files are.
            records: those of its runs, as far as there are any.
            tracking: how to look at it in the tracker, if it was sent to one.
        """
        bad = sum(child.status is not Status.OK for child in sweep.children)
        count = f"{len(sweep.children)} of {sweep.jobs}" if sweep.jobs else str(len(sweep.children))
        self._line(f"{one_line(sweep.name)}: {count} runs ended, {bad} of them not well", style="bold")
        if sweep.children:
            self._grid(runs(sweep, records))
        self._section("failed", child_failures(sweep, records), style="red")
        self._section("files", [f"{folder}{os.sep}"])
        self._tracking(tracking)

    def error(self, message: str) -> None:
        """An error, on stderr.

        Args:
            message: what was given, what is possible, what to do.
        """
        text = Text("error: ", style="bold red")
        text.append("\n".join(map(one_line, message.splitlines())), style="not bold default")
        self._err.print(text, soft_wrap=True)

    def _tables(self, record: Record, known: Sequence[Row]) -> None:
        about = subject(record.plan, record.environment)
        self._line(str(about), style="bold")
        self._line(f"on {about.device or 'a device that is not known'}", indent=2)
        if known:
            self._grid(overview.points(known, requested_percentiles(record)))
        for title, grid in (("phases", overview.phases(known)), ("beside the time", overview.metrics(known))):
            if grid:
                self._line(title, style="bold")
                self._grid(grid)
        firsts = first_predictions(record)
        fields = varying(first.key for first in firsts)
        lines = [f"{label(first.key, fields)} {first_prediction_text(first)}".strip() for first in firsts]
        self._section("first prediction of a fresh process", lines)

    def _result_lines(self, known: Sequence[Row]) -> None:
        fields = varying(row.key for row in known) or ("input_size", "batch_size")
        for row in known:
            if row.time:
                self._line(f"{label(row.key, fields)}: {row.time_kind} {median_text(row)}")

    def _remarks(self, record: Record, known: Sequence[Row]) -> None:
        lines = []
        for raised in raised_doubts(record, known):
            lines += [str(raised), *([f"  → {raised.doubt.remedy}"] if raised.doubt.remedy else [])]
        self._section("doubts", lines, style="yellow")
        self._section("failed", failures(record), style="red")

    def _tracking(self, tracking: str | None) -> None:
        if tracking:
            self._section("tracking", tracking.splitlines())

    def _section(self, title: str, lines: Sequence[str], style: str = "") -> None:
        """A title and lines below it; nothing where there are no lines."""
        if not lines:
            return
        self._line(title, style=f"bold {style}".strip())
        for line in lines:
            stripped = line.lstrip()
            self._line(one_line(stripped), indent=2 + len(line) - len(stripped))

    def _grid(self, grid: Grid) -> None:
        grid = grid.fitted(self._out.width)
        if grid.columns:
            self._out.print(_table(grid, plain=self.plain, fits=grid.least_width <= self._out.width))
        for note in grid.notes:
            self._line(note, indent=2)

    def _line(self, text: str, *, style: str = "", indent: int = 0) -> None:
        self._out.print(Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent), expand=False))


def _table(grid: Grid, *, plain: bool, fits: bool) -> Table:
    """A grid as rich draws it: figures flush right and whole, prose flush left."""
    table = Table(box=None if plain else SIMPLE_HEAD, padding=(0, 1), pad_edge=True, header_style="bold")
    for column in grid.columns:
        justify: rich.console.JustifyMethod = "left" if column.prose else "right"
        table.add_column(Text(column.title), justify=justify, no_wrap=fits and not column.prose, overflow="fold")
    for line in grid.lines:
        table.add_row(*map(Text, line))
    return table


def _stream(stream: TextIO, *, plain: bool, width: int | None) -> rich.console.Console:
    """A console that changes nothing in what it is given; what the stream can't encode becomes `?`."""
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
