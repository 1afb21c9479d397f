"""Flat: a record's figures as lines of named cells, for CSV, Parquet, JSON and MLflow.

A line is one row of a table, a dictionary with cells by column name. `overall`, `epochs` and
`sweep` make result files; `points` adds the run's identity, so that lines from many runs can be
joined (`perfexp export`, `perfexp.load`). `charted` gives the figures that MLflow charts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perfexp.prediction.predictions import Forecast, key_of
from perfexp.records import quantities as registry
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.fact_lookup import fact_at
from perfexp.records.quantities import ENERGY, PEAK_MEMORY, POWER
from perfexp.records.record import Key, Metric, Point, Record, Status
from perfexp.records.rows import Row
from perfexp.records.subject import Subject
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.records.units import prettify
from perfexp.statistics.blockwise import Summary
from perfexp.statistics.estimators import Interval

Cell = str | float | int | bool | None
Line = dict[str, Cell]

#: Columns that identify a line's run among other runs, in order.
IDENTITY = (
    *(
        "run_uid",
        "run_name",
        "folder",
        "host",
        "device_name",
        "driver",
        "torch",
        "cudnn",
        "git_commit",
        "git_dirty",
    ),
    *("plan_hash", "perfexp_version", "started", "sweep_uid", "sweep_job"),
)
#: Environment facts among these columns, with their dotted places.
_FACTS = {
    "host": "host",
    "device_name": "device.name",
    "driver": "device.driver",
    "torch": "packages.torch",
    "cudnn": "device.cudnn",
    "git_commit": "git.commit",
}
#: Prefix for columns with the values of sweep axes, the overrides that vary.
AXIS = "axis_"
#: Metrics among the first columns, and metrics with their own columns.
_FIRST_METRICS = (POWER, ENERGY)
_PLACED = (PEAK_MEMORY, *_FIRST_METRICS)
#: Time columns, in milliseconds if the name ends in `_ms`.
_OF_TIME: dict[str, Callable[[Summary], float | None]] = {
    "mean_ms": lambda time: time.mean.value,
    "std_ms": lambda time: time.std,
    "min_ms": lambda time: time.minimum,
    "max_ms": lambda time: time.maximum,
    "median_ms": lambda time: time.median.value,
    "ci_low_ms": lambda time: time.median.low,
    "ci_high_ms": lambda time: time.median.high,
    "half_width_percent": lambda time: _scaled(time.median.relative_half_width, 100),
    "n": lambda time: time.n,
    "n_effective": lambda time: time.n / time.tau,
    "outliers": lambda time: len(time.outliers),
}
#: Columns in milliseconds that CSV files name without a unit, before all other columns.
_BARE = ("mean", "std", "min", "max")
#: MLflow's names for some columns.
_CHARTED = {
    "median_ms": "p50_ms",
    "ci_low_ms": "ci_low_ms",
    "ci_high_ms": "ci_high_ms",
    "half_width_percent": "ci_half_width_percent",
    "mean_ms": "mean_ms",
    "std_ms": "std_ms",
    "n": "measured_count",
}
#: First columns of every table.
FIRST_COLUMNS = (
    *("model", "algorithm", "input_size", *_BARE),
    *(registry.named(name).column for name in _FIRST_METRICS),
)
#: Limit on a metric's values in an MLflow chart; more take time and are not shown.
CHART_POINTS = 320


def overall(analysis: Analysis, further: Sequence[Diagnostic] = ()) -> list[Line]:
    """Return a line for each timed point; a failed point's figures are None.

    Times are milliseconds per call for the time in `time_kind`. `pN_ms` columns belong to
    `percentile_kind`; their ends are None if n is too small for an interval. All lines have the
    same columns in the same order, `FIRST_COLUMNS` first. The run writes them as
    MODEL_ALGORITHM_overall.csv, and MLflow shows them as a table.

    Args:
        further: diagnostics about the run that only its sweep reveals.
    """
    about, doubts = analysis.about, (*analysis.record.doubts, *further)
    parts: list[tuple[Mapping[str, Cell], ...]] = []
    for row in analysis.rows:
        times = _time_columns(row, about), _percentile_columns(row, analysis.percentiles)
        rates = with_ends("samples_per_second", row.samples_per_second), _phases(row)
        metrics = _metric_columns(row), _ends_of_metrics(row)
        parts.append((*times, *rates, *metrics, _outcome(row, about, doubts)))
    # a group of columns, such as percentiles, has the same names in all lines, in one place
    lines: list[Line] = [{} for _ in parts]
    for group in zip(*parts, strict=True):
        names: Line = dict.fromkeys(chain.from_iterable(group))
        for line, cells in zip(lines, group, strict=True):
            line |= {**names, **cells}
    return lines


def epochs(analysis: Analysis) -> list[Line]:
    """Return a line for each epoch in each training, with the figures of `Epoch`.

    The run writes them as MODEL_ALGORITHM_epochs.csv.
    """
    lines: list[Line] = []
    for point in analysis.record.points:
        for epoch in point.epochs:
            epoch_key = {"replicate": point.key.replicate, "epoch": epoch.number}
            lines.append({**columns_of(analysis.about, point.key), **epoch_key, **epoch.figures})
    return lines


def sweep(sweep_analysis: SweepAnalysis) -> list[Line]:
    """Return a line for each point in each run of a sweep, with the varying axes first.

    A run without points also has a line. The sweep writes them as sweep.csv.
    """
    lines: list[Line] = []
    for child, analysis in sweep_analysis.runs:
        further = [sweep_analysis.slower[child.job]] if child.job in sweep_analysis.slower else []
        points = overall(analysis, further) if analysis else []
        ending: Line = {"status": child.status.value, "error": child.error}
        for point in points or [ending]:
            lines.append({**child.axes, "job": child.job, "run": child.name, **point})
    return lines


def predicted(analysis: Analysis, forecasts: Sequence[Forecast]) -> list[Line]:
    """Return a line for each point in a sparse sweep, measured or predicted.

    Times are in ms and energies in joules, with the ends of 90 % intervals. `source` says where a
    time comes from. The run writes them as MODEL_ALGORITHM_predicted.csv.

    Args:
        forecasts: curves over sizes and batch sizes, from the prediction room.
    """
    about = analysis.about
    table: dict[tuple[str, object], Line] = {}
    for forecast in forecasts:
        curve = forecast.curve
        for point in forecast.points:
            key = key_of(point.pair, curve.phase, about.precision)
            line = table.setdefault((curve.phase, point.pair), columns_of(about, key))
            name, factor = registry.named(ENERGY).column, 1.0
            if curve.quantity == "time":
                name, factor = "median_ms", 1e3
                near = key_of(point.nearest, curve.phase, about.precision)
                line |= {"source": point.source, "time_kind": curve.kind}
                line["nearest_input_size"] = near.size_label
                line["nearest_batch_size"] = near.batch_size
            cells = with_ends(name, point.value, factor)
            line |= {f"{name}_low": cells.pop(f"{name}_low"), **cells}
            if point.reason:
                line["reason"] = point.reason
    return list(table.values())


def points(analysis: Analysis, folder: Path, further: Sequence[Diagnostic] = ()) -> list[Line]:
    """Return a line for each timed point, as in `overall`, after the run's identity.

    Column names have their unit. A run without timed points has a line with its status.

    Args:
        folder: the run's folder.
        further: diagnostics about the run that only its sweep reveals.
    """
    record, about = analysis.record, analysis.about
    identity = identity_of(record, folder)
    lines = list(map(with_units, overall(analysis, further)))
    if not lines:
        lines.append({"status": record.status.value})
    names: Line = {
        "model": about.model,
        "algorithm": about.algorithm,
        "mode": about.mode,
        "execution": about.execution,
    }
    # identity comes again, because a metric must not replace a fact with the same name
    return [identity | names | line | identity for line in lines]


def refused(sweep: Sweep, child: SweepChild, folder: Path) -> Line:
    """Return the line for a run that left no record: its sweep and the reason.

    Args:
        folder: the run's folder.
    """
    return {
        **dict.fromkeys(IDENTITY),
        "run_name": child.name,
        "folder": folder.as_posix(),
        "sweep_uid": sweep.uid,
        "sweep_job": child.job,
        **{f"{AXIS}{name}": value for name, value in child.axes.items()},
        "status": child.status.value,
        "error": child.error,
    }


def aligned(lines: Sequence[Line]) -> list[Line]:
    """Return lines from several runs with the same columns: identity, sweep axes, then the rest.

    Data frames need equal columns in all lines.
    """
    names = dict.fromkeys(chain.from_iterable(lines))
    ordered = sorted(names, key=lambda name: (name not in IDENTITY, not name.startswith(AXIS)))
    return [dict(zip(ordered, map(line.get, ordered), strict=True)) for line in lines]


def identity_of(record: Record, folder: Path) -> Line:
    """Return the cells that identify a run: folder, machine, software and place in a sweep.

    Unknown facts are None.
    """
    line: Line = {"run_uid": record.uid, "run_name": record.name, "folder": folder.as_posix()}
    for name, fact_path in _FACTS.items():
        fact = fact_at(record.environment, fact_path)
        line[name] = None if fact is None else str(fact)
    is_dirty = str(fact_at(record.environment, "git.dirty"))
    line["git_dirty"] = {"True": True, "False": False}.get(is_dirty)
    line["plan_hash"] = record.plan_hash
    line["perfexp_version"] = record.perfexp_version
    line["started"] = record.started
    line |= {"sweep_uid": None, "sweep_job": None}
    if record.sweep:
        line |= {"sweep_uid": record.sweep.uid, "sweep_job": record.sweep.job}
        line |= {f"{AXIS}{name}": value for name, value in record.sweep.axes.items()}
    return line


def with_units(line: Line) -> Line:
    """Return a line with units in its names and the size in pixels, without the device.

    Result files of a run keep shorter names, which other tools expect.
    """
    cells: Line = {}
    for name, cell in line.items():
        if name == "input_size":
            height, _, width = str(cell).partition("x")
            cells |= size_cells(int(height), int(width or height))
        elif name != "device":
            cells[f"{name}_ms" if name in _BARE else name] = cell
    return cells


def size_cells(height: int, width: int) -> Line:
    """Return an input size as a label and in pixels."""
    label = str(height) if height == width else f"{height}x{width}"
    return {"input_size": label, "input_height_pixels": height, "input_width_pixels": width}


def columns_of(about: Subject, key: Key) -> Line:
    """Return the columns that identify a point in tables of layers, convolutions and epochs."""
    return {
        "model": about.model,
        "algorithm": about.algorithm,
        "phase": key.phase,
        "input_size": key.size_label,
        "batch_size": key.batch_size,
        "precision": key.precision,
    }


def with_ends(
    name: str, figure: Interval | Metric | None, factor: float = 1.0, unit: str = ""
) -> dict[str, float | None]:
    """Return a figure and its interval as NAME, NAME_low and NAME_high, each followed by a unit.

    Unknown values are None.

    Args:
        factor: factor for all three values, for example 1e3 from seconds to ms.
        unit: suffix of the names, for example `_ms`.
    """
    if figure is None:
        return dict.fromkeys((f"{name}{unit}", f"{name}_low{unit}", f"{name}_high{unit}"))
    return {
        f"{name}{unit}": _scaled(figure.value, factor),
        f"{name}_low{unit}": _scaled(figure.low, factor),
        f"{name}_high{unit}": _scaled(figure.high, factor),
    }


def to_ms(seconds: float | None) -> float | None:
    """Return seconds as milliseconds; None for None."""
    return _scaled(seconds, 1e3)


def _scaled(value: float | None, factor: float) -> float | None:
    """Return a value times a factor; None for None."""
    return None if value is None else value * factor


def _of_time(time: Summary | None) -> dict[str, float | None]:
    """Return the cells of a time's statistics, in ms if the name says so; None without a time."""
    cells: dict[str, float | None] = dict.fromkeys(_OF_TIME)
    if time is None:
        return cells
    for name, read in _OF_TIME.items():
        cell = read(time)
        cells[name] = to_ms(cell) if name.endswith("_ms") else cell
    return cells


def _time_columns(row: Row, about: Subject) -> Line:
    """Return the first columns: point, mean and spread in ms, statistics, and sampling."""
    size, cells = row.key.input_size, _of_time(row.time)
    line: Line = {"model": about.model, "algorithm": about.algorithm, "input_size": size[0]}
    if size[0] != size[1]:
        line["input_size"] = row.key.size_label
    for name in _BARE:
        line[name] = cells.pop(f"{name}_ms")
    for name in _FIRST_METRICS:
        line[registry.named(name).column] = row.value(name)
    line["phase"] = row.key.phase
    line["batch_size"] = row.key.batch_size
    line["precision"] = row.key.precision
    line["time_kind"] = row.time_kind
    line |= cells
    line |= dict.fromkeys(("warmup_calls", "calls_per_sample", "stop_reason"))
    if row.time_kind:
        series = row.series[row.time_kind]
        line["warmup_calls"] = series.warmup * series.calls_per_sample
        line["calls_per_sample"] = series.calls_per_sample
        if series.stop:
            line["stop_reason"] = series.stop.reason
    return line


def _percentile_columns(row: Row, percentiles: Sequence[float]) -> Line:
    """Return the percentiles of the time that a caller experiences, in ms, with intervals."""
    line: Line = {"percentile_kind": row.service_kind}
    for number in percentiles:
        line |= with_ends(f"p{number:g}", row.percentile(number), 1e3, "_ms")
    return line


def _phases(row: Row) -> Line:
    """Return the median ms of each part of a call, for example `phase_forward_ms`."""
    return {f"phase_{name}_ms": to_ms(seconds) for name, seconds in row.phases.items()}


def _metric_columns(row: Row) -> Line:
    """Return peak memory in MiB, and the metrics that have no place of their own, in SI units."""
    line: Line = {"peak_memory_mib": _scaled(row.value(PEAK_MEMORY), 1 / 2**20)}
    for metric in row.metrics:
        if metric.name not in _PLACED:
            line[registry.of(metric).column] = metric.value
    return line


def _ends_of_metrics(row: Row) -> Line:
    """Return the interval ends of metrics, as NAME_low and NAME_high."""
    line: Line = {}
    for metric in row.metrics:
        if metric.low is not None:
            name = registry.of(metric).column
            line |= {f"{name}_low": metric.low, f"{name}_high": metric.high}
    return line


def _outcome(row: Row, about: Subject, run_doubts: Sequence[Diagnostic]) -> Line:
    """Return the last columns: names of estimated metrics, status and codes of all diagnostics.

    The run's own diagnostics are included, because each line is read alone.
    """
    estimated = [registry.of(metric).column for metric in row.metrics if metric.estimated]
    line: Line = {
        "estimated": ";".join(estimated),
        "device": about.device,
        "status": row.status.value,
        "doubts": ";".join(dict.fromkeys(doubt.code for doubt in (*run_doubts, *row.doubts))),
        "error": row.error,
        "processes": 0,
    }
    if row.status is Status.OK:
        line |= {"error": None, "processes": row.processes}
    return line


class Charted(NamedTuple):
    """Number in a chart.

    Attributes:
        group: `latency`, `throughput`, `memory`, …
        name: name within the group, ending in its unit.
        step: the point's input width if points differ only in a square size, otherwise its index.
            In the groups `samples` and `epoch` it is the sample index and the epoch number.
        reason: why there is no value.
        estimated: whether it is derived from another measured value, or has no interval.
    """

    group: str
    name: str
    value: float | None
    key: Key
    step: int
    reason: str | None = None
    estimated: bool = False


class PointRun(NamedTuple):
    """Points with the same phase and batch size, so that their metrics share names in MLflow.

    Attributes:
        analysis: analysis with these points' rows only; no rows for a cold start alone.
    """

    phase: str
    batch_size: int
    analysis: Analysis


def point_runs(analysis: Analysis) -> list[PointRun]:
    """Split a record's rows by phase and batch size, in record order.

    Each becomes a run in MLflow, nested in the record's run if there are several.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in analysis.rows:
        groups.setdefault((row.key.phase, row.key.batch_size), []).append(row)
    # a cold start may have been measured without timed calls
    for first in analysis.cold_starts:
        groups.setdefault(("inference", first.key.batch_size), [])
    return [PointRun(*group, replace(analysis, rows=tuple(rows))) for group, rows in groups.items()]


def by_size(run: PointRun) -> list[PointRun]:
    """Split a run with several sizes into a run for each size; empty for a single size.

    Each becomes a nested run in MLflow.
    """
    if len(run.analysis.rows) < 2:
        return []
    sizes = []
    for row in run.analysis.rows:
        sizes.append(run._replace(analysis=replace(run.analysis, rows=(row,))))
    return sizes


def charted(run: PointRun) -> Iterator[Charted]:
    """Yield the figures that MLflow charts for a phase and batch size, point by point.

    A single point also has its raw samples and epochs.
    """
    rows = run.analysis.rows
    steps = _steps(rows)
    for row in rows:
        for group, name, value, is_estimate in _of_row(row, run.analysis.percentiles):
            if value is not None:
                yield Charted(group, name, value, row.key, steps[row.key], estimated=is_estimate)
        yield from _metrics(row, steps[row.key])
    yield from _scalings(run.analysis, steps)
    yield from _cold_starts(run, steps)
    if len(rows) != 1:
        return
    [row] = rows
    if row.time_kind:  # a chart of warm-up, drift and outliers
        for index, seconds in decimate(row.series[row.time_kind].samples):
            yield Charted("samples", f"{row.time_kind}_ms", seconds * 1e3, row.key, index)
    for point in run.analysis.record.points:
        if point.key == row.key:
            yield from of_epochs(point)


def of_epochs(point: Point) -> Iterator[Charted]:
    """Yield the figures of each training epoch, with the epoch number as step."""
    for epoch in point.epochs:
        for name, value in epoch.figures.items():
            if value is not None:
                yield Charted("epoch", name, value, point.key, epoch.number)


def decimate(samples: Sequence[float], limit: int = CHART_POINTS) -> list[tuple[int, float]]:
    """Return up to `limit` samples (an even number) with their indices, keeping local extremes.

    Each section of the samples keeps its smallest and its largest.
    """
    if len(samples) <= limit:
        return list(enumerate(samples))
    values, indices = np.asarray(samples), set[int]()
    for section in np.array_split(np.arange(values.size), limit // 2):
        indices |= {int(section[values[section].argmin()]), int(section[values[section].argmax()])}
    return [(index, samples[index]) for index in sorted(indices)]


def _steps(table: Sequence[Row]) -> dict[Key, int]:
    """Return each point's step, which is the chart's axis: the width if only square sizes vary.

    MLflow needs a whole number for each value of a metric.
    """
    widths = set()
    for row in table:
        height, width = row.key.input_size
        if height == width:
            widths.add(width)
    is_sweep = len(widths) == len(table) > 1
    steps = {}
    for index, row in enumerate(table):
        steps[row.key] = row.key.input_size[1] if is_sweep else index
    return steps


def _of_row(
    row: Row, percentiles: Sequence[float]
) -> Iterator[tuple[str, str, float | None, bool]]:
    """Yield group, name and value of a row's own figures, and whether reports mark them `≈`.

    Names end in their unit.
    """
    for kind, time in row.times.items():
        cells = _of_time(time)
        for name, charted in _CHARTED.items():
            yield kind, charted, cells[name], name == "median_ms" and time.median.low is None
    rate = row.samples_per_second
    for name, value in with_ends("samples_per_second", rate).items():
        yield "throughput", name, value, rate is not None and rate.low is None
    for name, seconds in row.phases.items():
        yield f"{row.key.phase}_phase", f"{name}_ms", seconds * 1e3, False
    height, width = row.key.input_size
    facts = {"input_height": height, "input_width": width, "batch_size": row.key.batch_size}
    facts |= {"processes_count": row.processes, "ok": row.status is Status.OK}
    for name, fact in {**facts, "spread_percent": _scaled(row.spread, 100)}.items():
        yield "point", name, fact, False
    for number in percentiles:
        interval = row.percentile(number)
        if interval and row.service_kind and number != 50:
            yield row.service_kind, f"p{number:g}_ms", interval.value * 1e3, interval.low is None


def _metrics(row: Row, step: int) -> Iterator[Charted]:
    """Yield a point's charted metrics; metrics without a group use the phase as group.

    Seconds, bytes and hertz are converted for display, and names with them.
    """
    for metric in row.metrics:
        if not registry.of(metric).is_charted:
            continue
        group, _, stem = metric.name.rpartition("/")
        if "/" in metric.name:
            group, _, stem = metric.name.partition("/")
        for ending, number in (("", metric.value), ("_low", metric.low), ("_high", metric.high)):
            name, value = prettify(stem, number or 0.0, metric.unit)
            if number is None and ending:
                continue
            yield Charted(
                group or row.key.phase,
                f"{name}{ending}",
                None if number is None else value,
                row.key,
                step,
                metric.reason,
                metric.estimated,
            )


def _scalings(part: Analysis, steps: Mapping[Key, int]) -> Iterator[Charted]:
    """Yield how times scale with size, at the largest size's step: times in ms, and the exponent.

    A time is a constant plus a part that grows with the pixels, given at the largest size.

    Missing figures have a reason.
    """
    for scaling in part.scalings:
        fit = scaling.fit
        values = {**with_ends("exponent", fit.exponent)}
        values |= {"constant_ms": fit.a * 1e3, "growing_ms": fit.b * 1e3}
        if scaling.doubt:
            values = dict.fromkeys(values)
        values["scatter_percent"] = fit.scatter * 100
        for name, value in values.items():
            reason = None
            if value is None:
                reason = scaling.doubt or "the time does not grow with the size"
            yield Charted("scaling", name, value, scaling.key, steps[scaling.key], reason)


def _cold_starts(run: PointRun, steps: Mapping[Key, int]) -> Iterator[Charted]:
    """Yield the parts of the cold starts for a run's sizes, in ms; a training has none."""
    if run.phase != "inference":
        return
    # of several points with the same size the first one's step counts
    step_at = {key.input_size: step for key, step in reversed(list(steps.items()))}
    firsts = [first for first in run.analysis.cold_starts if first.key.batch_size == run.batch_size]
    for index, first in enumerate(firsts):
        if not step_at or first.key.input_size in step_at:
            step = step_at.get(first.key.input_size, index)
            for name, seconds in (*first.parts.items(), ("total", first.total.value)):
                yield Charted("ttfp", f"{name}_ms", seconds * 1e3, first.key, step)
