"""Launch: has the points of a plan measured by workers, and gives every point a result, whatever becomes of one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.host import interrupts, untrusted
from perfexp.host.files import disk_error, write_atomically
from perfexp.host.process import Event, SilenceError, WorkerProcess, worker_command
from perfexp.profilers import About, NoProfiler, Profiler, ProfilerFailed, place_of, profiled_key
from perfexp.profilers.previous_files import Earlier
from perfexp.records.paths import RunPaths, append_line
from perfexp.records.record import (
    Key,
    Point,
    Status,
    missing,
    point_to_line,
    points_from_lines,
    read_points,
)

#: Workers that a signal may end one after the other before any point, until the points are given up.
_STARTS = 2

Listener = Callable[[Event], None]


@dataclass(kw_only=True)
class Job:
    """What is to be measured, and how its workers are started.

    Attributes:
        paths: of the run; plan.yaml is there.
        plan_sha256: of plan.yaml.
        timed: points that are timed.
        first_predictions: points whose time to first prediction is taken, each in a process of its own.
        layers: points whose layers are looked into, in a process of their own.
        profiles: points that a profiler looks at, each in a process of its own after everything else.
        again: those of them that have a result, which stays until there is a new one.
        profiler: that looks.
        settings: of the profiler: a profile that other settings made is not this one.
        command: overrides that the user typed.
        timeout_seconds: a worker that tells nothing for so long is ended; None for never.
        listener: gets the worker's events.
        refusal: why the measurement was given up before its end, if it was.
    """

    paths: RunPaths
    plan_sha256: str
    timed: Sequence[Key]
    first_predictions: Sequence[Key] = ()
    layers: Sequence[Key] = ()
    profiles: Sequence[Key] = ()
    again: Collection[Key] = ()
    profiler: Profiler = field(default_factory=NoProfiler)
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()
    timeout_seconds: float | None = None
    listener: Listener = field(default=lambda _: None)
    refusal: str | None = None

    @property
    def replicates(self) -> list[int]:
        """Numbers of the processes that measure the plan."""
        return sorted({key.replicate for key in self.timed})


class _Refused(PerfexpError):
    """The worker could not even begin; carries its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(kw_only=True)
class _Ending:
    """How a worker ended.

    Attributes:
        status: for what it leaves without a result.
        text: why, likewise.
        current: the point under way, if one was.
        hopeless: whether another worker would end in the same way.
    """

    status: Status
    text: str
    current: Key | None
    hopeless: bool


def measure(job: Job, replicate: int) -> None:
    """Measure what has no result yet of one replicate. An interrupt comes through only while a worker is waited for.

    Args:
        job: what and how.
        replicate: its number.

    Raises:
        PerfexpError: the worker refused to begin, or a result can't be written. What is finished is on disk.
        KeyboardInterrupt: the run was interrupted. Likewise.
    """
    with interrupts.held():
        for what, keys in (("timed", job.timed), ("layers", job.layers), ("ttfp", job.first_predictions)):
            _measure(job, what, replicate, [key for key in keys if key.replicate == replicate])


def profile(job: Job) -> None:
    """Make the profiles that are not there yet, or not as they are wanted; to be called when everything has been timed.

    A profiler that fails costs its profile, whose point says why; nothing else. What an earlier pass left goes when the
    new one has left something.

    Args:
        job: what and how.

    Raises:
        PerfexpError: a result can't be written. What is finished is on disk.
        KeyboardInterrupt: the run was interrupted. Likewise.
    """
    with interrupts.held():
        for number, key in enumerate(job.profiles):
            if key in job.again or missing([key], job.paths.points):
                before = _files_before(job.paths, key)
                earlier = Earlier(job.paths, worth=bool(before))
                try:
                    point = _profiled(job, number, key, earlier)
                    interrupts.check()  # one that came meanwhile: the profile is tried again then
                except BaseException:
                    earlier.put_back()
                    raise
                _settle(point, earlier, before, job.paths)
                _replace(job.paths, point)


def results(job: Job) -> list[Point]:
    """Every point's result so far, in the plan's order; `interrupted`, with the reason, where there is none.

    Args:
        job: what was to be measured.
    """
    found = {point.key: point for point in read_points(job.paths.points)}
    reason = f"not tried: {job.refusal}" if job.refusal else "the run was interrupted"
    return [
        found.get(key) or Point(key=key, status=Status.INTERRUPTED, error=reason)
        for key in (*job.timed, *job.first_predictions, *job.layers, *job.profiles)
    ]


def _measure(job: Job, what: str, replicate: int, keys: Sequence[Key]) -> None:
    """One worker after the other until every point has a result."""
    fruitless = 0
    while left := missing(keys, job.paths.points):
        ending = _one_worker(job, [f"--what={what}", f"--replicate={replicate}"])
        still = missing(keys, job.paths.points)
        fruitless = fruitless + 1 if len(still) == len(left) else 0
        if ending.current in still:
            _give_up(job.paths, [ending.current], ending)
        elif fruitless and (ending.hopeless or fruitless >= _STARTS):
            _give_up(job.paths, still, ending)


def _files_before(paths: RunPaths, key: Key) -> list[str]:
    """Names of what an earlier pass left, as far as it was a profile."""
    before = next((point for point in read_points(paths.points) if point.key == key), None)
    return list((before.facts.get("profile") or {}).get("files") or ()) if before else []


def _settle(point: Point, earlier: Earlier, before: Sequence[str], paths: RunPaths) -> None:
    """Keep the files of one pass only: of the new one, unless it left none."""
    facts = point.facts.get("profile") or {}
    if point.status is Status.OK or facts.get("files"):
        earlier.forget()
        return
    earlier.put_back()
    kept = [name for name in before if (paths.root / name).is_file()]
    if kept and "profile" in point.facts:
        facts["files"] = kept
        point.error = f"{point.error}; the files of the profile before are there as they were"


def _profiled(job: Job, number: int, key: Key, earlier: Earlier) -> Point:
    """A profile, or why there is none, as a point."""
    point = Point(key=key, status=Status.OK, started=datetime.now(UTC).isoformat(timespec="milliseconds"))
    timed = next((each for each in read_points(job.paths.points) if each.key == profiled_key(key)), None)
    if job.profiler.times and (timed is None or timed.status is not Status.OK):
        how = timed.status.value if timed else "no result"
        point.status, point.error = Status.UNSUPPORTED, f"not tried: the call was not timed ({how})"
        return point
    start = time.perf_counter_ns()
    facts = point.facts["profile"] = {"profiler": job.profiler.name, "settings": dict(job.settings)}
    try:
        _look(job, number, key, point, earlier)
    except ProfilerFailed as error:
        point.status, point.error = Status.FAILED, str(error)
        facts["files"] = error.files
    except Unsupported as error:
        point.status, point.error = Status.UNSUPPORTED, str(error)
    except (_Refused, UserError) as error:
        point.status, point.error = Status.FAILED, str(error)
    except OSError as error:
        where = f": {error.filename2 or error.filename}" if error.filename else ""
        point.status, point.error = Status.FAILED, f"{error.strerror or error}{where}"
    point.wall_seconds = (time.perf_counter_ns() - start) * 1e-9
    return point


def _look(job: Job, number: int, key: Key, point: Point, earlier: Earlier) -> None:
    """Have a worker look, then have the profiler say what it saw."""
    profiler, facts = job.profiler, point.facts["profile"]
    place = place_of(key, job.profiles, job.paths.root)
    about = About(phase=profiled_key(key).phase, device=device_facts(job), command=job.command)
    job.listener({"event": "block", "text": f"{profiler.name}: {key}"})
    prefix = profiler.command(place, about)
    earlier.make_room(profiler.outputs(place))
    told: dict[str, Any] = {}

    def listen(event: Event) -> None:
        told.update(event.get("profile") or {})
        job.listener(event)

    began = job.paths.log.stat().st_size if job.paths.log.exists() else 0
    ending = _one_worker(replace(job, listener=listen), [f"--profile={number}"], prefix)
    facts |= {"command": prefix}
    if "status" in told:
        point.status, point.error = Status(told["status"]), str(told["error"])
        return
    said = untrusted.read_bytes(job.paths.log)[began:].decode(errors="replace")
    if ending.status is Status.TIMEOUT or (ending.status is Status.KILLED and not told):
        when = f"while {profiler.name} was writing, " if told else ""
        point.status, point.error = ending.status, f"{when}{ending.text}"
        return
    if not told and not prefix:
        raise ProfilerFailed(ending.text)
    found = profiler.collect(place, about, said, told)
    if not told:
        raise ProfilerFailed(f"{profiler.name} left a profile, but {ending.text}", found.files)
    facts |= {**told, **found.facts, "files": found.files}
    point.doubts += found.doubts


def device_facts(job: Job) -> Mapping[str, Any]:
    """Facts of the device, as the timed run recorded them; none where nothing has been measured.

    Args:
        job: what was measured.
    """
    try:
        found = untrusted.json_data(untrusted.read_bytes(job.paths.environment))["environment"]["device"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _one_worker(job: Job, what: Sequence[str], prefix: Sequence[str] = ()) -> _Ending:
    """Start one worker and see it to its end."""
    command = [*prefix, *worker_command(str(job.paths.root), f"--plan-sha256={job.plan_sha256}", *what)]
    job.paths.refusal.unlink(missing_ok=True)
    process = WorkerProcess(command, job.paths.log)
    current: Key | None = None
    refusal, failure, silence = None, None, None
    try:
        for event in process.events(job.timeout_seconds):
            if event["event"] == "point":
                current = msgspec.convert(event["key"], Key)
            elif event["event"] == "done":
                current = None
            elif event["event"] == "refused":
                refusal = _Refused(event["message"], event["exit_code"])
            elif event["event"] == "failed":
                failure = event
            job.listener(event)
    except SilenceError as error:
        silence = error
    finally:
        code = process.end()
    if refusal is not None:
        job.refusal = str(refusal)
        if not any(word.startswith("--profile=") for word in what):  # the point says why there is no profile
            with suppress(OSError):  # a disk that is full is told otherwise
                job.paths.claim(job.paths.refusal)
                write_atomically(job.paths.refusal, job.refusal.encode(errors="replace") + b"\n")
        if current is not None and current not in job.profiles:
            _give_up(job.paths, [current], _Ending(status=Status.FAILED, text=job.refusal, current=None, hopeless=True))
        raise refusal
    if silence is not None and not silence.finished:
        text = f"the worker told nothing for {silence.seconds:g} s (timeout_seconds) and was ended"
        return _Ending(status=Status.TIMEOUT, text=text, current=current, hopeless=True)
    return _death(code, current, failure)


def _death(code: int, current: Key | None, failure: Event | None) -> _Ending:
    """What a worker's end says of the points that it leaves without a result."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        text = f"the worker was ended by {name}{hint}; see run.log"
        return _Ending(status=Status.KILLED, text=text, current=current, hopeless=False)
    if failure is not None:
        status = Status(failure.get("status", Status.FAILED))
        hopeless = status is not Status.KILLED
        return _Ending(status=status, text=str(failure["message"]), current=current, hopeless=hopeless)
    ended = f"the worker ended with code {code}" if code else "the worker ended without a result"
    return _Ending(status=Status.FAILED, text=f"{ended}; see run.log", current=current, hopeless=True)


def _give_up(paths: RunPaths, keys: Iterable[Key], ending: _Ending) -> None:
    _append(paths, [Point(key=key, status=ending.status, error=ending.text) for key in keys])


def _append(paths: RunPaths, points: Iterable[Point]) -> None:
    try:
        for point in points:
            append_line(paths.points, point_to_line(point))
    except OSError as error:
        raise disk_error(error) from error


def _replace(paths: RunPaths, point: Point) -> None:
    """Write a result down; one of the same key that was there goes in the same moment."""
    known = read_points(paths.points)
    if all(each.key != point.key for each in known):
        _append(paths, [point])
        return
    lines = untrusted.read_bytes(paths.points).split(b"\n")
    kept = [line + b"\n" for line in lines for each in points_from_lines(line) if each.key != point.key]
    try:
        write_atomically(paths.points, b"".join([*kept, point_to_line(point)]))
    except OSError as error:
        raise disk_error(error) from error
