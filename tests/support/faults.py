"""Faults: whole runs in real processes, something that goes wrong at a random moment, and what has to hold afterwards.

A trial starts a run, lets one thing go wrong (a signal, a scripted failure, a full disk, a server that is of no use),
waits for the end, goes on with the run and says what did not hold. Its number is its seed: it gives the kind of fault,
the plan, and the moment, as far as the machine's timing is the same.

`tests/end_to_end/test_faults.py` runs a few trials, and `validation/faults.py` many.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from perfexp.devices import lock
from perfexp.errors import PerfexpError
from perfexp.plan import config, plan_file
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, Point, Record, Status, points_from_lines
from perfexp.records.sweep_record import Sweep

ROOT = Path(__file__).resolve().parents[2]
#: In the environment of every process of a trial, with the trial's folder.
MARKER = "PERFEXP_TRIAL"
#: So long a run may take, whatever happens to it; far more than any does.
BOUND_SECONDS = 150.0
#: So long what was killed may take to vanish: torch's loaders look every five seconds whether their parent is there.
VANISH_SECONDS = 20.0
#: A worker that is silent for so long is ended: longer than its start takes on a busy machine.
SILENCE_SECONDS, TORCH_SILENCE_SECONDS = 3, 20

#: Results that no later run may change or lose.
FINAL = {Status.OK, Status.OOM, Status.OOM_PREDICTED, Status.UNSUPPORTED}

COMMON = ("tracking=none", "stopping=fixed", "output_dir=run")
FAKE = ("model=fake", "gpu=fake", "cold_start=true", "stopping.measure=300")
TORCH = (
    "model=torchvision",
    "model.name=squeezenet1_1",
    "gpu=cpu",
    "cold_start=true",
    "execution.threads=1",
)
FEW_CALLS = ("stopping.warmup=1", "stopping.measure=3")


def sizes(count: int, first: int = 32, step: int = 1) -> str:
    return f"input_size=[{','.join(str(first + step * number) for number in range(count))}]"


@dataclass(frozen=True)
class Course:
    """What is measured.

    Attributes:
        arguments: of the command.
        points: how many there are, first predictions included.
        jobs: of a sweep; 0 for a run of its own.
    """

    arguments: tuple[str, ...]
    points: int
    jobs: int = 0

    @property
    def workers(self) -> int:
        """How many processes measure it if nothing goes wrong."""
        replicates = 2 if "processes=2" in self.arguments else 1
        return max(self.jobs, 1) * replicates * (1 if "cold_start=false" in self.arguments else 2)


def courses(count: int) -> dict[str, Course]:
    """On the scripted device, about `count` points each."""
    half, quarter = count // 2, count // 4
    return {
        "sizes": Course((*FAKE, sizes(count), "cold_start=false"), count),
        "training": Course((*FAKE, sizes(half), "mode=train_inference"), 2 * half + 1),
        "replicates": Course((*FAKE, sizes(half), "processes=2"), 2 * half + 2),
        "sweep": Course((*FAKE, sizes(half), "-m", "batch_size=1,2"), 2 * half + 2, jobs=2),
        "rounds": Course(
            (*FAKE, sizes(quarter), "-m", "batch_size=1,2", "processes=2", "cold_start=false"),
            4 * quarter,
            2,
        ),
    }


def torch_courses(pictures: Path) -> dict[str, Course]:
    """With torch on the processor; with loaders of pictures a worker has children of its own."""
    loaders = ("data=images", f"data.root={pictures}", "data.workers=2")
    return {
        "synthetic": Course(
            (*TORCH, *FEW_CALLS, sizes(5, 64, 8), "mode=train_inference", "cold_start=false"), 10
        ),
        "pictures": Course((*TORCH, *FEW_CALLS, sizes(5, 64, 8), *loaders), 6),
    }


def draw_pictures(folder: Path) -> Path:
    """A few generated pictures of two classes."""
    from PIL import Image

    for name, number in itertools.product(("one", "two"), range(4)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 96), (40 * number, 80, 120)).save(folder / name / f"{number}.png")
    return folder


@dataclass
class Outcome:
    """What a trial showed.

    Attributes:
        number: of the trial.
        kind: of the fault.
        text: what was done, in words.
        finished: results that were final before the fault.
        lost: those of them that are not there any more.
        left: processes that kept running.
        problems: what did not hold.
    """

    number: int
    kind: str
    text: str = ""
    finished: int = 0
    lost: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Fault:
    """What goes wrong in a trial, and what it may lead to.

    Attributes:
        text: in words.
        settings: arguments of the first run and of those that go on with it.
        once: arguments of the first run only.
        inject: does it, at the chosen moment; None where it is scripted.
        mend: between the end of the run and the next one.
        leads_to: what may become of a point, beside `ok`.
        most: points with more pixels than this get `scripted`, in every run.
        scripted: likewise.
        stays: what may have become of a point once the run was gone on with, beside `ok`.
        kills_parent: whether the run ends without a word.
        code: what the first run's exit code may be, given that of its record; None for the usual rule.
        complete: whether a folder with points has to have a record after the first run.
        at_most: so many points, at most, may be the worse for it; None for any number.
    """

    text: str
    settings: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    inject: Callable[[], None] | None = None
    mend: Callable[[], None] | None = None
    leads_to: frozenset[Status] = frozenset()
    most: int | None = None
    scripted: Status = Status.OK
    stays: frozenset[Status] = frozenset()
    kills_parent: bool = False
    code: Callable[[int, int | None], bool] | None = None
    complete: bool = True
    at_most: int | None = None


class Trial:
    """One run with one fault.

    Args:
        number: its seed.
        folder: where it happens; empty.
        short: whether it measures few points and draws nothing.
        pictures: for a trial with torch on the processor, a folder of pictures.
        kind: of the fault; the number's if not given.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        *,
        short: bool = False,
        pictures: Path | None = None,
        kind: str | None = None,
    ) -> None:
        self.torch = pictures is not None
        self.module = "tests.support.undrawn" if short else "perfexp"
        kinds = TORCH_KINDS if self.torch else KINDS
        self.kind = kind or list(kinds)[number % len(kinds)]
        self.random = random.Random(f"{number} {self.torch}")
        self.folder = folder
        self.run = folder / "run"
        self.stack = ExitStack()
        self.outcome = Outcome(number, self.kind)
        self.lock_name = f"trial-{os.getpid()}-{folder.name}"
        choice = torch_courses(pictures) if pictures else courses(12 if short else 40)
        if self.kind == "loader":
            choice = {"pictures": choice["pictures"]}
        if self.kind == "hang":  # each point that hangs is waited for, twice
            choice = {name: choice[name] for name in ("sizes", "sweep")}
        self.course_name = self.random.choice(list(choice))
        self.course = choice[self.course_name]
        self.moment = _Moment.drawn(self.random, self.course.points, 4.0 if self.torch else 0.8)
        self.process: subprocess.Popen[bytes] | None = None
        self.fault: Fault = kinds[self.kind](self)
        self._final: set[tuple[Path, bytes]] = set()

    def go(self) -> Outcome:
        """Run it; what did not hold is in the outcome's problems."""
        outcome = self.outcome
        outcome.text = f"{self.course_name}; {self.fault.text}" + (
            f"; {self.moment}" if self.fault.inject else ""
        )
        try:
            with self.stack:
                self._go()
        except _Violation as violation:
            outcome.problems.append(str(violation))
        except Exception as error:
            outcome.problems.append(f"the trial itself failed: {type(error).__name__}: {error}")
        finally:
            for process in self._marked():
                with suppress(psutil.Error):
                    process.kill()
        return outcome

    def report(self) -> str:
        """What was done, what did not hold, what was printed, and the end of each run's log."""
        logs = [
            (path, path.read_text(errors="replace")) for path in sorted(self.run.rglob("run.log"))
        ]
        ends = [
            f"{path.relative_to(self.folder)}:\n" + "\n".join(text.splitlines()[-30:])
            for path, text in logs
        ]
        printed = (self.folder / "printed.txt").read_text(errors="replace")[-3000:]
        return "\n".join([self.outcome.text, *self.outcome.problems, printed, *ends])

    def _go(self) -> None:
        fault, outcome = self.fault, self.outcome
        own = () if self.torch else (f"+gpu.script.lock_name={self.lock_name}",)
        arguments = (*self.course.arguments, *own, *COMMON, *fault.settings)
        self._start((*arguments, *fault.once))
        hit = fault.inject is not None and self._wait_for_moment()
        self._look()
        outcome.finished = len(self._final)
        if hit and fault.inject:
            fault.inject()
        code = self._end("the run")
        at_once = fault.kills_parent and fault.mend is None and self.random.random() < 0.5
        if not at_once:
            self._nothing_runs("the run")
        self._look()
        if not at_once:
            self._check_first(code, hit)
        if fault.mend:
            fault.mend()
        outcome.finished = max(outcome.finished, len(self._final))
        how, command = self._resumption(arguments)
        outcome.text += f"; {how}{' at once' if at_once else ''}"
        self._start(command)
        code = self._end("the resumed run")
        self._nothing_runs("the resumed run")
        self._look()
        self._check_last(code)

    def _start(self, arguments: Sequence[str]) -> None:
        (self.folder / "temporary").mkdir(exist_ok=True)
        environment = {
            **os.environ,
            MARKER: str(self.folder),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.folder / "temporary"),
        }
        with (self.folder / "printed.txt").open("ab") as printed:
            printed.write(f"$ perfexp {' '.join(arguments)}\n".encode())
            printed.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )

    def _end(self, what: str) -> int:
        assert self.process is not None
        try:
            return self.process.wait(BOUND_SECONDS)
        except subprocess.TimeoutExpired:
            raise _Violation(f"{what} did not end within {BOUND_SECONDS:g} s") from None

    def _wait_for_moment(self) -> bool:
        """Whether the run was still there at the moment that was drawn."""
        process = self.process
        assert process is not None
        lines = _Lines(self.run)
        self._until(lambda: lines.count() >= self.moment.points)
        with suppress(subprocess.TimeoutExpired):  # a moment is drawn, nothing is waited for
            process.wait(self.moment.seconds)
        return process.poll() is None

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a run does, or for its end."""
        process, end = self.process, time.monotonic() + BOUND_SECONDS
        assert process is not None
        while not condition():
            if process.poll() is not None:
                return
            if time.monotonic() > end:
                raise _Violation(f"it did not come to {self.moment} within {BOUND_SECONDS:g} s")
            time.sleep(0.004)

    def worker(self) -> psutil.Process | None:
        """The worker; None if the run ends before there is one."""

        def workers() -> list[psutil.Process]:
            forked = (
                child
                for server in self._children("perfexp.worker.server")
                for child in server.children()
            )
            return [*forked, *self._children("perfexp.worker.entry")]

        return self._first(workers)

    def server(self) -> psutil.Process | None:
        """The process from which workers are forked; None if the run ends before there is one."""
        return self._first(lambda: self._children("perfexp.worker.server"))

    def _children(self, module: str) -> list[psutil.Process]:
        """Child processes of the run that execute a module; before, each is a copy of the parent that waits for it."""
        assert self.process is not None
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if module in child.cmdline()
        ]

    def _first(self, look: Callable[[], list[psutil.Process]]) -> psutil.Process | None:
        found: list[psutil.Process] = []

        def is_there() -> bool:
            with suppress(psutil.Error):
                found.extend(look())
            return bool(found)

        self._until(is_there)
        return found[0] if found else None

    def folders(self) -> list[Path]:
        """The folders of runs that there are."""
        return sorted(file.parent.parent for file in self.run.rglob("run.log"))

    def _look(self) -> None:
        """Remember every result that is final, and see that none which was is gone."""
        now = {(folder, line) for folder in self.folders() for line in _final_lines(folder)}
        gone = self._final - now
        if gone:
            self.outcome.lost += len(gone)
            where = ", ".join(sorted({str(folder.relative_to(self.folder)) for folder, _ in gone}))
            self._final -= gone
            self.outcome.problems.append(
                f"{len(gone)} finished points are not in points.jsonl any more ({where})"
            )
        self._final |= now

    def forget(self, folder: Path, line: bytes) -> None:
        """A line that the trial itself has cut."""
        self._final.discard((folder, line))

    def _marked(self) -> list[psutil.Process]:
        """All processes of this trial; those that have ended but for their parent's notice have no environment."""
        mark, found = f"{MARKER}={self.folder}".encode(), []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def _nothing_runs(self, what: str) -> None:
        """Wait until all processes have gone, and with them their locks, which the system frees a little later."""
        end = time.monotonic() + VANISH_SECONDS
        while left := self._marked():
            if time.monotonic() > end:
                self.outcome.left += len(left)
                told = []
                for process in left:
                    with suppress(psutil.Error):
                        told.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
                raise _Violation(f"{what} left running: {'; '.join(told)}")
            psutil.wait_procs(left, timeout=0.1)
        while locked := [str(path) for path in self._locked()]:
            if time.monotonic() > end:
                raise _Violation(f"{what} left locked: {', '.join(locked)}")
            time.sleep(0.01)

    def _locked(self) -> list[Path]:
        """Folders and the device; the processor's lock is every trial's, and goes with its process."""
        device = lock.lock_path(self.lock_name)
        return [
            path
            for path in (*self.folder.rglob("run.log"), device)
            if path.exists() and _is_locked(path)
        ]

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.outcome.problems.append(problem)

    def _records(self) -> dict[Path, Record]:
        """The records, each checked against its plan."""
        records = {}
        for folder in self.folders():
            if not (folder / "record.json").exists():
                continue
            try:
                records[folder] = record = Record.load(folder)
            except PerfexpError as error:
                self.outcome.problems.append(str(error))
                continue
            keys = [point.key for point in record.points]
            self._check(
                keys == _planned(folder),
                f"{folder.name}: the record's points are not those of the plan",
            )
        return records

    def _check_first(self, code: int, hit: bool) -> None:
        """What has to hold once the run with the fault has ended."""
        fault, records = self.fault, self._records()
        if hit and fault.kills_parent:
            return self._check(
                code == -signal.SIGKILL, f"exit code {code} of a parent that was killed"
            )
        points = [point for record in records.values() for point in record.points]
        statuses = Counter(point.status for point in points)
        whole = len(points) == self.course.points
        usual = None if not whole else 0 if set(statuses) == {Status.OK} else 1
        if fault.code and (hit or fault.inject is None):
            self._check(fault.code(code, usual), f"exit code {code}, statuses {dict(statuses)}")
        else:
            self._check(
                code == usual, f"exit code {code}, statuses {dict(statuses)}, {len(points)} points"
            )
        if fault.complete:
            for folder in self.folders():
                self._check(
                    folder in records or not _lines(folder),
                    f"{folder.name} has points and no record",
                )
        wrong = [point for point in points if point.status not in self._possible(point, hit)]
        self._check(not wrong, f"after the run: {_told(wrong)}")
        if hit and fault.at_most is not None:
            bad = len(points) - statuses[Status.OK]
            self._check(
                bad <= fault.at_most,
                f"{bad} points are not ok, {fault.at_most} at most were under way",
            )
        printed = (self.folder / "printed.txt").read_text()
        self._check("Traceback" not in printed or code < 0, "a traceback was printed")

    def _possible(self, point: Point, hit: bool) -> set[Status]:
        if self._is_scripted(point.key):
            return {self.fault.scripted}
        return {Status.OK} | (self.fault.leads_to if hit else set())

    def _is_scripted(self, key: Key) -> bool:
        return self.fault.most is not None and key.pixels * key.batch_size > self.fault.most

    def _check_last(self, code: int) -> None:
        """What has to hold once the run was gone on with."""
        records = self._records()
        points = [point for record in records.values() for point in record.points]
        self._check(
            len(points) == self.course.points,
            f"{len(points)} of {self.course.points} points in the end",
        )
        stays = self.fault.stays
        wrong = [
            point
            for point in points
            if point.status
            not in ({self.fault.scripted} if self._is_scripted(point.key) else {Status.OK} | stays)
        ]
        self._check(not wrong, f"in the end: {_told(wrong)}")
        expected = 0 if all(point.status is Status.OK for point in points) else 1
        self._check(code == expected, f"exit code {code} of the resumed run")
        for folder, record in records.items():
            written = [
                point.key
                for point in points_from_lines((folder / "details" / "points.jsonl").read_bytes())
            ]
            self._check(
                len(written) == len(set(written)), f"{folder.name}: a point is written twice"
            )
            self._check(
                set(written) == {point.key for point in record.points},
                f"{folder.name}: points without a line",
            )
            known = set(RunPaths(folder).claimed())
            files = [path for path in folder.rglob("*") if path.is_file()]
            names = [path.relative_to(folder).as_posix() for path in files]
            litter = [name for name in names if name not in known]
            self._check(not litter, f"{folder.name}: nobody knows of {litter}")
        if self.course.jobs:
            sweep = Sweep.load(self.run)
            jobs = sorted(child.job for child in sweep.children)
            self._check(jobs == list(range(self.course.jobs)), f"sweep.json lists the runs {jobs}")
            self._check(sweep.ended is not None, "sweep.json has no end")
            found = {(child.job, child.status) for child in sweep.children}
            told = {
                (record.sweep.job, record.status) for record in records.values() if record.sweep
            }
            self._check(found == told, f"sweep.json tells {found}, the records {told}")
        printed = (self.folder / "printed.txt").read_text().rpartition("$ perfexp")[2]
        self._check("Traceback" not in printed, "a traceback was printed by the resumed run")

    def _resumption(self, arguments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        begun = (self.run / ("sweep.json" if self.course.jobs else "details/plan.yaml")).exists()
        if begun and self.random.random() < 0.5:
            places = (
                text for text in arguments if text.startswith("data.root=")
            )  # which a file may not choose
            return "gone on with", ("resume=run", *places)
        return "repeated", tuple(arguments)


@dataclass(frozen=True)
class _Moment:
    """So many seconds after so many points."""

    points: int
    seconds: float

    @classmethod
    def drawn(cls, generator: random.Random, points: int, start_seconds: float) -> _Moment:
        """During the start, between two points, or while the record is written."""
        part = generator.random()
        if part < 0.2:
            return cls(0, generator.uniform(0, 1.5 * start_seconds))
        if part < 0.75:
            return cls(generator.randint(1, points - 1), generator.uniform(0, 0.03))
        return cls(points, generator.uniform(0, 0.8))

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.1f} ms after {self.points} points"


class _Violation(Exception):
    """Something did not hold, and the trial can't go on."""


class _Lines:
    """Counts the lines of all points.jsonl below a folder, reading only what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}

    def count(self) -> int:
        for path in (
            self._folder / "details" / "points.jsonl",
            *self._folder.glob("*/details/points.jsonl"),
        ):
            with suppress(OSError), path.open("rb") as file:
                offset, lines = self._seen.get(path, (0, 0))
                file.seek(offset)
                new = file.read()
                self._seen[path] = offset + len(new), lines + new.count(b"\n")
        return sum(lines for _, lines in self._seen.values())


def _lines(folder: Path) -> list[bytes]:
    """The complete lines of a points.jsonl, among them a last one that lacks its end only."""
    file = folder / "details" / "points.jsonl"
    *complete, rest = (file.read_bytes() if file.exists() else b"").split(b"\n")
    return [line + b"\n" for line in [*complete, *([rest] if points_from_lines(rest) else [])]]


def _final_lines(folder: Path) -> list[bytes]:
    return [line for line in _lines(folder) if points_from_lines(line)[0].status in FINAL]


def _planned(folder: Path) -> list[Key]:
    plan = config.typed(plan_file.read(folder / "details" / "plan.yaml"))
    return [*plan.timed_keys(), *plan.first_prediction_keys()]


def _told(points: Sequence[Point]) -> str:
    return "; ".join(f"{point.key} is {point.status} ({point.error})" for point in points[:3])


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _silence(trial: Trial) -> str:
    return f"timeout_seconds={TORCH_SILENCE_SECONDS if trial.torch else SILENCE_SECONDS}"


def _signalled(trial: Trial, number: signal.Signals) -> Fault:
    def inject() -> None:
        worker = trial.worker()
        if worker is not None:
            with suppress(psutil.Error):
                worker.send_signal(number)

    return Fault(text=f"{number.name} to the worker", inject=inject)


def kill_worker(trial: Trial) -> Fault:
    number = trial.random.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGTERM])
    return replace(_signalled(trial, number), leads_to=frozenset({Status.KILLED}), at_most=1)


def kill_server(trial: Trial) -> Fault:
    """Its worker ends with it, and the run goes on with another server."""
    number = trial.random.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])

    def inject() -> None:
        server = trial.server()
        if server is not None:
            with suppress(psutil.Error):
                server.send_signal(number)

    return Fault(
        text=f"{number.name} to the fork server",
        inject=inject,
        leads_to=frozenset({Status.KILLED}),
        at_most=1,
    )


def stop_worker(trial: Trial) -> Fault:
    """A worker that falls silent before it has finished anything costs all points, a later one that under way."""
    alone = trial.course.workers == 1 and trial.moment.points > 0
    fault = _signalled(trial, signal.SIGSTOP)
    leads_to, at_most = frozenset({Status.TIMEOUT}), 1 if alone else None
    return replace(fault, settings=(_silence(trial),), leads_to=leads_to, at_most=at_most)


def kill_parent(trial: Trial) -> Fault:
    def inject() -> None:
        assert trial.process is not None
        trial.process.kill()

    return Fault(text="SIGKILL to the parent", inject=inject, kills_parent=True, complete=False)


def interrupt(trial: Trial) -> Fault:
    first, second = (trial.random.choice([signal.SIGINT, signal.SIGTERM]) for _ in range(2))
    twice = trial.random.random() < 0.5
    gap_seconds = trial.random.choice(
        [0.0, trial.random.uniform(0, 0.01), trial.random.uniform(0, 0.4)]
    )

    def inject() -> None:
        process = trial.process
        assert process is not None
        process.send_signal(first)
        if twice:
            with suppress(subprocess.TimeoutExpired):
                process.wait(gap_seconds)
            process.send_signal(second)

    def code(code: int, usual: int | None) -> bool:
        """A process that has not begun, or has nothing left to do, ends by the signal as any other does."""
        begun = any(map(_lines, trial.folders()))
        return code in (130, usual) or (code in (-first, -second) and (usual == 0 or not begun))

    text = (
        f"{first.name} and {second.name} after {1e3 * gap_seconds:.1f} ms" if twice else first.name
    )
    return Fault(text=text, inject=inject, leads_to=frozenset({Status.INTERRUPTED}), code=code)


def _limited(trial: Trial) -> Fault:
    """The address space of the worker may not grow any more."""

    def inject() -> None:
        worker = trial.worker()
        with suppress(psutil.Error, ProcessLookupError):
            if worker is not None:
                size = worker.memory_info().vms
                resource.prlimit(worker.pid, resource.RLIMIT_AS, (size, size))

    return Fault(
        text="no more address space for the worker",
        inject=inject,
        settings=(_silence(trial),),
        leads_to=frozenset({Status.OOM, Status.FAILED, Status.KILLED, Status.TIMEOUT}),
        stays=frozenset({Status.OOM}),
    )


def _scripted(trial: Trial, name: str, status: Status, worst: int) -> Fault:
    """Some of the largest points go wrong, in a sweep those of its larger batch size."""
    side = max(_sizes_of(trial.course)) - trial.random.randint(1, worst)
    most = side**2 * (2 if trial.course.jobs else 1)
    settings = (f"model.faults.{name}={most}", *((_silence(trial),) if name == "hang" else ()))
    return Fault(text=f"scripted: {name}", settings=settings, most=most, scripted=status)


def _sizes_of(course: Course) -> list[int]:
    text = next(text for text in course.arguments if text.startswith("input_size="))
    return [int(size) for size in text.partition("=")[2].strip("[]").split(",")]


def out_of_memory(trial: Trial) -> Fault:
    if trial.torch or trial.random.random() < 0.5:
        return _limited(trial)
    return _scripted(trial, "oom", Status.OOM, 5)


def hang(trial: Trial) -> Fault:
    return _scripted(trial, "hang", Status.TIMEOUT, 1)


def lost_device(trial: Trial) -> Fault:
    return _scripted(trial, "lost", Status.FAILED, 3)


def crash(trial: Trial) -> Fault:
    return _scripted(trial, trial.random.choice(["crash", "kill"]), Status.KILLED, 3)


def full_disk(trial: Trial) -> Fault:
    """A small file system that something else fills, or where none can be mounted, a limit on the size of files."""
    mounted = trial.random.random() < 0.7 and _mounted(trial)
    ballast = trial.run / "ballast"

    def fill() -> None:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def limit() -> None:
        """Whatever is started later inherits it; the worker that is there already gets it too."""
        assert trial.process is not None
        files = [file.stat().st_size for file in trial.run.rglob("points.jsonl")]
        size = max(files, default=0) + trial.random.randint(0, 4000)
        with suppress(psutil.Error, ProcessLookupError):
            parent = psutil.Process(trial.process.pid)
            for process in (parent, *parent.children(recursive=True)):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))

    return Fault(
        text="the disk is full" if mounted else "files may not grow",
        inject=fill if mounted else limit,
        mend=lambda: ballast.unlink(missing_ok=True),
        leads_to=frozenset({Status.FAILED, Status.INTERRUPTED}),
        code=lambda code, usual: code in (1, 2) or code == usual == 0,
        complete=False,
    )


def _mounted(trial: Trial) -> bool:
    """A file system of its own for the run's folder, until the trial ends; not everybody may make one."""
    trial.run.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "perfexp-faults", str(trial.run)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return False
    trial.stack.callback(
        subprocess.run, ["umount", "-l", str(trial.run)], check=True, capture_output=True
    )
    return True


def server_gone(trial: Trial) -> Fault:
    """The record is on disk, and the exit code says that it is there only."""
    how = trial.random.choice(
        ["refuses", "is silent", "stops in the middle of an answer", "goes after its first answer"]
    )
    port = trial.stack.enter_context(_server(how))
    uri = (
        "tracking=mlflow",
        f"tracking.uri=http://127.0.0.1:{port}",
        "tracking.request_timeout_seconds=1",
    )
    return Fault(text=f"the server {how}", once=uri, code=lambda code, usual: code == (usual or 3))


@contextmanager
def _server(how: str) -> Iterator[int]:
    """The port of a tracking server that is of no use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if how != "refuses":
            listener.listen()
        thread = threading.Thread(target=_serve, args=(listener, how), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends its accept
            thread.join()


def _serve(listener: socket.socket, how: str) -> None:
    held = []
    body = b'{"experiment": {"experiment_id": "1", "name": "perfexp", "lifecycle_stage": "active"}}'
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    with suppress(OSError):  # the listener was closed
        while True:
            connection, _ = listener.accept()
            if how == "is silent":
                held.append(connection)
                continue
            with connection, suppress(OSError):
                connection.settimeout(5)
                connection.recv(65536)
                connection.sendall(answer if "first" in how else answer[:-40])
            if "first" in how:
                break
    for connection in held:
        connection.close()


def torn_file(trial: Trial) -> Fault:
    """What a crash of the machine leaves: the last line is not whole, or lacks its end only."""

    def tear() -> None:
        for folder in trial.folders():
            lines = _lines(folder)
            if lines and trial.random.random() < 0.8:
                cut = trial.random.choice([1, trial.random.randint(1, len(lines[-1]) - 1)])
                file = folder / "details" / "points.jsonl"
                os.truncate(file, file.stat().st_size - cut)
                if cut > 1:
                    trial.forget(folder, lines[-1])

    fault = kill_parent(trial)
    fault.text, fault.mend = "SIGKILL to the parent, points.jsonl torn", tear
    return fault


def kill_loader(trial: Trial) -> Fault:
    """One of the processes that load pictures; the point under way may do without it, or fail."""

    def inject() -> None:
        worker = trial.worker()
        with suppress(psutil.Error):
            loaders = worker.children(recursive=True) if worker else []
            if loaders:
                trial.random.choice(loaders).kill()

    leads_to = frozenset({Status.FAILED})
    return Fault(
        text="SIGKILL to a loader",
        inject=inject,
        leads_to=leads_to,
        settings=(_silence(trial),),
        at_most=1,
    )


KINDS: dict[str, Callable[[Trial], Fault]] = {
    "kill worker": kill_worker,
    "kill server": kill_server,
    "kill parent": kill_parent,
    "stop worker": stop_worker,
    "interrupt": interrupt,
    "out of memory": out_of_memory,
    "hang": hang,
    "lost device": lost_device,
    "crash": crash,
    "full disk": full_disk,
    "server gone": server_gone,
    "torn file": torn_file,
}
TORCH_KINDS: dict[str, Callable[[Trial], Fault]] = {
    "kill worker": kill_worker,
    "kill server": kill_server,
    "kill parent": kill_parent,
    "stop worker": stop_worker,
    "interrupt": interrupt,
    "loader": kill_loader,
    "out of memory": out_of_memory,
    "full disk": full_disk,
    "torn file": torn_file,
}
