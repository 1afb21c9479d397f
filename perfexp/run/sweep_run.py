"""Bookkeeping for a sweep over several runs (`-m`), from the first run to table and plot.

`main` creates a `SweepRun` with the first run of a sweep. It locks the sweep's folder, writes
sweep.json after each run, and at the end the table, the plot and the tracker's summary.
"""

from __future__ import annotations

import os
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
from perfexp.plan import config, naming
from perfexp.plan.override_keys import differing_keys, key_of, line_to_type, measures_the_same
from perfexp.records.analysis import SweepAnalysis
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Record, Status, SweepMembership, timestamp
from perfexp.records.subject import subject
from perfexp.records.sweep_record import PlannedRun, Sweep, SweepChild
from perfexp.report import run_files
from perfexp.report.console import Console
from perfexp.report.progress import Whole
from perfexp.report.run_status import counted_points, points_by_kind
from perfexp.report.tracking import Tracker
from perfexp.run.preparation import Assignment

#: Shown length of a store's address, in characters.
_LONGEST = 200
#: Entries in the user's cache. The store is not read from the sweep's folder, which another user
#: may have made.
_SWEEPS, _STORE = "sweeps", "store"
#: Plan names by which `perfexp status` arranges runs.
_OPTIONS = ("model", "algorithm", "mode", "precision")
#: File with a sweeper's best values, under the name that Hydra's sweepers use.
OPTIMUM = "optimization_results.yaml"


class SweepRun:
    """A sweep in progress.

    Attributes:
        folder: folder of the last sweep that this process started, for Hydra callbacks.

    Args:
        folder: folder of this sweep.
        command: overrides as typed.
        axes: override keys that vary.
        jobs: number of runs; None if unknown.
        multirun: Hydra's sweep configuration, as YAML.

    Raises:
        UserError: the folder holds another sweep.
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
        """Create the folder and lock it until the sweep is closed.

        `main` and `ab` call it before the first run.

        Raises:
            UserError: the folder cannot be written or is in use.
        """
        self.paths.create(uid=self.sweep.uid)
        with ExitStack() as stack:
            stack.enter_context(self.paths.locked())
            self.sweep = self._before(self.sweep.command) or self.sweep
            self.sweep.ended = None
            if self.paths.begun_in(self.sweep) is None:  # now it is what this user typed
                self.sweep.command = list(self._command)
                self.paths.sign(self.sweep)
            self._write()
            write_atomically(self.paths.multirun, self._multirun)
            self._stack = stack.pop_all()
        self._has_begun = True
        SweepRun.folder = self.paths.root

    def add(self, file: Path) -> None:
        """Copy one of the sweeper's files into the folder.

        An optimizing sweeper, such as Optuna, writes its best values.
        """
        self.paths.claim(target := self.paths.root / file.name)
        write_atomically(target, file.read_bytes())

    def _before(self, command: Sequence[str]) -> Sweep | None:
        """Return the sweep in the folder, to be continued; None if there is none.

        Raises:
            UserError: the folder holds another sweep.
        """
        if not self.paths.summary.exists():
            return None
        sweep = Sweep.load(self.paths.root)
        before = [key for key in map(key_of, sweep.command) if key in self.axes]
        today = [key for key in map(key_of, command) if key in self.axes]
        is_same = measures_the_same(sweep.command, _as_stored(command, sweep.command))
        if not is_same or before != today:  # the order numbers the runs
            line = (
                line_to_type(sweep.command, in_turn=sweep.in_turn) or "its command can't be shown"
            )
            problem = f"{self.paths.root} holds another sweep: {line}"
            advice = "Choose another output_dir, or repeat that command to continue it"
            if keys := differing_keys(sweep.command, command):
                advice += f"; yours differs in {', '.join(keys)}"
            raise UserError(f"{problem}. {advice}.")
        sweep.refresh(self.paths.root)
        return sweep

    def refuse_other_runs(self, folder: Path) -> None:
        """Check that a run's folder belongs to this sweep if it exists; used with `resume=`.

        A run of a stage has its folder outside the sweep's.

        Raises:
            UserError: the folder holds a run that this sweep did not begin.
        """
        if (
            folder.parent.absolute() != self.paths.root
            and folder.exists()
            and RunPaths(folder).sweep != self.sweep.uid
        ):
            raise UserError(
                f"{folder} holds a run that this sweep did not begin: repeat its command, not the "
                "sweep's."
            )

    def accept(self, assignment: Assignment) -> None:
        """Take tracker, points and estimated time from the first valid run.

        `main` and `ab` call it for each run.

        Raises:
            UserError: the run's settings clash.
        """
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
        """Print the header once, when the first measurement starts.

        Jobs call it, since only they know when measuring begins.
        """
        if self._header is not None:
            self._header()
            self._header = None

    def _settle_store(self, tracker: Tracker) -> None:
        """Remember a newly chosen store; warn if the store differs from the sweep's."""
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
                f"the sweep's earlier runs are in {self.sweep.store[:_LONGEST]}; the others are "
                f"sent to {uri}. To choose: {self.sweep.continuation(self.paths.root)} "
                "tracking.uri=URI"
            )

    def membership(self, job: int, axes: dict[str, str], folder: Path) -> SweepMembership:
        """Return the description of a run's place in the sweep, for the run's record.

        `main` and `ab` call it for each run.

        Args:
            job: number of the run, from 0.
            axes: the run's axis values by key.
            folder: folder of the run.
        """
        directory = _relative(self.paths.root, folder)
        return SweepMembership(
            uid=self.sweep.uid, job=job, jobs=self.sweep.jobs, axes=axes, directory=directory
        )

    def plan(self, assignments: Sequence[Assignment]) -> None:
        """Enter all runs to measure, before the first run begins.

        `perfexp status` shows those that have not begun.
        """
        self.sweep.planned = []
        for assignment in assignments:
            if assignment.sweep is not None:
                self.sweep.planned.append(self._planned(assignment, assignment.sweep))
        self._write()

    def _planned(self, assignment: Assignment, membership: SweepMembership) -> PlannedRun:
        """Return a run's entry in the list of planned runs, which `perfexp status` shows."""
        plan, about = assignment.plan, subject(assignment.plain)
        keys = plan.keys()
        options = {name: getattr(about, name) for name in _OPTIONS}
        options["gpu"] = plan.gpu_name
        return PlannedRun(
            job=membership.job,
            directory=_relative(assignment.folder, self.paths.root),
            overrides=[f"{axis}={value}" for axis, value in membership.axes.items()],
            options=options,
            points=dict(points_by_kind(keys)),
            seconds=assignment.seconds(keys),
        )

    def expect(self, assignments: Sequence[Assignment]) -> None:
        """Enter runs that other processes will measure. Runs that have ended stay unchanged.

        Folders are those composed here: the other processes measure into the folders named here. A
        campaign calls it before its processes start.
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
        """Enter a run that has ended, with its record or the error that ended it.

        The driver and campaigns call it through `main`.
        """
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
        """Return a run's entry in the list of runs."""
        directory = _relative(folder, self.paths.root)
        return SweepChild(
            job=run.job, name=name, directory=directory, status=status, axes=run.axes, error=error
        )

    def _enter(self, child: SweepChild) -> None:
        """Put an entry into the list of runs, in place of an earlier one."""
        others = (other for other in self.sweep.children if other.job != child.job)
        self.sweep.children = sorted([*others, child], key=lambda sibling: sibling.job)

    def refused(self, job: int, axes: dict[str, str], error: PerfexpError) -> None:
        """Enter a run that was refused because of its configuration.

        `main` calls it if a run cannot be composed.
        """
        folder = naming.child_folder(None, self.paths.root, job, axes)
        self.ended(self.membership(job, axes, folder), naming.run_name((), axes), folder, error)

    def close(self) -> bool:
        """Finish the sweep: write the table and the plot, publish the summary and show it.

        A failure here loses no results. If all runs were refused, the folder is removed.

        Returns:
            Whether everything succeeded.
        """
        with self._stack:
            return self._close()

    def withdraw(self) -> None:
        """Remove a sweep that this command began, unless a job of it is queued."""
        if not self.paths.jobs.exists():
            self.paths.withdraw()

    def unlock(self) -> None:
        """Release the folder. Other processes may continue to measure in it.

        `main` calls it if the sweep goes on elsewhere, or is refused.
        """
        self._stack.close()

    def _close(self) -> bool:
        """Finish the sweep while its folder is locked; see `close`."""
        is_whole = len(self.sweep.children) == self.sweep.jobs
        if self.sweep.jobs is None:  # the sweeper chooses
            folders = set(filter(Path.is_dir, self.paths.root.iterdir()))
            is_whole = folders <= {self.paths.details}
        if self._is_refused and self.sweep.children and is_whole and self.paths.withdraw():
            self._console.show_sweep(SweepAnalysis.of(self.sweep, []), None)
            return True
        self.sweep.ended = timestamp()
        self.sweep.refresh(self.paths.root)
        sweep_analysis = SweepAnalysis.of(self.sweep, self.sweep.records(self.paths.root))
        link, is_complete = None, True
        try:
            with interrupts.held():  # an interrupted import leaves a library broken
                self._write()
                run_files.write_sweep(sweep_analysis, self.paths.root)
            if self._tracker is not None:
                link = self._tracker.publish_sweep(sweep_analysis, self.paths.root)
        except (PerfexpError, OSError) as error:
            is_complete = False
            self._console.error(f"The summary of the sweep is not complete: {error}")
        self._console.show_sweep(sweep_analysis, self.paths.root, tracking=link)
        return is_complete

    def _write(self) -> None:
        """Write sweep.json."""
        write_atomically(self.paths.summary, self.sweep.to_json())


def _relative(target: Path, start: Path) -> str:
    """Return a relative path from a folder to a target, with slashes."""
    return Path(os.path.relpath(target, start)).as_posix()


def remember_store(sweep: str, folder: Path, settings: Mapping[str, str]) -> None:
    """Cache a sweep's store, so that the sweep can resume from another working directory.

    The key includes the folder: another folder with the same uid is a copy, or foreign.
    """
    JsonCache(cache_folder(_SWEEPS), {"sweep": sweep, "folder": str(folder.resolve())}).add(
        _STORE, dict(settings)
    )


def remembered_store(sweep: str, folder: Path, typed: Collection[str]) -> dict[str, str]:
    """Return a sweep's cached store as overrides by key. Typed keys take precedence.

    `resume=` adds them to the repeated command.

    Args:
        folder: the sweep's folder, or a run's folder in it.
        typed: keys on the command line.
    """
    places = (folder.resolve(), folder.resolve().parent)
    store = None
    for home in places:
        identity = {"sweep": sweep, "folder": str(home)}
        entry = JsonCache(cache_folder(_SWEEPS), identity).find(_STORE)
        if isinstance(entry, dict):
            store = entry
            break
    if "tracking" in typed or store is None:
        return {}
    texts = {}
    for name, value in store.items():
        key, text = f"tracking.{name}", str(value)
        if key not in typed and not credentials.is_masked(text):
            texts[key] = text
    return texts


def _as_stored(command: Sequence[str], stored: Sequence[str]) -> list[str]:
    """Return a command without its precision if the stored command does not name one.

    Commands were stored that way while it was the default. The runs' plans name it in any case.
    """
    if "precision" in map(key_of, stored):
        return list(command)
    return [text for text in command if key_of(text) != "precision"]
