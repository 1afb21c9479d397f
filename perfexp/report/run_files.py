"""Files that people read, for runs and sweeps: CSV tables, PNG plots and Markdown reports.

The parent process writes them when a run or sweep ends, beside record.json or sweep.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from perfexp.host.files import write_atomically
from perfexp.prediction import predictions
from perfexp.prediction.predictions import Forecast
from perfexp.records import profile_summary
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Artifact, Record
from perfexp.report import markdown
from perfexp.report.console import Console
from perfexp.report.plots import record_plots, sweep_plots
from perfexp.report.plots.chart import Bars, Chart, Strips
from perfexp.report.tables import (
    convolutions,
    csv_tables,
    flat,
    layer_tables,
    speed_files,
    vendor_file,
)


def write(
    analysis: Analysis, paths: RunPaths, forecasts: Sequence[Forecast] = ()
) -> list[Artifact]:
    """Write a run's tables, plots, report and speed files.

    Args:
        forecasts: predictions from a sparse sweep, for their own files and for the plot.

    Returns:
        All run files, including earlier ones such as the plan and the log.

    Raises:
        OSError: a file cannot be written.
    """
    record = analysis.record
    kinds = {
        paths.plan: "config",
        paths.environment: "config",
        paths.record: "data",
        paths.points: "data",
    }
    for path, kind, content in _contents(analysis, paths, forecasts):
        kinds[path] = kind
        if content is not None:
            paths.claim(path)
            write_atomically(path, content)
    kinds[paths.log] = "logs"
    kinds |= dict.fromkeys(speed_files.write(record, paths, on_error=Console().error), "data")
    kinds |= dict.fromkeys(_of_profiles(record, paths), "profiles")
    return _artifacts(kinds, paths.root)


def _contents(
    analysis: Analysis, paths: RunPaths, forecasts: Sequence[Forecast]
) -> Iterator[tuple[Path, str, bytes | None]]:
    """Yield path, kind and content for tables, plots and the report.

    The content is None if there is nothing to write.
    """
    record, about = analysis.record, analysis.about
    tables = {
        "overall": flat.overall(analysis),
        "convolutions": convolutions.lines(analysis),
        "attention": convolutions.lines(analysis, "attention"),
        "layers": layer_tables.lines(analysis),
        "epochs": flat.epochs(analysis),
        "predicted": flat.predicted(analysis, forecasts),
    }
    for name, lines in tables.items():
        table = paths.table(about.model, about.algorithm, name)
        yield table, "tables", csv_tables.to_csv(lines) if lines or name == "overall" else None
    yield paths.predicted, "data", predictions.to_lines(forecasts, about.precision) or None
    plots = {
        paths.plot("time"): _png(record_plots.plot(analysis, forecasts)),
        paths.plot("layers"): _layers_png(record),
    }
    plot_names = []
    for path, content in plots.items():
        yield path, "plots", content
        if content is not None:
            plot_names.append(path.name)
    for name in profile_summary.files(record):
        if name.endswith("_roofline.png"):
            plot_names.append(name)
    report = markdown.markdown(analysis, plot_names).encode("utf-8", errors="replace")
    yield paths.report, "report", report
    if vendor_file.is_wanted(record):
        yield paths.root / vendor_file.name(record), "data", vendor_file.to_json(analysis)


def write_sweep(sweep_analysis: SweepAnalysis, folder: Path) -> list[Artifact]:
    """Write a sweep's table and plot, and return all its files, as in `write`.

    Args:
        folder: the sweep's folder.

    Raises:
        OSError: the folder cannot be written.
    """
    paths = SweepPaths(folder)
    write_atomically(paths.table, csv_tables.to_csv(flat.sweep(sweep_analysis)))
    if png := _png(sweep_plots.plot(sweep_analysis, folder)):
        write_atomically(paths.plot, png)
    kinds = {paths.summary: "data", paths.table: "tables", paths.plot: "plots"}
    return _artifacts(kinds, paths.root)


def _artifacts(kinds: Mapping[Path, str], root: Path) -> list[Artifact]:
    """Return the files that exist, with their kinds, relative to the folder."""
    artifacts = []
    for path, kind in kinds.items():
        if path.is_file():
            artifacts.append(Artifact(path=path.relative_to(root).as_posix(), kind=kind))
    return artifacts


def _of_profiles(record: Record, paths: RunPaths) -> list[Path]:
    """Return profiler files that belong to this run.

    A record is data, so only files in the manifest count.
    """
    claimed = {name for name in paths.claimed() if Path(name).name == name}
    return [paths.root / name for name in profile_summary.files(record) if name in claimed]


def _png(plot: Chart | Bars | Strips | None) -> bytes | None:
    """Return a plot as PNG; None for None."""
    if plot is None:
        return None
    from perfexp.report.plots import drawing  # matplotlib imports slowly

    return drawing.draw(plot)


def _layers_png(record: Record) -> bytes | None:
    """Return the layer plot as PNG; None unless layers were profiled."""
    if layer_tables.representative_point(record) is None:
        return None
    from perfexp.report.plots import layer_plot  # matplotlib imports slowly

    return layer_plot.draw(record)
