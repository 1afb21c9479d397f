"""Preparation: a run's folder made ready: what is there is compared, and what is measured again is forgotten."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfexp import config
from perfexp.errors import UserError
from perfexp.paths import RunPaths, write_atomically
from perfexp.profilers import profiled_key
from perfexp.record import Key, Status, points_from_lines, read_points, timed_key
from perfexp.sinks.store import without_password

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
        UserError: the folder has another plan.
    """
    if paths.plan.exists():
        _refuse_other_plan(paths, plain)
        known = read_points(paths.points)
        forgotten = {point.key for point in known if point.status not in _FINAL and point.key not in again}
        if forgotten:
            write_atomically(paths.points, b"".join(_other_lines(paths.points, forgotten)))
    content = config.to_yaml(without_passwords(plain))
    write_atomically(paths.plan, content)
    return hashlib.sha256(content).hexdigest()


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
    for line in path.read_bytes().split(b"\n"):
        for point in points_from_lines(line):
            if forgotten.isdisjoint((point.key, timed_key(point.key), profiled_key(point.key))):
                yield line + b"\n"


def profiler_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a profiler, as JSON values; nothing where nobody looks on.

    Args:
        node: of a plan.
    """
    return {} if node.get("name") == "none" else {key: value for key, value in node.items() if key != "_target_"}


def _refuse_other_plan(paths: RunPaths, plain: Mapping[str, Any]) -> None:
    changed = config.differences(config.read(paths.plan), plain)
    if changed:
        listed = "\n  ".join(changed[:20])
        raise UserError(
            f"{paths.root} holds the run of another plan. It differs in\n  {listed}\n"
            "Choose another output_dir, or repeat the command that made it to go on with it."
        )


def without_passwords(node: Any) -> Any:
    """A plan, or a part of it, in which no URL carries a password: it is written to files that are passed on.

    Args:
        node: of plain data.
    """
    if isinstance(node, Mapping):
        return {key: without_passwords(value) for key, value in node.items()}
    if isinstance(node, list):
        return [without_passwords(value) for value in node]
    return without_password(node) if isinstance(node, str) else node
