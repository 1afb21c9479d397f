"""perfexp show: print the report of a finished run or sweep again."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands import list_runs
from perfexp.commands.app import (
    PLAN,
    RECORD,
    SWEEP,
    Force,
    Json,
    app,
    echo,
    refuse_to_overwrite,
    write_files,
)
from perfexp.errors import PerfexpError, UserError
from perfexp.records import folders, units
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.paths import RunPaths, folder_of, home_of
from perfexp.records.record import Record, is_trial, read_points
from perfexp.records.sweep_record import Sweep
from perfexp.report import run_status
from perfexp.report.console import Console
from perfexp.report.sections import of_sweep, sections
from perfexp.report.tables import json_results

_REMEDY = "Choose another file with --html FILE"
#: Runs that a message names; further runs are counted.
_NAMED = 3


@app.command()
def show(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="A run's folder, its record.json, or a sweep's folder; by default what ended last "
            "in outputs.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only results, errors, warnings and failures.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all metrics, warnings and notes.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write the results and plots as a page."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show the report of a run or a sweep again, by default the last.

    Example: perfexp show outputs/2026-11-28/100000-resnet50-b1 --html report.html
    """
    if html is not None:
        refuse_to_overwrite([html], _REMEDY, force=force)
    folder = list_runs.last() if folder is None else folder
    absolute = folder_of(folder).absolute()
    console = Console(quiet=quiet, verbose=verbose)
    if (folder / SWEEP).is_file() and not (folder / RECORD).is_file():
        sweep = Sweep.load(folder)
        sweep_analysis = SweepAnalysis.of(sweep, sweep.records(folder))
        if html is not None:
            from perfexp.report.plots import pages  # matplotlib takes half a second

            page = pages.of_sweep(sweep_analysis, of_sweep(sweep_analysis), absolute)
            write_files({html: page}, _REMEDY)
        if as_json:
            echo(json_results.text(json_results.of_sweep(sweep_analysis, absolute)))
        else:
            console.show_sweep(sweep_analysis, absolute)
    else:
        if folder.is_dir() and not (folder / RECORD).exists():
            refuse_unfinished(folder)
        analysis = Analysis.of(Record.load(folder))
        if html is not None:
            from perfexp.report.plots import pages  # matplotlib takes half a second

            write_files({html: pages.of_run(analysis, sections(analysis))}, _REMEDY)
        if as_json:
            echo(
                json_results.text(json_results.document([json_results.of_run(analysis, absolute)]))
            )
        else:
            console.show(analysis, absolute)
    if html is not None:
        echo(f"wrote {html.absolute()}", err=as_json)


def refuse_unfinished(folder: Path) -> None:
    """Raise `UserError` for a folder with an unfinished run, or with runs below it.

    For any other folder, do nothing. Commands that read a record call it if there is none.
    """
    paths = RunPaths(folder)
    if paths.plan.is_file():
        measured = sum(not is_trial(point.key) for point in read_points(paths.points))
        finished = units.counted(measured, "point")
        continuation = _continuation(paths)
        if paths.in_use():
            raise UserError(
                f"{folder} is being measured into, {finished} so far: perfexp status {folder}."
            )
        if why := run_status.refusal(paths.refusal):
            raise UserError(
                f"The run in {folder} was refused and has no record: {why}\n"
                f"If the command is right, resume it: {continuation}. Otherwise "
                "correct it and repeat it with another output_dir."
            )
        raise UserError(
            f"The run in {folder} was interrupted and has no record yet, {finished} finished: "
            f"{continuation} measures the rest and makes it."
        )
    files = folders.below(folder, RECORD, PLAN, SWEEP, refused=lambda _: None)
    below = list(dict.fromkeys(map(home_of, files)))
    if below:
        more = f" and {len(below) - _NAMED} more" if len(below) > _NAMED else ""
        raise UserError(
            f"{folder} is neither a run's folder nor a sweep's: they lie below it. Name one of "
            f"them: {', '.join(map(str, below[:_NAMED]))}{more}.{_sweep_of(below)} To list them: "
            f"{shlex.join(['perfexp', 'list', 'runs', str(folder)])}"
        )


def _continuation(paths: RunPaths) -> str:
    """Return the command line that measures what a run lacks.

    Runs that take turns continue together, with the command of their sweep.
    """
    folder = paths.root.parent
    with suppress(UserError):
        if (sweep := Sweep.load(folder)).in_turn and sweep.uid == paths.sweep:
            return sweep.continuation(folder)
    return shlex.join(["perfexp", f"resume={paths.root}"])


def _sweep_of(places: list[Path]) -> str:
    """Return a sentence that names the sweep folder of some runs.

    The sentence is empty if the sweep folder is among the places or unknown.
    """
    for path in places:
        try:
            sweep = Record.load(path).sweep
        except PerfexpError:
            continue
        if not (sweep and sweep.directory):
            continue
        home = Path(os.path.normpath(path / sweep.directory))
        if home not in places and (home / SWEEP).is_file():
            return f" The sweep that measured {path.name} lies in {home}."
    return ""
