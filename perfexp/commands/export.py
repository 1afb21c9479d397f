"""perfexp export: write points, layers and raw samples from many runs as tidy tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from perfexp.commands.app import (
    RECORD,
    SWEEP,
    Force,
    Json,
    app,
    echo,
    emit,
    one_of,
    refuse_to_overwrite,
    write_files,
)
from perfexp.commands.show import refuse_unfinished
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import KEY_FIELDS, label, measured
from perfexp.errors import PerfexpError, UserError
from perfexp.records import algorithm_plan, folders, units
from perfexp.records.analysis import Analysis
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.report.tables import csv_tables, flat, json_results, layer_tables, tidy
from perfexp.report.tables.flat import Line
from perfexp.report.tables.layer_tables import LayerRow
from perfexp.report.tables.tidy import Block
from perfexp.statistics.moderated import Repeats

if TYPE_CHECKING:
    import pandas as pd


#: Tables of many runs.
TABLES = ("points", "layers", "samples")
_REMEDY = "Choose another with --out FILE"
#: Figures by point, which has the same name in every run, and measure; empty for a failed point.
Figures = dict[str, dict[str, Repeats]]
#: Bencher's own measures with the factor to their units: nanoseconds, and operations/s.
_BUILT_IN = {"latency": ("latency", 1e9), "throughput": ("throughput", 1.0)}


class Format(StrEnum):
    """Format of the tables."""

    csv = "csv"
    parquet = "parquet"
    both = "both"
    bencher = "bencher"
    github_action_benchmark = "github-action-benchmark"


Places = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR",
        help="A run's folder or record.json, a sweep's, or any folder above runs.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Output file, by default in the current folder; its suffix may set the format.",
    ),
]
Form = Annotated[
    Format | None,
    typer.Option("--format", help="By default the format of FILE's suffix, or both."),
]
Samples = Annotated[bool, typer.Option("--samples", help="All raw samples too, in FILE_samples.")]
Layers = Annotated[
    bool, typer.Option("--layers", help="All layers too, with winners, in FILE_layers.")
]
AlgorithmPlan = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the algorithms of one run for perfexp.apply instead."),
]


@app.command()
def export(
    places: Places,
    out: Out = Path("export"),
    form: Form = None,
    samples: Samples = False,
    layers: Layers = False,
    plan: AlgorithmPlan = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write one table of many runs: a complete line per point.

    Figures have different units, so each has its own column. First come the run, the machine and
    the sweep axes, then the columns of MODEL_ALGORITHM_overall.csv with their units. A refused run
    of a sweep has a line with the reason.

    The formats bencher and github-action-benchmark hold figures for dashboards. They have SI units;
    Bencher's latency is in nanoseconds. If several runs measured the same point, the last counts.

    With --samples, each sample has a line, cold starts included.

    With --layers, runs with probes.layers=true have a line per row and pass. A line for a layer or
    an operation names its fastest algorithm among these runs: default, or an algorithm that
    computed it itself.

    Example: perfexp export outputs --out runs.parquet --samples
    """
    if plan is not None:
        _export_plan(places, plan, force=force, as_json=as_json)
        return
    targets = _targets(out, form, samples=samples, layers=layers)
    collected = Collected(samples=samples, layers=layers)
    files = [file for place in places for file in collected.files(place)]
    refuse_to_overwrite(list(targets), _REMEDY, force=force)
    for file in files:
        collected.add(file)
    lines = collected.points()
    if layers and not collected.layer_rows():
        echo("no layers: none of these runs was measured with probes.layers=true", err=True)
        targets = {file: table for file, table in targets.items() if table != "layers"}
    contents: dict[Path, bytes] = {}
    listed: list[str] = []
    if lines:
        listed.append(
            f"{units.counted(len(lines), 'line')} of {units.counted(len(collected.runs), 'run')}"
        )
        for file, table in targets.items():
            contents[file] = collected.content(table, file, form)
    write_files(contents, f"{_REMEDY}.")
    written = [str(file.absolute()) for file in contents]
    emit(
        {"lines": len(lines), "runs": len(collected.runs), "files": written},
        [*listed, *map("wrote {}".format, written)],
        as_json=as_json,
    )
    raise typer.Exit(collected.exit_code)


def _export_plan(places: Sequence[Path], file: Path, *, force: bool, as_json: bool) -> None:
    """Write the algorithms of one run for `perfexp.apply`.

    Raises:
        UserError: there are several places, or the file exists or cannot be written.
    """
    if len(places) != 1:
        raise UserError("--plan takes one run: name its folder alone.")
    refuse_to_overwrite([file], "Choose another with --plan FILE", force=force)
    content = algorithm_plan.encoded(algorithm_plan.read(places[0]))
    write_files({file: content}, "Choose another with --plan FILE.")
    emit({"file": str(file.absolute())}, [f"wrote {file.absolute()}"], as_json=as_json)


def _targets(out: Path, form: Format | None, *, samples: bool, layers: bool) -> dict[Path, str]:
    """Return the files to write, each with the name of its table.

    Raises:
        UserError: the format has no such table, or the suffix is wrong.
    """
    if form in FORMATS and (samples or layers):
        raise UserError(f"--format {form} takes neither --samples nor --layers.")
    stems = {"points": out.stem}
    if samples:
        stems["samples"] = f"{out.stem}_samples"
    if layers:
        stems["layers"] = f"{out.stem}_layers"
    kinds = _kinds(out, form)
    targets: dict[Path, str] = {}
    for table, stem in stems.items():
        targets |= {out.with_name(f"{stem}.{kind}"): table for kind in kinds}
    return targets


def _kinds(out: Path, form: Format | None) -> list[str]:
    """Return the suffixes of the files to write.

    Raises:
        UserError: the suffix is unknown, or contradicts `--format`.
    """
    suffix = out.suffix.lower().removeprefix(".")
    every = ["json"] if form in FORMATS else [Format.csv.value, Format.parquet.value]
    if suffix and suffix not in every:
        raise UserError(
            f"--out {out}: the suffix is .{' or .'.join(every)}, or none; not .{suffix}."
        )
    if suffix and form in every and form != suffix:
        raise UserError(
            f"--out {out} and --format {form} contradict each other: leave one of them out."
        )
    kind = form.value if form else suffix
    if kind in every:
        return [kind]
    return every


@dataclass(kw_only=True)
class _ExportedRun:
    """The lines of one run for the tables, and its place in a sweep: identity and number."""

    ended: str
    folder: str
    model: str
    lines: list[Line]
    sweep: tuple[str, int] | None = None
    blocks: list[Block] = field(default_factory=list)
    layers: list[LayerRow] = field(default_factory=list)
    figures: Figures = field(default_factory=dict)


@dataclass(kw_only=True)
class Collected:
    """Runs and sweeps by identity; among duplicates, the run that ended last.

    Attributes:
        samples: whether to collect raw samples.
        layers: whether to collect layers.
        exit_code: 1 if something could not be read, otherwise 0.
    """

    samples: bool
    layers: bool = False
    runs: dict[str, _ExportedRun] = field(default_factory=dict)
    sweeps: dict[str, tuple[Sweep, Path]] = field(default_factory=dict)
    exit_code: int = 0
    _read: set[Path] = field(default_factory=set)

    @classmethod
    def of(cls, places: Sequence[Path], *, samples: bool = False, layers: bool = False) -> Self:
        """Collect everything in and below some folders.

        `perfexp.load` calls it.

        Raises:
            UserError: a folder has no run.
        """
        collected = cls(samples=samples, layers=layers)
        for file in list(chain.from_iterable(map(collected.files, places))):
            collected.add(file)
        return collected

    def points(self) -> list[Line]:
        """Return the lines of all points and all refused runs.

        They are the table `points`.
        """
        recorded = [line for run in self.runs.values() for line in run.lines]
        return flat.aligned([*recorded, *self.refused()])

    def layer_rows(self) -> list[Line]:
        """Return the lines of all layers, with the fastest algorithm for each.

        They are the table `layers`.
        """
        return flat.aligned(
            layer_tables.with_winners([row for run in self.runs.values() for row in run.layers])
        )

    def blocks(self) -> list[Block]:
        """Return the series of all points.

        They are the table `samples`.
        """
        return [block for run in self.runs.values() for block in run.blocks]

    def frame(self, what: str) -> pd.DataFrame:
        """Return the table `points`, `layers` or `samples`.

        `perfexp.load` returns it, and Parquet files are written from it.

        Raises:
            UserError: there is no such table.
        """
        if what == "samples":
            return tidy.samples(self.blocks())
        return tidy.frame(self._lines(one_of("table", what, TABLES)))

    def content(self, what: str, file: Path, form: Format | None = None) -> bytes:
        """Return the file content for one table, by default in the format of the file's suffix.

        `export` calls it for each file that it writes.
        """
        if form in FORMATS:
            return json_results.text(FORMATS[form](self._latest_figures())).encode()
        if file.suffix == ".parquet":
            return tidy.to_parquet(self.frame(what))
        if what == "samples":
            return tidy.samples_csv(self.blocks())
        return csv_tables.to_csv(self._lines(what))

    def _latest_figures(self) -> Figures:
        """Return the figures of the latest run of each model.

        Points of several models that have one name, such as two widths, get their run's folder as
        well.
        """
        latest: dict[str, dict[str, tuple[str, Any]]] = defaultdict(dict)
        for run in sorted(self.runs.values(), key=lambda run: run.ended):
            for name, figure in run.figures.items():
                latest[name][run.model] = run.folder, figure
        every = {}
        for name, of_models in latest.items():
            for folder, figure in of_models.values():
                every[name if len(of_models) == 1 else f"{name} · {folder}"] = figure
        return every

    def _lines(self, what: str) -> list[Line]:
        """Return the lines of the table `points` or `layers`."""
        if what == "points":
            return self.points()
        return self.layer_rows()

    def files(self, path: Path) -> list[Path]:
        """Return all records and sweeps in and below a folder, or the named file.

        `export` lists all files before it reads the first.

        Raises:
            UserError: there are none.
        """
        files = []
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = list(folders.below(path, RECORD, SWEEP, refused=self._failed))
        if not (files or self.exit_code):
            refuse_unfinished(path)
            raise UserError(
                f"There is no {RECORD} and no {SWEEP} in or below {path}. Name a run's folder, "
                f"its {RECORD}, a sweep's folder, or any folder above some."
            )
        return files

    def add(self, file: Path, *, of: str | None = None) -> None:
        """Add a record, or the records of a sweep's runs wherever they lie.

        Args:
            of: sweep identity that the record must confirm; None accepts any record.
        """
        try:
            if file.name == SWEEP:
                self._add_sweep(Sweep.load(file), file.parent)
            elif file.resolve() not in self._read:
                self._add_record(Record.load(file), file, of)
        except PerfexpError as error:
            self._failed(error)

    def _add_record(self, record: Record, file: Path, of: str | None) -> None:
        """Add a record, unless a newer version of it was added.

        Args:
            of: identity of the sweep that it must belong to; None accepts any record.
        """
        membership = record.sweep
        if of is not None and (membership is None or membership.uid != of):
            return
        self._read.add(file.resolve())
        before = self.runs.get(record.uid)
        # a copied run folder may hold an earlier version of the record
        if before is not None and before.ended >= record.ended:
            return
        analysis = Analysis.of(record)
        run = _ExportedRun(
            ended=record.ended,
            folder=file.parent.name,
            model=repr(record.plan.get("model")),
            lines=flat.points(analysis, file.parent),
            figures=figures(analysis),
        )
        if membership:
            run.sweep = membership.uid, membership.job
        if self.samples:
            run.blocks = tidy.blocks(record)
        if self.layers:
            run.layers = tidy.layers(analysis, file.parent)
        self.runs[record.uid] = run

    def _add_sweep(self, sweep: Sweep, sweep_folder: Path) -> None:
        """Add a sweep and the records of its runs."""
        self.sweeps[sweep.uid] = sweep, sweep_folder
        for _, folder in folders.run_folders(sweep, sweep_folder):
            record = folder / RECORD
            # a summary is data, and links could lead out of the sweep
            if record.is_file() and not (record.is_symlink() or folder.is_symlink()):
                self.add(record, of=sweep.uid)

    def refused(self) -> Iterator[Line]:
        """Yield a line for each run without a record.

        Such runs have a line with their error, so that no run is missing in the table.
        """
        recorded = {run.sweep for run in self.runs.values()}
        for sweep, sweep_folder in self.sweeps.values():
            for child, folder in folders.run_folders(sweep, sweep_folder):
                if child.error and (sweep.uid, child.job) not in recorded:
                    yield flat.refused(sweep, child, folder)

    def _failed(self, error: Exception) -> None:
        """Print why something was not exported, and remember it in the exit code."""
        echo(f"not exported: {error}", err=True)
        self.exit_code = 1


def figures(analysis: Analysis) -> Figures:
    """Return all figures of a run."""
    return {label(one, (*one.features, *KEY_FIELDS)): one.figures for one in measured(analysis)}


def _bencher(every: Figures) -> dict[str, dict[str, Any]]:
    """Return a Bencher Metric Format document."""
    document = {}
    for point, measures in every.items():
        metrics = {}
        for measure, figure in measures.items():
            named = f"{measure} ({MEASURES[measure].unit})", 1.0
            key, factor = _BUILT_IN.get(measure, named)
            value = figure.interval
            ends = {"value": value.value, "lower_value": value.low, "upper_value": value.high}
            metrics[key] = {end: factor * one for end, one in ends.items() if one is not None}
        if metrics:
            document[point] = metrics
    return document


def _smaller_is_better(every: Figures) -> list[dict[str, Any]]:
    """Return entries for the action's tool `customSmallerIsBetter`, without rates and accuracy."""
    entries = []
    for point, measures in every.items():
        for measure, figure in measures.items():
            kind, value = MEASURES[measure], figure.interval
            if kind.is_better_if_lower:
                entry = {"name": f"{point} · {measure}", "unit": kind.unit, "value": value.value}
                if value.relative_half_width is not None:
                    entry["range"] = f"± {value.relative_half_width * value.value:.3g}"
                entries.append({**entry, "extra": f"processes: {len(figure.values)}"})
    return entries


#: Documents by `perfexp export --format`.
FORMATS: dict[str, Callable[[Figures], Any]] = {
    "bencher": _bencher,
    "github-action-benchmark": _smaller_is_better,
}
