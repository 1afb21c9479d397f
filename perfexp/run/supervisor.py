"""Have workers measure a plan's points; every point gets a result even if a worker dies.

A worker measures all missing points of one kind and replicate, and appends each to points.jsonl.
The first replicate's layers follow in the same worker. If it dies, the point in progress gets the
reason as its result, and another worker measures the rest. Profiles come last, each in its own
process.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from perfexp.doctor import environment
from perfexp.errors import Unsupported, UserError
from perfexp.host import foreign, interrupts
from perfexp.host.files import disk_error, write_atomically
from perfexp.host.process import Event, WorkerProcess, worker_command
from perfexp.measuring.profilers import (
    About,
    ProfileLocation,
    Profiler,
    ProfilerFailed,
    place_of,
    refuse_to_overwrite,
)
from perfexp.plan import config
from perfexp.plan.largest_batch import TRIALS, failures
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths, append_line, refuse_link
from perfexp.records.profile_keys import is_profile, profiled_key
from perfexp.records.record import (
    Key,
    Point,
    Status,
    missing,
    point_to_line,
    read_points,
    timestamp,
    without_replicate,
)
from perfexp.run.preparation import (
    Assignment,
    other_lines,
    prepare,
    profiler_settings,
    profiles_again,
    write_expected,
)
from perfexp.run.worker_query import Heard, error_of, listen
from perfexp.statistics import distributions

#: Statuses that another process would get, too.
_LASTING = (Status.UNSUPPORTED, Status.OOM, Status.OOM_PREDICTED)
#: Argument for a worker that measures its own cold start.
_COLD_START = "--what=ttfp"
#: Limit on consecutive workers killed by a signal without a result; then points are abandoned.
_STARTS = 2

Listener = Callable[[Event], None]


class Supervisor:
    """A run's plan, and the points to measure given the results in its folder.

    Attributes:
        again: profiles to repeat. Their results stay until there are new results.
        refusal: why the measurement was abandoned, e.g. a worker refused to start; None if it was
            not.
        keys: points by how they are measured: `timed`, `layers`, `ttfp` (cold starts) and `trials`
            (whether a batch fits).
        profiles: profiles, each in its own process after everything else.
        listener: called with each event of a worker.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment, self.paths = assignment, RunPaths(assignment.folder)
        self.listener: Listener = lambda _: None
        self.refusal: str | None = None
        #: Results of `measured`, and the file's state when they were read.
        self._results: list[Point] = []
        self._version: tuple[Any, ...] | None = None

    def prepare(self) -> None:
        """Write the plan and choose the points to measure.

        `Job` calls it when its folder is locked.

        Raises:
            UserError: the folder has another plan.
        """
        self.plan, self.plain = self.assignment.plan, self.assignment.plain
        self.keys: dict[str, list[Key]] = {"timed": []}
        self.profiler: Profiler = config.build(self.plan.profiler)
        self.again = profiles_again(self.paths, self.plan)
        self.plan_sha256 = prepare(self.paths, self.plan, self.plain, self.again)
        self.extend()

    @property
    def timed(self) -> list[Key]:
        """Return the timed points."""
        return self.keys["timed"]

    def extend(self) -> None:
        """Choose the points again, given the results so far; earlier profiles stay included.

        It is called again when results may have added some.
        """
        plan, results, before = self.plan, self.measured(), self.timed
        finished = [point.key for point in results]
        self.profiles = plan.profile_keys(results) or list(filter(is_profile, finished))
        self.keys = {
            "timed": plan.timed_keys(results),
            "ttfp": plan.first_prediction_keys(results),
            "layers": plan.layer_keys(results),
            "trials": plan.trial_keys(results),
        }
        if not self.profiler.times:  # calls are only marked
            for keys in self.keys.values():
                keys[:] = [key for key in keys if key in finished]
        elif (
            before and before != self.timed and not plan.is_sparse
        ):  # `perfexp status` counts chosen points
            write_expected(self.paths, plan, results)

    def measured(self) -> list[Point]:
        """Return the results so far, which callers must not change.

        The file is read again only if it has changed.
        """
        try:
            found = self.paths.points.stat()
        except OSError:  # a missing file has no results; reading reports other errors
            return read_points(self.paths.points)
        version = (self.paths.points, found.st_ino, found.st_size, found.st_mtime_ns)
        if version != self._version:
            self._results, self._version = read_points(self.paths.points), version
        return list(self._results)

    def left(self) -> list[Key]:
        """Return the points without a result, and profiles to repeat, in measuring order."""
        planned = [key for kind in ("timed", "ttfp", "layers") for key in self.keys[kind]]
        left = missing([*planned, *self.profiles], self.measured())
        return left + [key for key in self.profiles if key in self.again and key not in left]


def replicates(timed: Iterable[Key]) -> list[int]:
    """Return replicate numbers in measuring order.

    If the first replicate has more points than others, it is placed in the middle. It stays first
    if only it trains: the others may infer with its weights. `Job.measure` goes through them.
    """
    timed = list(timed)
    points = Counter(key.replicate for key in timed)
    if not points:
        return []
    first, *others = sorted(points)
    trains_alone = {key.replicate for key in timed if key.phase == "train"} == {first} and others
    before = 0
    if points[first] > min(points.values()) and not trains_alone:
        before = len(others) // 2
    return [*others[:before], first, *others[before:]]


class _Ending(NamedTuple):
    """How a worker ended, for the points that it left without a result.

    Attributes:
        status: status for points without a result.
        text: the reason.
        current: the point in progress, if any.
    """

    status: Status
    text: str
    current: Key | None = None


def measure(job: Supervisor, replicate: int) -> None:
    """Measure a replicate's points that have no result.

    Interrupts take effect while waiting for a worker. Finished points are on disk before an
    exception is raised. `Job.measure` calls it for each replicate.

    Raises:
        PerfexpError: a worker refused to start, or a result cannot be written.
    """
    with interrupts.held():
        for kind in ("timed", "layers", "ttfp"):
            if kind != "layers":
                _pass_over(job, kind, replicate)
            _measure(job, kind, replicate)


def profile(job: Supervisor) -> None:
    """Make missing and outdated profiles, after everything has been timed.

    If a profiler fails, only its profile is affected. Exceptions are the same as in `measure`.
    `Job.measure` calls it after the last replicate.
    """
    job.extend()
    with interrupts.held():
        for key in job.profiles:
            if key in job.again or missing([key], job.measured()):
                _replace(job, _profiled(job, key))


def results(job: Supervisor) -> list[Point]:
    """Return a result for every point, in plan order.

    Points without a result are `interrupted`, with the reason. Two kinds of points follow the
    plan's points: smaller batches that fit instead (sweep.oom=shrink), and points that ran out of
    memory although their batch fitted before (batch_size=max). `Job.assembled` builds the record
    from them.
    """
    measured = {point.key: point for point in job.measured()}
    reason = "the run was interrupted"
    if job.refusal:
        reason = f"not tried: {job.refusal}"

    def result(key: Key) -> Point:
        return measured.get(key) or Point(key=key, status=Status.INTERRUPTED, error=reason)

    further = []
    planned = set(job.timed)
    for key, point in measured.items():
        if key not in planned and point.facts.keys() & {"shrunk_from", TRIALS}:
            further.append(point)
    others = [*job.keys["ttfp"], *job.keys["layers"], *job.profiles]
    return [*map(result, job.timed), *further, *map(result, others)]


def _measure(job: Supervisor, kind: str, replicate: int) -> None:
    """Start workers until all points of one kind have a result.

    Args:
        kind: kind of points, see `Supervisor.keys`.
        replicate: replicate to measure.
    """
    fruitless = 0  # workers in a row without a result
    while left := _left(job, kind, replicate):
        if (
            kind == "timed" and job.keys["trials"]
        ):  # some points need a batch search first, or again
            _measure(job, "trials", replicate)
            continue
        if failed := failures(left, job.measured()):
            _append(job.paths, failed)
            continue
        ending = _one_worker(job, [f"--what={kind}", f"--replicate={replicate}"])
        still = _left(job, kind, replicate)
        fruitless = fruitless + 1 if still == left else 0
        if ending.current is not None and missing([ending.current], job.measured()):
            _abandon(job.paths, [ending.current], ending)
        elif fruitless and (ending.status is not Status.KILLED or fruitless >= _STARTS):
            if kind == "trials":  # a worker makes one trial
                del still[1:]
            _abandon(job.paths, still, ending)


def _left(job: Supervisor, kind: str, replicate: int) -> list[Key]:
    """Return the points of one kind that have no result, after choosing them again."""
    job.extend()
    if kind == "trials":  # any replicate's process makes them
        return job.keys[kind]
    return missing([key for key in job.keys[kind] if key.replicate == replicate], job.measured())


def _pass_over(job: Supervisor, kind: str, replicate: int) -> None:
    """Fail points in advance if the same point failed in another process for lasting reasons.

    For example, points out of memory need no second attempt. This includes cold starts.
    """
    failed = {}
    for point in job.measured():
        if point.status in _LASTING:
            failed[without_replicate(point.key)] = point
    points = []
    for key in _left(job, kind, replicate):
        call = msgspec.structs.replace(key, phase="inference") if kind == "ttfp" else key
        if before := failed.get(without_replicate(call)):
            points.append(
                Point(
                    key=key, status=before.status, error=f"not tried: {before.error or before.key}"
                )
            )
    _append(job.paths, points)


def _profiled(job: Supervisor, key: Key) -> Point:
    """Make a profile in a separate folder, and return it as a point.

    Its files, if any, replace the files from earlier passes. A failure is the point's status.
    """
    point = Point(key=key, status=Status.OK, started=timestamp())
    timed = next((other for other in job.measured() if other.key == profiled_key(key)), None)
    if job.profiler.times and (timed is None or timed.status is not Status.OK):
        how = "no result"
        if timed:
            how = timed.status.value
        point.status, point.error = Status.UNSUPPORTED, f"not tried: the call was not timed ({how})"
        return point
    start, folder = time.perf_counter_ns(), job.paths.profile
    point.facts["profile"] = {
        "profiler": job.profiler.name,
        "settings": profiler_settings(job.plan.profiler),
    }
    location = place_of(key, job.profiles, folder)
    refuse_link(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        for action in (_run_profiler, _keep_files):
            _attempt(point, partial(action, job, point, location))
            interrupts.check()  # the next command tries the profile again
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    point.wall_seconds = (time.perf_counter_ns() - start) * 1e-9
    return point


def _attempt(point: Point, action: Callable[[], None]) -> None:
    """Run a profiling step; an error becomes the status of its point."""
    try:
        action()
    except Unsupported as error:
        point.status, point.error = Status.UNSUPPORTED, str(error)
    except (ProfilerFailed, UserError) as error:
        point.status, point.error = Status.FAILED, str(error)
        if isinstance(error, ProfilerFailed):
            point.facts["profile"]["files"] = error.files
    except OSError as error:
        file_text = ""
        if error.filename:
            file_text = f": {error.filename2 or error.filename}"
        point.status, point.error = Status.FAILED, f"{error.strerror or error}{file_text}"


def _keep_files(job: Supervisor, point: Point, location: ProfileLocation) -> None:
    """Move a new profile's files into the run's folder.

    Without new files the earlier files stay.

    Args:
        location: file or folder that the profiler writes.
    """
    root, facts, outputs = job.paths.root, point.facts["profile"], job.profiler.outputs(location)
    if point.status is Status.OK or facts.get("files"):
        existing = [path for path in outputs if path.is_file()]
        for path in existing:
            job.paths.claim(root / path.name)
        for path in existing:
            path.replace(root / path.name)
        for path in outputs:
            if path not in existing:
                (root / path.name).unlink(missing_ok=True)
        return
    earlier = {path.name for path in outputs if (root / path.name).is_file()}
    earlier.intersection_update(job.paths.claimed())
    if earlier:
        facts["files"] = sorted(earlier)
        point.error = f"{point.error}; the files of the earlier profile are unchanged"


def _run_profiler(job: Supervisor, point: Point, location: ProfileLocation) -> None:
    """Run a worker under the profiler, and read the profile into the point's facts.

    Raises:
        ProfilerFailed: there is no usable profile.
    """
    profiler, key, facts = job.profiler, point.key, point.facts["profile"]
    device = recorded_environment(job)[0].get("device") or {}
    about = About(phase=profiled_key(key).phase, device=device, command=job.plain["command"])
    job.listener({"event": "block", "text": f"{profiler.name}: {key}"})
    prefix, root = profiler.command(location, about), job.paths.root
    targets = [root / path.name for path in profiler.outputs(location)]
    refuse_to_overwrite(targets, root, "move it away and repeat the command")
    reported: dict[str, Any] = {}
    began = 0
    if job.paths.log.exists():
        began = job.paths.log.stat().st_size
    ending = _one_worker(job, [f"--profile={job.profiles.index(key)}"], prefix, reported)
    facts |= {"command": prefix}
    if "status" in reported:
        point.status, point.error = Status(reported["status"]), str(reported["error"])
        return
    log = foreign.read_bytes(job.paths.log)[began:].decode(errors="replace")
    if ending.status is Status.TIMEOUT or (ending.status is Status.KILLED and not reported):
        when = ""
        if reported:
            when = f"while {profiler.name} was writing, "
        point.status, point.error = ending.status, f"{when}{ending.text}"
        return
    if not reported and not prefix:
        raise ProfilerFailed(ending.text)
    collected = profiler.collect(location, about, log, reported)
    if not reported:
        raise ProfilerFailed(f"{profiler.name} left a profile, but {ending.text}", collected.files)
    facts |= {**reported, **collected.facts, "files": collected.files}
    point.doubts += collected.doubts


def recorded_environment(job: Supervisor) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Return the recorded environment and its diagnostics; empty if no worker has begun.

    The first worker writes it.
    """
    try:
        return environment.load(job.paths.environment)
    except UserError:
        return {}, []


def _one_worker(
    job: Supervisor,
    what: Sequence[str],
    prefix: Sequence[str] = (),
    profile: dict[str, Any] | None = None,
) -> _Ending:
    """Start a worker and wait until it ends.

    Args:
        what: arguments for the worker, such as `--what=timed`.
        prefix: profiler command in front of the worker's.
        profile: dictionary to fill with the worker's report on its profile.

    Raises:
        PerfexpError: the worker refused its work.
    """
    command = [
        *prefix,
        *worker_command(str(job.paths.root), f"--plan-sha256={job.plan_sha256}", *what),
    ]
    job.paths.refusal.unlink(missing_ok=True)
    imports = None if prefix or _COLD_START in what else config.imports(job.plain)
    process = WorkerProcess(command, job.paths.log, imports=imports)
    if _COLD_START not in what:
        distributions.preload()  # the listener must not do that while the worker measures
    current: Key | None = None

    def take(event: Event) -> None:
        """Remember the point at work and the profile's facts; pass the event on."""
        nonlocal current
        if event["event"] == "point":
            current = msgspec.convert(event["key"], Key)
        elif event["event"] in ("done", "left"):
            current = None
        if profile is not None:
            profile.update(event.get("profile") or {})
            Status(profile.get("status", Status.OK))
        job.listener(event)

    heard = listen(process, job.plan.timeout_seconds, take)
    if refused := heard.last.get("refused"):
        if profile is not None:  # its point has the reason
            raise UserError(refused["message"])
        job.refusal = refused["message"]
        with suppress(OSError):  # a full disk is reported elsewhere
            job.paths.claim(job.paths.refusal)
            write_atomically(job.paths.refusal, refused["message"].encode(errors="replace") + b"\n")
        if current is not None:
            _abandon(job.paths, [current], _Ending(Status.FAILED, refused["message"]))
        raise error_of(refused)
    status, text = _judged(heard)
    return _Ending(status, text, current)


def _judged(heard: Heard) -> tuple[Status, str]:
    """Return status and reason for the point during which a worker ended.

    The worker may have timed out, been killed, or failed with a message.
    """
    if heard.termination:
        status, why = Status.TIMEOUT, " (timeout_seconds)"
        if heard.garbled:
            status, why = Status.FAILED, ""
        return status, f"the worker {heard.termination}{why}"
    if heard.code < 0:
        hint = ""
        if heard.code == -signal.SIGKILL:
            hint = "; the system may have run out of memory"
        return Status.KILLED, f"the worker {heard.ending}{hint}; see details/run.log"
    if failure := heard.last.get("failed"):
        return Status(failure.get("status", Status.FAILED)), failure["message"]
    text = "ended without a result"
    if heard.code:
        text = heard.ending
    return Status.FAILED, f"the worker {text}; see details/run.log"


def _abandon(paths: RunPaths, keys: Iterable[Key], ending: _Ending) -> None:
    """Give points the result that the worker's end means, so that they are not tried again."""
    _append(paths, [Point(key=key, status=ending.status, error=ending.text) for key in keys])


def _append(paths: RunPaths, points: Iterable[Point]) -> None:
    """Append results to points.jsonl.

    Raises:
        PerfexpError: the file cannot be written.
    """
    try:
        for point in points:
            append_line(paths.points, point_to_line(point))
    except OSError as error:
        raise disk_error(error) from error


def _replace(job: Supervisor, point: Point) -> None:
    """Append a result, or atomically replace an earlier result with the same key."""
    if all(other.key != point.key for other in job.measured()):
        _append(job.paths, [point])
        return
    try:
        write_atomically(
            job.paths.points, b"".join([*other_lines(job.paths, {point.key}), point_to_line(point)])
        )
    except OSError as error:
        raise disk_error(error) from error
