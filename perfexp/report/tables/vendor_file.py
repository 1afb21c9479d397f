"""Vendor file: a run's figures for other tools, with its record, named by vendor and time.

A run with `export.vendor_json=true` writes it. `perfexp compare` reads the record in it, so that
files from several vendors' machines can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.records.analysis import Analysis
from perfexp.records.fact_lookup import fact_at, vendor
from perfexp.records.quantities import ACCURACY, IMAGE_ENERGY, PEAK_MEMORY
from perfexp.records.record import Metric, Record, Status
from perfexp.records.rows import Row
from perfexp.statistics.estimators import Interval

#: Version of the file's own keys; the record inside has its own `schema_version`.
FORMAT = 1
_BEGINNING = "benchmark_"
_TO_MS = partial(mul, 1e3)

Entry = dict[str, Any]


class _Content(msgspec.Struct):
    """Keys of a vendor file that perfexp reads back."""

    format: int
    record: msgspec.Raw


def name(record: Record) -> str:
    """Return `benchmark_VENDOR_YYYYMMDD-HHMMSS.json`, with the run's start time in UTC."""
    date, _, time = record.started.partition("T")
    moment = f"{date.replace('-', '')}-{time[:8].replace(':', '')}"
    return f"{_BEGINNING}{vendor(record.environment)}_{moment}.json"


def is_wanted(record: Record) -> bool:
    """Return whether the run's plan has `export.vendor_json=true` and anything was timed.

    `run_files` then writes the file beside the other results.
    """
    is_timed = any(point.status is Status.OK and point.key.is_timed for point in record.points)
    return is_timed and fact_at(record.plan, "export.vendor_json") is True


def to_json(analysis: Analysis) -> bytes:
    """Return a vendor file's content: facts, figures of trainings and inferences, and the record.

    Figures have a value and the ends of their 95 % interval, null without an interval. Times end in
    their unit; the whole record comes last, so that `load` can read it back.
    """
    record, about = analysis.record, analysis.about
    start, end = datetime.fromisoformat(record.started), datetime.fromisoformat(record.ended)
    training, inference = [], []
    for row in analysis.rows:
        if row.key.phase == "train":
            training.append(_training(row, record))
        elif row.key.phase == "inference":
            inference.append(_inference(row, analysis))
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
        "training": training,
        "inference": inference,
        "record": msgspec.Raw(msgspec.json.encode(record)),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def is_one(path: Path) -> bool:
    """Return whether a file is named like a vendor file.

    `perfexp compare` recognizes vendor files by it.
    """
    return path.name.startswith(_BEGINNING) and path.suffix == ".json"


def load(path: Path) -> Record:
    """Read the record in a vendor file.

    `perfexp compare` accepts such files in place of run folders.

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
            f"{path} has format {content.format}; this perfexp reads up to {FORMAT}. "
            "Update perfexp."
        )
    return Record.from_json(bytes(content.record), source=str(path))


def _training(row: Row, record: Record) -> Entry:
    """Return a training's figures.

    Epoch times come from the first process. Only the total includes evaluations and checkpoints.
    """
    epochs = next((point.epochs for point in record.points if point.key == row.key), [])
    figures: Entry = {
        "total_runtime_seconds": None,
        "training_seconds": None,
        "epoch_seconds": [],
        "epoch_losses": [],
        "epoch_accuracies": [],
        "epoch_metrics": [],
        "samples_per_second": _figure(row.samples_per_second),
        "data_loading_seconds": row.phases.get("data"),
        "accuracy": None,
    }
    for epoch in epochs:
        figures["epoch_seconds"].append(epoch.seconds)
        figures["epoch_losses"].append(epoch.loss)
        figures["epoch_accuracies"].append(epoch.accuracy)
        figures["epoch_metrics"].append({metric.name: metric.value for metric in epoch.metrics})
        figures["accuracy"] = epoch.accuracy
    if epochs:
        figures["total_runtime_seconds"] = sum(epoch.total_seconds for epoch in epochs)
        figures["training_seconds"] = sum(figures["epoch_seconds"])
    return _common(row) | figures


def _inference(row: Row, analysis: Analysis) -> Entry:
    """Return an inference's figures: rate, percentiles in ms, cold start, accuracy and energy."""
    rate, start = row.samples_per_second, None
    for first in reversed(analysis.cold_starts):
        if (first.key.input_size, first.key.batch_size) == (row.key.input_size, row.key.batch_size):
            start = first.total
    entry = _common(row)
    entry["predictions_per_second"] = _figure(rate)
    entry["milliseconds_per_prediction"] = _figure(rate, lambda per_second: 1e3 / per_second)
    entry["ttfp_milliseconds"] = _figure(start, _TO_MS)
    for number in analysis.percentiles:
        entry[f"p{number:g}_milliseconds"] = _figure(row.percentile(number), _TO_MS)
    entry["accuracy"] = row.value(ACCURACY)
    entry["energy_joules_per_prediction"] = _figure(row.metric(IMAGE_ENERGY))
    return entry


def _common(row: Row) -> Entry:
    """Return the entries that trainings and inferences share, with the user's own metrics.

    Their names and units are the file's own format.
    """
    entry: Entry = {
        "input_size": list(row.key.input_size),
        "batch_size": row.key.batch_size,
        "precision": row.key.precision,
        "status": row.status.value,
        "processes": row.processes,
        "memory_peak_bytes": row.value(PEAK_MEMORY),
        "metrics": {},
    }
    for metric in row.metrics:
        if metric.name.startswith("custom/"):
            entry["metrics"][metric.name] = metric.value
    return entry


def _figure(
    figure: Interval | Metric | None, scaled: Callable[[float], float] = float
) -> Entry | None:
    """Return a figure and the ends of its interval in another unit, lower end first.

    None for a missing figure; both ends are None without an interval.
    """
    if figure is None or figure.value is None:
        return None
    low = high = None
    if figure.low is not None and figure.high is not None:
        low, high = sorted((scaled(figure.low), scaled(figure.high)))
    return {"value": scaled(figure.value), "low": low, "high": high}
