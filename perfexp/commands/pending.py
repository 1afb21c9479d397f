"""Pending: the runs of a sweep that have left no folder: what tells what they measure, and why they were refused."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from perfexp.cli.overrides import jobs_of
from perfexp.errors import UserError
from perfexp.orchestration.stored_sweep import measures_the_same
from perfexp.plan import config
from perfexp.records.folders import run_folders
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.reports import run_status

if TYPE_CHECKING:
    from perfexp.records.record import Key
    from perfexp.reports.run_status import Run

#: What the modes of conf/ measure; which options of other groups have which settings makes no point more or less.
_PHASES: dict[str, dict[str, Any]] = {
    "train": {"train": {}, "inference": None},
    "inference": {"train": None, "inference": {}},
    "train_inference": {"train": {}, "inference": {}},
}


def runs(sweep: Sweep, folder: Path, known: Collection[Run]) -> list[Run] | None:
    """The runs of a sweep that have not begun, or were refused before they had a folder.

    What they measure is taken from the runs that have begun, but for what varies. Nothing is composed.

    Args:
        sweep: its summary.
        folder: where that lies.
        known: runs that have a plan, those of other sweeps too.

    Returns:
        A run for each; None where the sweep's command does not tell which runs it has.
    """
    try:
        jobs = jobs_of(sweep.command, _params(folder))
    except UserError:
        return None
    if not jobs or len(jobs) != sweep.jobs:
        return None
    ended = {path.absolute(): child for child, path in run_folders(sweep, folder)}
    own = list(_own(jobs, known, {folder.absolute(), *(path.parent for path in ended)}))
    varying = set().union(*jobs) - set(jobs[0]).intersection(*jobs)
    begun = {frozenset(varying.intersection(_command(run.plan))) for run in own}
    begun |= {_axes(ended[run.folder.absolute()], varying) for run in own if run.folder.absolute() in ended}
    children = {_axes(child, varying): child for child in sweep.children}
    found: list[Run] = []
    for number, job in enumerate(jobs):
        which = frozenset(varying.intersection(job))
        child = children.get(which)
        if which in begun or (child and not child.error):
            continue
        plan = _plan(job, [run.plan for run in own])
        keys: frozenset[Key] | None = None
        with suppress(UserError):  # a run that is going to be refused
            keys = run_status.expected(plan)
        why = child.error if child else None
        found.append(run_status.run(folder / str(number), plan, keys=keys, known={}, running=False, refusal=why))
    return found


def _params(folder: Path) -> Mapping[str, Any]:
    """The axes that a configuration file gave to the sweeper, as Hydra wrote them down; none where it did not."""
    with suppress(UserError, KeyError, TypeError):
        params = config.read(folder / "multirun.yaml")["hydra"]["sweeper"]["params"]
        return params if isinstance(params, Mapping) else {}
    return {}


def _own(jobs: Sequence[Sequence[str]], known: Collection[Run], parents: Collection[Path]) -> Iterator[Run]:
    """The runs of a sweep: those that lie where its runs lie, and a stage's, whose folder only their command tells."""
    for run in known:
        if run.folder.absolute().parent in parents or (
            run.plan.get("stage") and any(measures_the_same(job, _command(run.plan)) for job in jobs)
        ):
            yield run


def _axes(child: SweepChild, varying: Collection[str]) -> frozenset[str]:
    """What varies, as overrides; one that adds a key is the same."""
    values = {f"{axis}={value}" for axis, value in child.axes.items()}
    return frozenset(text for text in varying if text.lstrip("+") in values)


def _command(plan: Mapping[str, Any]) -> list[str]:
    """The overrides that a run was started with, without flags."""
    command = plan.get("command")
    return [text for text in command if str(text)[:1] != "-"] if isinstance(command, list) else []


def _plan(job: Sequence[str], begun: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run is going to measure: the plan of the run that is most like it, with what it changes.

    Args:
        job: its overrides.
        begun: plans of other runs of the same sweep.
    """
    nearest = max(begun, key=lambda plan: len(set(job).intersection(_command(plan))), default={})
    plan = copy.deepcopy(dict(nearest))
    for text in set(job).difference(_command(nearest)):
        key, _, value = text.lstrip("+").partition("=")
        twin = next((other for other in begun if text in _command(other)), {})
        if key in twin:
            plan[key] = twin[key]
        elif isinstance(plan.get(key), Mapping):  # another option of a group
            plan[key] = {"name": value} | (_PHASES.get(value, {}) if key == "mode" else {})
        else:
            _put(plan, key.split("."), value)
            if begun and key.partition(".")[0] not in nearest:  # what an experiment changes is in its file
                plan.pop("sweep", None)
    return plan


def _put(plan: dict[str, Any], path: Sequence[str], value: str) -> None:
    """Set a value as it is written."""
    node: Any = plan
    for part in path[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if isinstance(node, dict):
        with suppress(yaml.YAMLError):
            node[path[-1]] = yaml.safe_load(value)
