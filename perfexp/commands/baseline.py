"""perfexp baseline: named baselines for `perfexp check`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands import sides
from perfexp.commands.app import Force, Json, app, echo
from perfexp.comparison import named_baselines
from perfexp.errors import PerfexpError, UserError
from perfexp.records import units
from perfexp.reports.console import Console
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.grid import Column, Grid
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
    """Store copies of records under a name, for each machine and GPU, as baselines of perfexp check."""
    root = folder or named_baselines.default_folder()
    if action is Action.list:
        _list(root, as_json=as_json)
    elif name is None or (source is None) is (action is Action.add):
        raise UserError("Give perfexp baseline add NAME DIR, list, show NAME, or rm NAME.")
    elif source is not None:
        records, missing = sides.records(source, uri)
        for line in missing:
            echo(f"left out, without a record: {line}", err=True)
        place = named_baselines.add(root, name, records, machine, force=force)
        echo(json_results.text({"added": place}) if as_json else f"added {place}")
    elif action is Action.show:
        place = sides.baseline(root, name, machine)
        analyses = map(Analysis.of, named_baselines.read(place))
        runs = [(analysis, place / str(number)) for number, analysis in enumerate(analyses)]
        if as_json:
            echo(json_results.document([json_results.of_run(*run) for run in runs]))
        for run in () if as_json else runs:
            Console().show(*run)
    else:
        _remove(sides.baseline(root, name, machine), as_json=as_json)


def _remove(place: Path, *, as_json: bool) -> None:
    try:
        named_baselines.remove(place)
    except OSError as error:
        raise UserError(f"{place} can't be removed: {error.strerror}.") from error
    echo(json_results.text({"removed": place}) if as_json else f"removed {place}")


def _list(root: Path, *, as_json: bool) -> None:
    places = named_baselines.find(root)
    if as_json:
        names = ("measured", "content", "first_run")
        known = [
            {"machine": place.parent.name, "name": place.name, **dict(zip(names, _content(place), strict=True))}
            for place in places
        ]
        echo(json_results.text({"folder": root, "baselines": known}))
        return
    if not places:
        echo(f"no baselines in {root}")
        return
    content = [_content(place) for place in places]
    columns = [
        Column("machine", (place.parent.name for place in places), prose=True),
        Column("name", (place.name for place in places), prose=True),
        Column("measured", (measured for measured, _, _ in content)),
        Column("content", (runs for _, runs, _ in content)),
        Column("first run", (name for _, _, name in content), prose=True, rank=1),
    ]
    Console().show_grid(str(root), Grid(columns))


def _content(place: Path) -> tuple[str, str, str]:
    """The date, the number of runs and the first run of a baseline, or why it cannot be read."""
    try:
        records = named_baselines.read(place)
    except PerfexpError as error:
        return "", "unreadable", one_line(str(error))
    return records[0].started[:10], units.counted(len(records), "run"), records[0].name
