"""The files of a record and of a sweep for readers: CSV, PNG and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfexp.host.files import write_atomically
from perfexp.plots import record_plots
from perfexp.plots.chart import Bars, Chart, Strips
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Artifact, Record
from perfexp.records.sweep_record import Sweep
from perfexp.reports import markdown
from perfexp.reports.console import Console
from perfexp.summaries import profile_summary
from perfexp.summaries.subject import subject
from perfexp.tables import convolutions, csv_tables, layer_tables, speed_files


def write(record: Record, paths: RunPaths) -> list[Artifact]:
    """Write tables, plots, report and speed files of a run.

    Returns:
        The existing files of the run, those that it wrote before included.

    Raises:
        OSError: the folder cannot be written.
    """
    about = subject(record.plan, record.environment)
    table, time_plot = paths.table(about.model, about.algorithm, "overall"), paths.picture("time")
    _put(paths, table, csv_tables.to_csv(csv_tables.overall(record)))
    by_layer = paths.table(about.model, about.algorithm, "convolutions")
    if lines := convolutions.lines(record):
        _put(paths, by_layer, csv_tables.to_csv(lines))
    layers = paths.table(about.model, about.algorithm, "layers")
    if lines := layer_tables.lines(record):
        _put(paths, layers, csv_tables.to_csv(lines))
    layers_plot = paths.picture("layers")
    if png := _layers_png(record):
        _put(paths, layers_plot, png)
    if png := _png(record_plots.picture(record)):
        _put(paths, time_plot, png)
    _put(paths, paths.report, markdown.markdown(record).encode("utf-8", errors="replace"))
    kinds = {
        paths.plan: "config",
        paths.environment: "config",
        paths.record: "data",
        paths.points: "data",
        table: "tables",
        by_layer: "tables",
        layers: "tables",
        time_plot: "plots",
        layers_plot: "plots",
        paths.report: "report",
        paths.log: "logs",
    }
    kinds |= dict.fromkeys(speed_files.write(record, paths, on_error=Console().error), "data")
    kinds |= dict.fromkeys(_of_profiles(record, paths), "profiles")
    return [Artifact(path=_name(path, paths.root), kind=kind) for path, kind in kinds.items() if path.is_file()]


def write_sweep(sweep: Sweep, folder: Path, records: Sequence[Record]) -> list[Artifact]:
    """Write the table and the plot of a sweep.

    Args:
        sweep: summary of the sweep.
        folder: folder of the sweep.
        records: available records of its runs.

    Raises:
        OSError: the folder cannot be written.
    """
    paths = SweepPaths(folder)
    write_atomically(paths.table, csv_tables.to_csv(csv_tables.sweep(sweep, records)))
    if png := _png(record_plots.sweep_picture(sweep, records)):
        write_atomically(paths.picture, png)
    kinds = {paths.summary: "data", paths.table: "tables", paths.picture: "plots"}
    return [Artifact(path=_name(path, paths.root), kind=kind) for path, kind in kinds.items() if path.is_file()]


def _of_profiles(record: Record, paths: RunPaths) -> list[Path]:
    """Files of profilers; a record is data, so only files in the manifest count as this run's."""
    claimed = set(paths.claimed())
    return [paths.root / name for name in profile_summary.files(record) if name in claimed and Path(name).name == name]


def _put(paths: RunPaths, path: Path, content: bytes) -> None:
    paths.claim(path)
    write_atomically(path, content)


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _png(plot: Chart | Bars | Strips | None) -> bytes | None:
    """A plot as PNG; None for none."""
    if plot is None:
        return None
    from perfexp.plots import canvas

    return canvas.draw(plot)


def _layers_png(record: Record) -> bytes | None:
    """The plot of a record's layers as PNG; None if no layers were measured."""
    if layer_tables.representative_point(record) is None:
        return None
    from perfexp.plots import layer_areas

    return layer_areas.draw(record)
