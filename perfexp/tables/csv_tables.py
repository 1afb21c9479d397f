"""A record and a sweep as CSV (RFC 4180), for spreadsheets and pandas; every figure in full precision."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence

from perfexp.host.untrusted import spreadsheet_text
from perfexp.records import quantities
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import ENERGY, PEAK_MEMORY, POWER
from perfexp.records.record import Key, Record, Status
from perfexp.records.summary import Row, requested_percentiles, rows
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.subject import Subject, one_line, subject
from perfexp.summaries.sweep_summary import diagnostics_of, paired
from perfexp.summaries.wording import find_metric, percentile, service_time

Cell = str | float | int | bool | None
Line = dict[str, Cell]

#: The first columns of every table.
FIRST_COLUMNS = (
    *("model", "algorithm", "input_size", "mean", "std", "min", "max"),
    *(quantities.named(name).column for name in (POWER, ENERGY)),
)


def overall(record: Record, table: Sequence[Row] | None = None, further: Sequence[Diagnostic] = ()) -> list[Line]:
    """Return one line for each timed point; the figures of a failed point are None.

    Times are milliseconds per call of the kind in `time_kind`; `pN_ms` are of `percentile_kind`, and their ends None if
    n is too small for an interval. All lines have the same columns in the same order, `FIRST_COLUMNS` first. `table`
    has the record's rows, if they are at hand, and `further` diagnostics of the run that its sweep shows.
    """
    table = rows(record) if table is None else table
    about = subject(record.plan, record.environment)
    percentiles = requested_percentiles(record)
    phases = list(dict.fromkeys(name for row in table for name in row.phases))
    metrics = list(dict.fromkeys(metric.name for row in table for metric in row.metrics))
    ranged = list(dict.fromkeys(metric.name for row in table for metric in row.metrics if metric.low is not None))
    return [
        {
            **_time_columns(row, about),
            **_percentile_columns(row, percentiles),
            **_figure_columns(row, phases, metrics, ranged),
            "device": about.device,
            **_outcome_columns(row, (*record.doubts, *further)),
        }
        for row in table
    ]


def epochs(record: Record) -> list[Line]:
    """Return one line for each epoch of each training."""
    about = subject(record.plan, record.environment)
    return [
        {**columns_of(about, point.key), "replicate": point.key.replicate, "epoch": epoch.number, **epoch.figures}
        for point in record.points
        for epoch in point.epochs
    ]


def sweep(summary: Sweep, records: Sequence[Record]) -> list[Line]:
    """Return one line for each point of each run of a sweep, the axes that vary first; a run without points has one."""
    lines: list[Line] = []
    raised = diagnostics_of(summary, records)
    for child, record in paired(summary, records):
        points = overall(record, further=[raised[child.job]] if child.job in raised else []) if record else []
        if not points:
            points = [{"status": child.status.value, "error": child.error}]
        lines += [{**child.axes, "job": child.job, "run": child.name, **point} for point in points]
    return lines


def to_csv(lines: Sequence[Mapping[str, Cell]]) -> bytes:
    """Return lines as CSV in UTF-8, with all columns in the order of their first appearance.

    Without lines, only the header of `FIRST_COLUMNS` is written.
    """
    columns = list(dict.fromkeys(name for line in lines for name in line)) or list(FIRST_COLUMNS)
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow([cell_text(column) for column in columns])
    writer.writerows([cell_text(line.get(column)) for column in columns] for line in lines)
    return buffer.getvalue().encode("utf-8", errors="replace")


def cell_text(cell: Cell) -> str:
    """Return a cell as text; a text that a spreadsheet would run as a formula begins with an apostrophe."""
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int | float):
        return repr(cell)
    return spreadsheet_text(one_line(cell))


def columns_of(about: Subject, key: Key) -> Line:
    """Return the columns that identify a point in the tables of layers and of convolutions."""
    return {
        "model": about.model,
        "algorithm": about.algorithm,
        "phase": key.phase,
        "input_size": key.size_label,
        "batch_size": key.batch_size,
        "precision": key.precision,
    }


def to_ms(seconds: float | None) -> float | None:
    """Return seconds as milliseconds; None for None."""
    return None if seconds is None else seconds * 1e3


def _time_columns(row: Row, about: Subject) -> Line:
    time, series, size = row.time, row.series, row.key.input_size
    width = time.median.relative_half_width if time else None
    return {
        "model": about.model,
        "algorithm": about.algorithm,
        "input_size": row.key.size_label if size[0] != size[1] else size[0],
        "mean": to_ms(time.mean.value) if time else None,
        "std": to_ms(time.std) if time else None,
        "min": to_ms(time.minimum) if time else None,
        "max": to_ms(time.maximum) if time else None,
        **{_column(name): _metric(row, name) for name in (POWER, ENERGY)},
        "phase": row.key.phase,
        "batch_size": row.key.batch_size,
        "precision": row.key.precision,
        "time_kind": row.time_kind,
        "median_ms": to_ms(time.median.value) if time else None,
        "ci_low_ms": to_ms(time.median.low) if time else None,
        "ci_high_ms": to_ms(time.median.high) if time else None,
        "half_width_percent": None if width is None else 100 * width,
        "n": time.n if time else None,
        "n_effective": time.n / time.tau if time else None,
        "outliers": len(time.outliers) if time else None,
        "warmup_calls": series.warmup * series.calls_per_sample if series else None,
        "calls_per_sample": series.calls_per_sample if series else None,
        "stop_reason": series.stop.reason if series and series.stop else None,
    }


def _percentile_columns(row: Row, percentiles: Sequence[float]) -> Line:
    service = service_time(row)
    line: Line = {"percentile_kind": service[0] if service else None}
    for number in percentiles:
        value = percentile(service[1], number) if service else None
        line[f"p{number:g}_ms"] = to_ms(value.value) if value else None
        line[f"p{number:g}_low_ms"] = to_ms(value.low) if value else None
        line[f"p{number:g}_high_ms"] = to_ms(value.high) if value else None
    return line


def _figure_columns(row: Row, phases: Sequence[str], metrics: Sequence[str], ranged: Sequence[str]) -> Line:
    """Rates, phases, `peak_memory_mib` always, and other metrics; `estimated` lists those that are derived.

    `ranged`: metrics that have an interval at some point, and columns for its ends.
    """
    rate, peak = row.samples_per_second, _metric(row, PEAK_MEMORY)
    return {
        "samples_per_second": rate.value if rate else None,
        "samples_per_second_low": rate.low if rate else None,
        "samples_per_second_high": rate.high if rate else None,
        **{f"phase_{name}_ms": to_ms(row.phases.get(name)) for name in phases},
        "peak_memory_mib": None if peak is None else peak / 2**20,
        **{_column(name): _metric(row, name) for name in metrics if name not in (PEAK_MEMORY, POWER, ENERGY)},
        **{f"{_column(name)}_{end}": _metric(row, name, end) for name in ranged for end in ("low", "high")},
        "estimated": ";".join(_column(metric.name) for metric in row.metrics if metric.estimated),
    }


def _outcome_columns(row: Row, run_doubts: Sequence[Diagnostic]) -> Line:
    """Status, and all diagnostics: the whole run's too, because a line is read alone."""
    return {
        "status": row.status.value,
        "doubts": ";".join(dict.fromkeys(doubt.code for doubt in (*run_doubts, *row.doubts))),
        "error": row.error if row.status is not Status.OK else None,
        "processes": row.processes if row.status is Status.OK else 0,
    }


def _metric(row: Row, name: str, field: str = "value") -> float | None:
    metric = find_metric(row, name)
    return getattr(metric, field) if metric else None


def _column(name: str) -> str:
    return quantities.named(name).column
