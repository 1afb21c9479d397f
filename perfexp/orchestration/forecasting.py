"""Predictions and notes for a sparse sweep whose record is on disk; a failure is reported and loses nothing else."""

from __future__ import annotations

from perfexp.forecast import corpus, lookup, predictions
from perfexp.forecast.predictions import Forecast
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record
from perfexp.reports.console import Console
from perfexp.summaries.subject import one_line


def stairs(record: Record, paths: RunPaths, console: Console) -> list[Diagnostic]:
    """Return the notes on measured values that are far from a smooth curve."""
    try:
        return [doubt for curve in corpus.of_record(record, paths.root) for doubt in lookup.stairs(curve)]
    except Exception as error:
        console.error(_failure("The curves could not be checked for stairs", error, paths))
        return []


def forecasts(record: Record, paths: RunPaths, console: Console) -> list[Forecast]:
    """Predict the unmeasured points of a sparse sweep, with the runs beside it as calibration."""
    try:
        phases = {point.key.phase for point in record.points}
        if not any(predictions.candidates(record.plan, phase) for phase in phases):
            return []
        own = corpus.of_record(record, paths.root)
        return predictions.of_record(record, own, corpus.Corpus(corpus.sibling_curves(paths.root)))
    except Exception as error:
        console.error(_failure("Other points could not be predicted", error, paths))
        return []


def _failure(what: str, error: Exception, paths: RunPaths) -> str:
    return f"{what}: {one_line(repr(error))}. The record is safe: {paths.record}"
