"""Old names: earlier names of settings and `_target_`s in commands, user files and stored plans."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

#: Current setting names by earlier name.
NAMES = {"replicate": "processes", "ttfp": "cold_start", "stopping.epsilon": "stopping.target"}
#: Current modules and packages by earlier name, for the `_target_`s of perfexp's own code.
MOVED = {
    "perfexp.algorithms": "perfexp.convolution",
    "perfexp.modes": "perfexp.measuring.modes",
    "perfexp.prediction.sparse": "perfexp.plan.sparse",
    "perfexp.profilers": "perfexp.measuring.profilers",
    "perfexp.stopping": "perfexp.timing.stopping",
    "perfexp.sweep": "perfexp.plan.sweep",
    "perfexp.tracking": "perfexp.report.tracking",
}
_OVERRIDE = re.compile(rf"^(?P<sign>[+~]{{0,2}})(?P<name>{'|'.join(map(re.escape, NAMES))})(?==|$)")


def arguments_of_today(arguments: Sequence[str]) -> list[str]:
    """Return a command line with current names: `["replicate=3"]` becomes `["processes=3"]`."""
    return [
        _OVERRIDE.sub(lambda found: found["sign"] + NAMES[found["name"]], text, count=1)
        for text in arguments
    ]


def plan_of_today(plain: Mapping[str, Any], typed: Collection[str] = ()) -> dict[str, Any]:
    """Return a plan or configuration with current names.

    Args:
        typed: keys that the user typed; an earlier name in a file does not override them.
    """
    renamed = _renamed(plain, NAMES, typed)
    return {key: _moved(node, MOVED) for key, node in renamed.items()}


def plan_as_first_named(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with the earlier names, which keep plan hashes equal across versions."""
    renamed = _renamed(plain, {new: old for old, new in NAMES.items()})
    first_places = {new: old for old, new in MOVED.items()}
    return {key: _moved(node, first_places) for key, node in renamed.items()}


def _renamed(
    plain: Mapping[str, Any], names: Mapping[str, str], typed: Collection[str] = ()
) -> dict[str, Any]:
    renamed = dict(plain)
    for old, new in names.items():
        group, _, key = old.rpartition(".")
        node = renamed.get(group) if group else renamed
        if not isinstance(node, Mapping) or key not in node or not _is_own(node):
            continue
        node = dict(node)
        value, name = node.pop(key), new.rpartition(".")[2]
        if (value is not None and new not in typed) or name not in node:
            node[name] = value
        renamed = {**renamed, group: node} if group else node
    return renamed


def _moved(node: Any, places: Mapping[str, str]) -> Any:
    """Return a plan's node with each `_target_` in its other place."""
    if isinstance(node, list):
        return [_moved(item, places) for item in node]
    if not isinstance(node, Mapping):
        return node
    moved = {key: _moved(value, places) for key, value in node.items()}
    target = node.get("_target_")
    if isinstance(target, str):
        moved["_target_"] = _moved_target(target, places)
    return moved


def _moved_target(target: str, places: Mapping[str, str]) -> str:
    for before, after in places.items():
        if target.startswith(f"{before}."):
            return after + target.removeprefix(before)
    return target


def _is_own(node: Mapping[str, Any]) -> bool:
    """Return whether the settings configure perfexp's code: a user's class keeps its own names."""
    return str(node.get("_target_", "perfexp.")).startswith("perfexp.")
