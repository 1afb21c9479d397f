"""A run's assignment, and its folder, which must hold the same plan or none.

Before measuring, `prepare` writes the plan into the folder and keeps earlier results from the same
plan, so that repeating a command continues a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.host.files import write_atomically
from perfexp.plan import config, plan_file
from perfexp.records.expected import Expected
from perfexp.records.paths import RunPaths, SweepPaths, append_line
from perfexp.records.profile_keys import profiled_key
from perfexp.records.record import (
    Key,
    Point,
    Record,
    Status,
    SweepMembership,
    point_to_line,
    points_from_lines,
    read_points,
    timed_key,
)
from perfexp.report import run_status
from perfexp.report.progress import Whole
from perfexp.report.run_status import median_seconds, seconds_left


@dataclass(kw_only=True)
class Assignment:
    """A run to measure, alone or within a sweep.

    Attributes:
        plan: plan of the run.
        plain: plain data of the plan, as a file has it.
        folder: folder of the run.
        name: name in lists and messages.
        sweep: the run's place in its sweep; None for a run alone.
        is_sent: whether the tracker accepted the record; valid after the run.
        begun: called when the first measurement begins.
        whole: progress of the sweep, or of all processes measured in turn; None for a single run.
        number: position in the sweep, from 1.
        overwrites: whether to remove earlier results in the folder first.
    """

    plan: config.Plan
    plain: dict[str, Any]
    folder: Path
    name: str
    sweep: SweepMembership | None = None
    is_sent: bool = True
    begun: Callable[[], None] = lambda: None
    whole: Whole | None = None
    number: int = 1
    overwrites: bool = False

    def seconds(self, left: Collection[Key], measured: Sequence[float] = ()) -> float | None:
        """Return the estimated seconds for points without a result; None if unknown.

        Progress displays and dry runs show it.

        Args:
            left: points without a result.
            measured: wall times of measured points, in seconds.
        """
        return seconds_left(left, median_seconds(measured) if measured else self.plan.point_seconds)


#: Configuration key for the number of processes.
_PROCESSES = "processes"
#: Results that stay when a command is repeated; the others are measured again.
_FINAL = (Status.OK, Status.OOM, Status.OOM_PREDICTED, Status.UNSUPPORTED)


def prepare(
    paths: RunPaths, plan: config.Plan, plain: Mapping[str, Any], keys_again: Collection[Key]
) -> str:
    """Write plan.yaml and expected.json, and forget failed points from the same plan.

    `Supervisor.prepare` calls it.

    Args:
        paths: the run's folder.
        keys_again: profiles to repeat; their results stay until there are new results.

    Returns:
        The SHA-256 of plan.yaml, by which a worker recognizes it.

    Raises:
        UserError: the folder has another plan, or a record that would be lost.
    """
    refuse_other_plan(paths, plain)
    if paths.record.exists():
        _recover_points(paths, plan_file.plan_hash(_with_fewer_processes(paths, plain)))
    finished = read_points(paths.points)
    forgotten = set[Key]()
    for point in finished:
        if point.status not in _FINAL and point.key not in keys_again:
            forgotten.add(point.key)
    if paths.plan.exists() and forgotten:
        write_atomically(paths.points, b"".join(other_lines(paths, forgotten)))
        finished = read_points(paths.points)
    write_expected(paths, plan, finished)
    content = plan_file.signed(plan_file.to_yaml({**plain, "uid": paths.uid}))
    write_atomically(paths.plan, content)
    return hashlib.sha256(content).hexdigest()


def write_expected(paths: RunPaths, plan: config.Plan, results: Collection[Point]) -> None:
    """Write expected.json: the plan's points, including points chosen by the results so far.

    `perfexp status` compares the results with it.
    """
    keys = plan.keys(results)
    if not config.build(plan.profiler).times:  # points timed earlier count, too
        keys = list(dict.fromkeys([*(point.key for point in results), *keys]))
    write_atomically(
        paths.expected, Expected(keys=keys, point_seconds=plan.point_seconds).to_json()
    )


def is_finished(paths: RunPaths, plan: config.Plan) -> bool:
    """Return whether a run's folder has its record and a final result for each point.

    Campaigns skip such runs.
    """
    try:
        results = run_status.results(foreign.read_bytes(paths.points))
        everything = plan.keys(read_points(paths.points))
    except (OSError, UserError):
        return False
    for key in everything:
        if key not in results or results[key].status not in _FINAL:
            return False
    return paths.record.is_file()


def _recover_points(paths: RunPaths, plan_hash: str) -> None:
    """Append results that only the record has.

    Raises:
        UserError: the record cannot be read and would be lost.
    """
    try:
        record = Record.load(paths.record)
    except UserError as error:
        raise UserError(
            f"{error} It would be overwritten: move it away, or choose another output_dir."
        ) from error
    done = {point.key for point in read_points(paths.points)}
    if record.plan_hash == plan_hash:
        for point in record.points:
            if point.status in _FINAL and point.key not in done:
                append_line(paths.points, point_to_line(point))


def profiles_again(paths: RunPaths, plan: config.Plan) -> frozenset[Key]:
    """Return profiles to repeat: failed, made with other settings, or with missing files.

    `Supervisor.prepare` calls it.
    """
    results, settings = read_points(paths.points), profiler_settings(plan.profiler)
    keys = plan.profile_keys(results)
    again = set[Key]()
    for point in results:
        profile = point.facts.get("profile") or {}
        is_final = point.status in _FINAL and not _is_stale(profile, paths.root, settings)
        if point.key in keys and not is_final:
            again.add(point.key)
    return frozenset(again)


def _is_stale(profile: Mapping[str, Any], folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a profile was made with other settings, or lacks a file.

    Args:
        profile: facts about the profile, from its point.
        folder: folder of the run.
        settings: the plan's profiler settings.
    """
    missing_files = (name for name in profile.get("files", []) if not (folder / name).exists())
    return profile.get("settings") != settings or any(missing_files)


def other_lines(paths: RunPaths, forgotten: set[Key]) -> Iterator[bytes]:
    """Yield the lines in points.jsonl that stay, byte for byte.

    If a point is forgotten, so are its layers and its profile. Forgetting and replacing points
    write them back.
    """
    for line in foreign.read_bytes(paths.points).split(b"\n"):
        for point in points_from_lines(line):
            if forgotten.isdisjoint((point.key, timed_key(point.key), profiled_key(point.key))):
                yield line + b"\n"


def profiler_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a profiler's node as JSON values; empty for profiler=none.

    A profile made with other settings is made again.
    """
    settings = dict(node)
    if settings.get("name") == "none":
        return {}
    settings.pop("_target_", None)
    return settings


def is_of_perfexp(paths: RunPaths) -> bool:
    """Return whether the manifest in a folder has the identity of the run or sweep there.

    Otherwise it may come from other software, which also writes manifests, for example for data
    sets. Only then may files be deleted (`perfexp clean`, `--overwrite`).
    """
    identities: set[str | None] = set()
    for file in (paths.record, SweepPaths(paths.root).summary):
        with suppress(OSError, ValueError, msgspec.MsgspecError, RecursionError):
            identities.add(foreign.from_json(foreign.read_bytes(file), _Identity).uid)
    with suppress(UserError):
        identities.add(str(plan_file.read(paths.plan).get("uid")))
    return paths.uid is not None and paths.uid in identities


class _Identity(msgspec.Struct):
    """The identity in a record.json or sweep.json."""

    uid: str | None = None


def holds_other_plan(paths: RunPaths, plain: Mapping[str, Any]) -> bool:
    """Return whether a folder has another plan, or a plan that cannot be read.

    A run of a stage then takes the next numbered folder.
    """
    try:
        refuse_other_plan(paths, plain)
    except UserError:
        return True
    return False


def with_processes(plain: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Return a plan, including its command, with another number of processes.

    `perfexp ab` adds processes until it has a verdict.
    """
    others = [text for text in plain["command"] if text.lstrip("+").partition("=")[0] != _PROCESSES]
    return {**plain, _PROCESSES: processes, "command": [*others, f"{_PROCESSES}={processes}"]}


def _with_fewer_processes(paths: RunPaths, plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plan with the folder's number of processes, if that is lower.

    More processes continue a run.
    """
    before = plan_file.read(paths.plan).get(_PROCESSES) if paths.plan.exists() else None
    is_lower = type(before) is int and 0 < before < (plain.get(_PROCESSES) or 0)
    if is_lower:
        return {**plain, _PROCESSES: before}
    return plain


class OtherCode(UserError):
    """Raised if a folder has results from other user code than now."""


def refuse_other_plan(paths: RunPaths, plain: Mapping[str, Any]) -> None:
    """Compare a folder's plan with this plan, as data: nothing in either plan is built.

    The user's own code may differ if every point failed. `main` calls it before anything is built,
    and `prepare` before anything is written.

    Raises:
        UserError: the folder has another plan, or a plan in another format.
    """
    if not paths.plan.exists():
        return
    before, now = plan_file.read_to_resume(paths.plan), _with_fewer_processes(paths, plain)
    changed = plan_file.differences(before, now)
    if changed and (why := plan_file.refusal_of_sources(before, now)):
        is_lost = before["sources"].keys() - now["sources"].keys()  # it could not be imported
        if is_lost or not _all_failed(paths):
            raise OtherCode(
                f"{paths.root} has results of other code: {why} --overwrite replaces the results."
            )
        changed = plan_file.differences({**before, "sources": now["sources"]}, now)
    if changed:
        listed = "\n  ".join(changed[:20])
        raise UserError(
            f"{paths.root} holds the run of another plan. It differs in\n  {listed}\nChoose "
            "another output_dir, add --overwrite, or repeat the original command to continue it."
        )


def _all_failed(paths: RunPaths) -> bool:
    """Return whether a folder has results, none of which would stay if its command is repeated.

    Layers and profiles of failed points do not count.
    """
    points = read_points(paths.points)
    if paths.record.exists():
        points += Record.load(paths.record).points
    final = {point.key for point in points if point.status in _FINAL}
    return bool(points) and not any(timed_key(profiled_key(key)) in final for key in final)
