"""Read the sides of a comparison, and define the options that comparing commands share.

A side (A, B, …) is one or more records: a run, a sweep, a group of a sweep's runs, a named
baseline, or a run in the tracking store.
"""

from __future__ import annotations

import string
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from perfexp.commands.app import RECORD, SWEEP, echo, one_of
from perfexp.commands.show import refuse_unfinished
from perfexp.comparison import comparability, named_baselines, pairing
from perfexp.comparison.judging import Settings
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import Side
from perfexp.errors import UserError
from perfexp.records import folders, sweep_summary, units
from perfexp.records.analysis import Analysis
from perfexp.records.record import Record
from perfexp.records.remarks import raised_diagnostics
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.records.wording import codes
from perfexp.report.tables import vendor_file
from perfexp.statistics.distributions import ALPHA

#: Prefix of a side in the tracking store.
MLFLOW = "mlflow:"
#: Option of `perfexp ab` in a stored command.
METRIC = "--metric="
#: Algorithm coverage that needs no remark.
_PROVEN = "100 %, proven"

Margin = Annotated[
    str,
    typer.Option(
        metavar="PERCENT",
        help="Difference up to which two figures are the same: relative, of accuracy in points.",
    ),
]
Fdr = Annotated[
    str,
    typer.Option(
        metavar="PERCENT",
        help="Tolerated share of false verdicts over all pairs of a measure, "
        "for differences and for SAME; at most 5%.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option("--metric", metavar="NAME,…", help=f"Measures to compare: {', '.join(MEASURES)}."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY", help="Compare although this differs; may be repeated, or a list with commas."
    ),
]
Baselines = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        envvar="PERFEXP_BASELINES",
        help="Folder of named baselines; by default PERFEXP_BASELINES, "
        "or perfexp/baselines in the user's data.",
    ),
]
Machine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Machine of the named baseline as `perfexp baseline list` shows it, "
        "such as where host names are random.",
    ),
]


def settings(margin: str, fdr: str, metrics: str | None, allow: Sequence[str] | None) -> Settings:
    """Return the comparison settings from command-line options.

    All comparing commands call it with their options.

    Raises:
        UserError: a value is not allowed.
    """
    allowed = words(allow or ())
    comparability.check_allowed(allowed)
    measures = words([metrics]) if metrics else list(MEASURES)
    return Settings(
        margin=_fraction("--margin", margin),
        fdr=_fraction("--fdr", fdr, ALPHA),
        measures=[one_of("metric", name, list(MEASURES)) for name in measures],
        allowed=allowed,
    )


def words(texts: Iterable[str]) -> list[str]:
    """Return the words in texts with commas, each once.

    Options such as `--metric` take such lists.
    """
    stripped = (word.strip() for word in ",".join(texts).split(","))
    return list(dict.fromkeys(filter(None, stripped)))


def load(places: Sequence[str], uri: str | None) -> list[Side]:
    """Load each side, or the groups within a single sweep.

    `compare` and `ab` call it.

    Args:
        places: folders, records, or `mlflow:RUN_ID`.
        uri: tracking store; None for the default.

    Raises:
        UserError: a side is named twice, there are fewer than two, or a side cannot be read.
    """
    if len(places) == 1 and is_sweep(Path(places[0])):
        return _within(Path(places[0]))
    if len(places) < 2:
        raise UserError(f"{places[0]} is one side only; name two or more: perfexp compare A B.")
    seen = set()
    for source in places:
        resolved = source if source.startswith(MLFLOW) else str(Path(source).resolve())
        if resolved in seen:
            raise UserError(f"{source} was given twice; name two different runs.")
        seen.add(resolved)
    sides = []
    for name, source in zip(_names(len(places)), places, strict=True):
        records_here, missing = records(source, uri)
        sides.append(_side(name, source, list(map(Analysis.of, records_here)), missing))
    return sides


def _within(folder: Path) -> list[Side]:
    """Return the run groups of a sweep as sides; the runs of a group measure different points.

    Groups without a timed point are left out if at least two groups have some.

    Raises:
        UserError: fewer than two groups have a record.
    """
    runs = _of_sweep(folder)
    analyzed = []
    for child, _, record in runs:
        analysis = Analysis.of(record) if record else None
        analyzed.append((child, analysis))
    every = pairing.groups(analyzed)
    groups = [group for group in every if group.recorded]
    timed = [group for group in groups if group.timed]
    if len(timed) > 1:
        groups = timed
        for group in every:
            if not group.timed:
                echo(f"left out, without a timed point: {group.name} of {folder}", err=True)
    if len(groups) < 2:
        varying = [axis for axis in every[0].runs[0][0].axes if axis not in every[0].axes]
        if varying and len(every) == 1:
            raise UserError(
                f"{folder} is one side only: its runs differ in {' and '.join(varying)} alone, "
                "and only equal points are compared. Sweep over something else as well, "
                "such as model=A,B, or name two sides: perfexp compare A B."
            )
        raise UserError(f"{folder} is one side only; name two or more: perfexp compare A B.")
    places = {child.job: str(run_folder) for child, run_folder, _ in runs}
    decided_by = _decided_by(folder)
    sides = []
    for name, group in zip(_names(len(groups)), groups, strict=True):
        of_several = f"{folder} {group.name} ({units.counted(len(group.recorded), 'run')})"
        source = places[group.number] if len(group.runs) == 1 else of_several
        sides.append(_side(name, source, group.recorded, _missing(group.runs), decided_by))
    return sides


def _names(count: int) -> str:
    """Return the names of `count` sides, a letter each.

    Raises:
        UserError: there are more sides than letters.
    """
    if count > len(string.ascii_uppercase):
        raise UserError(
            f"{count} sides were given; at most {len(string.ascii_uppercase)} can be compared."
        )
    return string.ascii_uppercase[:count]


def _side(
    name: str,
    source: str,
    runs: Sequence[Analysis],
    missing: list[str],
    decided_by: tuple[str, ...] | None = None,
) -> Side:
    """Return a side with the facts that qualify its figures, such as warnings.

    Args:
        name: letter of the side.
        source: where its records come from, for messages.
        runs: its records, analyzed.
        missing: lines about runs without a record.
        decided_by: measures that decided `perfexp ab`; None for another kind of side.
    """
    coverage = sweep_summary.coverage(chain.from_iterable(analysis.rows for analysis in runs))
    raised = chain.from_iterable(map(raised_diagnostics, runs))
    side = Side.of(name, source, runs, missing)
    facts = msgspec.structs.replace(
        side.facts,
        decided_by=decided_by,
        coverage="" if coverage == _PROVEN else coverage,
        warnings=tuple(codes(analysis.worst for analysis in raised)),
    )
    return replace(side, facts=facts)


def _decided_by(folder: Path) -> tuple[str, ...] | None:
    """Return the measures that decide `perfexp ab` in a folder.

    Empty means the default measures, None means another kind of sweep.
    """
    sweep = Sweep.load(folder)
    metrics = [text.removeprefix(METRIC) for text in sweep.command if text.startswith(METRIC)]
    if not sweep.in_turn:
        return None
    return tuple(words(metrics))


def records(source: str, uri: str | None) -> tuple[list[Record], list[str]]:
    """Return the records of a run or a sweep, and a line for each run without a record.

    `compare`, `check` and `baseline` read their folders with it.

    Raises:
        UserError: there is no record, or a record is unreadable.
    """
    if source.startswith(MLFLOW):
        return _stored(source.removeprefix(MLFLOW), uri), []
    folder = Path(source)
    if is_sweep(folder):
        runs = _of_sweep(folder)
        measured = [record for _, _, record in runs if record]
        return measured, _missing((child, record) for child, _, record in runs)
    if folder.is_dir() and not (folder / RECORD).exists():
        refuse_unfinished(folder)
        raise UserError(
            f"There is no {RECORD} and no {SWEEP} in {source}. Name a run's folder or a sweep's."
        )
    load_one = vendor_file.load if vendor_file.is_one(folder) else Record.load
    return [load_one(folder)], []


def baseline(root: Path, name: str, machine: str | None = None) -> Path:
    """Return the folder of a named baseline.

    `check --against NAME` and `baseline show` call it.

    Args:
        machine: machine name; None accepts any machine.

    Raises:
        UserError: no machine has the baseline, or several do.
    """
    places = named_baselines.find(root, name)
    matching = [candidate for candidate in places if machine in (None, candidate.parent.name)]
    if len(matching) == 1:
        return matching[0]
    machines = ", ".join(candidate.parent.name for candidate in places)
    if matching:
        raise UserError(
            f"Several machines have a baseline {name}: {machines}. Name one with --machine."
        )
    of_machine = f" of {machine}" if machine else ""
    others = f", only of {machines}: name one with --machine, or add" if places else ". Add"
    raise UserError(
        f"There is no baseline {name}{of_machine} in {root}{others} it with: "
        f"perfexp baseline add {name} DIR."
    )


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is a sweep folder.

    A folder that holds a record as well counts as a run.
    """
    return (folder / SWEEP).is_file() and not (folder / RECORD).is_file()


def _of_sweep(folder: Path) -> list[tuple[SweepChild, Path, Record | None]]:
    """Return the runs of a sweep with their folders and records.

    Raises:
        UserError: no run has a record.
    """
    sweep = Sweep.load(folder)
    children = sorted(folders.run_folders(sweep, folder), key=lambda pair: pair[0].job)
    runs = [(child, run_folder, sweep.record_of(child, folder)) for child, run_folder in children]
    if not any(record for _, _, record in runs):
        raise UserError(
            f"None of the runs of the sweep in {folder} has a {RECORD}: perfexp status {folder}."
        )
    return runs


def _missing(runs: Iterable[tuple[SweepChild, object]]) -> list[str]:
    """Return a line for each run without a record."""
    lines = []
    for child, record in runs:
        if not record:
            why = f": {child.error}" if child.error else ""
            lines.append(f"{child.name} ({child.status.value}){why}")
    return lines


def _stored(run_id: str, uri: str | None) -> list[Record]:
    """Return the records of a run in the tracking store.

    Raises:
        UserError: it is a sweep without runs.
    """
    from perfexp.report.tracking.mlflow_sink import MlflowSink  # only for sides from a store

    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        files = MlflowSink(uri=uri).fetch(run_id, Path(folder))
        if not files:
            raise UserError(f"{MLFLOW}{run_id} is a sweep without runs.")
        return list(map(Record.load, files))


def _fraction(option: str, text: str, most: float | None = None) -> float:
    """Return a percentage (`1%`) or a fraction (`0.01`) as a fraction.

    Raises:
        UserError: the value is not above 0 and below 100 %, or exceeds `most`.
    """
    bare = text.strip().removesuffix("%")
    try:
        value = float(bare)
        if bare != text.strip():
            value /= 100
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UserError(
            f"{option} {text}: give a percentage above 0 % and below 100 %, such as 1%."
        )
    if most and value > most:  # every verdict has this level anyway
        raise UserError(
            f"{option} {text}: give at most {100 * most:g}%, the error rate of a single verdict."
        )
    return value
