"""Sweep run: the bookkeeping of a sweep over several runs (`-m`), from its first job to its table and plot."""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import ClassVar

from perfexp.errors import PerfexpError, UserError
from perfexp.host import credentials, interrupts
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.host.files import write_atomically
from perfexp.orchestration.preparation import Assignment
from perfexp.plan import config, naming
from perfexp.plan.override_keys import differing_keys, key_of, measures_the_same
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Record, Status, SweepMembership, timestamp
from perfexp.records.sweep_record import PlannedRun, Sweep, SweepChild
from perfexp.reports import run_files
from perfexp.reports.console import Console
from perfexp.reports.progress import Whole
from perfexp.reports.run_status import counted_points, points_by_kind
from perfexp.summaries.analysis import SweepAnalysis
from perfexp.summaries.subject import subject
from perfexp.tracking import Tracker

#: Characters of a store's address that are shown.
_LONGEST = 200
#: Entries of the user's cache: the store is not read from the sweep's folder, which somebody else may have made.
_SWEEPS, _STORE = "sweeps", "store"
#: Names of a plan by which `perfexp status` arranges runs.
_OPTIONS = ("model", "algorithm", "mode", "precision")
#: File with the best values that a sweeper has found, by the name that Hydra's sweepers give it.
OPTIMUM = "optimization_results.yaml"


class SweepRun:
    """A sweep in progress; raises `UserError` if the folder holds another sweep.

    Attributes:
        folder: folder of the last sweep that this process started, for Hydra's callbacks.

    Args:
        axes: keys of the overrides that vary.
        jobs: number of runs; None if unknown.
        multirun: Hydra's configuration of the sweep, as YAML.
    """

    folder: ClassVar[Path | None] = None

    def __init__(
        self,
        *,
        folder: Path,
        command: Sequence[str],
        axes: Iterable[str],
        jobs: int | None,
        console: Console,
        multirun: bytes = b"",
    ) -> None:
        self.paths = SweepPaths(folder)
        self.axes, self._command = tuple(axes), tuple(command)
        self._console, self._multirun = console, multirun
        self._tracker: Tracker | None = None
        self._header: Callable[[], None] | None = None
        self._is_refused, self._has_begun = True, False
        self._stack = ExitStack()
        self.sweep = self._before(command) or Sweep(
            uid=self.paths.uid or uuid.uuid4().hex,
            name=" × ".join(self.axes) or "one run",
            started=timestamp(),
            command=list(command),
            jobs=jobs,
        )
        self.whole = Whole(self.sweep.jobs)

    def begin(self) -> None:
        """Create the folder and lock the sweep; raises UserError if it cannot be written, or is in use."""
        self.paths.create(uid=self.sweep.uid)
        with ExitStack() as stack:
            stack.enter_context(self.paths.locked())
            self.sweep = self._before(self.sweep.command) or self.sweep
            self.sweep.ended = None
            if (
                self.paths.begun_in(self.sweep.command) is None
            ):  # from here on it is what this user typed
                self.sweep.command = list(self._command)
                self.paths.sign(self._command)
            self._write()
            write_atomically(self.paths.multirun, self._multirun)
            self._stack = stack.pop_all()
        self._has_begun = True
        SweepRun.folder = self.paths.root

    def add(self, file: Path) -> None:
        """Copy a file of the sweeper into the folder."""
        self.paths.claim(target := self.paths.root / file.name)
        write_atomically(target, file.read_bytes())

    def _before(self, command: Sequence[str]) -> Sweep | None:
        """Return the sweep in the folder, which is continued; raises UserError if it is another one."""
        if not self.paths.summary.exists():
            return None
        sweep = Sweep.load(self.paths.root)
        orders = [
            [key for key in map(key_of, words) if key in self.axes]
            for words in (sweep.command, command)
        ]
        if (
            not measures_the_same(sweep.command, _as_stored(command, sweep.command))
            or orders[0] != orders[1]
        ):  # runs are numbered by the order
            keys = ", ".join(differing_keys(sweep.command, command))
            raise UserError(
                f"{self.paths.root} holds another sweep: {shlex.join(sweep.command)}. Choose another output_dir, "
                f"or repeat that command to continue it{f'; yours differs in {keys}' * bool(keys)}."
            )
        sweep.refresh(self.paths.root)
        return sweep

    def refuse_other_runs(self, folder: Path) -> None:
        """Raise UserError if a folder, such as a stage's, holds a run that this sweep did not begin."""
        is_elsewhere = folder.parent.absolute() != self.paths.root
        if is_elsewhere and folder.exists() and RunPaths(folder).sweep != self.sweep.uid:
            raise UserError(
                f"{folder} holds a run that this sweep did not begin: repeat its command, not the sweep's."
            )

    def accept(self, assignment: Assignment) -> None:
        """Take tracker, points and estimated time from the first valid run; raises UserError if its settings clash."""
        if self._tracker is not None:
            return
        plan = assignment.plan
        points, seconds = counted_points(plan.timed_keys()), assignment.seconds(plan.keys())
        self.whole.estimated_seconds = seconds
        self._tracker = config.build(plan.tracking)
        if self._has_begun:
            self._settle_store(self._tracker)
        in_all = seconds and seconds * (self.sweep.jobs or 1)
        self._header = partial(
            self._console.sweep_header, self.sweep, points=points, seconds=in_all
        )

    def announce(self) -> None:
        """Print the header once, when the first measurement starts."""
        if self._header is not None:
            self._header()
            self._header = None

    def _settle_store(self, tracker: Tracker) -> None:
        """Remember a store that was chosen just now; warn if the store differs from the sweep's."""
        uri = tracker.settings.get("uri")
        if uri is None or any(axis.partition(".")[0] == "tracking" for axis in self.axes):
            return
        if self.sweep.store is None or any(
            text.startswith("tracking.uri=") for text in self._command
        ):
            self.sweep.store = uri
            self._write()
            remember_store(self.sweep.uid, self.paths.root, tracker.settings)
        elif uri != self.sweep.store:
            self._console.warning(
                f"the sweep's earlier runs are in {self.sweep.store[:_LONGEST]}; the others are sent to {uri}. "
                f"To choose: {self.sweep.continuation(self.paths.root)} tracking.uri=URI"
            )

    def membership(self, job: int, axes: dict[str, str], folder: Path) -> SweepMembership:
        """Return the description of the sweep for a run's record."""
        directory = _relative(self.paths.root, folder)
        return SweepMembership(
            uid=self.sweep.uid, job=job, jobs=self.sweep.jobs, axes=axes, directory=directory
        )

    def plan(self, assignments: Sequence[Assignment]) -> None:
        """Enter the runs that are going to be measured, before the first of them begins."""
        self.sweep.planned = [
            self._planned(one, one.sweep) for one in assignments if one.sweep is not None
        ]
        self._write()

    def _planned(self, assignment: Assignment, membership: SweepMembership) -> PlannedRun:
        plan, about = assignment.plan, subject(assignment.plain)
        keys = plan.keys()
        return PlannedRun(
            job=membership.job,
            directory=_relative(assignment.folder, self.paths.root),
            overrides=[f"{axis}={value}" for axis, value in membership.axes.items()],
            options={name: getattr(about, name) for name in _OPTIONS} | {"gpu": plan.gpu_name},
            points=dict(points_by_kind(keys)),
            seconds=assignment.seconds(keys),
        )

    def expect(self, assignments: Sequence[Assignment]) -> None:
        """Enter runs that other processes are going to measure; those that have ended stay as they are.

        The folders are those composed here: processes measure into the folders that the sweep names.
        """
        self._is_refused = False
        before = {child.job: child for child in self.sweep.children}
        for run in assignments:
            assert run.sweep is not None
            child = self._child(run.sweep, run.name, run.folder, Status.INTERRUPTED)
            earlier = before.get(child.job)
            if earlier is None or earlier.error is not None or earlier.directory != child.directory:
                self._enter(child)
        self._write()

    def ended(
        self, membership: SweepMembership, name: str, folder: Path, outcome: Record | PerfexpError
    ) -> None:
        """Enter a run that has ended, with its record or the error that ended it."""
        if isinstance(outcome, Record):
            self._is_refused = False
            child = self._child(membership, name, folder, outcome.status)
        else:
            self._is_refused &= outcome.exit_code == UserError.exit_code
            child = self._child(membership, name, folder, Status.FAILED, str(outcome))
        self._enter(child)
        self._write()

    def _child(
        self,
        run: SweepMembership,
        name: str,
        folder: Path,
        status: Status,
        error: str | None = None,
    ) -> SweepChild:
        directory = _relative(folder, self.paths.root)
        return SweepChild(
            job=run.job, name=name, directory=directory, status=status, axes=run.axes, error=error
        )

    def _enter(self, child: SweepChild) -> None:
        others = (other for other in self.sweep.children if other.job != child.job)
        self.sweep.children = sorted([*others, child], key=lambda one: one.job)

    def refused(self, job: int, axes: dict[str, str], error: PerfexpError) -> None:
        """Enter a run that was refused because of its configuration."""
        folder = naming.child_folder(None, self.paths.root, job, axes)
        self.ended(self.membership(job, axes, folder), naming.run_name((), axes), folder, error)

    def close(self) -> bool:
        """Sum up in table, plot, tracker and console; returns whether all succeeded.

        A failure here loses nothing. A sweep whose runs were all refused leaves nothing.
        """
        with self._stack:
            return self._close()

    def withdraw(self) -> None:
        """Remove a sweep that this command began and of which no job is in the queue."""
        if not self.paths.jobs.exists():
            self.paths.withdraw()

    def unlock(self) -> None:
        """Leave the folder to others; what is measured in it by other processes goes on."""
        self._stack.close()

    def _close(self) -> bool:
        is_whole = len(self.sweep.children) == self.sweep.jobs
        if self.sweep.jobs is None:  # the sweeper chooses
            is_whole = not any(
                path.is_dir() for path in self.paths.root.iterdir() if path != self.paths.details
            )
        if self._is_refused and self.sweep.children and is_whole and self.paths.withdraw():
            self._console.show_sweep(SweepAnalysis.of(self.sweep, []), None)
            return True
        self.sweep.ended = timestamp()
        self.sweep.refresh(self.paths.root)
        whole = SweepAnalysis.of(self.sweep, self.sweep.records(self.paths.root))
        link, is_complete = None, True
        try:
            with interrupts.held():  # a library that is interrupted during its import stays broken
                self._write()
                run_files.write_sweep(whole, self.paths.root)
            if self._tracker is not None:
                link = self._tracker.publish_sweep(whole, self.paths.root)
        except (PerfexpError, OSError) as error:
            is_complete = False
            self._console.error(f"The summary of the sweep is not complete: {error}")
        self._console.show_sweep(whole, self.paths.root, tracking=link)
        return is_complete

    def _write(self) -> None:
        write_atomically(self.paths.summary, self.sweep.to_json())


def _relative(target: Path, start: Path) -> str:
    return Path(os.path.relpath(target, start)).as_posix()


def remember_store(sweep: str, folder: Path, settings: Mapping[str, str]) -> None:
    """Cache the store of a sweep for resuming it from elsewhere; another folder with its uid is a copy, or foreign."""
    JsonCache(cache_folder(_SWEEPS), {"sweep": sweep, "folder": str(folder.resolve())}).add(
        _STORE, dict(settings)
    )


def remembered_store(sweep: str, folder: Path, typed: Collection[str]) -> dict[str, str]:
    """Return the cached store of a sweep, for its folder or a run's, as overrides by key; typed keys prevail."""
    places = (folder.resolve(), folder.resolve().parent)
    identities = ({"sweep": sweep, "folder": str(place)} for place in places)
    entries = (JsonCache(cache_folder(_SWEEPS), identity).find(_STORE) for identity in identities)
    store = next((entry for entry in entries if isinstance(entry, dict)), None)
    if "tracking" in typed or store is None:
        return {}
    texts = {f"tracking.{name}": str(text) for name, text in store.items()}
    return {
        key: text
        for key, text in texts.items()
        if key not in typed and not credentials.is_masked(text)
    }


def _as_stored(command: Sequence[str], stored: Sequence[str]) -> list[str]:
    """A command without the precision that a stored one leaves to its default, which the plans of its runs name."""
    is_named = any(key_of(text) == "precision" for text in stored)
    return [text for text in command if is_named or key_of(text) != "precision"]
