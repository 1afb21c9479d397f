"""Record assembly: the record of a run from its points, its environment and its plan."""

from __future__ import annotations

import uuid
from contextlib import suppress
from datetime import UTC, datetime

from perfexp import __version__
from perfexp.diagnosis import environment
from perfexp.errors import UserError
from perfexp.orchestration import supervisor
from perfexp.orchestration.assignment import Assignment
from perfexp.orchestration.preparation import profiler_settings
from perfexp.plan import plan_file
from perfexp.profilers import is_profile, profiled_key
from perfexp.records.record import Point, Record, Status, is_layers, overall_status, timed_key

#: Diagnostics that times and layers of a point share: the point shows them once.
_SHARED = ("busy_host", "data_left_out", "waits_left_out", "algorithm_substituted")


def assemble(assignment: Assignment, job: supervisor.Job) -> Record:
    """Assemble the record of a run; points without a result are `interrupted`."""
    points, ended = _merged(supervisor.results(job)), datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        facts, doubts = environment.load(job.paths.environment)
    except UserError:
        facts, doubts = {}, []
    before = None
    with suppress(UserError):  # the run of an earlier record keeps its identity and its sweep
        before = Record.load(job.paths.root)
    return Record(
        uid=before.uid if before else job.paths.uid or uuid.uuid4().hex,
        name=assignment.name,
        perfexp_version=__version__,
        status=overall_status([point for point in points if not is_profile(point.key)] or points),
        started=min((point.started for point in points if point.started), default=ended),
        ended=before.ended if before and before.points == points else ended,  # nothing was measured this time
        command=assignment.plain["command"],
        plan=assignment.plain,
        plan_hash=plan_file.plan_hash(assignment.plain),
        environment=facts,
        points=points,
        doubts=doubts,
        sweep=assignment.sweep or (before.sweep if before else None),
    )


def exit_code(record: Record) -> int:
    """Return 1 if a requested measurement or profile failed, otherwise 0; profiles of earlier commands do not count."""
    is_requested = bool(profiler_settings(record.plan.get("profiler") or {"name": "none"}))
    is_made = all(point.status is Status.OK for point in record.points if is_profile(point.key))
    return 0 if record.status is Status.OK and (is_made or not is_requested) else 1


def _merged(points: list[Point]) -> list[Point]:
    """Add metrics and diagnostics of layers, and diagnostics of profiles, to the timed points."""
    layers_of = {timed_key(point.key): point for point in points if is_layers(point.key)}
    profiles = {profiled_key(point.key): point for point in points if is_profile(point.key)}
    for point in points:
        if (layers := layers_of.get(point.key)) is not None:
            codes = {doubt.code for doubt in point.doubts if doubt.code in _SHARED}
            names = {metric.name for metric in point.metrics}  # a point from a record has them already
            point.metrics = [*point.metrics, *(metric for metric in layers.metrics if metric.name not in names)]
            further = (doubt for doubt in layers.doubts if doubt.code not in codes and doubt not in point.doubts)
            point.doubts = [*point.doubts, *further]
        if (profile := profiles.get(point.key)) is not None and profile is not point:
            point.doubts = [*point.doubts, *(doubt for doubt in profile.doubts if doubt not in point.doubts)]
    return points
