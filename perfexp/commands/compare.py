"""perfexp compare: which finished run is faster, by how much, and if they are comparable."""

from __future__ import annotations

import json
import tempfile
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands import sides
from perfexp.commands.app import Force, Json, Uri, app, echo, emit, refuse_to_overwrite, write_files
from perfexp.comparison import comparison_table, judging
from perfexp.comparison.document import Comparison, measures_of
from perfexp.comparison.pairing import Side
from perfexp.report import markdown
from perfexp.report.console import Console
from perfexp.report.tables import csv_tables

_STEM, _REMEDY = "comparison", "Choose another folder with --output DIR"


@app.command()
def compare(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="A B…",
            help="Folders of runs or sweeps, a record.json, or mlflow:RUN_ID; A is the baseline. "
            "One sweep alone: its runs, of which those that differ only in mode, input size or "
            "batch size are one side.",
        ),
    ],
    margin: sides.Margin = "1%",
    fdr: sides.Fdr = "5%",
    metric: sides.Metrics = None,
    allow: sides.Allow = None,
    uri: Uri = None,
    as_json: Json = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for comparison.md, .csv, .json and .html."),
    ] = None,
    log: Annotated[
        bool,
        typer.Option(
            "--log", help="Also send the comparison to the tracking store, as a run of its own."
        ),
    ] = False,
    force: Force = False,
) -> None:
    """Compare finished runs with the first: ratios with 95 % intervals, and verdicts.

    FASTER and SLOWER: the interval lies entirely beyond the margin. SAME: it lies entirely within
    the margin. UNDECIDED: everything else, for example a ratio between single processes, which has
    no interval. NOT COMPARABLE: something other than the subject differs and may explain the ratio.
    The exit code is 0 whatever the verdicts are.

    Example: perfexp compare outputs/2026-11-27/100000-resnet50-b1
    outputs/2026-11-28/100000-resnet50-b1
    """
    settings = sides.settings(margin, fdr, metric, allow)
    targets = _targets(output, force=force)
    loaded = sides.load(places, uri)
    compared = judging.compare(loaded, settings)
    if output:
        _write(compared, targets)
    measured = measures_of(compared.pairs)
    unmeasured = [name for name in settings.measures if name not in measured]
    if metric and unmeasured:
        echo(
            f"not compared, since no point of both sides has it: {', '.join(unmeasured)}", err=True
        )
    wrote = map("wrote {}".format, targets.values())
    emit(
        json.loads(compared.to_json()),
        chain(comparison_table.sections(compared), wrote, [comparison_table.conclusion(compared)]),
        as_json=as_json,
    )
    if log:
        echo(_log(compared, loaded, output, uri), err=as_json)


def _log(compared: Comparison, loaded: list[Side], output: Path | None, uri: str | None) -> str:
    """Send a comparison with its files to the tracking store and return the link."""
    from perfexp.report.tracking.mlflow_sink import MlflowSink  # only for a store

    records = []
    for side in loaded:
        by_id = {id(measurement.record): measurement.record for measurement in side.measurements}
        records.append(list(by_id.values()))
    with tempfile.TemporaryDirectory(prefix="perfexp-") as temporary:
        folder = output or Path(temporary)
        if not output:
            _write(compared, _targets(folder, force=True))
        return MlflowSink(uri=uri).publish_comparison(compared, records, folder)


def _targets(folder: Path | None, *, force: bool) -> dict[str, Path]:
    """Return the output files by suffix; none without a folder."""
    if folder is None:
        return {}
    targets = {suffix: folder / f"{_STEM}.{suffix}" for suffix in ("md", "csv", "json", "html")}
    refuse_to_overwrite(list(targets.values()), _REMEDY, force=force)
    return targets


def _write(compared: Comparison, targets: dict[str, Path]) -> None:
    """Write the comparison's files, by suffix."""
    from perfexp.report.plots import pages  # matplotlib takes half a second

    contents = {
        "md": markdown.comparison(compared).encode(),
        "csv": csv_tables.to_csv(comparison_table.csv_lines(compared)),
        "json": compared.to_json(),
        "html": pages.of_comparison(compared),
    }
    write_files({file: contents[suffix] for suffix, file in targets.items()}, f"{_REMEDY}.")


def print_comparison(compared: Comparison, console: Console | None = None) -> None:
    """Print the tables of a comparison; `ab` and `reproduce` end with it."""
    (console or Console()).show_sections(comparison_table.sections(compared))
