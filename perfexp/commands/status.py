"""status: the progress of everything below a folder, also of runs that are being measured or were killed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.cli.overrides import jobs_of
from perfexp.cluster import job_states
from perfexp.commands.app import PLAN, RECORD, SWEEP, Json, app, echo
from perfexp.errors import PerfexpError, UserError
from perfexp.host import untrusted
from perfexp.plan import plan_file
from perfexp.plan.override_keys import key_of, measures_the_same
from perfexp.profilers import is_profile
from perfexp.records import folders
from perfexp.records.expected import Expected
from perfexp.records.folders import run_folders
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.reports import run_status
from perfexp.reports.console import Console
from perfexp.reports.run_status import Run
from perfexp.tables import json_results

#: Overrides that change the number of points; one size or batch size is as many as another.
_CHANGES_POINTS = re.compile(
    r"\+*((experiment|mode|probes\.layers|processes|replicate|cold_start|ttfp)=|(sweep|profiler)[.=]|(batch_size|input_size)=\[)"
)


@app.command()
def status(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, a sweep's, or any folder above some.")
    ] = Path("outputs"),
    as_json: Json = False,
) -> None:
    """Show what is done, failed, unsupported, refused, missing or being measured: models down, algorithms across.

    Exit code 0 if everything is done, requested profiles included, otherwise 1.
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
    is_open = any(group.refused or group.not_begun for group in groups.values())
    total = run_status.tally(runs, pace)
    is_complete = total.complete and not is_open
    if as_json:
        refused = [line for group in groups.values() for line in group.refused]
        lines = [_facts(run, run_status.tally([run], pace)) for run in runs]
        echo(json_results.document(lines, is_complete=is_complete, refused=refused))
    else:
        console = Console()
        _show(groups, pace, folder, console)
        if len(groups) > 1 and runs:
            console.note(f"in all: {total}")
    raise typer.Exit(0 if is_complete and not below.unreadable else 1)


@dataclass(kw_only=True)
class _Below:
    """Runs, by their absolute folders, and sweeps below a folder; unreadable ones are reported and counted."""

    runs: dict[Path, Run] = field(default_factory=dict)
    sweeps: list[tuple[Sweep, Path]] = field(default_factory=list)
    unreadable: int = 0

    def scan(self, folder: Path) -> None:
        """Find everything in and below a folder, and the runs of its sweeps in other folders."""
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}. Name one that perfexp wrote to.")
        paths = list(folders.below(folder, PLAN, SWEEP, refused=self._failed))
        for place in (path.parent for path in paths if path.name == SWEEP):
            try:
                self.sweeps.append((Sweep.load(place), place))
            except PerfexpError as error:
                self._failed(error, place)
        children = [path for sweep, place in self.sweeps for _, path in run_folders(sweep, place)]
        own = [path.parent for path in paths if path.name == PLAN]
        for run in [*own, *(path for path in children if (path / PLAN).is_file() and not path.is_symlink())]:
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
        """Sweeps that were not begun again later by the same command, with the same runs."""
        ordered = sorted(self.sweeps, key=lambda pair: pair[0].started)
        return [
            pair
            for number, pair in enumerate(ordered, start=1)
            if not any(_repeats(later, pair) for later in ordered[number:])
        ]


@dataclass(kw_only=True)
class _Group:
    """Runs of one folder, begun or not, and lines on its sweeps and refused runs; `not_begun` counts runs of sweeps."""

    runs: list[Run] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    not_begun: int = 0


def _run(folder: Path) -> Run:
    paths = RunPaths(folder)
    running = paths.in_use()  # first: a run that ends now has left its results
    record = Record.load(paths.record) if paths.record.exists() else None  # one that `show` cannot read is not done
    # YAML takes a hundred times as long to read as a record, whose plan is that of the folder once all has ended
    plan = plan_file.read(paths.plan) if record is None or running else record.plan
    results = run_status.results(untrusted.read_bytes(paths.points)) if paths.points.is_file() else {}
    if record is not None and not paths.points.exists():  # the record alone was copied
        results = {one.key: run_status.Result(key=one.key, status=one.status) for one in record.points}
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
    """Whether a sweep repeats another one; compares commands alone if the earlier one has no runs."""
    if not measures_the_same(later[0].command, earlier[0].command):
        return False
    before, after = ({path for _, path in run_folders(*pair)} for pair in (earlier, later))
    return not before or bool(before & after)


def _show(groups: Mapping[Path, _Group], pace: run_status.Pace, folder: Path, console: Console) -> None:
    """Print a table for each folder that holds runs."""
    for place, group in groups.items():
        shown = folder if [run.folder for run in group.runs] == [folder] else place  # the user named a run
        title = ": ".join(filter(None, (str(shown if shown.name else shown.absolute()), "; ".join(group.sweeps))))
        grid = run_status.matrix(group.runs, pace) if group.runs else None
        console.show_grid(title, grid, not_measured=group.refused)
        console.show_lines("jobs", group.jobs)


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
        waiting = not_begun(sweep, place, below.runs.values())
        group.runs += waiting or []
        ended = sum(child.status is not Status.INTERRUPTED for child in sweep.children)
        if SweepPaths(place).jobs.exists():
            queued = queued or job_states.listed()  # once: a controller that is away answers after minutes
            states = job_states.states(sweep, place, queued)
            ended = sum(state.has_ended and state.state is not job_states.State.unsubmitted for state in states)
            group.jobs += [job_states.counted(states), *job_states.lines(states)]
        left = max((sweep.jobs or 0) - len(sweep.children), 0)
        of = f" of {sweep.jobs}" if sweep.jobs else ""
        unknown = "; those that have not begun are not counted" if left and waiting is None else ""
        group.sweeps.append(f"sweep over {sweep.name}, {ended}{of} runs have ended{unknown}")
        group.not_begun += left
        group.refused += _refused(sweep, place, below)
        reported.update(path.absolute() for child, path in children if child.error)
    for path, run in below.runs.items():
        if run.refusal is not None and path not in reported:
            groups[run.folder.parent].refused.append(f"{run.folder.name}: refused: {run.refusal}")
    return dict(sorted(groups.items()))


def _refused(sweep: Sweep, place: Path, below: _Below) -> Iterator[str]:
    """Yield a line with the reason for each run of a sweep that ended with an error and without a record."""
    for child, folder in run_folders(sweep, place):
        run = below.runs.get(folder.absolute()) if child.error else None
        if child.error and not (folder / RECORD).is_file() and not (run and run.running):
            yield f"run {child.job} {child.name}: {child.status.value}: {child.error}"


def not_begun(sweep: Sweep, folder: Path, begun: Collection[Run]) -> list[Run] | None:
    """List the runs of a sweep that have not begun, or were refused before they had a folder.

    Each copies a run of those `begun` (with a plan, also of other sweeps); nothing is composed. Its points are known if
    both runs have the same number of points. None if the sweep's command does not determine the runs.
    """
    try:
        jobs = jobs_of(sweep.command, _sweeper_params(folder))
    except UserError:
        return None
    if not jobs or len(jobs) != sweep.jobs:
        return None
    ended = {path.absolute(): child for child, path in run_folders(sweep, folder)}
    own = list(_own(jobs, begun, {folder.absolute(), *(path.parent for path in ended)}))
    different = set().union(*jobs) - set(jobs[0]).intersection(*jobs)
    varying = {text.lstrip("+"): text for text in different}  # one that adds a key counts as one that changes it
    has_begun = {frozenset(different.intersection(_command(run.plan))) for run in own}
    has_begun |= {_axes(ended[run.folder.absolute()], varying) for run in own if run.folder.absolute() in ended}
    children = {_axes(child, varying): child for child in sweep.children}
    pending, alike = list[Run](), _Begun(own)
    for number, job in enumerate(jobs):
        child = children.get(axes := frozenset(different.intersection(job)))
        if axes not in has_begun and (child is None or child.error or child.status is Status.INTERRUPTED):
            pending.append(alike.run_of(job, folder / str(number), child.error if child else None))
    return pending


def _sweeper_params(folder: Path) -> Mapping[str, Any]:
    """Read the axes that a configuration file gave to the sweeper from multirun.yaml."""
    with suppress(UserError, KeyError, TypeError):
        params = plan_file.read(folder / "multirun.yaml")["hydra"]["sweeper"]["params"]
        return params if isinstance(params, Mapping) else {}
    return {}


def _own(jobs: Sequence[Sequence[str]], begun: Collection[Run], parents: Collection[Path]) -> Iterator[Run]:
    """Yield the runs of a sweep: by folder, or by command for those in the folder of a stage."""
    for run in begun:
        if run.folder.absolute().parent in parents or (
            run.plan.get("stage") and any(measures_the_same(job, _command(run.plan)) for job in jobs)
        ):
            yield run


def _axes(child: SweepChild, varying: Mapping[str, str]) -> frozenset[str]:
    """Select the overrides of a run from the varying ones, which are given by their text without `+`."""
    values = (f"{axis}={value}" for axis, value in child.axes.items())
    return frozenset(varying[text] for text in values if text in varying)


def _command(plan: Mapping[str, Any]) -> list[str]:
    command = plan.get("command")
    return [text for text in command if str(text)[:1] != "-"] if isinstance(command, list) else []


class _Begun:
    """Runs of a sweep that have begun, by which others that have not are known."""

    def __init__(self, runs: Sequence[Run]) -> None:
        commands = [(run, _command(run.plan)) for run in reversed(runs)]
        self._first = next(iter(runs), None)
        self._alike = {_of_points(command): run for run, command in commands}
        self._plans = {text: run.plan for run, command in commands for text in command}

    def run_of(self, job: Sequence[str], folder: Path, refusal: str | None) -> Run:
        """Return the run of some overrides; its points are known if one with as many of them has begun."""
        same = self._alike.get(_of_points(job))
        plan: dict[str, Any] = {key_of(text): {"name": text.partition("=")[2]} for text in job}
        if run := same or self._first:
            plan = dict(run.plan)  # its nodes are replaced, never changed
            for text in set(job).difference(_command(run.plan)):
                key, value = key_of(text), text.partition("=")[2]
                twin = self._plans.get(text, {})
                group, _, name = key.partition(".")
                if key in twin:
                    plan[key] = twin[key]
                elif isinstance(plan.get(group), dict) and name in ("", "name"):
                    plan[group] = {**plan[group], "name": value} if name else {"name": value}
        expected, seconds = (same.expected, same.point_seconds) if same else (None, None)
        return Run(folder=folder, plan=plan, results={}, expected=expected, point_seconds=seconds, refusal=refusal)


def _of_points(command: Iterable[str]) -> frozenset[str]:
    return frozenset(text for text in command if _CHANGES_POINTS.match(text))
