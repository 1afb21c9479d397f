"""perfexp baseline: named baselines for `perfexp check`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands import sides
from perfexp.commands.app import Force, Json, app, echo, emit
from perfexp.comparison import named_baselines
from perfexp.errors import PerfexpError, UserError
from perfexp.records import units
from perfexp.reports.console import Console
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.grid import Grid, Section
from perfexp.summaries.subject import one_line
from perfexp.tables import json_results


class Action(StrEnum):
    """An action on baselines."""

    add = "add"
    list = "list"
    show = "show"
    rm = "rm"


@app.command()
def baseline(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="add NAME DIR, list, show NAME, or rm NAME.")],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a baseline.")] = None,
    source: Annotated[
        str | None, typer.Argument(metavar="DIR", help="A run's or a sweep's folder, or mlflow:RUN_ID.")
    ] = None,
    folder: sides.Baselines = None,
    machine: sides.Machine = None,
    uri: sides.Uri = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Store copies of records under a name, for each machine and GPU, as baselines of perfexp check.

    Example: perfexp baseline add main outputs/2026-11-28/10-00-00-resnet50
    """
    root = folder or named_baselines.default_folder()
    if action is Action.list:
        known = [_facts(place) for place in named_baselines.find(root)]
        rows = [{title.replace("_", " "): cell for title, cell in one.items()} for one in known]
        parts = [Section(str(root), Grid.of_rows(rows))] if known else [f"no baselines in {root}"]
        emit({"folder": root, "baselines": known}, parts, as_json=as_json)
    elif name is None or (source is None) is (action is Action.add):
        raise UserError("Give perfexp baseline add NAME DIR, list, show NAME, or rm NAME.")
    elif source is not None:
        records, missing = sides.records(source, uri)
        for line in missing:
            echo(f"left out, without a record: {line}", err=True)
        place = named_baselines.add(root, name, records, machine, force=force)
        emit({"added": place}, [f"added {place}"], as_json=as_json)
    elif action is Action.show:
        _show(sides.baseline(root, name, machine), as_json=as_json)
    else:
        place = sides.baseline(root, name, machine)
        try:
            named_baselines.remove(place)
        except OSError as error:
            raise UserError(f"{place} can't be removed: {error.strerror}.") from error
        emit({"removed": place}, [f"removed {place}"], as_json=as_json)


def _show(place: Path, *, as_json: bool) -> None:
    analyses = map(Analysis.of, named_baselines.read(place))
    runs = [(analysis, place / str(number)) for number, analysis in enumerate(analyses)]
    if as_json:
        emit(json_results.document([json_results.of_run(*run) for run in runs]), (), as_json=True)
        return
    for run in runs:
        Console().show(*run)


def _facts(place: Path) -> dict[str, str]:
    """The date, the number of runs and the first run of a baseline, or why it cannot be read."""
    try:
        records = named_baselines.read(place)
        measured, content, first = records[0].started[:10], units.counted(len(records), "run"), records[0].name
    except PerfexpError as error:
        measured, content, first = "", "unreadable", one_line(str(error))
    about = {"machine": place.parent.name, "name": place.name}
    return {**about, "measured": measured, "content": content, "first_run": first}
