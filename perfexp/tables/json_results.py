"""Results as JSON: the columns of the tidy table, for programs that read stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.remarks import Raised, raised_diagnostics
from perfexp.summaries.sweep_summary import diagnostics_of
from perfexp.tables import flat

#: Version of the document.
_FORMAT = 1


def of_run(record: Record, folder: Path, further: Sequence[Diagnostic] = ()) -> dict[str, Any]:
    """Return a run: where it is, how it ended, its diagnostics, and a line for each measurement.

    Each diagnostic comes once, with the details of its worst measurement and the names of all (`where`); without names
    it is of the whole run. `further` are diagnostics of the run that its sweep shows.
    """
    raised = [*raised_diagnostics(record, rows(record)), *(Raised(diagnostics=(one,)) for one in further)]
    return {
        "name": record.name,
        "uid": record.uid,
        "folder": str(folder),
        "status": record.status.value,
        "diagnostics": [{**msgspec.to_builtins(one.worst), "where": list(one.where)} for one in raised],
        "points": [
            {name: cell for name, cell in line.items() if cell is not None and name not in flat.IDENTITY}
            for line in flat.points(record, folder, further)
        ],
    }


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
    raised = diagnostics_of(sweep, [record for record, _ in runs])
    found = [
        of_run(record, place, [raised[record.sweep.job]] if record.sweep and record.sweep.job in raised else [])
        for record, place in runs
    ]
    return document([*found, *failed], sweep=str(folder))


def text(content: Any) -> str:
    """Return JSON that any parser reads: numbers that are not finite are null."""
    finite = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1, ensure_ascii=False)
