"""Old names: earlier setting names in commands, users' files, stored plans and Python arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

#: Current setting names by earlier name.
NAMES = {"replicate": "processes", "ttfp": "cold_start", "stopping.epsilon": "stopping.target"}
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
    return _renamed(plain, NAMES, typed)


def plan_as_first_named(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with the earlier names, which keep plan hashes equal across versions."""
    return _renamed(plain, {new: old for old, new in NAMES.items()})


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


def _is_own(node: Mapping[str, Any]) -> bool:
    """Return whether the settings configure perfexp's code: a user's class keeps its own names."""
    return str(node.get("_target_", "perfexp.")).startswith("perfexp.")
