"""Results as JSON: the columns of the tidy table, for programs that read stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.tables import csv_tables, tidy

#: Version of the document.
_FORMAT = 1


def of_run(record: Record, folder: Path) -> dict[str, Any]:
    """Return a run: where it is, how it ended, its diagnostics, and a line for each measurement."""
    return {
        "name": record.name,
        "uid": record.uid,
        "folder": str(folder),
        "status": record.status.value,
        "diagnostics": msgspec.to_builtins(record.doubts),
        "points": [{name: cell for name, cell in line.items() if cell is not None} for line in _lines(record, folder)],
    }


def _lines(record: Record, folder: Path) -> list[csv_tables.Line]:
    return [
        {name: cell for name, cell in line.items() if name not in tidy.IDENTITY} for line in tidy.points(record, folder)
    ]


def document(runs: Sequence[dict[str, Any]], **facts: Any) -> str:
    """Return the document of some runs with further facts."""
    return text({"format": _FORMAT, **facts, "runs": list(runs)})


def of_sweep(sweep: Sweep, runs: Sequence[tuple[Record, Path]], folder: Path) -> str:
    """Return the document of a sweep; a run without a record has its error."""
    recorded = {record.sweep.job for record, _ in runs if record.sweep}
    failed = [
        {"name": child.name, "status": child.status.value, "error": child.error}
        for child in sweep.children
        if child.job not in recorded
    ]
    return document([*(of_run(record, place) for record, place in runs), *failed], sweep=str(folder))


def text(content: Any) -> str:
    """Return JSON that any parser reads: numbers that are not finite are null."""
    return json.dumps(_plain(content), indent=1, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.isoformat() if isinstance(value, datetime) else str(value)
