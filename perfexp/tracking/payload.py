"""Payload: a record or a sweep as MLflow runs with parameters, tags, metrics and files. Nothing is sent here."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from perfexp.comparison import comparison_table
from perfexp.comparison.document import Comparison
from perfexp.host.untrusted import printable
from perfexp.records.paths import SweepPaths
from perfexp.records.record import LARGEST, Artifact, Key, Point, Record, Status
from perfexp.records.summary import Row, rows
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.sweep_summary import paired
from perfexp.tables import flat
from perfexp.tables.flat import PointRun, Quantity, by_size, of_epochs, point_runs, quantities
from perfexp.tracking import best, datasets, descriptions, run_names, run_params
from perfexp.tracking.datasets import Dataset
from perfexp.tracking.descriptions import NAME_LENGTH, clean, metric_part, reasons, safe_uid
from perfexp.tracking.uploads import Upload, sendable

#: Experiment of a plan without a stage.
DEFAULT_EXPERIMENT = "perfexp"
#: Most nested runs for sizes; each takes some 50 ms to send.
_MOST_SIZES = 64
#: Endings of the names of an interval's parts: of a median, and of any metric.
_MEDIAN_INTERVAL = re.compile(r"/ci_(low_ms|high_ms|half_width_percent)$")
_INTERVAL = re.compile(r"_(low|high)$")
_log = logging.getLogger(__name__)


class Figure(NamedTuple):
    """One value of a metric `GROUP/NAME_UNIT`, at the step of its `Quantity` and the end of its point or epoch.

    The time comes from the record alone: a store keeps one of several values with the same name, step and time.
    """

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One MLflow run.

    Attributes:
        identity: tags that the run is found by; `tags` has others, `first_tags` those that a person may extend.
        status: `FINISHED`, `FAILED`, `KILLED`; `SCHEDULED` or, of a training, `RUNNING` while the outcome is open.
        started: date and time, ISO 8601, as of `ended`.
        parent: the sweep's own run, as it is created if it is missing.
        children: nested runs, one for each phase and batch size if there are several, and one for each size.
    """

    name: str
    identity: dict[str, str]
    status: str
    started: str
    ended: str | None = None
    figures: list[Figure] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    first_tags: dict[str, str] = field(default_factory=dict)
    datasets: list[Dataset] = field(default_factory=list)
    note: str = ""
    files: list[Upload] = field(default_factory=list)
    parent: Payload | None = None
    children: list[Payload] = field(default_factory=list)
    experiment: str = DEFAULT_EXPERIMENT


def of_run(record: Record, folder: Path) -> Payload:
    """A record as an MLflow run, with a nested run for each phase and batch size if it has several."""
    table = rows(record)
    parts = point_runs(record, table)
    figures, notes = _figures(record, parts[0]) if len(parts) == 1 else _best(record, table)
    own = Artifact(path="record.json", kind="data")  # it is written last and need not name itself
    is_named = any(artifact.path == own.path for artifact in record.artifacts)
    files, skipped = sendable([*record.artifacts, *([] if is_named else [own])], folder)
    points, first_tags = datasets.table(flat.overall(record))
    for path, reason in skipped.items():
        _log.warning("%s is not sent to MLflow: %s", printable(path), printable(reason))
    tags = {
        "perfexp.point": record.plan_hash,
        "perfexp.version": record.perfexp_version,
        "perfexp.status": record.status.value,
        "perfexp.skipped_files": reasons(skipped),
    }
    return Payload(
        name=_name(run_names.of_run(record)),
        experiment=_experiment(record),
        identity=_run_identity(record),
        status=run_status([record.status, *(point.status for point in record.points)]),
        started=record.started,
        ended=record.ended,
        figures=figures,
        params=run_params.of_run(record),
        tags=descriptions.point_tags(record, table, notes) | descriptions.tags(tags),
        first_tags=first_tags,
        datasets=datasets.of_keys(record, [row.key for row in table]),
        note=descriptions.of_run(record, table, skipped),
        files=[*files, *points],
        parent=_parent(record),
        children=_children(record, [part for part in parts if part.batch_size != LARGEST], is_split=len(parts) > 1),
    )


def of_sweep(sweep: Sweep, folder: Path) -> Payload:
    """Return the summary of a sweep as the parent run of its runs."""
    records = sweep.records(folder)
    paths = SweepPaths(folder)
    kinds = {paths.summary: "data", paths.table: "tables", paths.plot: "plots"}
    files = [Artifact(path=path.name, kind=kind) for path, kind in kinds.items() if path.exists()]
    num_finished = sum(child.status is Status.OK for child in sweep.children)
    is_whole = len(sweep.children) == sweep.jobs
    ended = to_ms(max((record.ended for record in records), default=sweep.started)) or 0
    table = [row for _, record in paired(sweep, records) if record for row in rows(record)]
    points, first_tags = datasets.table(flat.sweep(sweep, records) if records else [])
    tags = {
        "perfexp.expected": "" if sweep.jobs is None else str(sweep.jobs),
        "perfexp.finished": str(num_finished),
        "perfexp.failed": str(len(sweep.children) - num_finished),
        "perfexp.estimated_metrics": ", ".join(one.name for one in best.figures(table) if one.is_estimated),
        "mlflow.source.name": "perfexp",
        **(best.winner(sweep, records) if is_whole else {}),
        **(descriptions.sweep_tags(records[0]) if records else {}),
    }
    return Payload(
        name=_name(run_names.of_sweep(sweep, records)),
        experiment=_experiment(records[0]) if records else DEFAULT_EXPERIMENT,
        identity=_sweep_identity(sweep.uid),
        status=sweep_status(sweep),
        started=sweep.started,
        ended=sweep.ended,
        figures=[Figure(one.name, one.value, 0, ended) for one in best.figures(table)],
        params=run_params.of_sweep(sweep, records) if is_whole else {},  # a parameter is never changed
        tags=descriptions.tags(tags),
        first_tags=first_tags,
        note=descriptions.of_sweep(sweep, records),
        files=[*sendable(files, folder)[0], *points],
    )


def of_comparison(comparison: Comparison, records: Sequence[Sequence[Record]], folder: Path) -> Payload:
    """A comparison as an MLflow run: each ratio at the step of its point, verdicts, and tags of the runs of all sides.

    Args:
        records: the records of each side, the baseline first.
        folder: folder of the comparison's files.
    """
    uids = [[safe_uid(record.uid) for record in side] for side in records]
    ended = max(record.ended or record.started for side in records for record in side)
    points = list(dict.fromkeys(pair.point for pair in comparison.pairs))
    figures, counts = [], Counter[str]()
    for pair in comparison.pairs:
        name = f"{metric_part(pair.side)}/{metric_part(pair.measure)}_ratio"
        if pair.ratio is not None:
            figures.append(Figure(name, pair.ratio, points.index(pair.point), to_ms(ended) or 0))
        counts[f"{metric_part(pair.side)}/{metric_part(pair.verdict)}_count"] += 1
    figures += [Figure(name, float(count), 0, to_ms(ended) or 0) for name, count in counts.items()]
    sides = dict(zip((side.name for side in comparison.sides), records, strict=True))
    tags = {
        **{f"perfexp.side.{name}": " ".join(f"{one.name} ({one.uid})" for one in side) for name, side in sides.items()},
        "perfexp.version": comparison.perfexp_version,
        "mlflow.source.name": "perfexp",
    }
    files = [Artifact(path=file.name, kind="") for file in sorted(folder.glob("comparison.*"))]
    return Payload(
        name=clean(" against ".join(side[0].name for side in (*reversed(records),)), NAME_LENGTH),
        identity={
            "perfexp.kind": "comparison",
            "perfexp.uid": hashlib.sha256(json.dumps([uids, comparison.margin]).encode()).hexdigest(),
        },
        status="FINISHED",
        started=min(record.started for side in records for record in side),
        ended=ended,
        figures=figures,
        params={"margin": str(comparison.margin), "fdr": str(comparison.fdr), "allowed": ", ".join(comparison.allowed)},
        tags=descriptions.tags(tags),
        note=clean(comparison_table.markdown(comparison), descriptions.TAG_LENGTH),
        files=sendable(files, folder)[0],
    )


def _children(record: Record, parts: Sequence[PointRun], *, is_split: bool) -> list[Payload]:
    """A nested run for each phase and batch size if they are split, and one for each size of those with several.

    A filter finds a measurement by its size, batch size and phase wherever it was measured.
    """
    sizes = [one for part in parts for one in by_size(part)]
    split = [_of_points(record, part, "point") for part in parts] if is_split else []
    return split + ([_of_points(record, one, "size") for one in sizes] if len(sizes) <= _MOST_SIZES else [])


def _of_points(record: Record, part: PointRun, kind: str) -> Payload:
    figures, notes = _figures(record, part)
    keys = [row.key for row in part.rows]
    size = {"perfexp.input_size": keys[0].size_label} if kind == "size" else {}
    identity = {"perfexp.kind": kind, "perfexp.uid": safe_uid(record.uid), "perfexp.phase": safe_uid(part.phase)}
    return Payload(
        name=_name(run_names.of_part(record, keys)),
        identity=identity | {"perfexp.batch_size": str(part.batch_size), **size},
        status=run_status([row.status for row in part.rows]),
        started=record.started,
        ended=record.ended,
        figures=figures,
        params=run_params.of_keys(record, keys),
        tags=descriptions.point_tags(record, part.rows, notes),
        datasets=datasets.of_keys(record, keys),
        note=descriptions.of_points(record, part.rows),
    )


def _parent(record: Record) -> Payload | None:
    """The sweep's run with the facts that one of its children has."""
    if record.sweep is None:
        return None
    return Payload(
        name=_name(run_names.of_unfinished_sweep(record)),
        identity=_sweep_identity(record.sweep.uid),
        status="SCHEDULED",
        started=record.started,
    )


def _name(text: str) -> str:
    return clean(text, NAME_LENGTH)


def _sweep_identity(uid: str) -> dict[str, str]:
    return {"perfexp.kind": "sweep", "perfexp.sweep": safe_uid(uid)}


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


# metrics


def _figures(record: Record, part: PointRun) -> tuple[list[Figure], dict[str, str]]:
    """The metrics of one phase and batch size, and tags: why others are dropped, and which ones are derived."""
    figures, dropped, estimated = _sent(quantities(record, part), _end_times(record))
    return figures, {"perfexp.dropped_metrics": reasons(dropped), "perfexp.estimated_metrics": ", ".join(estimated)}


def _sent(
    found: Iterable[Quantity], times: Mapping[tuple[Key, int | None], int]
) -> tuple[list[Figure], dict[str, str], Collection[str]]:
    """The figures that a store takes, why others are dropped, and the names of estimated ones."""
    sent: dict[tuple[str, int], Figure] = {}
    dropped: dict[str, str] = {}
    estimated: dict[str, None] = {}
    for quantity in found:
        # one bad name rejects a whole batch
        name = f"{metric_part(quantity.group)}/{metric_part(quantity.name)}"[:NAME_LENGTH].rstrip(" .")
        if quantity.value is None or not math.isfinite(quantity.value):
            dropped.setdefault(name, quantity.reason or f"the value is {quantity.value}")
        elif (name, quantity.step) in sent:
            dropped.setdefault(name, "two metrics have this name in MLflow's letters; the first one is shown")
        else:
            place = (quantity.key, quantity.step if quantity.group == "epoch" else None)
            sent[name, quantity.step] = Figure(name, float(quantity.value), quantity.step, times[place])
            estimated |= {name: None} if quantity.estimated else {}
    outdated = _outdated(sent)
    dropped |= dict.fromkeys(outdated, "the last measurement has no interval; see tables/points.json")
    return [one for one in sent.values() if one.name not in outdated], dropped, estimated


def _outdated(sent: Iterable[tuple[str, int]]) -> list[str]:
    """The parts of intervals that end before their metric: a store would show them beside another point's value."""
    last: dict[str, int] = {}
    for name, step in sent:
        last[name] = max(step, last.get(name, step))
    metrics = {name: _INTERVAL.sub("", _MEDIAN_INTERVAL.sub("/p50_ms", name)) for name in last}
    return [name for name, metric in metrics.items() if last[name] < last.get(metric, last[name])]


def _best(record: Record, table: Sequence[Row]) -> tuple[list[Figure], dict[str, str]]:
    """The best figures of a run, and the tag of those that are estimated."""
    times, found = _end_times(record), list(best.figures(table))
    estimated = ", ".join(one.name for one in found if one.is_estimated)
    figures = [Figure(one.name, one.value, 0, times[one.row.key, None]) for one in found]
    return figures, {"perfexp.estimated_metrics": estimated}


def of_training(record: Record, point: Point, *, after: int, status: str) -> Payload:
    """The epochs of a training with numbers above `after`, for the run that `of_run` completes."""
    figures, _, _ = _sent(of_epochs(point), _ends_of_epochs(point))
    return Payload(
        name=_name(run_names.of_run(record, [point.key])),
        experiment=_experiment(record),
        identity=_run_identity(record),
        status=status,
        started=point.started or record.started,
        ended=record.ended,
        figures=[figure for figure in figures if figure.step > after],
    )


def _run_identity(record: Record) -> dict[str, str]:
    return {"perfexp.kind": "run", "perfexp.uid": safe_uid(record.uid)}


def _end_times(record: Record) -> dict[tuple[Key, int | None], int]:
    """The ends of all points and of their epochs; that of the record for a point without a start."""
    ends: dict[tuple[Key, int | None], int] = {}
    for point in record.points:
        start = to_ms(point.started)
        wall_ms = round(1e3 * (point.wall_seconds or 0.0))
        ends[point.key, None] = (to_ms(record.ended) or 0) if start is None else start + wall_ms
        ends |= _ends_of_epochs(point)
    return ends


def _ends_of_epochs(point: Point) -> dict[tuple[Key, int | None], int]:
    """The ends of a training's epochs as if it had begun with its point: the same while it runs and afterwards."""
    seconds = (one.total_seconds for one in point.epochs)
    start = to_ms(point.started) or 0
    return {
        (point.key, one.number): start + round(1e3 * end)
        for one, end in zip(point.epochs, accumulate(seconds), strict=True)
    }


def to_ms(date: str | None) -> int | None:
    """An ISO 8601 date as milliseconds since 1970; None if it is not a date."""
    try:
        return max(round(datetime.fromisoformat(date or "").timestamp() * 1e3), 0)
    except (ValueError, OverflowError):
        return None
