"""perfexp show: print the report of a run or a sweep again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import PLAN, RECORD, SWEEP, Force, Json, app, echo, refuse_to_overwrite
from perfexp.errors import PerfexpError, UserError
from perfexp.host.files import write_atomically
from perfexp.records import folders, units
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, is_trial, read_points
from perfexp.records.sweep_record import Sweep
from perfexp.reports import run_status
from perfexp.reports.console import Console
from perfexp.reports.sections import of_sweep, sections
from perfexp.summaries.analysis import Analysis, SweepAnalysis
from perfexp.tables import json_results

#: Runs that are named; the rest is counted.
_NAMED = 3


@app.command()
def show(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, its record.json, or a sweep's folder.")
    ],
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only results, errors, warnings and failures.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all metrics, warnings and notes.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the results and plots as a page.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show what was measured, as it was shown then."""
    if html is not None:
        refuse_to_overwrite([html], "Choose another file with --html FILE", force=force)
    console = Console(quiet=quiet, verbose=verbose)
    if (folder / SWEEP).is_file() and not (folder / RECORD).is_file():
        _show_sweep(console, folder, html, as_json=as_json)
        return
    if folder.is_dir() and not (folder / RECORD).exists():
        refuse_unfinished(folder)
    analysis = Analysis.of(Record.load(folder))
    place = (folder if folder.is_dir() else folder.parent).absolute()
    if html is not None:
        _write(html, lambda pages: pages.of_run(analysis, sections(analysis)))
    if as_json:
        echo(json_results.document([json_results.of_run(analysis, place)]))
    else:
        console.show(analysis, place)
    _name_written(html, as_json=as_json)


def _show_sweep(console: Console, folder: Path, html: Path | None, *, as_json: bool) -> None:
    sweep = Sweep.load(folder)
    whole = SweepAnalysis.of(sweep, sweep.records(folder))
    if html is not None:
        _write(html, lambda pages: pages.of_sweep(whole, of_sweep(whole)))
    if as_json:
        echo(json_results.of_sweep(whole, folder.absolute()))
    else:
        console.show_sweep(whole, folder.absolute())
    _name_written(html, as_json=as_json)


def _write(file: Path, content: Callable[[Any], bytes]) -> None:
    from perfexp.plots import pages  # matplotlib takes half a second

    try:
        write_atomically(file, content(pages))
    except OSError as error:
        raise UserError(f"{file} can't be written: {error.strerror}.") from error


def _name_written(file: Path | None, *, as_json: bool) -> None:
    if file is not None:
        echo(f"wrote {file.absolute()}", err=as_json)


def refuse_unfinished(folder: Path) -> None:
    """Raise UserError for a folder whose run has no record yet, or with runs below; return for any other folder."""
    paths = RunPaths(folder)
    if paths.plan.is_file():
        finished = units.counted(sum(not is_trial(point.key) for point in read_points(paths.points)), "point")
        again = _continuation(paths)
        if paths.in_use():
            raise UserError(f"{folder} is being measured into, {finished} so far: perfexp status {folder}.")
        if why := run_status.refusal(paths.refusal):
            raise UserError(
                f"The run in {folder} was refused and has no record: {why}\n"
                f"If the command is right, resume it: {again}. Otherwise correct it and repeat it with "
                "another output_dir."
            )
        raise UserError(
            f"The run in {folder} was interrupted and has no record yet, {finished} finished: "
            f"{again} measures the rest and makes it."
        )
    files = folders.below(folder, RECORD, PLAN, SWEEP, refused=lambda _: None)
    below = list(dict.fromkeys(path.parent for path in files))
    if below:
        more = f" and {len(below) - _NAMED} more" if len(below) > _NAMED else ""
        raise UserError(
            f"{folder} is neither a run's folder nor a sweep's: they lie below it. Name one of them: "
            f"{', '.join(map(str, below[:_NAMED]))}{more}.{_sweep_of(below)}"
        )


def _continuation(paths: RunPaths) -> str:
    """The command line that measures what a run lacks; runs whose processes take turns continue together."""
    folder = paths.root.parent
    with suppress(UserError):
        if (sweep := Sweep.load(folder)).in_turn and sweep.uid == paths.sweep:
            return sweep.continuation(folder)
    return shlex.join(["perfexp", f"resume={paths.root}"])


def _sweep_of(places: list[Path]) -> str:
    """A sentence that names the folder of the runs' sweep, if that is elsewhere; otherwise empty."""
    for place in places:
        try:
            sweep = Record.load(place).sweep
        except PerfexpError:
            continue
        home = Path(os.path.normpath(place / sweep.directory)) if sweep and sweep.directory else None
        if home and home not in places and (home / SWEEP).is_file():
            return f" The sweep that measured {place.name} lies in {home}."
    return ""
