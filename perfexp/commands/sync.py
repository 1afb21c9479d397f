"""perfexp sync: send records on disk to MLflow, for the first time or again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import RECORD, SWEEP, Json, Uri, app, echo, emit
from perfexp.errors import PerfexpError, UserError
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.folders import below
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.report.tracking.mlflow_sink import MlflowSink


@app.command()
def sync(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="A run's folder, or any folder above runs.")
    ],
    uri: Uri = None,
    experiment: Annotated[
        str | None, typer.Option(help="Experiment; by default the one in each record's plan.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send records to MLflow; sending a record twice does no harm.

    Example: perfexp sync outputs --uri http://mlflow.example.org:5000
    """
    links: dict[str, str] = {}
    experiments: dict[str, Any] = {}
    sent: list[dict[str, str]] = []
    exit_code = 0
    for folder in folders:
        files = [folder]
        if not folder.is_file():
            files = list(below(folder, RECORD, SWEEP, refused=lambda error: None))
        # runs first: a sweep needs their experiment
        ordered = sorted(files, key=lambda file: (file.name == SWEEP, file))
        if not any(file.name == RECORD for file in ordered):
            reason = "there is no such folder"
            if folder.exists():
                reason = f"no {RECORD} in it or below it"
            echo(f"failed  {folder}: {reason}; set the store with --uri", err=True)
            exit_code = max(exit_code, UserError.exit_code)
        for file in ordered:
            try:
                sent.append(_send(file, uri, experiment, experiments, links))
                if not as_json:
                    echo(f"sent    {sent[-1]['name']}  {sent[-1]['folder']}")
            except PerfexpError as error:
                echo(f"failed  {file.parent}: {error}", err=True)
                exit_code = max(exit_code, error.exit_code)
    emit({"sent": sent}, links.values(), as_json=as_json)
    raise typer.Exit(exit_code)


def _send(
    file: Path,
    uri: str | None,
    experiment: str | None,
    experiments: dict[str, Any],
    links: dict[str, str],
) -> dict[str, str]:
    """Send a record or a sweep and return its name, folder and link.

    A sweep goes to the experiment of its runs.

    Args:
        file: record.json or sweep.json.
        uri: tracking store; None for the default.
        experiment: experiment that the user named; None for the one in each plan.
        experiments: experiment by sweep; filled from the records.
        links: latest link by store; updated.
    """
    if file.name == RECORD:
        record = Record.load(file)
        tracking = record.plan.get("tracking")
        planned = tracking.get("experiment") if isinstance(tracking, Mapping) else None
        if record.sweep:
            experiments[record.sweep.uid] = planned
        # a record is data and must not choose the store
        sink = MlflowSink(uri=uri, experiment=experiment or planned)
        name = record.name
        link = sink.publish(Analysis.of(record), file.parent)
    else:
        sweep = Sweep.load(file)
        sink = MlflowSink(uri=uri, experiment=experiment or experiments.get(sweep.uid))
        sweep_analysis = SweepAnalysis.of(sweep, sweep.records(file.parent))
        name = sweep.name
        link = sink.publish_sweep(sweep_analysis, file.parent)
    links[sink.uri] = link
    return {"name": name, "folder": str(file.parent), "link": link}
