"""perfexp status: progress of everything below a folder, also of running and killed runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import PLAN, RECORD, SWEEP, Json, app, echo, emit
from perfexp.errors import PerfexpError, UserError
from perfexp.host import foreign
from perfexp.plan import plan_file
from perfexp.plan.override_keys import measures_the_same
from perfexp.records import folders
from perfexp.records.expected import Expected
from perfexp.records.folders import run_folder, run_folders
from perfexp.records.grid import Section
from perfexp.records.paths import RunPaths, SweepPaths, home_of
from perfexp.records.profile_keys import is_profile
from perfexp.records.record import Record, Status
from perfexp.records.subject import one_line
from perfexp.records.sweep_record import PlannedRun, Sweep
from perfexp.report import run_status
from perfexp.report.run_status import RunProgress
from perfexp.report.sections import NOT_MEASURED
from perfexp.report.tables import json_results
from perfexp.run.cluster import job_states


@app.command()
def status(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run's folder, a sweep's, or any folder above some."),
    ] = Path("outputs"),
    as_json: Json = False,
) -> None:
    """Show progress: models down, algorithms across.

    Each entry is done, failed, unsupported, refused, missing or being measured. The exit code is 0
    if everything is done, requested profiles included, otherwise 1.

    Example: perfexp status outputs/2026-11-28
    """
    below = _Below()
    below.scan(folder)
    if not (below.runs or below.sweeps or below.unreadable):
        raise UserError(
            f"There is no run in or below {folder}: no {PLAN} and no {SWEEP}. "
            "Name a folder that perfexp wrote to, or measure something."
        )
    groups = _groups(below)
    runs: list[RunProgress] = []
    refused: list[str] = []
    not_begun = 0
    for group in groups.values():
        runs += group.runs
        refused += group.refused
        not_begun += group.not_begun
    pace = run_status.Pace(runs)
    total = run_status.tally(runs, pace)
    is_complete = total.complete and not refused and not not_begun
    facts = [_facts(run, run_status.tally([run], pace)) for run in runs]
    parts: list[Section | str] = []
    for home, group in groups.items():
        parts += _sections(home, group, pace, folder)
    if len(groups) > 1 and runs:
        parts.append(f"in all: {total}")
    emit(
        json_results.document(facts, is_complete=is_complete, refused=refused),
        parts,
        as_json=as_json,
    )
    raise typer.Exit(0 if is_complete and not below.unreadable else 1)


@dataclass(kw_only=True)
class _Below:
    """Runs (by absolute folder) and sweeps below a folder.

    Attributes:
        unreadable: number of unreadable runs and sweeps; each is reported.
    """

    runs: dict[Path, RunProgress] = field(default_factory=dict)
    sweeps: list[tuple[Sweep, Path]] = field(default_factory=list)
    unreadable: int = 0

    def scan(self, folder: Path) -> None:
        """Find everything in and below a folder, and its sweeps' runs in other folders.

        Raises:
            UserError: the folder does not exist.
        """
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}. Name one that perfexp wrote to.")
        runs: list[Path] = []
        for path in list(folders.below(folder, PLAN, SWEEP, refused=self._failed)):
            if path.name == PLAN:
                runs.append(home_of(path))
                continue
            try:
                self.sweeps.append((Sweep.load(path.parent), path.parent))
            except PerfexpError as error:
                self._failed(error, path.parent)
        for sweep, sweep_folder in self.sweeps:
            for _, child in run_folders(sweep, sweep_folder):
                if RunPaths(child).plan.is_file() and not child.is_symlink():
                    runs.append(child)
        for run in runs:
            if run.absolute() not in self.runs:
                try:
                    self.runs[run.absolute()] = _run(run)
                except (PerfexpError, OSError) as error:
                    self._failed(error, run)

    def _failed(self, error: Exception, folder: Path | None = None) -> None:
        """Report a run or sweep that cannot be read."""
        prefix = f"{folder}: " if folder else ""
        echo(f"unreadable  {prefix}{error}", err=True)
        self.unreadable += 1

    @property
    def current_sweeps(self) -> list[tuple[Sweep, Path]]:
        """Return the sweeps that no later sweep repeats.

        A later sweep repeats an earlier sweep if it has the same command and shares runs.
        """
        ordered = sorted(self.sweeps, key=lambda pair: pair[0].started)
        current = []
        for number, pair in enumerate(ordered, start=1):
            if not any(_repeats(later, pair) for later in ordered[number:]):
                current.append(pair)
        return current


@dataclass(kw_only=True)
class _Group:
    """Runs in one folder, begun or not.

    Attributes:
        sweeps: lines about sweeps.
        refused: lines about refused runs.
        jobs: lines about SLURM jobs.
        not_begun: number of sweep runs that have not begun.
    """

    runs: list[RunProgress] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    not_begun: int = 0


def _run(folder: Path) -> RunProgress:
    """Return the progress of a run, from its folder.

    It reads the points and what was expected, also of a running run, and no more of the record than
    needed.
    """
    paths = RunPaths(folder)
    running = paths.in_use()  # check this before reading: a run that ends now has its results
    # an unreadable record means not done
    record = Record.load(paths.record) if paths.record.exists() else None
    # reading YAML takes a hundred times as long as the record, which has the same plan at the end
    plan = plan_file.read(paths.plan) if record is None or running else record.plan
    results = {}
    if paths.points.is_file():
        results = run_status.results(foreign.read_bytes(paths.points))
    elif record is not None and not paths.points.exists():  # the record alone was copied
        for point in record.points:
            results[point.key] = run_status.Result(key=point.key, status=point.status)
    expected = Expected.load(paths.expected)
    if record is not None and expected is None:  # an older version measured it
        profiler = plan.get("profiler")
        is_profiled = isinstance(profiler, dict) and profiler.get("name", "none") != "none"
        keys = (point.key for point in record.points)
        expected = Expected(keys=[key for key in keys if is_profiled or not is_profile(key)])
    expected_keys = point_seconds = refusal = None
    if expected:
        expected_keys, point_seconds = frozenset(expected.keys), expected.point_seconds
    if not (results or running or record):
        refusal = run_status.refusal(paths.refusal)
    return RunProgress(
        folder=folder,
        plan=plan,
        results=results,
        expected=expected_keys,
        point_seconds=point_seconds,
        running=running,
        refusal=refusal,
    )


def _repeats(later: tuple[Sweep, Path], earlier: tuple[Sweep, Path]) -> bool:
    """Return whether a sweep repeats an earlier sweep.

    Compares only the commands if the earlier sweep has no runs.
    """
    if not measures_the_same(later[0].command, earlier[0].command):
        return False
    before = {path for _, path in run_folders(*earlier)}
    return not before or not before.isdisjoint(path for _, path in run_folders(*later))


def _sections(home: Path, group: _Group, pace: run_status.Pace, folder: Path) -> Iterator[Section]:
    """Yield the table for a folder with runs, its refusals, and its job states."""
    if [run.folder for run in group.runs] == [folder]:  # the user named a run
        home = folder
    names = [str(home if home.name else home.absolute())]
    if group.sweeps:
        names.append("; ".join(group.sweeps))
    matrix = run_status.matrix(group.runs, pace) if group.runs else ()
    yield Section(one_line(": ".join(names)), matrix)
    if group.refused:
        yield Section(NOT_MEASURED, group.refused)
    if group.jobs:
        yield Section("jobs", group.jobs)


def _facts(run: RunProgress, total: run_status.Tally) -> dict[str, Any]:
    """Return a run's progress as JSON values."""
    return {
        "folder": str(run.folder.absolute()),
        "model": run.about.model,
        "algorithm": run.about.algorithm,
        "gpu": run.gpu,
        "is_complete": total.complete,
        "is_running": run.running,
        "points": total.by_status(),
        "left_seconds": total.left_seconds,
        "refusal": run.refusal,
    }


def _groups(below: _Below) -> dict[Path, _Group]:
    """Return the runs and sweeps below a folder, grouped by the folder above the runs."""
    groups: dict[Path, _Group] = {}
    for run in below.runs.values():
        groups.setdefault(run.folder.parent, _Group()).runs.append(run)
    reported: set[Path] = set()
    queued = None
    for sweep, sweep_folder in below.current_sweeps:
        home = sweep_folder
        for child, path in reversed(list(run_folders(sweep, sweep_folder))):
            if path.absolute() in below.runs:
                home = path.parent
            if child.error:
                reported.add(path.absolute())
        group = groups.setdefault(home, _Group())
        group.runs += not_begun(sweep, sweep_folder, below.runs)
        ended = sum(child.status is not Status.INTERRUPTED for child in sweep.children)
        if SweepPaths(sweep_folder).jobs.exists():
            queued = queued or job_states.listed()  # once: an absent controller takes minutes
            states = job_states.states(sweep, sweep_folder, queued)
            submitted = (
                run_state
                for run_state in states
                if run_state.state is not job_states.JobState.unsubmitted
            )
            ended = sum(run_state.has_ended for run_state in submitted)
            group.jobs += [job_states.counted(states), *job_states.lines(states)]
        left = max((sweep.jobs or 0) - len(sweep.children), 0)
        of_total = f" of {sweep.jobs}" if sweep.jobs else ""
        line = f"sweep over {sweep.name}, {ended}{of_total} runs have ended"
        if left and not sweep.planned:
            line += "; those that have not begun are not counted"
        group.sweeps.append(line)
        group.not_begun += left
        group.refused += _refused(sweep, sweep_folder, below)
    for path, run in below.runs.items():
        if run.refusal is not None and path not in reported:
            groups[run.folder.parent].refused.append(f"{run.folder.name}: refused: {run.refusal}")
    return dict(sorted(groups.items()))


def _refused(sweep: Sweep, sweep_folder: Path, below: _Below) -> Iterator[str]:
    """Yield a line with the reason for each sweep run that failed and has no record."""
    for child, folder in run_folders(sweep, sweep_folder):
        run = below.runs.get(folder.absolute())
        if child.error and not (folder / RECORD).is_file() and not (run and run.running):
            yield f"run {child.job} {child.name}: {child.status.value}: {child.error}"


def not_begun(
    sweep: Sweep, folder: Path, begun: Mapping[Path, RunProgress]
) -> Iterator[RunProgress]:
    """Yield the runs of a sweep that have not begun, including refused ones.

    `perfexp status` counts their points as missing, and shows why a run was refused. A run that
    ended well is not among them, even if its folder was moved.

    Args:
        begun: runs that have begun, by absolute folder.
    """
    children = {child.job: child for child in sweep.children}
    for planned in sweep.planned:
        path, child = run_folder(planned, folder), children.get(planned.job)
        # a campaign enters runs as interrupted before their processes start
        is_left = child is None or child.error or child.status is Status.INTERRUPTED
        if is_left and path.absolute() not in begun:
            yield _waiting(path, planned.options, child.error if child else None, planned)
    if not sweep.planned:
        return
    numbers = {planned.job for planned in sweep.planned}
    for child, path in run_folders(sweep, folder):
        # an error without a planned run: the configuration is wrong
        if child.error and child.job not in numbers and path.absolute() not in begun:
            options = dict(sweep.planned[0].options)
            # an axis is a group or the name in it: `algorithm` or `algorithm.name`
            for axis, value in child.axes.items():
                group = axis.removesuffix(".name")
                if group in options:
                    options[group] = value
            yield _waiting(path, options, child.error)


def _waiting(
    folder: Path, options: Mapping[str, str], refusal: str | None, planned: PlannedRun | None = None
) -> RunProgress:
    """Return the progress of a run that has not begun, from its options."""
    plan = {group: {"name": name} for group, name in options.items()}
    return RunProgress(
        folder=folder, plan=plan, results={}, expected=None, refusal=refusal, planned=planned
    )
