"""Preparation: a run's folder made ready: what is there is compared, and what is measured again is forgotten."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.host.files import write_atomically
from perfexp.plan import config
from perfexp.profilers import profiled_key
from perfexp.records.paths import RunPaths, SweepPaths, append_line
from perfexp.records.record import (
    Key,
    Record,
    Status,
    point_to_line,
    points_from_lines,
    read_points,
    timed_key,
)

#: Results that stay when a command is repeated; what else there is, is measured again.
_FINAL = (Status.OK, Status.OOM, Status.OOM_PREDICTED, Status.UNSUPPORTED)


def prepare(paths: RunPaths, plain: Mapping[str, Any], again: Collection[Key]) -> str:
    """Write the plan; in a folder that has this plan already, what failed is forgotten. Returns the file's SHA-256.

    A profile that is made again is not: its line stays until there is a new one.

    Args:
        paths: of the run.
        plain: the plan as plain data.
        again: profiles that are made again.

    Raises:
        UserError: the folder has another plan, or a record that would be lost.
    """
    refuse_other_plan(paths, plain)
    if paths.record.exists():
        _recover_points(paths, config.plan_hash(plain))
    if paths.plan.exists():
        known = read_points(paths.points)
        forgotten = {point.key for point in known if point.status not in _FINAL and point.key not in again}
        if forgotten:
            write_atomically(paths.points, b"".join(_other_lines(paths.points, forgotten)))
    content = config.to_yaml({**plain, "uid": paths.uid})
    write_atomically(paths.plan, content)
    return hashlib.sha256(content).hexdigest()


def _recover_points(paths: RunPaths, plan_hash: str) -> None:
    """Take results that only the record still has back into points.jsonl, which may have been cut.

    Raises:
        UserError: the record cannot be read, and would be overwritten.
    """
    try:
        record = Record.load(paths.record)
    except UserError as error:
        raise UserError(f"{error} It would be overwritten: move it away, or choose another output_dir.") from error
    done = {point.key for point in read_points(paths.points)}
    if record.plan_hash == plan_hash:
        for point in record.points:
            if point.status in _FINAL and point.key not in done:
                append_line(paths.points, point_to_line(point))


def profiles_again(paths: RunPaths, settings: Mapping[str, Any], wanted: Collection[Key]) -> frozenset[Key]:
    """Profiles that are made again: what did not end well, what other settings made, or whose files are gone.

    Args:
        paths: of the run.
        settings: of the profiler.
        wanted: the profiles of the plan.
    """
    known = [point for point in read_points(paths.points) if point.key in wanted]
    return frozenset(
        point.key
        for point in known
        if point.status not in _FINAL or _is_stale(point.facts.get("profile") or {}, paths.root, settings)
    )


def _is_stale(profile: Mapping[str, Any], folder: Path, settings: Mapping[str, Any]) -> bool:
    missing_files = (name for name in profile.get("files", []) if not (folder / name).exists())
    return profile.get("settings") != settings or any(missing_files)


def _other_lines(path: Path, forgotten: set[Key]) -> Iterator[bytes]:
    """The lines of a points.jsonl whose result stays, byte for byte; layers and profile go with their point."""
    for line in untrusted.read_bytes(path).split(b"\n"):
        for point in points_from_lines(line):
            if forgotten.isdisjoint((point.key, timed_key(point.key), profiled_key(point.key))):
                yield line + b"\n"


def profiler_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a profiler, as JSON values; nothing where nobody looks on.

    Args:
        node: of a plan.
    """
    return {} if node.get("name") == "none" else {key: value for key, value in node.items() if key != "_target_"}


def is_of_perfexp(paths: RunPaths) -> bool:
    """Whether the identity in a manifest is that of the run or the sweep beside it; data sets have manifests, too.

    Args:
        paths: files of the folder.
    """
    known: set[str | None] = set()
    for file in (paths.record, SweepPaths(paths.root).summary):
        with suppress(OSError, ValueError, msgspec.MsgspecError, RecursionError):
            known.add(msgspec.json.decode(untrusted.read_bytes(file), type=_Identified).uid)
    with suppress(UserError):
        known.add(str(config.read(paths.plan).get("uid")))
    return paths.uid is not None and paths.uid in known


class _Identified(msgspec.Struct):
    uid: str | None = None


def holds_other_plan(paths: RunPaths, plain: Mapping[str, Any]) -> bool:
    """Whether a folder has the plan of another run, or one that can't be read.

    Args:
        paths: of the run.
        plain: the plan as plain data.
    """
    try:
        refuse_other_plan(paths, plain)
    except UserError:
        return True
    return False


def refuse_other_plan(paths: RunPaths, plain: Mapping[str, Any]) -> None:
    """Compare with the plan that a folder holds, as data: nothing of either is built.

    Args:
        paths: of the run.
        plain: the plan as plain data.

    Raises:
        UserError: the folder has another plan.
    """
    if not paths.plan.exists():
        return
    changed = config.differences(config.read(paths.plan), plain)
    if changed:
        listed = "\n  ".join(changed[:20])
        raise UserError(
            f"{paths.root} holds the run of another plan. It differs in\n  {listed}\n"
            "Choose another output_dir, add --overwrite, or repeat the command that made it to go on with it."
        )
