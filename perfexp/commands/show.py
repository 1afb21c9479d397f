"""show: the report of a run, or of a sweep, again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfexp.record import Record, Sweep


def show(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, its record.json, or a sweep's folder.")
    ],
    quiet: Annotated[bool, typer.Option("--quiet", help="Results, doubts and failures only.")] = False,
) -> None:
    """Show what was measured, as it was shown then."""
    from perfexp.sinks.console import Console  # late: `perfexp --help` imports all commands

    console = Console(quiet=quiet)
    if (folder / "sweep.json").is_file() and not (folder / "record.json").is_file():
        sweep = Sweep.load(folder)
        console.show_sweep(sweep, folder.absolute(), sweep.records(folder))
        return
    record = Record.load(folder)
    console.show(record, (folder if folder.is_dir() else folder.parent).absolute())
