"""The data of a run as an input of it, and its figures as a table, in the forms of MLflow."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfexp.host.credentials import hide
from perfexp.records.record import LARGEST, Key, Record
from perfexp.summaries.subject import one_line
from perfexp.tables.flat import Cell
from perfexp.tracking import run_names
from perfexp.tracking.descriptions import NAME_LENGTH, clean
from perfexp.tracking.uploads import Upload

#: Longest source of a dataset that every store accepts.
_SOURCE_LENGTH = 16_000
#: The table of a run's points, and the tag by which MLflow's pages find it.
_FOLDER, _TABLE, _TAG = "tables", "points.json", "mlflow.loggedArtifacts"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What was fed to a model, `synthetic 224 b8`; `context` is `training` or `inference`, `source` is JSON."""

    name: str
    digest: str
    source: str
    context: str


def of_keys(record: Record, keys: Sequence[Key]) -> list[Dataset]:
    """Return the data of some points, for each phase; none if the plan has no data, or a batch is searched for."""
    node, choices = record.plan.get("data"), record.plan.get("choices")
    if not isinstance(node, Mapping):
        return []
    kind = node.get("name") or (choices.get("data") if isinstance(choices, Mapping) else None) or "data"
    source = json.dumps(hide({**node}), default=str, sort_keys=True)
    found = []
    for phase in dict.fromkeys(key.phase for key in keys if key.is_timed):
        of_phase = [key for key in keys if key.phase == phase]
        if any(key.batch_size == LARGEST for key in of_phase):
            continue
        name = clean(f"{one_line(str(kind))} {run_names.shape(of_phase)}", NAME_LENGTH)
        identity = json.dumps([source, name, record.plan.get("seed")], default=str)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        context = "training" if phase == "train" else phase
        found.append(Dataset(name=name, digest=digest, source=clean(source, _SOURCE_LENGTH), context=context))
    return found


def table(lines: Sequence[Mapping[str, Cell]]) -> tuple[list[Upload], dict[str, str]]:
    """Return a table as a file, in the form of `mlflow.log_table`, and the tag that lists it; nothing without lines.

    MLflow groups the rows of several runs by the first column, and compares the second one.
    """
    lines = [line for line in lines if line.get("batch_size") != LARGEST]  # a point whose batch is searched for
    if not lines:
        return [], {}
    lines = [{"point": _point(line), "median_ms": line.get("median_ms"), **line} for line in lines]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    content = json.dumps({"columns": columns, "data": [[_cell(line.get(name)) for name in columns] for line in lines]})
    listed = json.dumps([{"path": f"{_FOLDER}/{_TABLE}", "type": "table"}])
    return [Upload(source=None, folder=_FOLDER, name=_TABLE, content=content)], {_TAG: listed}


def _point(line: Mapping[str, Cell]) -> str:
    """The identity of a line among those of other runs; in a sweep's table with the name of its run."""
    parts = (line.get(name) for name in ("run", "phase", "input_size", "batch_size", "precision"))
    return " · ".join(one_line(str(part)) for part in parts if part is not None)


def _cell(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell
