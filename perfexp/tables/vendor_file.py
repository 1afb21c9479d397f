"""Vendor file: a run's figures for other tools, with its record, named by vendor and time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import msgspec

from perfexp.diagnosis.environment import fact_at, vendor
from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.records.quantities import ACCURACY, IMAGE_ENERGY, PEAK_MEMORY
from perfexp.records.record import Metric, Record, Status
from perfexp.records.summary import Row
from perfexp.statistics.estimators import Interval
from perfexp.summaries.analysis import Analysis

#: Version of the file's own keys; the record inside has its own `schema_version`.
FORMAT = 1
_BEGINNING = "benchmark_"
_TO_MS = partial(mul, 1e3)

Entry = dict[str, Any]


class _Content(msgspec.Struct):
    format: int
    record: msgspec.Raw


def name(record: Record) -> str:
    """Return `benchmark_VENDOR_YYYYMMDD-HHMMSS.json`, with the run's start time in UTC."""
    date, _, time = record.started.partition("T")
    return f"{_BEGINNING}{vendor(record.environment)}_{date.replace('-', '')}-{time[:8].replace(':', '')}.json"


def is_wanted(record: Record) -> bool:
    """Return whether the run's plan has `export.vendor_json=true` and anything was timed."""
    is_timed = any(point.status is Status.OK and point.key.is_timed for point in record.points)
    return is_timed and fact_at(record.plan, "export.vendor_json") is True


def to_json(analysis: Analysis) -> bytes:
    """Return the file content.

    Figures have a value and the ends of their 95 % interval, null without an interval.
    """
    record, about = analysis.record, analysis.about
    start, end = (datetime.fromisoformat(time) for time in (record.started, record.ended))
    content = {
        "format": FORMAT,
        "vendor": vendor(record.environment),
        "device": about.device,
        "started": record.started,
        "model": about.model,
        "algorithm": about.algorithm,
        "execution": about.execution,
        "parameters": fact_at(record.environment, "session.parameters"),
        "total_runtime_seconds": (end - start).total_seconds(),
        "training": [_training(row, record) for row in analysis.rows if row.key.phase == "train"],
        "inference": [
            _inference(row, analysis) for row in analysis.rows if row.key.phase == "inference"
        ],
        "record": msgspec.Raw(msgspec.json.encode(record)),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def is_one(path: Path) -> bool:
    """Return whether a file is named like a vendor file."""
    return path.name.startswith(_BEGINNING) and path.suffix == ".json"


def load(path: Path) -> Record:
    """Read the record in a vendor file.

    Raises:
        UserError: the file is missing or invalid, or its format is newer.
    """
    try:
        content = foreign.from_json(foreign.read_bytes(path), _Content)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}.") from error
    except foreign.DECODING_ERRORS as error:
        raise UserError(f"{path} is not a file of export.vendor_json=true: {error}.") from error
    if content.format > FORMAT:
        raise UserError(
            f"{path} has format {content.format}; this perfexp reads up to {FORMAT}. Update perfexp."
        )
    return Record.from_json(bytes(content.record), source=str(path))


def _training(row: Row, record: Record) -> Entry:
    """Return a training's figures.

    Epoch times come from the first process. Only the total includes evaluations and checkpoints.
    """
    epochs = next((point.epochs for point in record.points if point.key == row.key), [])
    return _common(row) | {
        "total_runtime_seconds": sum(epoch.total_seconds for epoch in epochs) if epochs else None,
        "training_seconds": sum(epoch.seconds for epoch in epochs) if epochs else None,
        "epoch_seconds": [epoch.seconds for epoch in epochs],
        "epoch_losses": [epoch.loss for epoch in epochs],
        "epoch_accuracies": [epoch.accuracy for epoch in epochs],
        "epoch_metrics": [
            {metric.name: metric.value for metric in epoch.metrics} for epoch in epochs
        ],
        "samples_per_second": _figure(row.samples_per_second),
        "data_loading_seconds": row.phases.get("data"),
        "accuracy": epochs[-1].accuracy if epochs else None,
    }


def _inference(row: Row, analysis: Analysis) -> Entry:
    rate, place = row.samples_per_second, (row.key.input_size, row.key.batch_size)
    of_place = (
        one for one in analysis.cold_starts if (one.key.input_size, one.key.batch_size) == place
    )
    start = next(of_place, None)
    percentiles = {number: row.percentile(number) for number in analysis.percentiles}
    return _common(row) | {
        "predictions_per_second": _figure(rate),
        "milliseconds_per_prediction": _figure(rate, lambda per_second: 1e3 / per_second),
        "ttfp_milliseconds": _figure(start.total if start else None, _TO_MS),
        **{
            f"p{number:g}_milliseconds": _figure(one, _TO_MS) for number, one in percentiles.items()
        },
        "accuracy": row.value(ACCURACY),
        "energy_joules_per_prediction": _figure(row.metric(IMAGE_ENERGY)),
    }


def _common(row: Row) -> Entry:
    return {
        "input_size": list(row.key.input_size),
        "batch_size": row.key.batch_size,
        "precision": row.key.precision,
        "status": row.status.value,
        "processes": row.processes,
        "memory_peak_bytes": row.value(PEAK_MEMORY),
        "metrics": {
            metric.name: metric.value for metric in row.metrics if metric.name.startswith("custom/")
        },
    }


def _figure(
    figure: Interval | Metric | None, scaled: Callable[[float], float] = float
) -> Entry | None:
    """Return a figure and the ends of its interval in another unit, lower end first."""
    if figure is None or figure.value is None:
        return None
    ends = (
        ()
        if figure.low is None or figure.high is None
        else sorted(map(scaled, (figure.low, figure.high)))
    )
    return {
        "value": scaled(figure.value),
        "low": ends[0] if ends else None,
        "high": ends[1] if ends else None,
    }
