"""Files: a record and a sweep as the files that people open: CSV, PNG and Markdown."""

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
    """Write the table, the picture, the report and the speed files of a run.

    Args:
        record: finished, whatever its status.
        paths: of the run's folder.

    Returns:
        These files and those that the run left before, as far as they are there.

    Raises:
        OSError: the folder can't be written.
    """
    about = subject(record.plan, record.environment)
    table, picture = paths.table(about.model, about.algorithm, "overall"), paths.picture("time")
    _put(paths, table, csv_tables.to_csv(csv_tables.overall(record)))
    by_layer = paths.table(about.model, about.algorithm, "convolutions")
    if found := convolutions.lines(record):
        _put(paths, by_layer, csv_tables.to_csv(found))
    dissected = paths.table(about.model, about.algorithm, "layers")
    if found := layer_tables.lines(record):
        _put(paths, dissected, csv_tables.to_csv(found))
    mosaic = paths.picture("layers")
    if areas_drawn := _layers_png(record):
        _put(paths, mosaic, areas_drawn)
    drawn = _png(record_plots.picture(record))
    if drawn:
        _put(paths, picture, drawn)
    _put(paths, paths.report, markdown.markdown(record).encode("utf-8", errors="replace"))
    kinds = {
        paths.plan: "config",
        paths.environment: "config",
        paths.record: "data",
        paths.points: "data",
        table: "tables",
        by_layer: "tables",
        dissected: "tables",
        picture: "plots",
        mosaic: "plots",
        paths.report: "report",
        paths.log: "logs",
    }
    kinds |= dict.fromkeys(speed_files.write(record, paths, on_error=Console().error), "data")
    kinds |= dict.fromkeys(_of_profiles(record, paths), "profiles")
    return [Artifact(path=_name(path, paths.root), kind=kind) for path, kind in kinds.items() if path.is_file()]


def write_sweep(sweep: Sweep, folder: Path, records: Sequence[Record]) -> list[Artifact]:
    """Write the table and the picture of a sweep.

    Args:
        sweep: its summary.
        folder: the sweep's folder.
        records: those of its runs, as far as there are any.

    Returns:
        These files and the summary, as far as they are there.

    Raises:
        OSError: the folder can't be written.
    """
    paths = SweepPaths(folder)
    write_atomically(paths.table, csv_tables.to_csv(csv_tables.sweep(sweep, records)))
    drawn = _png(record_plots.sweep_picture(sweep, records))
    if drawn:
        write_atomically(paths.picture, drawn)
    kinds = {paths.summary: "data", paths.table: "tables", paths.picture: "plots"}
    return [Artifact(path=_name(path, paths.root), kind=kind) for path, kind in kinds.items() if path.is_file()]


def _of_profiles(record: Record, paths: RunPaths) -> list[Path]:
    """What profilers left; a record is data, so only what the manifest names is taken for a file of this run."""
    claimed = set(paths.claimed())
    return [paths.root / name for name in profile_summary.files(record) if name in claimed and Path(name).name == name]


def _put(paths: RunPaths, path: Path, content: bytes) -> None:
    paths.claim(path)
    write_atomically(path, content)


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _png(picture: Chart | Bars | Strips | None) -> bytes | None:
    """The plot as PNG; None for none."""
    if picture is None:
        return None
    from perfexp.plots import canvas

    return canvas.draw(picture)


def _layers_png(record: Record) -> bytes | None:
    """The plot of a record's layers as PNG; None where no layers were measured."""
    if layer_tables.told(record) is None:
        return None
    from perfexp.plots import layer_areas

    return layer_areas.draw(record)
