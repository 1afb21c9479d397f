"""JSON results: the columns of the tidy table, for programs that read stdout.

Commands with `--json` print a document: format, facts, and a list of runs with their points.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.folders import run_folder
from perfexp.records.remarks import Raised, raised_diagnostics
from perfexp.report.tables import flat

#: Document version.
_FORMAT = 1


def of_run(analysis: Analysis, folder: Path, further: Sequence[Diagnostic] = ()) -> dict[str, Any]:
    """Return a run: folder, status, diagnostics, and a line for each measurement.

    Each diagnostic appears once, with its worst measurement's details and the names of all
    measurements (`where`). Without names it is about the whole run. `perfexp show --json` and runs
    with JSON output print it.

    Args:
        further: diagnostics about the run that only its sweep reveals.
    """
    record, diagnostics, points = analysis.record, [], []
    for raised in (
        *raised_diagnostics(analysis),
        *(Raised(diagnostics=(diagnostic,)) for diagnostic in further),
    ):
        diagnostics.append({**msgspec.to_builtins(raised.worst), "where": list(raised.where)})
    for line in flat.points(analysis, folder, further):
        for name in flat.IDENTITY:
            line.pop(name, None)
        points.append({name: cell for name, cell in line.items() if cell is not None})
    return {
        "name": record.name,
        "uid": record.uid,
        "folder": str(folder),
        "status": record.status.value,
        "diagnostics": diagnostics,
        "points": points,
    }


def document(runs: Sequence[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """Return a document with runs, from `of_run`, and further facts by key."""
    return {"format": _FORMAT, **facts, "runs": list(runs)}


def of_sweep(sweep_analysis: SweepAnalysis, folder: Path) -> dict[str, Any]:
    """Return a sweep's document; a run without a record has its error instead.

    Args:
        folder: absolute path of the sweep's folder.
    """
    measured, failed = list[dict[str, Any]](), list[dict[str, Any]]()
    for child, analysis in sweep_analysis.runs:
        if analysis is None:
            failed.append({"name": child.name, "status": child.status.value, "error": child.error})
            continue
        further = [sweep_analysis.slower[child.job]] if child.job in sweep_analysis.slower else []
        measured.append(of_run(analysis, run_folder(child, folder), further))
    return document([*measured, *failed], sweep=str(folder))


def text(content: Any) -> str:
    """Return JSON that any parser reads: numbers that are not finite become null."""
    finite = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1, ensure_ascii=False)
