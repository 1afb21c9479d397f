"""Payload: a record, a sweep or a comparison as MLflow runs. Nothing is sent here.

`mlflow_sink` passes payloads to the sending process. A sweep is a run whose children are its runs;
a run with several phases, batch sizes or input sizes has a nested run for each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from perfexp.comparison.document import Comparison
from perfexp.host.files import safe_name
from perfexp.host.foreign import printable
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.paths import DETAILS, SweepPaths
from perfexp.records.record import LARGEST, Artifact, Point, Record, Status
from perfexp.records.subject import one_line
from perfexp.records.sweep_record import Sweep
from perfexp.report import markdown
from perfexp.report.tables import flat
from perfexp.report.tables.flat import Cell, PointRun, by_size, charted, of_epochs, point_runs
from perfexp.report.tracking import descriptions, figures, run_names
from perfexp.report.tracking.delivery import DEFAULT_EXPERIMENT, Figure, Payload, Upload, to_ms
from perfexp.report.tracking.descriptions import reasons, safe_uid
from perfexp.report.tracking.figures import metric_part
from perfexp.report.tracking.store import NAME_LENGTH, TAG_LENGTH, clean

#: A run's artifact folders; files of any other kind lie next to them.
FOLDERS = ("config", "data", "plots", "tables", "profiles", "logs")
#: Larger files stay on disk: a copied sparse file could fill the store.
_MAX_FILE_BYTES = 2 << 30
#: Limit on nested runs for sizes; each takes some 50 ms to send.
_MOST_SIZES = 64
#: File name of the table with a run's points.
_TABLE = "points.json"
_log = logging.getLogger(__name__)


def of_run(analysis: Analysis, folder: Path) -> Payload:
    """Return a record as an MLflow run, with the artifacts in its folder.

    If the run has several phases, batch sizes or input sizes, each becomes a nested run. The run
    itself then shows the best figures only.
    """
    record, parts = analysis.record, point_runs(analysis)
    found = charted(parts[0]) if len(parts) == 1 else figures.best(analysis.rows)
    metrics, notes = figures.of(found, figures.times(record))
    itself = Artifact(path="record.json", kind="data")  # the record does not list itself
    others = [artifact for artifact in record.artifacts if artifact.path != itself.path]
    files, skipped = sendable([*others, itself], folder)
    for path, reason in skipped.items():
        _log.warning("%s is not sent to MLflow: %s", printable(path), printable(reason))
    statuses = {record.status, *(point.status for point in record.points)}
    points, first_tags = table_of(flat.overall(analysis))
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
        status=run_status(statuses),
        started=record.started,
        ended=record.ended,
        figures=metrics,
        params=descriptions.params_of_run(record),
        tags=descriptions.point_tags(analysis, notes) | descriptions.tags(tags),
        first_tags=first_tags,
        datasets=descriptions.datasets(record, [row.key for row in analysis.rows]),
        note=descriptions.of_run(analysis, skipped),
        files=[*files, *points],
        parent=_parent(record),
        children=_children(record, parts),
    )


def of_sweep(whole: SweepAnalysis, folder: Path) -> Payload:
    """Return a sweep's summary as the parent run for its runs, which are sent separately.

    Parameters and the winner are set once all runs have ended.
    """
    sweep = whole.sweep
    records = [one.record for one in whole.analyses]
    paths = SweepPaths(folder)
    kinds = {paths.summary: "data", paths.table: "tables", paths.plot: "plots"}
    files = []
    for path, kind in kinds.items():
        if path.exists():
            files.append(Artifact(path=path.name, kind=kind))
    num_finished = sum(child.status is Status.OK for child in sweep.children)
    is_whole = len(sweep.children) == sweep.jobs
    ended = to_ms(max((record.ended for record in records), default=sweep.started)) or 0
    table = list(itertools.chain.from_iterable(one.rows for one in whole.analyses))
    metrics, notes = figures.of(figures.best(table), lambda _: ended)
    points, first_tags = table_of(flat.sweep(whole) if records else [])
    tags = {
        "perfexp.expected": "" if sweep.jobs is None else str(sweep.jobs),
        "perfexp.finished": str(num_finished),
        "perfexp.failed": str(len(sweep.children) - num_finished),
        **notes,
        "mlflow.source.name": "perfexp",
    }
    params: dict[str, str] = {}
    if is_whole:  # MLflow never changes a parameter
        params = descriptions.params_of_sweep(sweep, records)
        tags |= figures.winner(whole)
    experiment = DEFAULT_EXPERIMENT
    if records:
        experiment = _experiment(records[0])
        tags |= descriptions.sweep_tags(records[0])
    return Payload(
        name=_name(run_names.of_sweep(sweep, records)),
        experiment=experiment,
        identity=_sweep_identity(sweep.uid),
        status=sweep_status(sweep),
        started=sweep.started,
        ended=sweep.ended,
        figures=metrics,
        params=params,
        tags=descriptions.tags(tags),
        first_tags=first_tags,
        note=descriptions.of_sweep(whole),
        files=[*sendable(files, folder)[0], *points],
    )


def of_comparison(
    comparison: Comparison, records: Sequence[Sequence[Record]], folder: Path
) -> Payload:
    """Return a comparison as an MLflow run: ratios, verdict counts, and tags that name the runs.

    Each ratio has its point's number as its step.

    Args:
        records: records per side, the baseline first.
        folder: the comparison's folder.
    """
    whole = list(itertools.chain.from_iterable(records))
    started = min(record.started for record in whole)
    ended = max(record.ended or record.started for record in whole)
    time_ms = to_ms(ended) or 0
    steps: dict[str, int] = {}
    metrics, counts = [], Counter[str]()
    for pair in comparison.pairs:
        step = steps.setdefault(pair.point, len(steps))
        group = metric_part(pair.side)
        counts[f"{group}/{metric_part(pair.verdict)}_count"] += 1
        if pair.ratio is not None:
            name = f"{group}/{metric_part(pair.measure)}_ratio"
            metrics.append(Figure(name, pair.ratio, step, time_ms))
    for name, count in counts.items():
        metrics.append(Figure(name, float(count), 0, time_ms))
    tags = {"perfexp.version": comparison.perfexp_version, "mlflow.source.name": "perfexp"}
    uids = list[list[str]]()
    for side, of_side in zip(comparison.sides, records, strict=True):
        tags[f"perfexp.side.{side.name}"] = " ".join(f"{one.name} ({one.uid})" for one in of_side)
        uids.append([safe_uid(one.uid) for one in of_side])
    uid = hashlib.sha256(json.dumps([uids, comparison.margin]).encode()).hexdigest()
    files = [Artifact(path=file.name, kind="") for file in sorted(folder.glob("comparison.*"))]
    return Payload(
        name=_name(" against ".join(side[0].name for side in reversed(records))),
        identity={"perfexp.kind": "comparison", "perfexp.uid": uid},
        status="FINISHED",
        started=started,
        ended=ended,
        figures=metrics,
        params={
            "margin": str(comparison.margin),
            "fdr": str(comparison.fdr),
            "allowed": ", ".join(comparison.allowed),
        },
        tags=descriptions.tags(tags),
        note=clean(markdown.comparison(comparison), TAG_LENGTH),
        files=sendable(files, folder)[0],
    )


def of_training(record: Record, point: Point) -> Payload:
    """Return a training in progress, without figures, for the run that `of_run` later completes."""
    return Payload(
        name=_name(run_names.of_run(record, [point.key])),
        experiment=_experiment(record),
        identity=_run_identity(record),
        status="RUNNING",
        started=point.started or record.started,
        ended=record.ended,
    )


def epochs_of(point: Point, seconds: float) -> list[Figure]:
    """Return figures for a point's epochs, sent while the training runs.

    Args:
        seconds: duration of earlier epochs, which the point does not contain.
    """
    ends = figures.ends_of_epochs(point, seconds)
    return figures.of(of_epochs(point), lambda one: ends[one.step])[0]


def _children(record: Record, parts: Sequence[PointRun]) -> list[Payload]:
    """Return nested runs, so that filters find a measurement by size, batch size and phase.

    If there are several phases or batch sizes, each gets a run. Within them, each of several sizes
    gets a run, unless there would be more than `_MOST_SIZES` runs.
    """
    children, sizes = list[Payload](), list[PointRun]()
    for part in parts:
        if part.batch_size != LARGEST:
            sizes += by_size(part)
            if len(parts) > 1:
                children.append(_of_points(record, part, "point"))
    if len(sizes) <= _MOST_SIZES:
        for part in sizes:
            children.append(_of_points(record, part, "size"))
    return children


def _of_points(record: Record, part: PointRun, kind: str) -> Payload:
    """Return a nested run for a part of a record's points.

    Args:
        kind: `point` for a phase and batch size, `size` for one input size in it.
    """
    metrics, notes = figures.of(charted(part), figures.times(record))
    keys = [row.key for row in part.analysis.rows]
    identity = {
        "perfexp.kind": kind,
        "perfexp.uid": safe_uid(record.uid),
        "perfexp.phase": safe_uid(part.phase),
        "perfexp.batch_size": str(part.batch_size),
    }
    if kind == "size":
        identity["perfexp.input_size"] = keys[0].size_label
    return Payload(
        name=_name(run_names.of_part(record, keys)),
        identity=identity,
        status=run_status([row.status for row in part.analysis.rows]),
        started=record.started,
        ended=record.ended,
        figures=metrics,
        params=descriptions.params_of_points(record, keys),
        tags=descriptions.point_tags(part.analysis, notes),
        datasets=descriptions.datasets(record, keys),
        note=descriptions.of_points(part.analysis),
    )


def _parent(record: Record) -> Payload | None:
    """Return the sweep's run, with the facts that a single child knows."""
    if record.sweep is None:
        return None
    return Payload(
        name=_name(run_names.of_unfinished_sweep(record)),
        identity=_sweep_identity(record.sweep.uid),
        status="SCHEDULED",
        started=record.started,
    )


def _name(text: str) -> str:
    """Return a run's name in the length that MLflow accepts."""
    return clean(text, NAME_LENGTH)


def _run_identity(record: Record) -> dict[str, str]:
    """Return the tags that identify a record's run in a store."""
    return {"perfexp.kind": "run", "perfexp.uid": safe_uid(record.uid)}


def _sweep_identity(uid: str) -> dict[str, str]:
    """Return the tags that identify a sweep's run in a store."""
    return {"perfexp.kind": "sweep", "perfexp.sweep": safe_uid(uid)}


def _experiment(record: Record) -> str:
    """Return the MLflow experiment: the stage that the user named (`stage=…`), or the default."""
    stage = record.plan.get("stage")
    if isinstance(stage, str) and stage:
        return stage
    return DEFAULT_EXPERIMENT


def run_status(statuses: Collection[Status]) -> str:
    """Return MLflow's status for a run's points, or for a sweep's runs.

    * FINISHED: something was measured, and the rest is impossible (e.g. out of memory, or a size
      that the model refuses).
    * KILLED: somebody stopped it early.
    * FAILED: everything else, including a run without a single figure.

    MLflow's lists show it with an icon.
    """
    if {Status.INTERRUPTED, Status.KILLED} & set(statuses):
        return "KILLED"
    if Status.OK not in statuses or {Status.FAILED, Status.TIMEOUT} & set(statuses):
        return "FAILED"
    return "FINISHED"


def sweep_status(sweep: Sweep) -> str:
    """Return MLflow's status for a sweep: SCHEDULED while runs may still follow.

    RUNNING would outlive a killed sweep.
    """
    if sweep.jobs is not None and len(sweep.children) < sweep.jobs:
        if sweep.ended:
            return "KILLED"
        return "SCHEDULED"
    return run_status([child.status for child in sweep.children])


# files


def table_of(lines: Sequence[Mapping[str, Cell]]) -> tuple[list[Upload], dict[str, str]]:
    """Return a table as a file in the format of `mlflow.log_table`, and the tag that lists it.

    Both are empty without lines. MLflow groups rows across runs by the first column and compares
    the second. MLflow shows it on the run's page and compares it between runs.

    Args:
        lines: cells by column, one mapping per row.
    """
    rows, columns = list[dict[str, Cell]](), dict[str, None]()
    for line in lines:
        # leave out points whose batch is still being searched for
        if line.get("batch_size") != LARGEST:
            rows.append({"point": _point(line), "median_ms": line.get("median_ms"), **line})
            columns |= dict.fromkeys(rows[-1])
    if not rows:
        return [], {}
    data = list[list[Cell]]()
    for row in rows:
        data.append([_cell(row.get(name)) for name in columns])
    content = json.dumps({"columns": list(columns), "data": data})
    listed = json.dumps([{"path": f"tables/{_TABLE}", "type": "table"}])
    upload = Upload(source=None, folder="tables", name=_TABLE, content=content)
    return [upload], {"mlflow.loggedArtifacts": listed}


def _point(line: Mapping[str, Cell]) -> str:
    """Return a line's point as text that matches across runs.

    In a sweep's table the run comes first.
    """
    parts = map(line.get, ("run", "phase", "input_size", "batch_size", "precision"))
    return " · ".join(one_line(str(part)) for part in parts if part is not None)


def _cell(cell: Cell) -> Cell:
    """Return a cell as strict JSON allows it: None in place of infinity and NaN."""
    if isinstance(cell, float) and not math.isfinite(cell):
        return None
    return cell


def sendable(artifacts: Iterable[Artifact], folder: Path) -> tuple[list[Upload], dict[str, str]]:
    """Return the files to send, and reasons for skipped files, keyed by path in the record.

    The record is data and can name anything. For example, `plots/a b.png` with kind `plots` becomes
    `plots/a-b.png`; deeper folders become part of the name.
    """
    uploads: dict[str, Upload] = {}
    sources = set[str]()
    skipped: dict[str, str] = {}
    for artifact in artifacts:
        kind = artifact.kind if artifact.kind in FOLDERS else ""
        parts = PurePosixPath(artifact.path).parts
        name = safe_name("-".join(part for part in parts if part not in (kind, DETAILS)))
        source = str(folder.absolute() / artifact.path)
        place = f"{kind}/{name}".lstrip("/")
        if reason := _refusal(artifact.path, folder):
            skipped[artifact.path] = reason
        elif place in uploads:
            skipped[artifact.path] = f"{place} is there already"
        elif source in sources:
            skipped[artifact.path] = "it is named twice"
        else:
            uploads[place] = Upload(source=source, folder=kind, name=name)
            sources.add(source)
    return list(uploads.values()), skipped


def _refusal(path: str, folder: Path) -> str | None:
    """Return why a file is not sent, or None.

    Links, and files outside the run's folder, are never sent.
    """
    root = folder.resolve()
    source = root / path
    try:
        if not source.is_relative_to(root) or source.resolve() != source:
            return "a link, or outside of the run's folder"
        if not source.is_file():
            if source.exists():
                return "not a file"
            return "missing"
        if source.stat().st_size > _MAX_FILE_BYTES:
            return f"larger than {_MAX_FILE_BYTES >> 30} GiB"
        return None
    except (OSError, ValueError) as error:
        return str(error)
