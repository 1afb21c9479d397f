"""One run of one plan: measure it in workers, then assemble, write, send and show its record.

`driver` enters a `Job` (which prepares the folder), has it measure, and then calls `save` and
`publish`. `Job` extends `supervisor.Supervisor`, which knows the points and starts the workers.
"""

from __future__ import annotations

import statistics
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from perfexp.errors import PerfexpError, UserError
from perfexp.host import crash_report, foreign, gpu_sheets, installation, interrupts
from perfexp.host.files import disk_error, write_atomically
from perfexp.plan import config, plan_file
from perfexp.plan.hydra_errors import FOREIGN_ERRORS
from perfexp.plan.naming import earlier_stages
from perfexp.plan.sparse import falls_back, pair_of
from perfexp.prediction import corpus, lookup, predictions
from perfexp.prediction.predictions import Forecast
from perfexp.records import diagnostics, priors, profile_summary, summary, units
from perfexp.records.analysis import Analysis
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths
from perfexp.records.profile_keys import is_profile, profiled_key
from perfexp.records.record import (
    LARGEST,
    Key,
    Point,
    Record,
    Status,
    is_layers,
    overall_status,
    read_points,
    timed_key,
    timestamp,
    without_replicate,
)
from perfexp.records.subject import one_line, subject
from perfexp.records.wording import epoch_text, median_text
from perfexp.report import run_files
from perfexp.report.console import Console
from perfexp.report.overview import CAPTIONS
from perfexp.report.plots import roofline_files
from perfexp.report.progress import Progress
from perfexp.report.run_status import counted_points, measured_seconds
from perfexp.report.tracking import Tracker
from perfexp.run import machine_priors, supervisor
from perfexp.run.preparation import (
    Assignment,
    holds_other_plan,
    is_of_perfexp,
    profiler_settings,
    with_processes,
    write_expected,
)
from perfexp.statistics.prior import Prior
from perfexp.version import __version__

_Made = TypeVar("_Made")


class ProgressRelay:
    """Listener that forwards a worker's events to the progress display.

    A worker sends `point` when a point begins, `block` for each step within it, and `done` at its
    end, or `left` if another worker has to measure it.

    Args:
        progress: the display.
        keys: points of this run.
        left: points without a result.
        assignment: the run.
        points: file with the results so far.
        record: returns the record so far, whose machine decides on the intervals.
        begun: called when the first measurement begins.
        follow: called after each training epoch, with a point that holds only that epoch.
    """

    def __init__(
        self,
        progress: Progress,
        keys: Sequence[Key],
        left: Sequence[Key],
        assignment: Assignment,
        points: Path,
        record: Callable[[], Record],
        begun: Callable[[], None],
        follow: Callable[[Point], None],
    ) -> None:
        self._progress, self._keys, self._left = progress, list(keys), set(left)
        self._assignment, self._points, self._begun, self._follow = (
            assignment,
            points,
            begun,
            follow,
        )
        self._record = record
        self._priors: tuple[dict[str, Prior], int] | None = None
        self._count = assignment.plan.epochs or 0
        self._epoch_seconds: list[float] = []
        self._seconds = measured_seconds(read_points(self._points))
        self._estimate()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        if event["event"] == "point":
            self._begun()
            self._begun = lambda: None
        if "training" in event:
            self._train(msgspec.convert(event["training"], Point))
        if event["event"] == "block":
            if event.get("patient"):
                self._progress.waiting(event["text"])
            elif event.get("is_result"):
                self._progress.result(event["text"])
            else:
                self._progress.block(event["text"])
        if "key" not in event:
            return
        point_key = msgspec.convert(event["key"], Key)
        key, result = self._planned(point_key), ""
        if self._assignment.plan.is_sparse and key.is_timed and key not in self._keys:
            self._keys.append(key)  # chosen by the results so far
            self._progress.added()
        if event["event"] == "done":
            self._left.discard(key)
            result = self._result(point_key)
            self._estimate()
        text = str(point_key)
        if (mode := self._assignment.plan.mode.name) == "decode":
            text = text.replace("inference", mode, 1)
        if key not in self._keys:
            self._progress.block(text)
        elif event["event"] == "point":
            self._progress.point(text)
            if self._count and key.phase == "train":
                self._epoch_seconds = []
                self._progress.epochs(0, self._count, "", None)
        elif event["event"] == "done":
            self._progress.done(event["status"], result)

    def _train(self, training: Point) -> None:
        """Show an epoch that has ended, and send it to the tracker."""
        epoch = training.epochs[-1]
        self._epoch_seconds.append(epoch.total_seconds)
        left_seconds = statistics.mean(self._epoch_seconds) * (self._count - epoch.number)
        self._progress.epochs(epoch.number, self._count, epoch_text(epoch), left_seconds)
        if not training.key.replicate:
            self._follow(training)

    def _planned(self, key: Key) -> Key:
        """Return the key under which a point was planned.

        A batch search may have changed its batch.
        """
        unknown = msgspec.structs.replace(key, batch_size=LARGEST)
        if key not in self._keys and unknown in self._keys:
            return unknown
        return key

    def _estimate(self) -> None:
        """Show the remaining time, estimated from the results so far or from the plan."""
        total_progress = self._assignment.whole
        is_known = self._seconds or not (
            total_progress and total_progress.seconds
        )  # other runs predict better than the plan
        self._progress.remaining(
            self._assignment.seconds(self._left, self._seconds) if is_known else None
        )

    def _result(self, key: Key) -> str:
        """Return a point's median over all processes so far, as text; empty if it failed."""
        points, planned = read_points(self._points), without_replicate(key)
        self._seconds = measured_seconds(points)
        is_ok = any(point.key == key and point.status is Status.OK for point in points)
        replicates = [point for point in points if without_replicate(point.key) == planned]
        if not is_ok:
            return ""
        if self._priors is None:
            record = self._record()
            self._priors = record.priors, priors.free_cores(record)
        row = summary.row(replicates, (), *self._priors)
        if row.time_kind is None:
            return ""
        so_far = ""
        if row.processes > 1:
            so_far = " so far"
        return f"{CAPTIONS[row.time_kind]}{so_far} {median_text(row)}"


class Job(supervisor.Supervisor):
    """A run in progress: a context manager that is measured replicate by replicate.

    Entering it prepares and locks the folder.
    """

    def __init__(self, assignment: Assignment, console: Console) -> None:
        super().__init__(assignment)
        self._console = console
        self._stack = ExitStack()
        self._is_announced = self._is_refused = False
        self._before: set[Key] = set()
        self._measured: set[int] = set()

    def __enter__(self) -> Self:
        """Prepare and lock the folder.

        Raises:
            PerfexpError: the plan cannot be measured, or not in this folder.
        """
        paths, assignment = self.paths, self.assignment
        sweep = assignment.sweep.uid if assignment.sweep else None
        paths.create(sweep=sweep)
        with ExitStack() as stack:
            stack.enter_context(paths.locked())
            stack.push(self._withdraw)
            stack.enter_context(_logged(paths))
            paths.put_in_place()
            paths.remove_leftovers()
            if assignment.overwrites and paths.plan.exists():
                if not is_of_perfexp(paths):
                    raise UserError(
                        f"{paths.manifest} is not that of the run beside it: --overwrite removes "
                        "nothing."
                    )
                self.paths = paths = paths.replacement()
                if holds_other_plan(paths, assignment.plain):
                    paths.remove()
                paths.create(sweep=sweep)
                paths.remove_leftovers()
                stack.callback(_remove_empty, paths)
            self.prepare()
            self._before = {point.key for point in read_points(paths.points)}
            if not self.left():
                folder = assignment.folder.absolute()
                self._console.note(
                    f"Nothing is left to measure in {folder}: this is what was measured."
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    def _withdraw(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Remove the folder if nothing can be measured until the user changes something.

        It runs when the folder is left, with the error that ended the run, if any.
        """
        if (self._is_refused or _is_refusal(error)) and not self.has_results:
            self.paths.withdraw()

    def _announce(self, progress: Progress) -> None:
        """Print the header once, when a worker begins to measure: until then it may refuse to."""
        if self._is_announced:
            progress.begun()
            return
        self._is_announced = True
        self.assignment.begun()
        progress.begun()
        assignment = self.assignment
        for warning in _warnings_of_earlier_stages(
            assignment.plan.stage, assignment.folder.absolute()
        ):
            self._console.note(warning)
        measured = measured_seconds(read_points(self.paths.points))
        seconds = assignment.seconds(self.left(), measured) if self.profiler.times else None
        points = units.counted(len(self.profiles), "point")
        if self.timed:
            points = counted_points(self.timed)
        points += assignment.plan.scope
        if assignment.sweep is None:  # a sweep has a header of its own
            facts, _ = supervisor.recorded_environment(self)
            self._console.header(
                assignment.plain, facts, points=points, seconds=seconds, keys=self.timed
            )

    def measure(self, replicate: int | None = None) -> None:
        """Measure points without a result.

        Finished points are on disk before an exception is raised.

        Args:
            replicate: number of the only replicate to measure; None for all.

        Raises:
            PerfexpError: a worker refused to start.
        """
        total_progress = self.assignment.whole
        every = supervisor.replicates(self.timed)
        numbers = every if replicate is None else [replicate]
        keys = [key for key in self.timed if key.replicate <= max(numbers, default=0)]
        left = [key for key in self.left() if key.replicate in numbers]
        if total_progress:
            total_progress.begin(self.assignment.number, self.assignment.name)
        with (
            self._console.progress(whole=total_progress) as progress,
            self._following(left) as follow,
        ):
            progress.started(len(keys), len(keys) - len(set(keys) & set(left)))
            announce = partial(self._announce, progress)
            self.listener = ProgressRelay(
                progress,
                keys,
                left,
                self.assignment,
                self.paths.points,
                self.assembled,
                announce,
                follow,
            )
            for number in numbers:
                supervisor.measure(self, number)
                self._measured.add(number)
            every = supervisor.replicates(self.timed)  # results may have added replicates
            if not every or every[-1] in numbers:
                supervisor.profile(self)

    def further(self) -> int | None:
        """Return the next replicate that the results call for; None if they are precise enough.

        `driver.rounds` asks after each round.
        """
        if not self.plan.is_adaptive:
            return None
        with suppress(PerfexpError):  # saving the record reports read and write errors
            self.extend()
        for number in supervisor.replicates(self.timed):
            if number not in self._measured:
                return number
        return None

    def ended_by(self, error: PerfexpError) -> None:
        """Remember the error that ended the measurement: a refused run leaves no folder."""
        self._is_refused = _is_refusal(error)

    def set_num_processes(self, num_processes: int) -> None:
        """Set the run's total number of processes; write its plan and choose its points again.

        `perfexp ab` raises it until there is a verdict.
        """
        self.assignment.plain = with_processes(self.plain, num_processes)
        self.assignment.plan = config.typed(self.assignment.plain)
        self.prepare()

    def _following(self, left: Sequence[Key]) -> AbstractContextManager[Callable[[Point], None]]:
        """Return a context whose value sends each training epoch to the tracker as it comes.

        It does nothing unless a single training is all that the run measures.

        Args:
            left: points without a result.
        """
        plan, first = self.plan, [key for key in self.timed if not key.replicate]
        if not (plan.epochs and len(first) == 1 and first[0] in left):
            return nullcontext(lambda _: None)
        try:
            tracker: Tracker = config.build(plan.tracking)
        except PerfexpError:  # sending the record later reports the error
            return nullcontext(lambda _: None)
        return tracker.following(self.assembled)

    @property
    def has_results(self) -> bool:
        """Return whether any point has a result."""
        return bool(read_points(self.paths.points))

    def assembled(self) -> Record:
        """Return the record of all measurements so far; only `save` writes it to disk.

        Points without a result are `interrupted`. `perfexp ab` judges it between two processes, and
        `save` writes it.
        """
        points, ended = _merged(supervisor.results(self)), timestamp()
        facts, doubts = supervisor.recorded_environment(self)
        before = None
        with suppress(UserError):  # a continued run keeps its identity and its sweep
            before = Record.load(self.paths.root)
        uid, sweep = self.paths.uid or uuid.uuid4().hex, self.assignment.sweep
        if before:
            uid, sweep = before.uid, sweep or before.sweep
        started = min((point.started for point in points if point.started), default=ended)
        if before and before.points == points:  # nothing was measured this time
            ended = before.ended
        timed = [point for point in points if not is_profile(point.key)]
        record = Record(
            uid=uid,
            name=self.assignment.name,
            perfexp_version=__version__,
            status=overall_status(timed or points),
            started=started,
            ended=ended,
            command=self.plain["command"],
            plan=self.plain,
            plan_hash=plan_file.plan_hash(self.plain),
            environment=facts,
            points=points,
            doubts=doubts,
            sweep=sweep,
            priors=before.priors if before else {},
        )
        record.priors = record.priors or machine_priors.known_of(record)
        return record

    def save(self) -> Record:
        """Write the record, before any step that can fail without losing results.

        `driver` calls it after the last replicate, also after an interrupt.

        Raises:
            PerfexpError: the record cannot be written.
        """
        self.extend()
        record = self.assembled()
        ended_keys = {
            point.key for point in record.points if point.status is not Status.INTERRUPTED
        }
        if ended_keys - self._before:
            machine_priors.add(record)  # only results measured now: a folder may be foreign
        try:
            write_atomically(self.paths.record, record.to_json())
            if self.plan.is_sparse:
                write_expected(self.paths, self.plan, record.points)
            RunPaths(self.assignment.folder).put_in_place()
        except OSError as error:
            raise disk_error(error) from error
        self.paths = RunPaths(self.assignment.folder)
        if self.plan.is_sparse:  # `publish` writes these diagnostics to disk
            record.doubts += self._optional(
                "The curves could not be checked", partial(_notes, record)
            )
        return record

    def publish(self, record: Record, console: Console | None = None) -> Record:
        """Write tables and plots for a saved record, send the record and show it.

        `driver` calls it once all records of the command are saved.

        Args:
            console: console to print on; by default the run's.
        """
        console, analysis = console or self._console, Analysis.of(record)
        with interrupts.held():  # an interrupted import leaves a library broken
            self._write_files(analysis, console)
        link = self._send(analysis, console)
        show_results(analysis, self.assignment, console, tracking=link)
        return record

    def _optional(self, description: str, action: Callable[[Path], list[_Made]]) -> list[_Made]:
        """Run an optional step after the record is on disk, and return its result.

        A failure is reported, loses nothing else, and gives an empty list.

        Args:
            description: beginning of the message about a failure.
            action: step, called with the run's folder.
        """
        try:
            return action(self.paths.root)
        except Exception as error:
            self._console.error(
                f"{description}: {one_line(repr(error))}. The record is safe: {self.paths.record}"
            )
            return []

    def _write_files(self, analysis: Analysis, console: Console) -> None:
        """Write tables, plots and the roofline.

        The record is written again, with the list of these files.
        """
        record = analysis.record
        try:
            if profile_summary.profiles(record):
                roofline_files.write_profiled(
                    record, self.paths, gpu_sheets.read([installation.conf_dir()])
                )
            forecasts: list[Forecast] = []
            if self.plan.is_sparse:
                forecasts = self._optional(
                    "Other points could not be predicted", partial(_forecasts, record)
                )
            for forecast in forecasts if not console.quiet else ():
                console.note(predictions.summary(forecast))
            record.artifacts = run_files.write(analysis, self.paths, forecasts)
            write_atomically(self.paths.record, record.to_json())
        except OSError as error:
            record_path = self.paths.record
            console.error(
                f"Some tables and plots could not be written: {error}. "
                f"The record is safe: {record_path}"
            )

    def _send(self, analysis: Analysis, console: Console) -> str | None:
        """Send the record to the tracker; return a link to it, or None.

        A failure is reported and remembered in the assignment.
        """
        try:
            tracker: Tracker = config.build(self.plan.tracking)
            return tracker.publish(analysis, self.paths.root)
        except PerfexpError as error:
            self.assignment.is_sent = False
            console.error(str(error))
            return None


def _notes(record: Record, folder: Path) -> list[Diagnostic]:
    """Return notes on a sparse sweep: values far from a smooth curve, an algorithm without effect.

    An algorithm has no effect if it computes nothing of the model.
    """
    curves = corpus.of_record(record, folder)
    doubts = [doubt for curve in curves for doubt in lookup.stairs(curve)]
    if falls_back(record.points):
        sizes = {pair_of(point) for point in record.points if point.key.is_timed}
        name = subject(record.plan, record.environment).algorithm
        note = diagnostics.make("algorithm_without_effect", algorithm=name, count=len(sizes))
        doubts.append(note)
    return doubts


def _forecasts(record: Record, folder: Path) -> list[Forecast]:
    """Predict a sparse sweep's unmeasured points, calibrated with neighboring runs."""
    return predictions.of_record(
        record, corpus.of_record(record, folder), corpus.Corpus(corpus.sibling_curves(folder))
    )


def show_results(
    analysis: Analysis, assignment: Assignment, console: Console, *, tracking: str | None = None
) -> None:
    """Print a run's results.

    Within a sweep they take one line: the sweep's table and link follow at its end. Local campaigns
    call it for the records of their processes.
    """
    sweep = assignment.sweep
    if sweep is None:
        console.show(analysis, assignment.folder, tracking=tracking)
    else:
        name = " ".join(f"{axis}={value}" for axis, value in sweep.axes.items()) or assignment.name
        console.show_in_sweep(
            analysis, assignment.folder, number=sweep.job + 1, runs=sweep.jobs, name=name
        )


def _remove_empty(replacement: RunPaths) -> None:
    """Remove a replacement folder if `--overwrite` has measured nothing."""
    if not read_points(replacement.points):
        replacement.remove()


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether an error means that the user has to change something."""
    return isinstance(error, PerfexpError) and error.exit_code == UserError.exit_code


def _warnings_of_earlier_stages(stage: str | None, folder: Path) -> Iterator[str]:
    """Yield warnings about earlier failures of the same combination, since they tend to recur."""
    for before in earlier_stages(stage, folder):
        try:
            record = Record.load(before)
        except PerfexpError:
            yield (
                f"warning: {before} has no record: that stage of this combination was not finished."
            )
            continue
        failed = next((point for point in record.points if point.status is not Status.OK), None)
        if failed is not None:
            why = ""
            if failed.error:
                why = f": {one_line(failed.error)}"
            yield (
                f"warning: in {before} this combination ended {record.status.value} "
                f"({failed.key}{why})."
            )


@contextmanager
def _logged(paths: RunPaths) -> Iterator[None]:
    """Log tracebacks from the `with` block to run.log. Report an unwritable disk as such."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (PerfexpError, OSError, MemoryError, *FOREIGN_ERRORS)):
            raise crash_report.failure(error, paths.log) from error
        story = "".join(traceback.format_exception(error)).encode(errors="replace")
        with (
            suppress(OSError),
            foreign.open_append(paths.log) as log,
        ):  # a full disk has no room for the traceback
            log.write(story)
        if isinstance(error, OSError):
            raise disk_error(error) from error
        raise


def exit_code(record: Record) -> int:
    """Return 1 if a requested measurement or profile failed, otherwise 0.

    Profiles from earlier commands do not count. It is the run's part of the command's exit code.
    """
    is_requested = bool(profiler_settings(record.plan.get("profiler") or {"name": "none"}))
    is_made = all(point.status is Status.OK for point in record.points if is_profile(point.key))
    if record.status is Status.OK and (is_made or not is_requested):
        return 0
    return 1


def _merged(points: list[Point]) -> list[Point]:
    """Return the points; timed ones also have metrics and diagnostics of their layers and profiles.

    The given points stay as they are.
    """
    by_key = {point.key: point for point in points}
    for other in points:
        key = timed_key(other.key) if is_layers(other.key) else profiled_key(other.key)
        if key == other.key or not (point := by_key.get(key)):
            continue
        codes = {doubt.code for doubt in point.doubts if doubt.rule.shared}
        # points from a record already have these metrics
        names = {metric.name for metric in point.metrics}
        doubts = list(point.doubts)
        for doubt in other.doubts:
            if doubt.code not in codes and doubt not in doubts:
                doubts.append(doubt)
        metrics = [metric for metric in other.metrics if metric.name not in names]
        by_key[key] = msgspec.structs.replace(
            point, metrics=[*point.metrics, *metrics], doubts=doubts
        )
    return [by_key[point.key] for point in points]
