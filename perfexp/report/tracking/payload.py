"""Payload: a record, a sweep or a comparison as MLflow runs. Nothing is sent here.

`mlflow_sink` passes payloads to the sending process. A sweep is a run whose children are its runs;
a run with several phases, batch sizes or input sizes has a nested run for each. A `Charted`
(`tables.flat`) is a figure that MLflow charts; a `Figure` is the same in names that it accepts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from perfexp.comparison.document import Comparison
from perfexp.host.foreign import printable
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.paths import SweepPaths
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import (
    LARGEST,
    Artifact,
    Point,
    Record,
    Status,
    without_replicate,
)
from perfexp.records.rows import Row
from perfexp.records.subject import one_line
from perfexp.records.sweep_record import Sweep
from perfexp.report import markdown
from perfexp.report.tables import flat
from perfexp.report.tables.flat import (
    Cell,
    Charted,
    PointRun,
    by_size,
    charted,
    of_epochs,
    point_runs,
)
from perfexp.report.tracking import descriptions, run_names
from perfexp.report.tracking.delivery import (
    DEFAULT_EXPERIMENT,
    Figure,
    Payload,
    Upload,
    sendable,
    to_ms,
)
from perfexp.report.tracking.descriptions import reasons, safe_uid
from perfexp.report.tracking.store import NAME_LENGTH, TAG_LENGTH, clean, metric_part

#: Limit on nested runs for sizes; each takes some 50 ms to send.
_MOST_SIZES = 64
#: Call times that `best_figures` ranks.
_TIMES = (*DEVICE_TIMES, "latency")
#: Name endings of interval bounds: for medians, and for any metric.
_MEDIAN_INTERVAL = re.compile(r"/ci_(low_ms|high_ms|half_width_percent)$")
_INTERVAL = re.compile(r"_(low|high)$")
#: File name of the table with a run's points.
_TABLE = "points.json"
_log = logging.getLogger(__name__)


def of_run(analysis: Analysis, folder: Path) -> Payload:
    """Return a record as an MLflow run, with the artifacts in its folder.

    If the run has several phases, batch sizes or input sizes, each becomes a nested run. The run
    itself then shows the best figures only.
    """
    record, parts = analysis.record, point_runs(analysis)
    figures = charted(parts[0]) if len(parts) == 1 else best_figures(analysis.rows)
    metrics, notes = sendable_figures(figures, end_times(record))
    itself = Artifact(path="record.json", kind="data")  # the record does not list itself
    others = [artifact for artifact in record.artifacts if artifact.path != itself.path]
    files, skipped = sendable([*others, itself], folder)
    for path, reason in skipped.items():
        _log.warning("%s is not sent to MLflow: %s", printable(path), printable(reason))
    # points interrupted or killed count, even if the record has another status first
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


def of_sweep(sweep_analysis: SweepAnalysis, folder: Path) -> Payload:
    """Return a sweep's summary as the parent run for its runs, which are sent separately.

    Parameters and the winner are set once all runs have ended.
    """
    sweep = sweep_analysis.sweep
    records = [analysis.record for analysis in sweep_analysis.analyses]
    paths = SweepPaths(folder)
    kinds = {paths.summary: "data", paths.table: "tables", paths.plot: "plots"}
    files = []
    for path, kind in kinds.items():
        if path.exists():
            files.append(Artifact(path=path.name, kind=kind))
    num_finished = sum(child.status is Status.OK for child in sweep.children)
    is_whole = len(sweep.children) == sweep.jobs
    ended = to_ms(max((record.ended for record in records), default=sweep.started)) or 0
    table = list(
        itertools.chain.from_iterable(analysis.rows for analysis in sweep_analysis.analyses)
    )
    metrics, notes = sendable_figures(best_figures(table), lambda _: ended)
    points, first_tags = table_of(flat.sweep(sweep_analysis) if records else [])
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
        tags |= descriptions.winner_tags(sweep_analysis)
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
        note=descriptions.of_sweep(sweep_analysis),
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
    all_records = list(itertools.chain.from_iterable(records))
    started = min(record.started for record in all_records)
    ended = max(record.ended or record.started for record in all_records)
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
        tags[f"perfexp.side.{side.name}"] = " ".join(
            f"{measured_record.name} ({measured_record.uid})" for measured_record in of_side
        )
        uids.append([safe_uid(measured_record.uid) for measured_record in of_side])
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
    ends = ends_of_epochs(point, seconds)
    return sendable_figures(of_epochs(point), lambda figure: ends[figure.step])[0]


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
    metrics, notes = sendable_figures(charted(part), end_times(record))
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


# figures


def sendable_figures(
    charted_figures: Iterable[Charted], time_ms: Callable[[Charted], int]
) -> tuple[list[Figure], dict[str, str]]:
    """Return the figures that a tracking store accepts, and tags about the metrics.

    One tag lists dropped metrics with reasons. The other tag lists estimated metrics.

    Args:
        charted_figures: figures, including those without a value.
        time_ms: returns a metric's time, in ms since 1970.
    """
    sent: dict[tuple[str, int], Figure] = {}
    dropped: dict[str, str] = {}
    estimated: dict[str, None] = {}
    for quantity in charted_figures:
        # MLflow rejects a whole batch of metrics for one bad name
        name = f"{metric_part(quantity.group)}/{metric_part(quantity.name)}"
        name, step = name[:NAME_LENGTH].rstrip(" ."), quantity.step
        if quantity.value is None or not math.isfinite(quantity.value):
            dropped.setdefault(name, quantity.reason or f"the value is {quantity.value}")
        elif (name, step) in sent:
            reason = "two metrics have this name in MLflow's letters; the first one is shown"
            dropped.setdefault(name, reason)
        else:
            sent[name, step] = Figure(name, float(quantity.value), step, time_ms(quantity))
            if quantity.estimated:
                estimated[name] = None
    outdated = _outdated(sent)  # names of interval bounds
    reason = "the last measurement has no interval; see tables/points.json"
    dropped |= dict.fromkeys(outdated, reason)
    tags = {
        "perfexp.dropped_metrics": reasons(dropped),
        "perfexp.estimated_metrics": ", ".join(estimated),
    }
    return [figure for figure in sent.values() if figure.name not in outdated], tags


def _outdated(sent: Iterable[tuple[str, int]]) -> list[str]:
    """Return interval bounds whose last step comes before the last step of their metric.

    A store would show such bounds beside another point's value.
    """
    last: dict[str, int] = {}
    for name, step in sent:
        last[name] = max(step, last.get(name, step))
    outdated = []
    for name, step in last.items():
        metric = _INTERVAL.sub("", _MEDIAN_INTERVAL.sub("/p50_ms", name))
        if step < last.get(metric, step):
            outdated.append(name)
    return outdated


def end_times(record: Record) -> Callable[[Charted], int]:
    """Return a function that maps a figure to the end of its epoch or point, in ms since 1970.

    Points without a start get the record's end. With several processes a point ends with the last.
    A store shows the latest value, so figures from more processes replace figures from fewer. `of`
    calls it for each figure.
    """
    ends: dict[tuple[object, int | None], int] = {}
    for point in record.points:
        start = to_ms(point.started)
        end = to_ms(record.ended) or 0
        if start is not None:
            end = start + round(1e3 * (point.wall_seconds or 0.0))
        for key in (point.key, without_replicate(point.key)):
            ends[key, None] = max(end, ends.get((key, None), 0))
        for number, epoch_end in ends_of_epochs(point).items():
            ends[point.key, number] = epoch_end
    return lambda figure: ends[figure.key, figure.step if figure.group == "epoch" else None]


def ends_of_epochs(point: Point, seconds: float = 0.0) -> dict[int, int]:
    """Return a training's epoch end times in ms since 1970, by epoch number.

    They are computed as if training began at the point's start, after `seconds` of earlier epochs.
    Epochs sent during a training then have the same times as in the record.

    Args:
        seconds: duration of earlier epochs, which the point does not contain.
    """
    start = to_ms(point.started) or 0
    ends = {}
    for epoch in point.epochs:
        seconds += epoch.total_seconds
        ends[epoch.number] = start + round(1e3 * seconds)
    return ends


def best_figures(table: Sequence[Row]) -> Iterator[Charted]:
    """Yield the best figures per phase: the smallest median of each time in ms, and the best rate.

    The runs of a sweep, or of several points, show them in place of all figures. With several
    phases names begin with the phase.

    Args:
        table: rows of all points.
    """
    phases: dict[str, list[Row]] = {}
    for row in table:
        phases.setdefault(row.key.phase, []).append(row)
    for phase, rows in phases.items():
        prefix = ""
        if len(phases) > 1:
            prefix = f"{phase}_"
        for kind in _TIMES:
            if timed := [row for row in rows if kind in row.times]:
                row = min(timed, key=lambda row: row.times[kind].median.value)
                median = row.times[kind].median
                name, milliseconds = f"{prefix}{kind}_p50_ms", median.value * 1e3
                is_estimated = median.low is None
                yield Charted("best", name, milliseconds, row.key, 0, estimated=is_estimated)
        if rated := [(rate, row) for row in rows if (rate := row.samples_per_second)]:
            rate, row = max(rated, key=lambda pair: pair[0].value)
            name, is_estimated = f"{prefix}samples_per_second", rate.low is None
            yield Charted("best", name, rate.value, row.key, 0, estimated=is_estimated)


# files


def table_of(lines: Sequence[Mapping[str, Cell]]) -> tuple[list[Upload], dict[str, str]]:
    """Return a table as a file in the format of `mlflow.log_table`, and the tag that lists it.

    Both are empty without lines. MLflow shows the table on the run's page. Across runs it groups
    rows by the first column and compares the second.

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
