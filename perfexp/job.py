"""Job: one plan measured in workers, its record assembled, shown, written and sent."""

from __future__ import annotations

import hashlib
import json
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp import __version__, config, launch
from perfexp.errors import PerfexpError, UserError
from perfexp.paths import RunPaths, write_atomically
from perfexp.record import Doubt, Key, Point, Record, Status, SweepMembership, overall_status, read_points

if TYPE_CHECKING:
    from perfexp.sinks import Tracker
    from perfexp.sinks.console import Console

#: How many blocks of the stopping rule a point has at the most: three times on an asynchronous device, and the phases.
_BLOCKS_PER_POINT = {True: 4, False: 2}


@dataclass(kw_only=True)
class Assignment:
    """What one job has to do.

    Attributes:
        plan: what is measured.
        plain: the same as plain data.
        folder: the run's folder.
        name: of the run.
        command: the overrides as the user typed them.
        sweep: the sweep that it belongs to, if any.
    """

    plan: config.Plan
    plain: dict[str, Any]
    folder: Path
    name: str
    command: Sequence[str] = ()
    sweep: SweepMembership | None = None


def run(assignment: Assignment, console: Console) -> Record:
    """Measure a plan; the record is on disk, shown and sent when this returns.

    Args:
        assignment: what to do.
        console: where it is reported.

    Raises:
        PerfexpError: nothing could be measured.
        KeyboardInterrupt: interrupted; what was finished has been recorded.
    """
    plan, paths = assignment.plan, RunPaths(assignment.folder)
    config.check(plan)
    _prepare(paths, assignment)
    job = launch.Job(
        paths=paths,
        plan_sha256=hashlib.sha256(paths.plan.read_bytes()).hexdigest(),
        timed=plan.timed_keys(),
        first_predictions=plan.first_prediction_keys(),
        prefix=plan.profiler.command,
    )
    started = _now()
    device = None if plan.gpu_name == "auto" else plan.gpu_name
    console.header(assignment.plain, points=len(job.timed), device=device, longest_seconds=longest_seconds(plan))
    with _logged(paths), console.progress() as progress:
        progress.started(len(job.timed))
        job.listener = _Relay(progress, job.timed, paths)
        try:
            points = launch.run(job)
        except KeyboardInterrupt:
            _finish(assignment, paths, launch.results(job), started, console)
            raise
    return _finish(assignment, paths, points, started, console)


def longest_seconds(plan: config.Plan) -> float | None:
    """About how long measuring a plan takes at the most, or None where its stopping rule has no limit of time.

    Args:
        plan: to be measured.
    """
    longest = config.build(plan.stopping).longest_seconds()
    if longest is None or plan.epochs:
        return None
    blocks = _BLOCKS_PER_POINT[plan.gpu_name not in ("cpu", "auto")]
    return float(len(plan.timed_keys()) * blocks * longest)


def assemble(assignment: Assignment, paths: RunPaths, points: list[Point], started: str) -> Record:
    """A record of what was measured.

    Args:
        assignment: what was to be done.
        paths: of the run.
        points: all of them, with their results.
        started: date and time, ISO 8601.
    """
    environment, doubts = _environment(paths)
    return Record(
        uid=_uid(paths),
        name=assignment.name,
        perfexp_version=__version__,
        status=overall_status(points),
        started=started,
        ended=_now(),
        command=list(assignment.command),
        plan=assignment.plain,
        plan_hash=config.plan_hash(assignment.plain),
        environment=environment,
        points=points,
        doubts=doubts,
        sweep=assignment.sweep,
    )


def _prepare(paths: RunPaths, assignment: Assignment) -> None:
    """Make the run's folder and write the plan; a folder that holds another plan is not touched."""
    if paths.plan.exists():
        _refuse_other_plan(paths, assignment.plain)
        return
    paths.create()
    try:
        write_atomically(paths.plan, config.to_yaml(assignment.plain))
    except OSError as error:
        raise PerfexpError(f"The plan can't be written to {paths.plan}: {error.strerror}.") from error


def _refuse_other_plan(paths: RunPaths, plain: Mapping[str, Any]) -> None:
    old = config.read(paths.plan)
    changed = config.differences(old, plain)
    if changed:
        listed = "\n  ".join(changed[:20])
        raise UserError(
            f"{paths.root} holds the run of another plan. It differs in\n  {listed}\n"
            "Choose another output_dir, or repeat the command that made it to go on with it."
        )


def _finish(assignment: Assignment, paths: RunPaths, points: list[Point], started: str, console: Console) -> Record:
    """Record first; then everything that can fail without loss."""
    record = assemble(assignment, paths, points, started)
    try:
        write_atomically(paths.record, record.to_json())
    except OSError as error:
        raise PerfexpError(
            f"The record can't be written to {paths.record}: {error.strerror}. "
            f"The finished points are in {paths.points}."
        ) from error
    with _logged(paths):
        _write_files(record, paths, console)
        link = _send(record, assignment.plan, paths, console)
    console.show(record, paths.root, tracking=link)
    return record


def _write_files(record: Record, paths: RunPaths, console: Console) -> None:
    from perfexp.sinks import files

    try:
        record.artifacts = files.write(record, paths)
        write_atomically(paths.record, record.to_json())
    except OSError as error:
        console.error(f"Tables and pictures could not all be written: {error}. The record is safe: {paths.record}")


def _send(record: Record, plan: config.Plan, paths: RunPaths, console: Console) -> str | None:
    try:
        tracker: Tracker = config.build(plan.tracking)
        return tracker.publish(record, paths.root)
    except PerfexpError as error:
        console.error(str(error))
        return None


class _Relay:
    """Passes a worker's events on to the progress display.

    Args:
        progress: what is shown.
        keys: all points that are timed.
        paths: of the run.
    """

    def __init__(self, progress: Any, keys: Sequence[Key], paths: RunPaths) -> None:
        self._progress, self._keys, self._paths = progress, list(keys), paths

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "block":
            self._progress.block(event["text"])
        elif event["event"] == "point":
            key = msgspec.convert(event["key"], Key)
            self._progress.point(self._keys.index(key), str(key))
        elif event["event"] == "done":
            self._progress.done(event["status"], self._result(msgspec.convert(event["key"], Key)))

    def _result(self, key: Key) -> str:
        """What came out of a point, in a few words."""
        from perfexp import summary
        from perfexp.sinks.wording import median_text

        point = next(point for point in reversed(read_points(self._paths.points)) if point.key == key)
        return median_text(summary.row(point, ())) if point.status is Status.OK else point.error or ""


class _logged:
    """Writes the traceback of whatever leaves this block to run.log.

    Args:
        paths: of the run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            try:
                with self._paths.log.open("a") as log:
                    traceback.print_exception(error, file=log)
            except OSError:  # a full disk has no room for the story of the full disk
                return


def _environment(paths: RunPaths) -> tuple[dict[str, Any], list[Doubt]]:
    try:
        content = json.loads(paths.environment.read_bytes())
    except (OSError, ValueError):
        return {}, []
    return content["environment"], msgspec.convert(content["doubts"], list[Doubt])


def _uid(paths: RunPaths) -> str:
    """The run's identity: that of the record which is already there, or a new one."""
    try:
        return Record.load(paths.root).uid
    except UserError:
        return uuid.uuid4().hex


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
