"""Pending: runs of a sweep that have left no folder."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfexp.cli.overrides import jobs_of
from perfexp.errors import UserError
from perfexp.orchestration.stored_sweep import key_of, measures_the_same
from perfexp.plan import plan_file
from perfexp.records.folders import run_folders
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.reports.run_status import Run

#: Overrides that change the number of points; one size or batch size is as many as another.
_CHANGES_POINTS = re.compile(
    r"\+*((experiment|mode|probes\.layers|replicate|ttfp)=|(sweep|profiler)[.=]|(batch_size|input_size)=\[)"
)


def runs(sweep: Sweep, folder: Path, begun: Collection[Run]) -> list[Run] | None:
    """List the runs of a sweep that have not begun, or were refused before they had a folder.

    Each copies the most similar run of those `begun` (with a plan, also of other sweeps); nothing is composed. Its
    points are known if both runs have the same number of points. None if the sweep's command does not determine the
    runs.
    """
    try:
        jobs = jobs_of(sweep.command, _sweeper_params(folder))
    except UserError:
        return None
    if not jobs or len(jobs) != sweep.jobs:
        return None
    ended = {path.absolute(): child for child, path in run_folders(sweep, folder)}
    own = list(_own(jobs, begun, {folder.absolute(), *(path.parent for path in ended)}))
    varying = set().union(*jobs) - set(jobs[0]).intersection(*jobs)
    has_begun = {frozenset(varying.intersection(_command(run.plan))) for run in own}
    has_begun |= {_axes(ended[run.folder.absolute()], varying) for run in own if run.folder.absolute() in ended}
    children = {_axes(child, varying): child for child in sweep.children}
    pending: list[Run] = []
    for number, job in enumerate(jobs):
        child = children.get(axes := frozenset(varying.intersection(job)))
        if axes not in has_begun and (child is None or child.error):
            pending.append(_pending(job, own, folder / str(number), child.error if child else None))
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


def _axes(child: SweepChild, varying: Collection[str]) -> frozenset[str]:
    """Select the varying overrides of a run; one that adds a key counts as one that changes it."""
    values = {f"{axis}={value}" for axis, value in child.axes.items()}
    return frozenset(text for text in varying if text.lstrip("+") in values)


def _command(plan: Mapping[str, Any]) -> list[str]:
    command = plan.get("command")
    return [text for text in command if str(text)[:1] != "-"] if isinstance(command, list) else []


def _pending(job: Sequence[str], own: Sequence[Run], folder: Path, refusal: str | None) -> Run:
    """Derive a run that has not begun from the run of the same sweep (`own`) whose command is most similar."""
    points = {text for text in job if _CHANGES_POINTS.match(text)}

    def similarity(run: Run) -> tuple[bool, int]:
        same = points == {text for text in _command(run.plan) if _CHANGES_POINTS.match(text)}
        return same, len(set(job).intersection(_command(run.plan)))

    nearest = max(own, key=similarity, default=None)
    if nearest is None:
        plan = {key_of(text): {"name": text.partition("=")[2]} for text in job}
        return Run(folder=folder, plan=plan, results={}, expected=None, refusal=refusal)
    plan = copy.deepcopy(dict(nearest.plan))
    for text in set(job).difference(_command(nearest.plan)):
        key, value = key_of(text), text.partition("=")[2]
        twin = next((run.plan for run in own if text in _command(run.plan)), {})
        group, _, name = key.partition(".")
        if key in twin:
            plan[key] = twin[key]
        elif isinstance(plan.get(group), dict) and name in ("", "name"):
            plan[group] = {**plan[group], "name": value} if name else {"name": value}
    keys = nearest.expected if similarity(nearest)[0] else None
    return Run(
        folder=folder, plan=plan, results={}, expected=keys, point_seconds=nearest.point_seconds, refusal=refusal
    )
