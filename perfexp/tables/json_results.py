"""Results as JSON: the columns of the tidy table, for programs that read stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.folders import run_folder
from perfexp.summaries.analysis import Analysis, SweepAnalysis
from perfexp.summaries.remarks import Raised, raised_diagnostics
from perfexp.tables import flat

#: Version of the document.
_FORMAT = 1


def of_run(analysis: Analysis, folder: Path, further: Sequence[Diagnostic] = ()) -> dict[str, Any]:
    """Return a run: where it is, how it ended, its diagnostics, and a line for each measurement.

    Each diagnostic comes once, with the details of its worst measurement and the names of all (`where`); without names
    it is of the whole run. `further` are diagnostics of the run that its sweep shows.
    """
    record = analysis.record
    raised = [*raised_diagnostics(analysis), *(Raised(diagnostics=(one,)) for one in further)]
    return {
        "name": record.name,
        "uid": record.uid,
        "folder": str(folder),
        "status": record.status.value,
        "diagnostics": [
            {**msgspec.to_builtins(one.worst), "where": list(one.where)} for one in raised
        ],
        "points": [
            {
                name: cell
                for name, cell in line.items()
                if cell is not None and name not in flat.IDENTITY
            }
            for line in flat.points(analysis, folder, further)
        ],
    }


def document(runs: Sequence[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """Return the document of some runs with further facts."""
    return {"format": _FORMAT, **facts, "runs": list(runs)}


def of_sweep(whole: SweepAnalysis, folder: Path) -> dict[str, Any]:
    """Return the document of a sweep, whose folder is absolute; a run without a record has its error."""
    found, failed = list[dict[str, Any]](), list[dict[str, Any]]()
    for child, analysis in whole.runs:
        if analysis is None:
            failed.append({"name": child.name, "status": child.status.value, "error": child.error})
            continue
        further = [whole.slower[child.job]] if child.job in whole.slower else []
        found.append(of_run(analysis, run_folder(child, folder), further))
    return document([*found, *failed], sweep=str(folder))


def text(content: Any) -> str:
    """Return JSON that any parser reads: numbers that are not finite are null."""
    finite = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1, ensure_ascii=False)
