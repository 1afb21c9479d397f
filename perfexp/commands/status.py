"""perfexp status: progress of everything below a folder, also of running and killed runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.cluster import job_states
from perfexp.commands.app import PLAN, RECORD, SWEEP, Json, app, echo, emit
from perfexp.errors import PerfexpError, UserError
from perfexp.host import foreign
from perfexp.plan import plan_file
from perfexp.plan.override_keys import measures_the_same
from perfexp.profilers import is_profile
from perfexp.records import folders
from perfexp.records.expected import Expected
from perfexp.records.folders import run_folder, run_folders
from perfexp.records.paths import RunPaths, SweepPaths, home_of
from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import PlannedRun, Sweep
from perfexp.reports import run_status
from perfexp.reports.run_status import Run
from perfexp.reports.sections import NOT_MEASURED
from perfexp.summaries.grid import Section
from perfexp.summaries.subject import one_line
from perfexp.tables import json_results


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
            f"There is no run in or below {folder}: no {PLAN} and no {SWEEP}. Name a folder that perfexp wrote to, "
            "or measure something."
        )
    groups = _groups(below)
    runs = [run for group in groups.values() for run in group.runs]
    pace = run_status.Pace(runs)
    refused = [line for group in groups.values() for line in group.refused]
    total = run_status.tally(runs, pace)
    is_complete = (
        total.complete and not refused and not any(group.not_begun for group in groups.values())
    )
    facts = [_facts(run, run_status.tally([run], pace)) for run in runs]
    parts = [
        section
        for place, group in groups.items()
        for section in _sections(place, group, pace, folder)
    ]
    in_all = [f"in all: {total}"] if len(groups) > 1 and runs else []
    emit(
        json_results.document(facts, is_complete=is_complete, refused=refused),
        [*parts, *in_all],
        as_json=as_json,
    )
    raise typer.Exit(0 if is_complete and not below.unreadable else 1)


@dataclass(kw_only=True)
class _Below:
    """Runs (by absolute folder) and sweeps below a folder.

    Attributes:
        unreadable: number of unreadable runs and sweeps; each is reported.
    """

    runs: dict[Path, Run] = field(default_factory=dict)
    sweeps: list[tuple[Sweep, Path]] = field(default_factory=list)
    unreadable: int = 0

    def scan(self, folder: Path) -> None:
        """Find everything in and below a folder, and its sweeps' runs in other folders.

        Raises:
            UserError: the folder does not exist.
        """
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}. Name one that perfexp wrote to.")
        paths = list(folders.below(folder, PLAN, SWEEP, refused=self._failed))
        for place in (path.parent for path in paths if path.name == SWEEP):
            try:
                self.sweeps.append((Sweep.load(place), place))
            except PerfexpError as error:
                self._failed(error, place)
        children = [path for sweep, place in self.sweeps for _, path in run_folders(sweep, place)]
        own = [home_of(path) for path in paths if path.name == PLAN]
        for run in [
            *own,
            *(path for path in children if RunPaths(path).plan.is_file() and not path.is_symlink()),
        ]:
            if run.absolute() not in self.runs:
                try:
                    self.runs[run.absolute()] = _run(run)
                except (PerfexpError, OSError) as error:
                    self._failed(error, run)

    def _failed(self, error: Exception, folder: Path | None = None) -> None:
        echo(f"unreadable  {folder}: {error}" if folder else f"unreadable  {error}", err=True)
        self.unreadable += 1

    @property
    def current_sweeps(self) -> list[tuple[Sweep, Path]]:
        """Return the sweeps that no later sweep repeats.

        A later sweep repeats an earlier sweep if it has the same command and shares runs.
        """
        ordered = sorted(self.sweeps, key=lambda pair: pair[0].started)
        return [
            pair
            for number, pair in enumerate(ordered, start=1)
            if not any(_repeats(later, pair) for later in ordered[number:])
        ]


@dataclass(kw_only=True)
class _Group:
    """Runs in one folder, begun or not.

    Attributes:
        sweeps: lines about sweeps.
        refused: lines about refused runs.
        jobs: lines about SLURM jobs.
        not_begun: number of sweep runs that have not begun.
    """

    runs: list[Run] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    not_begun: int = 0


def _run(folder: Path) -> Run:
    paths = RunPaths(folder)
    running = paths.in_use()  # check this before reading: a run that ends now has its results
    record = (
        Record.load(paths.record) if paths.record.exists() else None
    )  # unreadable means not done
    # reading YAML takes a hundred times as long as the record, which has the same plan at the end
    plan = plan_file.read(paths.plan) if record is None or running else record.plan
    results = run_status.results(foreign.read_bytes(paths.points)) if paths.points.is_file() else {}
    if record is not None and not paths.points.exists():  # the record alone was copied
        results = {
            one.key: run_status.Result(key=one.key, status=one.status) for one in record.points
        }
    expected = Expected.load(paths.expected)
    if record is not None and expected is None:  # an older version measured it
        profiler = plan.get("profiler")
        is_profiled = isinstance(profiler, dict) and profiler.get("name", "none") != "none"
        keys = [point.key for point in record.points if is_profiled or not is_profile(point.key)]
        expected = Expected(keys=keys)
    is_empty = not (results or running or record)
    return Run(
        folder=folder,
        plan=plan,
        results=results,
        expected=None if expected is None else frozenset(expected.keys),
        point_seconds=expected.point_seconds if expected else None,
        running=running,
        refusal=run_status.refusal(paths.refusal) if is_empty else None,
    )


def _repeats(later: tuple[Sweep, Path], earlier: tuple[Sweep, Path]) -> bool:
    """Return whether a sweep repeats an earlier sweep.

    Compares only the commands if the earlier sweep has no runs.
    """
    if not measures_the_same(later[0].command, earlier[0].command):
        return False
    before, after = ({path for _, path in run_folders(*pair)} for pair in (earlier, later))
    return not before or bool(before & after)


def _sections(place: Path, group: _Group, pace: run_status.Pace, folder: Path) -> Iterator[Section]:
    """Yield the table for a folder with runs, its refusals, and its job states."""
    shown = (
        folder if [run.folder for run in group.runs] == [folder] else place
    )  # the user named a run
    title = ": ".join(
        filter(None, (str(shown if shown.name else shown.absolute()), "; ".join(group.sweeps)))
    )
    yield Section(one_line(title), run_status.matrix(group.runs, pace) if group.runs else ())
    if group.refused:
        yield Section(NOT_MEASURED, group.refused)
    if group.jobs:
        yield Section("jobs", group.jobs)


def _facts(run: Run, total: run_status.Tally) -> dict[str, Any]:
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
    groups: dict[Path, _Group] = {}
    for run in below.runs.values():
        groups.setdefault(run.folder.parent, _Group()).runs.append(run)
    reported: set[Path] = set()
    queued = None
    for sweep, place in below.current_sweeps:
        children = list(run_folders(sweep, place))
        begun = (path.parent for _, path in children if path.absolute() in below.runs)
        group = groups.setdefault(next(begun, place), _Group())
        group.runs += not_begun(sweep, place, below.runs)
        ended = sum(child.status is not Status.INTERRUPTED for child in sweep.children)
        if SweepPaths(place).jobs.exists():
            queued = queued or job_states.listed()  # once: an absent controller takes minutes
            states = job_states.states(sweep, place, queued)
            ended = sum(
                state.has_ended and state.state is not job_states.State.unsubmitted
                for state in states
            )
            group.jobs += [job_states.counted(states), *job_states.lines(states)]
        left = max((sweep.jobs or 0) - len(sweep.children), 0)
        of = f" of {sweep.jobs}" if sweep.jobs else ""
        unknown = (
            "; those that have not begun are not counted" if left and not sweep.planned else ""
        )
        group.sweeps.append(f"sweep over {sweep.name}, {ended}{of} runs have ended{unknown}")
        group.not_begun += left
        group.refused += _refused(sweep, place, below)
        reported.update(path.absolute() for child, path in children if child.error)
    for path, run in below.runs.items():
        if run.refusal is not None and path not in reported:
            groups[run.folder.parent].refused.append(f"{run.folder.name}: refused: {run.refusal}")
    return dict(sorted(groups.items()))


def _refused(sweep: Sweep, place: Path, below: _Below) -> Iterator[str]:
    """Yield a line with the reason for each sweep run that failed and has no record."""
    for child, folder in run_folders(sweep, place):
        run = below.runs.get(folder.absolute()) if child.error else None
        if child.error and not (folder / RECORD).is_file() and not (run and run.running):
            yield f"run {child.job} {child.name}: {child.status.value}: {child.error}"


def not_begun(sweep: Sweep, folder: Path, begun: Mapping[Path, Run]) -> Iterator[Run]:
    """Yield the runs of a sweep that have not begun; refused runs have their reason.

    A run that ended well is skipped even if its folder was moved.

    Args:
        begun: runs that have begun, by absolute folder.
    """
    children = {child.job: child for child in sweep.children}
    for planned in sweep.planned:
        place, child = run_folder(planned, folder), children.get(planned.job)
        is_left = child is None or child.error or child.status is Status.INTERRUPTED
        if is_left and place.absolute() not in begun:
            yield _waiting(place, planned.options, child.error if child else None, planned)
    numbers = {planned.job for planned in sweep.planned}
    for child, place in run_folders(sweep, folder) if numbers else ():
        if (
            child.error and child.job not in numbers and place.absolute() not in begun
        ):  # its configuration is wrong
            first = sweep.planned[0].options
            own = {axis.removesuffix(".name"): value for axis, value in child.axes.items()}
            yield _waiting(
                place, {group: own.get(group, name) for group, name in first.items()}, child.error
            )


def _waiting(
    folder: Path, options: Mapping[str, str], refusal: str | None, planned: PlannedRun | None = None
) -> Run:
    plan = {group: {"name": name} for group, name in options.items()}
    return Run(
        folder=folder, plan=plan, results={}, expected=None, refusal=refusal, planned=planned
    )
