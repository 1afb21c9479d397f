"""Job: one plan measured in workers, its record assembled, shown, written and sent."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from perfexp import __version__
from perfexp.diagnosis import environment
from perfexp.errors import PerfexpError, UserError
from perfexp.host import crash_report, gpu_sheets, installation, interrupts, untrusted
from perfexp.host.files import disk_error, write_atomically
from perfexp.orchestration import supervisor
from perfexp.orchestration.preparation import (
    is_of_perfexp,
    prepare,
    profiler_settings,
    profiles_again,
)
from perfexp.plan import config
from perfexp.plan.estimate import measured_seconds, pace, seconds_left
from perfexp.plan.hydra_errors import FOREIGN_ERRORS
from perfexp.plan.naming import earlier_stages
from perfexp.plots import profile_rooflines
from perfexp.profilers import is_profile, profiled_key
from perfexp.profilers.previous_files import recover
from perfexp.records import summary
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths
from perfexp.records.record import (
    Key,
    Point,
    Record,
    Status,
    SweepMembership,
    is_layers,
    missing,
    overall_status,
    points_from_lines,
    read_points,
    timed_key,
)
from perfexp.reports import run_files
from perfexp.summaries import profile_summary
from perfexp.summaries.subject import one_line
from perfexp.summaries.wording import median_text

if TYPE_CHECKING:
    from perfexp.reports.console import Console
    from perfexp.reports.progress import Progress, Whole
    from perfexp.tracking import Tracker

#: Doubts that times and layers of a point have alike: once is enough.
_OF_BOTH = ("busy_host", "data_left_out", "waits_left_out", "algorithm_substituted")


@dataclass(kw_only=True)
class Assignment:
    """What one job has to do.

    Attributes:
        plan: what is measured.
        plain: the same as plain data.
        folder: the run's folder.
        name: of the run.
        sweep: the sweep that it belongs to, if any.
        is_sent: whether the tracker has the record; only after the run.
        begun: called once, when the first measurement begins.
        whole: how far the sweep is, if it belongs to one.
        number: position of the run in the sweep, from 1.
        overwrites: whether results of a run that are in the folder are removed first.
    """

    plan: config.Plan
    plain: dict[str, Any]
    folder: Path
    name: str
    sweep: SweepMembership | None = None
    is_sent: bool = True
    begun: Callable[[], None] = lambda: None
    whole: Whole | None = None
    number: int = 1
    overwrites: bool = False

    def seconds(self, left: Collection[Key], point_seconds: float | None = None) -> float | None:
        """About how long it takes to measure what is left; None where it is unknown.

        Args:
            left: what has no result yet.
            point_seconds: see `seconds_left`.
        """
        series_seconds = config.build(self.plan.stopping).longest_seconds()
        return seconds_left(self.plain, left, series_seconds=series_seconds, point_seconds=point_seconds)


class Run:
    """One assignment under way; to be entered, measured replicate by replicate, and finished.

    Args:
        assignment: what to do.
        console: where it is reported.
    """

    def __init__(self, assignment: Assignment, console: Console) -> None:
        self.assignment = assignment
        self._console = console
        self._paths = RunPaths(assignment.folder)
        self._stack = ExitStack()
        self._is_announced = self._is_refused = False

    def __enter__(self) -> Self:
        """Prepare the folder.

        Raises:
            PerfexpError: it can't be measured, or not there.
        """
        plan, paths = self.assignment.plan, self._paths
        paths.create(sweep=self.assignment.sweep.uid if self.assignment.sweep else None)
        with ExitStack() as stack:
            stack.enter_context(paths.locked())
            stack.push(self._withdraw)
            stack.enter_context(_logged(paths))
            stack.callback(paths.put_back)
            if self.assignment.overwrites and paths.plan.exists():
                if not is_of_perfexp(paths):
                    raise UserError(f"{paths.manifest} is not that of the run beside it: --overwrite removes nothing.")
                paths.set_aside(self.assignment.sweep.uid if self.assignment.sweep else None)
            paths.remove_leftovers()
            recover(paths)
            again = profiles_again(paths, profiler_settings(plan.profiler), plan.profile_keys())
            self._job = supervisor.Job(
                paths=paths,
                plan_sha256=prepare(paths, self.assignment.plain, again),
                timed=plan.timed_keys(),
                first_predictions=plan.first_prediction_keys(),
                layers=plan.layer_keys(),
                profiles=plan.profile_keys(),
                again=again,
                profiler=config.build(plan.profiler),
                settings=profiler_settings(plan.profiler),
                command=self.assignment.plain["command"],
                timeout_seconds=plan.timeout_seconds,
            )
            _keep_what_is_there(self._job)
            if not _left(self._job):
                self._console.note(f"Nothing is left to measure in {paths.root}: this is what was measured.")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _withdraw(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Where the user is to change something before anything can be measured, no folder stays."""
        if (self._is_refused or _is_refusal(error)) and not self.has_results:
            self._paths.withdraw()

    def _announce(self, progress: Progress) -> None:
        """Say what is measured, not before a worker is ready: it may refuse to begin."""
        if self._is_announced:
            progress.begun()
            return
        self._is_announced = True
        self._paths.drop_aside()
        self.assignment.begun()
        progress.begun()
        _announce(self._job, self.assignment, self._console)

    def measure(self, replicates: Sequence[int] | None = None) -> None:
        """Measure what has no result yet.

        Args:
            replicates: numbers of those that are measured; all of them if not given.

        Raises:
            PerfexpError: a worker refused to begin. What is finished is on disk.
            KeyboardInterrupt: likewise.
        """
        job, whole = self._job, self.assignment.whole
        numbers = job.replicates if replicates is None else list(replicates)
        keys = [key for key in job.timed if key.replicate in numbers]
        left = [key for key in _left(job) if key.replicate in numbers]
        if whole:
            whole.begin(self.assignment.number, self.assignment.name)
        with self._console.progress(whole=whole) as progress:
            progress.started(len(keys))
            job.listener = _Relay(progress, keys, left, self.assignment, partial(self._announce, progress))
            try:
                for number in numbers:
                    supervisor.measure(job, number)
                if not job.replicates or job.replicates[-1] in numbers:
                    supervisor.profile(job)
            except PerfexpError as error:
                self._is_refused = _is_refusal(error)
                raise

    @property
    def has_results(self) -> bool:
        """Whether anything has been measured."""
        return bool(read_points(self._paths.points))

    def keep(self) -> Record:
        """Put the record on disk; what has no result yet is `interrupted`.

        Raises:
            PerfexpError: the disk does not take it.
        """
        return _keep(self.assignment, self._job)

    def tell(self, record: Record) -> Record:
        """Write the tables and pictures of a record that is on disk, send it, and show it."""
        return _tell(record, self.assignment, self._job.paths, self._console)


def _keep_what_is_there(job: supervisor.Job) -> None:
    """What a command does not make stays, if the folder has it: profiles, or all times where a call is only marked."""
    known = [point.key for point in read_points(job.paths.points)]
    job.profiles = job.profiles or [key for key in known if is_profile(key)]
    if not job.profiler.times:
        job.timed, job.first_predictions, job.layers = (
            [key for key in keys if key in known] for keys in (job.timed, job.first_predictions, job.layers)
        )


def run(assignment: Assignment, console: Console) -> Record:
    """Measure a plan; the record is on disk, shown and sent when this returns.

    Args:
        assignment: what to do.
        console: where it is reported.

    Raises:
        PerfexpError: nothing could be measured.
        KeyboardInterrupt: interrupted; what was finished has been recorded.
    """
    with Run(assignment, console) as under_way:
        record = None
        try:
            with interrupts.held():  # a second one finds the record on disk
                try:
                    under_way.measure()
                finally:
                    if under_way.has_results:
                        record = under_way.keep()
        except (KeyboardInterrupt, PerfexpError):
            if record is not None:
                under_way.tell(record)
            raise
        return under_way.tell(record or under_way.keep())


def exit_code(record: Record) -> int:
    """Of a command that left a record: 1 where something that it asked for was not measured or not profiled.

    The record's status is that of what was measured; a profile that other commands asked for concerns this one no more.

    Args:
        record: of its run.
    """
    asked = bool(profiler_settings(record.plan.get("profiler") or {"name": "none"}))
    made = all(point.status is Status.OK for point in record.points if is_profile(point.key))
    return 0 if record.status is Status.OK and (made or not asked) else 1


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an error is one that the user has to fix."""
    return isinstance(error, PerfexpError) and error.exit_code == UserError.exit_code


def _left(job: supervisor.Job) -> list[Key]:
    """What has no result yet, and the profiles that are made again."""
    left = missing([*job.timed, *job.first_predictions, *job.layers, *job.profiles], job.paths.points)
    return left + [key for key in job.profiles if key in job.again and key not in left]


def _announce(job: supervisor.Job, assignment: Assignment, console: Console) -> None:
    plan, left = assignment.plan, _left(job)
    for warning in _of_earlier_stages(plan.stage, job.paths.root):
        console.note(warning)
    device = supervisor.device_facts(job).get("name")
    seconds = (
        assignment.seconds(left, pace(measured_seconds(read_points(job.paths.points)))) if job.profiler.times else None
    )
    console.header(assignment.plain, points=len(job.timed) or len(job.profiles), device=device, seconds=seconds)


def _of_earlier_stages(stage: str | None, folder: Path) -> Iterator[str]:
    """What went wrong with this combination in the stages before, which is likely to go wrong again."""
    for before in earlier_stages(stage, folder):
        try:
            record = Record.load(before)
        except PerfexpError:
            yield f"warning: {before} has no record: that stage of this combination was not finished."
            continue
        failed = next((point for point in record.points if point.status is not Status.OK), None)
        if failed is not None:
            why = f": {one_line(failed.error)}" if failed.error else ""
            yield f"warning: in {before} this combination ended {record.status.value} ({failed.key}{why})."


def assemble(assignment: Assignment, job: supervisor.Job) -> Record:
    """A record of what was measured.

    Args:
        assignment: what was to be done.
        job: how it was.
    """
    points, ended, before = _with_layers(supervisor.results(job)), _now(), _record_before(job.paths)
    facts, doubts = _environment(job.paths)
    return Record(
        uid=before.uid if before else job.paths.uid or uuid.uuid4().hex,
        name=assignment.name,
        perfexp_version=__version__,
        status=overall_status([point for point in points if not is_profile(point.key)] or points),
        started=min((point.started for point in points if point.started), default=ended),
        ended=before.ended if before and before.points == points else ended,  # where nothing was measured anew
        command=assignment.plain["command"],
        plan=assignment.plain,
        plan_hash=config.plan_hash(assignment.plain),
        environment=facts,
        points=points,
        doubts=doubts,
        sweep=assignment.sweep or (before.sweep if before else None),
    )


def _with_layers(points: list[Point]) -> list[Point]:
    """The points, those that were timed with the figures and doubts of their layers, and doubts of their profile."""
    found = {timed_key(point.key): point for point in points if is_layers(point.key)}
    profiles = {profiled_key(point.key): point for point in points if is_profile(point.key)}
    for point in points:
        if (layers := found.get(point.key)) is not None:
            known = {doubt.code for doubt in point.doubts if doubt.code in _OF_BOTH}
            names = {metric.name for metric in point.metrics}  # a point that was taken from a record has them
            point.metrics = [*point.metrics, *(metric for metric in layers.metrics if metric.name not in names)]
            further = (doubt for doubt in layers.doubts if doubt.code not in known and doubt not in point.doubts)
            point.doubts = [*point.doubts, *further]
        if (profile := profiles.get(point.key)) is not None and profile is not point:
            point.doubts = [*point.doubts, *(doubt for doubt in profile.doubts if doubt not in point.doubts)]
    return points


def _keep(assignment: Assignment, job: supervisor.Job) -> Record:
    """The record, on disk; everything that comes after it can fail without loss."""
    record = assemble(assignment, job)
    try:
        write_atomically(job.paths.record, record.to_json())
    except OSError as error:
        raise disk_error(error) from error
    return record


def _tell(record: Record, assignment: Assignment, paths: RunPaths, console: Console) -> Record:
    with interrupts.held():  # a library that is interrupted while it is imported stays broken
        _write_files(record, paths, console)
    link = _send(record, assignment, paths, console)
    console.show(record, paths.root, tracking=link)
    return record


def _write_files(record: Record, paths: RunPaths, console: Console) -> None:
    try:
        _write_rooflines(record, paths)
        record.artifacts = run_files.write(record, paths)
        write_atomically(paths.record, record.to_json())
    except OSError as error:
        console.error(f"Tables and pictures could not all be written: {error}. The record is safe: {paths.record}")


def _write_rooflines(record: Record, paths: RunPaths) -> None:
    """Of what a profiler counted."""
    if profile_summary.points(record):
        profile_rooflines.write(record, paths, gpu_sheets.read([installation.conf_dir()]))


def _send(record: Record, assignment: Assignment, paths: RunPaths, console: Console) -> str | None:
    try:
        tracker: Tracker = config.build(assignment.plan.tracking)
        return tracker.publish(record, paths.root)
    except PerfexpError as error:
        assignment.is_sent = False
        console.error(str(error))
        return None


class _Relay:
    """Passes a worker's events on to the progress display.

    Args:
        progress: what is shown.
        keys: all points that are timed.
        left: all that have no result yet.
        assignment: run under way.
        begun: called when the first measurement begins.
    """

    def __init__(
        self,
        progress: Progress,
        keys: Sequence[Key],
        left: Sequence[Key],
        assignment: Assignment,
        begun: Callable[[], None],
    ) -> None:
        self._progress, self._keys, self._left = progress, list(keys), set(left)
        self._assignment, self._begun = assignment, begun
        self._paths = RunPaths(assignment.folder)
        self._seconds = measured_seconds(read_points(self._paths.points))
        self._estimate()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "point":
            self._begun()
            self._begun = lambda: None
        if event["event"] == "block":
            (self._progress.waiting if event.get("patient") else self._progress.block)(event["text"])
        if "key" not in event:
            return
        key = msgspec.convert(event["key"], Key)
        point = self._last(key) if event["event"] == "done" else None
        if event["event"] == "done":
            self._left.discard(key)
            self._seconds += measured_seconds([point] if point else [])
            self._estimate()
        if key not in self._keys:
            self._progress.block(str(key))
        elif event["event"] == "point":
            self._progress.point(self._keys.index(key), str(key))
        elif event["event"] == "done":
            self._progress.done(event["status"], _result(point) if point else "")  # only the display knows why

    def _last(self, key: Key) -> Point | None:
        """The point that was written last, if it is that one."""
        points = points_from_lines(untrusted.read_bytes(self._paths.points).rstrip().rpartition(b"\n")[2])
        return next((point for point in points if point.key == key), None)

    def _estimate(self) -> None:
        """Have the display know how long the rest takes."""
        whole = self._assignment.whole
        is_known = self._seconds or not (whole and whole.has_measured)  # other runs of a sweep tell more than the plan
        self._progress.remaining(self._assignment.seconds(self._left, pace(self._seconds)) if is_known else None)


def _result(point: Point) -> str:
    """What came out of a point, in a few words."""
    return median_text(summary.row(point, ())) if point.status is Status.OK else point.error or ""


@contextmanager
def _logged(paths: RunPaths) -> Iterator[None]:
    """The traceback of whatever leaves this block goes to run.log; a disk that can't be written is told as such."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (PerfexpError, OSError, MemoryError, *FOREIGN_ERRORS)):
            raise crash_report.failure(error, paths.root) from error
        story = "".join(traceback.format_exception(error)).encode(errors="replace")
        with suppress(OSError), untrusted.open_append(paths.log) as log:  # a full disk has no room for it
            log.write(story)
        if isinstance(error, OSError):
            raise disk_error(error) from error
        raise


def _environment(paths: RunPaths) -> tuple[dict[str, Any], list[Diagnostic]]:
    try:
        return environment.load(paths.environment)
    except UserError:
        return {}, []


def _record_before(paths: RunPaths) -> Record | None:
    """The record that is there already: its run keeps its identity and its sweep."""
    try:
        return Record.load(paths.root)
    except UserError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
