"""perfexp compare: which of two or more finished runs is faster, by how much, and whether they can be compared."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands.app import RECORD, SWEEP, Force, app, echo, one_of, refuse_to_overwrite
from perfexp.commands.show import refuse_unfinished
from perfexp.comparison import comparability, comparison_table, judging
from perfexp.comparison.document import Comparison
from perfexp.comparison.judging import Settings
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import Side
from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.records import folders
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.reports.console import Console
from perfexp.tables import csv_tables

_STEM = "comparison"


@app.command()
def compare(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="A B…", help="Folders of runs or sweeps, or a record.json; A is the baseline."),
    ],
    margin: Annotated[
        str, typer.Option(metavar="PERCENT", help="Relative difference up to which two figures are the same.")
    ] = "1%",
    fdr: Annotated[
        str, typer.Option(metavar="PERCENT", help="Tolerated share of false verdicts among those of a measure.")
    ] = "5%",
    metric: Annotated[
        str | None, typer.Option(metavar="NAME,…", help=f"Measures to compare: {', '.join(MEASURES)}; default all.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Compare although this differs; may be repeated, or a list with commas."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print comparison.json.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for comparison.md, .csv, .json and .html."),
    ] = None,
    force: Force = False,
) -> None:
    """Compare finished runs with the first one: ratios with 95 % intervals, and a verdict for each.

    FASTER, SLOWER: the interval lies wholly beyond the margin; SAME: wholly within it; else UNDECIDED. NOT COMPARABLE:
    something else than the subject differs and may explain the ratio. The exit code is 0 whatever the verdicts are.
    """
    settings = Settings(
        margin=_fraction("--margin", margin),
        fdr=_fraction("--fdr", fdr),
        measures=[one_of("metric", name, list(MEASURES)) for name in _words([metric] if metric else MEASURES)],
        allowed=_words(allow or ()),
    )
    comparability.check_allowed(settings.allowed)
    targets = _targets(output, force=force)
    compared = judging.compare(list(_sides(places)), settings)
    if output:
        _write(compared, targets, output)
    if as_json:
        echo(compared.to_json().decode().rstrip())
    else:
        _print(compared)
        for file in targets.values():
            echo(f"wrote {file}")


def _sides(places: list[Path]) -> Iterator[Side]:
    """Load each side; the same folder twice is refused before anything is read."""
    if len(places) < 2:
        raise UserError(f"{places[0]} is one side only; name two or more: perfexp compare A B.")
    if len(places) > len(string.ascii_uppercase):
        raise UserError(f"{len(places)} sides were given; at most {len(string.ascii_uppercase)} can be compared.")
    resolved = [place.resolve() for place in places]
    for number, place in enumerate(resolved):
        if place in resolved[:number]:
            raise UserError(f"{places[number]} was given twice; name two different runs.")
    for name, place in zip(string.ascii_uppercase, places, strict=False):
        yield Side.of(name, str(place), _records(place))


def _records(place: Path) -> list[Record]:
    """The records of a run or a sweep; raises `UserError` if there is none or one cannot be read."""
    if (place / SWEEP).is_file() and not (place / RECORD).is_file():
        sweep = Sweep.load(place)
        children = [folder for _, folder in folders.run_folders(sweep, place) if not folder.is_symlink()]
        runs = [folder for folder in children if (folder / RECORD).exists()]
        if not runs:
            raise UserError(f"None of the runs of the sweep in {place} has a {RECORD}: perfexp status {place}.")
        return [Record.load(folder) for folder in runs]
    if place.is_dir() and not (place / RECORD).exists():
        refuse_unfinished(place)
        raise UserError(f"There is no {RECORD} and no {SWEEP} in {place}. Name a run's folder or a sweep's.")
    return [Record.load(place)]


def _fraction(option: str, text: str) -> float:
    """A percentage (`1%`) or a fraction (`0.01`) above 0 and below 100 %."""
    bare, is_percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(bare) / (100 if is_percent else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UserError(f"{option} {text}: give a percentage above 0 % and below 100 %, such as 1%.")
    return value


def _words(texts: Iterable[str]) -> list[str]:
    """The words of texts with commas, each once."""
    return list(dict.fromkeys(word.strip() for text in texts for word in text.split(",") if word.strip()))


def _targets(folder: Path | None, *, force: bool) -> dict[str, Path]:
    """The files to write by suffix; none without a folder."""
    if folder is None:
        return {}
    targets = {suffix: folder / f"{_STEM}.{suffix}" for suffix in ("md", "csv", "json", "html")}
    refuse_to_overwrite(list(targets.values()), "Choose another folder with --output DIR", force=force)
    return targets


def _write(compared: Comparison, targets: dict[str, Path], folder: Path) -> None:
    from perfexp.plots import comparison_page  # plotly takes half a second

    contents = {
        "md": comparison_table.markdown(compared).encode(),
        "csv": csv_tables.to_csv(comparison_table.csv_lines(compared)),
        "json": compared.to_json(),
        "html": comparison_page.page(compared),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, file in targets.items():
            write_atomically(file, contents[suffix])
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror}. Choose another with --output DIR.") from error


def _print(compared: Comparison, console: Console | None = None) -> None:
    console = console or Console()
    for line in comparison_table.header(compared):
        console.note(line)
    for side in compared.sides[1:]:
        console.show_grid(comparison_table.title(compared, side), comparison_table.grid(compared, side))
        for heading, lines in comparison_table.sections(compared, side):
            console.show_lines(heading, lines)
        if layers := comparison_table.layers(compared, side):
            console.show_grid("layers that explain the difference", layers)
