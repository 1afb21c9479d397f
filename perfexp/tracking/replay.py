"""Replay: what a record, or a sweep, is in a tracking store; everything is decided here, nothing is sent."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from perfexp.host.untrusted import printable
from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.records.sweep_record import Sweep
from perfexp.tables.point_runs import PointRun, point_runs
from perfexp.tracking import descriptions, run_tags, uploads
from perfexp.tracking.mlflow_metrics import Figure, best_rates, figures
from perfexp.tracking.uploads import Upload, sendable

#: The experiment of what names none.
DEFAULT_EXPERIMENT = "perfexp"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One tracking run.

    Attributes:
        name: shown in lists.
        experiment: that the plan asks for.
        identity: the tags that the run is found by.
        status: `FINISHED`, `FAILED`, `KILLED`, or `SCHEDULED` where it is not known yet.
        started: date and time, ISO 8601.
        ended: likewise, or None where it is not known.
        figures: its metrics.
        params: its parameters.
        tags: the others.
        note: its description, Markdown.
        files: its artifacts.
        parent: the sweep's own run, as it is made where it is not there yet.
        children: the runs below it, one for each phase and batch size where there are several.
        placeholder: a name that this one takes the place of; any other name was given by a person and stays.
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
    parent: Replay | None = None
    children: list[Replay] = field(default_factory=list)
    placeholder: str | None = None


def of_run(record: Record, folder: Path) -> Replay:
    """A record as a tracking run, with a run below it for each phase and batch size where it has several.

    Args:
        record: of any run.
        folder: where its artifacts lie.
    """
    known = rows(record)
    apart = point_runs(record, known)
    shown = figures(record, apart[0]) if len(apart) == 1 else best_rates(record, known)
    files, skipped = sendable(uploads.of_record(record), folder)
    for path, reason in skipped.items():
        _log.warning("%s is not sent to MLflow: %s", printable(path), printable(reason))
    return Replay(
        name=run_tags.clean(record.name, run_tags.NAME_LENGTH),
        experiment=_experiment(record),
        identity=run_tags.run_identity(record.uid),
        status=run_tags.run_status([record.status, *(point.status for point in record.points)]),
        started=record.started,
        ended=record.ended,
        figures=shown.kept,
        params=run_tags.params(record),
        tags=run_tags.run_tags(record, known, shown, skipped),
        note=descriptions.of_run(record, known, skipped),
        files=files,
        parent=_parent(record),
        children=[_of_points(record, each) for each in apart] if len(apart) > 1 else [],
    )


def _of_points(record: Record, run: PointRun) -> Replay:
    """One phase and batch size of a record as a tracking run of its own."""
    shown = figures(record, run)
    return Replay(
        name=run_tags.clean(f"b{run.batch_size} {run.phase} · {record.name}", run_tags.NAME_LENGTH),
        experiment=_experiment(record),
        identity=run_tags.point_identity(record.uid, run.phase, run.batch_size),
        status=run_tags.run_status([row.status for row in run.rows]),
        started=record.started,
        ended=record.ended,
        figures=shown.kept,
        params=run_tags.axes(record, [row.key for row in run.rows]),
        tags=run_tags.point_tags(record, run.rows, shown),
        note=descriptions.of_points(record, run.rows),
    )


def of_sweep(sweep: Sweep, folder: Path) -> Replay:
    """The summary of a sweep as the run above those of its children.

    Args:
        sweep: finished or not.
        folder: where its table and picture lie, and below which the records of its runs.
    """
    records = sweep.records(folder)
    return Replay(
        name=run_tags.clean(sweep.name, run_tags.NAME_LENGTH),
        experiment=_experiment(records[0]) if records else DEFAULT_EXPERIMENT,
        identity=run_tags.sweep_identity(sweep.uid),
        status=run_tags.sweep_status(sweep),
        started=sweep.started,
        ended=sweep.ended,
        tags=run_tags.sweep_tags(sweep),
        note=descriptions.of_sweep(sweep, records),
        files=sendable(uploads.of_sweep(folder), folder)[0],
        placeholder=_placeholder(sweep.uid),
    )


def _parent(record: Record) -> Replay | None:
    """The sweep's run as far as one of its children knows it."""
    if record.sweep is None:
        return None
    return Replay(
        name=_placeholder(record.sweep.uid),
        experiment=_experiment(record),
        identity=run_tags.sweep_identity(record.sweep.uid),
        status="SCHEDULED",
        started=record.started,
    )


def _placeholder(uid: str) -> str:
    """The name of a sweep's run until the sweep's summary is sent."""
    return f"sweep {run_tags.uid(uid)}"


def _experiment(record: Record) -> str:
    stage = record.plan.get("stage")
    return stage if isinstance(stage, str) and stage else DEFAULT_EXPERIMENT
