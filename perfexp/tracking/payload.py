"""Payload: a record or a sweep as MLflow runs with parameters, tags, metrics and files. Nothing is sent here."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from perfexp.diagnosis.environment import fact_at
from perfexp.host.files import safe_name
from perfexp.host.untrusted import printable
from perfexp.records.paths import SweepPaths
from perfexp.records.record import Artifact, Key, Record, Status
from perfexp.records.summary import Row, rows
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.remarks import raised_diagnostics
from perfexp.summaries.subject import subject
from perfexp.tables.quantities import PointRun, point_runs
from perfexp.tracking import descriptions
from perfexp.tracking.descriptions import TAG_LENGTH, clean
from perfexp.tracking.mlflow_metrics import NAME_LENGTH, Figure, Figures, allowed, best_rates, figures

#: Experiment of a plan without a stage.
DEFAULT_EXPERIMENT = "perfexp"
#: MLflow truncates longer parameters silently.
PARAM_LENGTH = 6_000
#: Artifact folders of a run; files of any other kind lie next to them.
FOLDERS = ("config", "data", "plots", "tables", "profiles", "logs")
#: Larger files stay on disk: a copy of a sparse file could fill the store.
_MAX_FILE_BYTES = 2 << 30
#: Tags of facts, and their places in the environment; the first place with a value counts.
_FACTS = {
    "driver": ("device.driver", "device.driver_version"),
    "cuda": ("device.cuda", "torch.cuda"),
    "cudnn": ("device.cudnn", "torch.cudnn"),
    "rocm": ("device.rocm", "torch.rocm"),
    "torch": ("packages.torch",),
    "python": ("python",),
    "host": ("host",),
    "mlflow.source.git.commit": ("git.commit",),
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file to send, to one of `FOLDERS` or to none, under a name of letters, digits and `._-`."""

    source: Path
    folder: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One MLflow run.

    Attributes:
        identity: tags that the run is found by; `tags` has all others.
        status: `FINISHED`, `FAILED`, `KILLED`, or `SCHEDULED` while the outcome is open.
        started: date and time, ISO 8601, as of `ended`.
        parent: the sweep's own run, as it is created if it is missing.
        children: nested runs, one for each phase and batch size if there are several.
        placeholder: name that this one replaces; any other name was set by a person and stays.
    """

    name: str
    experiment: str
    identity: dict[str, str]
    status: str
    started: str
    ended: str | None = None
    figures: list[Figure] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    note: str = ""
    files: list[Upload] = field(default_factory=list)
    parent: Payload | None = None
    children: list[Payload] = field(default_factory=list)
    placeholder: str | None = None


def of_run(record: Record, folder: Path) -> Payload:
    """A record as an MLflow run, with a nested run for each phase and batch size if it has several."""
    table = rows(record)
    parts = point_runs(record, table)
    metrics = figures(record, parts[0]) if len(parts) == 1 else best_rates(record, table)
    own = Artifact(path="record.json", kind="data")  # it is written last and need not name itself
    is_named = any(artifact.path == own.path for artifact in record.artifacts)
    files, skipped = _sendable([*record.artifacts, *([] if is_named else [own])], folder)
    for path, reason in skipped.items():
        _log.warning("%s is not sent to MLflow: %s", printable(path), printable(reason))
    tags = {
        "perfexp.point": record.plan_hash,
        "perfexp.version": record.perfexp_version,
        "perfexp.status": record.status.value,
        "perfexp.skipped_files": _reasons(skipped),
    }
    axes = _axes(record, [point.key for point in record.points])
    params = axes | dict(_flattened(record.plan)) | axes
    return Payload(
        name=clean(record.name, NAME_LENGTH),
        experiment=_experiment(record),
        identity={"perfexp.kind": "run", "perfexp.uid": _uid(record.uid)},
        status=run_status([record.status, *(point.status for point in record.points)]),
        started=record.started,
        ended=record.ended,
        figures=metrics.sent,
        params={allowed(name)[:NAME_LENGTH].strip(" ."): clean(text, PARAM_LENGTH) for name, text in params.items()},
        tags=_point_tags(record, table, metrics) | _tags(tags),
        note=descriptions.of_run(record, table, skipped),
        files=files,
        parent=_parent(record),
        children=[_of_points(record, part) for part in parts] if len(parts) > 1 else [],
    )


def of_sweep(sweep: Sweep, folder: Path) -> Payload:
    """Return the summary of a sweep as the parent run of its runs."""
    records = sweep.records(folder)
    paths = SweepPaths(folder)
    kinds = {paths.summary: "data", paths.table: "tables", paths.picture: "plots"}
    files = [Artifact(path=path.name, kind=kind) for path, kind in kinds.items() if path.exists()]
    num_finished = sum(child.status is Status.OK for child in sweep.children)
    tags = {
        "perfexp.expected": "" if sweep.jobs is None else str(sweep.jobs),
        "perfexp.finished": str(num_finished),
        "perfexp.failed": str(len(sweep.children) - num_finished),
        "mlflow.source.name": "perfexp",
    }
    return Payload(
        name=clean(sweep.name, NAME_LENGTH),
        experiment=_experiment(records[0]) if records else DEFAULT_EXPERIMENT,
        identity=_sweep_identity(sweep.uid),
        status=sweep_status(sweep),
        started=sweep.started,
        ended=sweep.ended,
        tags=_tags(tags),
        note=descriptions.of_sweep(sweep, records),
        files=_sendable(files, folder)[0],
        placeholder=_placeholder(sweep.uid),
    )


def _of_points(record: Record, part: PointRun) -> Payload:
    """One phase and batch size of a record as an MLflow run of its own."""
    metrics = figures(record, part)
    identity = {"perfexp.kind": "point", "perfexp.uid": _uid(record.uid)}
    return Payload(
        name=clean(f"b{part.batch_size} {part.phase} · {record.name}", NAME_LENGTH),
        experiment=_experiment(record),
        identity=identity | {"perfexp.phase": _uid(part.phase), "perfexp.batch_size": str(part.batch_size)},
        status=run_status([row.status for row in part.rows]),
        started=record.started,
        ended=record.ended,
        figures=metrics.sent,
        params=_axes(record, [row.key for row in part.rows]),
        tags=_point_tags(record, part.rows, metrics),
        note=descriptions.of_points(record, part.rows),
    )


def _parent(record: Record) -> Payload | None:
    """The sweep's run with the facts that one of its children has."""
    if record.sweep is None:
        return None
    return Payload(
        name=_placeholder(record.sweep.uid),
        experiment=_experiment(record),
        identity=_sweep_identity(record.sweep.uid),
        status="SCHEDULED",
        started=record.started,
    )


def _placeholder(uid: str) -> str:
    """The name of a sweep's run until the sweep's summary is sent."""
    return f"sweep {_uid(uid)}"


def _sweep_identity(uid: str) -> dict[str, str]:
    return {"perfexp.kind": "sweep", "perfexp.sweep": _uid(uid)}


def _uid(text: str) -> str:
    """A uid that is safe in a query; it comes from a file that anybody may have written."""
    return safe_name(text)[:NAME_LENGTH]


def _experiment(record: Record) -> str:
    stage = record.plan.get("stage")
    return stage if isinstance(stage, str) and stage else DEFAULT_EXPERIMENT


def run_status(statuses: Collection[Status]) -> str:
    """MLflow's status for a run and its points, or for the runs of a sweep.

    FINISHED: something was measured, and the rest cannot be (too little memory, a size that the model refuses).
    KILLED: somebody ended it early. FAILED: everything else, including a run without a single figure.
    """
    if {Status.INTERRUPTED, Status.KILLED} & set(statuses):
        return "KILLED"
    if Status.OK not in statuses or {Status.FAILED, Status.TIMEOUT} & set(statuses):
        return "FAILED"
    return "FINISHED"


def sweep_status(sweep: Sweep) -> str:
    """MLflow's status for a sweep: SCHEDULED while runs may still come; RUNNING would outlive a killed sweep."""
    if sweep.jobs is not None and len(sweep.children) < sweep.jobs:
        return "KILLED" if sweep.ended else "SCHEDULED"
    return run_status([child.status for child in sweep.children])


# parameters and tags


def _axes(record: Record, keys: Sequence[Key]) -> dict[str, str]:
    """Parameters that runs are grouped by: model, algorithm, mode, precision, phase, batch_size, input_size."""
    about = subject(record.plan)
    axes = {
        "model": about.model,
        "algorithm": about.algorithm,
        "mode": about.mode,
        "precision": about.precision,
        "phase": ", ".join(dict.fromkeys(key.phase for key in keys if key.is_timed)),
        "batch_size": ", ".join(dict.fromkeys(str(key.batch_size) for key in keys)),
        "input_size": ", ".join(dict.fromkeys(key.size_label for key in keys)),
    }
    return {name: clean(text, PARAM_LENGTH) for name, text in axes.items() if text}


def _point_tags(record: Record, table: Sequence[Row], metrics: Figures) -> dict[str, str]:
    """Tags for some points of a run: how they ended, their diagnostics, and the machine."""
    statuses = Counter(row.status.value for row in table)
    tags = {
        "perfexp.points": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "perfexp.doubts": ", ".join(raised.worst.code for raised in raised_diagnostics(record, table)),
        "perfexp.dropped_metrics": _reasons(metrics.dropped),
        "perfexp.estimated_metrics": ", ".join(metrics.estimated),
        "mlflow.source.name": "perfexp",
        **{name: _first(record.environment, places) for name, places in _FACTS.items()},
    }
    is_cpu = _first(record.environment, ["device.kind"]) == "cpu"
    tags["cpu" if is_cpu else "gpu"] = _first(record.environment, ["device.name"])
    if record.sweep:
        tags |= {"perfexp.sweep": _uid(record.sweep.uid), "perfexp.job": str(record.sweep.job)}
    return _tags(tags)


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: clean(text, TAG_LENGTH) for name, text in tags.items() if text}


def _flattened(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and value of every leaf, as text."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _first(environment: dict[str, Any], places: Iterable[str]) -> str:
    """The first fact with a value, as text; empty if there is none."""
    facts = (fact_at(environment, place) for place in places)
    return next((str(fact) for fact in facts if isinstance(fact, (str, int, float))), "")


# files


def _sendable(artifacts: Iterable[Artifact], folder: Path) -> tuple[list[Upload], dict[str, str]]:
    """Files of a run or a sweep to send, and why others are skipped, by their names in the record.

    The record is data and can name anything. `plots/a b.png` of the kind `plots` becomes `plots/a-b.png`; deeper
    folders become part of the name.
    """
    uploads: dict[tuple[str, str], Upload] = {}
    skipped: dict[str, str] = {}
    for artifact in artifacts:
        kind = artifact.kind if artifact.kind in FOLDERS else ""
        name = safe_name("-".join(part for part in PurePosixPath(artifact.path).parts if part != kind))
        source = folder / artifact.path
        if reason := _refusal(artifact.path, folder):
            skipped[artifact.path] = reason
        elif (kind, name) in uploads:
            skipped[artifact.path] = f"{f'{kind}/' if kind else ''}{name} is there already"
        elif any(source == other.source for other in uploads.values()):
            skipped[artifact.path] = "it is named twice"
        else:
            uploads[kind, name] = Upload(source=source, folder=kind, name=name)
    return list(uploads.values()), skipped


def _refusal(path: str, folder: Path) -> str | None:
    """Why a file is not sent, or None. Nothing outside the run's folder is sent, and no link to it."""
    root = folder.resolve()
    source = root / path
    try:
        is_inside = source.is_relative_to(root) and source.resolve() == source
        if is_inside and source.is_file():
            return f"larger than {_MAX_FILE_BYTES >> 30} GiB" if source.stat().st_size > _MAX_FILE_BYTES else None
    except (OSError, ValueError) as error:
        return str(error)
    if not is_inside:
        return "a link, or outside of the run's folder"
    return "not a file" if source.exists() else "missing"
