"""Old names: earlier names of settings and `_target_`s in commands, user files and stored plans.

Commands, YAML files and records from earlier versions stay usable: they are translated where they
are read, and the rest of the package knows today's names only. `_target_` is the import path of
the code that a node of a plan selects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from perfexp.errors import UserError

#: Current setting names by earlier name.
NAMES = {"replicate": "processes", "ttfp": "cold_start", "stopping.epsilon": "stopping.target"}
#: Settings by the names that command lines may use: earlier ones, and one of a mode.
_TYPED = {**NAMES, "decode.context": "input_size"}
#: Current modules and packages by earlier name, for `_target_`s of perfexp's own code.
MOVED = {
    "perfexp.algorithms": "perfexp.convolution",
    "perfexp.modes": "perfexp.measuring.modes",
    "perfexp.prediction.sparse": "perfexp.plan.sparse",
    "perfexp.profilers": "perfexp.measuring.profilers",
    "perfexp.stopping": "perfexp.timing.stopping",
    "perfexp.sweep": "perfexp.plan.sweep",
    "perfexp.tracking": "perfexp.report.tracking",
}
_OVERRIDE = re.compile(
    rf"^(?P<sign>[+~]{{0,2}})(?P<name>{'|'.join(map(re.escape, _TYPED))})(?==|$)"
)


def arguments_of_today(arguments: Sequence[str]) -> list[str]:
    """Return a command line with current names: `["replicate=3"]` becomes `["processes=3"]`.

    Every command line is translated before Hydra sees it. `decode.context` becomes `input_size`,
    and `model=mine.py:Net` becomes `model=mine:Net`.

    Raises:
        UserError: `decode.context` without `mode=decode`.
    """
    words = " ".join(arguments)
    is_typed = re.search(r"(?<!\S)\+*decode\.context=", words)
    if is_typed and not re.search(r"(?<!\S)\+*mode=\S*decode", words):
        raise UserError("decode.context is for mode=decode: add it, or set input_size.")

    def current(match: re.Match[str]) -> str:
        return match["sign"] + _TYPED[match["name"]]

    return [
        text.replace(".py:", ":")
        if text.startswith("model=")
        else _OVERRIDE.sub(current, text, count=1)
        for text in arguments
    ]


def plan_of_today(plain: Mapping[str, Any], typed: Collection[str] = ()) -> dict[str, Any]:
    """Return a plan or configuration with current names.

    Stored plans, records and user files are translated when they are read.

    Args:
        plain: content as nested dictionaries, as YAML or JSON gives it.
        typed: keys that the user typed; an earlier name in a file does not override them.
    """
    renamed = _renamed(plain, NAMES, typed)
    return {key: _moved(node, MOVED) for key, node in renamed.items()}


def plan_as_first_named(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with the earliest names, from which its hash is computed.

    Hashes then stay equal across versions, so a run can be resumed with a newer perfexp.
    """
    first_names = {new: old for old, new in NAMES.items()}
    first_modules = {new: old for old, new in MOVED.items()}
    renamed = _renamed(plain, first_names)
    return {key: _moved(node, first_modules) for key, node in renamed.items()}


def _renamed(
    plain: Mapping[str, Any], names: Mapping[str, str], typed: Collection[str] = ()
) -> dict[str, Any]:
    """Return a plan with settings renamed; dotted names are settings in a group's node.

    If the plan has both names, the old name's value wins unless it is None or the new name was
    typed.
    """
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


def _moved(node: Any, modules: Mapping[str, str]) -> Any:
    """Return a plan's node in which each `_target_`, at any depth, names the other module.

    Args:
        modules: new module or package by the one to replace.
    """
    if isinstance(node, list):
        return [_moved(item, modules) for item in node]
    if not isinstance(node, Mapping):
        return node
    moved = {key: _moved(value, modules) for key, value in node.items()}
    target = node.get("_target_")
    if isinstance(target, str):
        for before, after in modules.items():
            if target.startswith(f"{before}."):
                moved["_target_"] = after + target.removeprefix(before)
                break
    return moved


def _is_own(node: Mapping[str, Any]) -> bool:
    """Return whether the settings configure perfexp's code: a user's class keeps its own names."""
    return str(node.get("_target_", "perfexp.")).startswith("perfexp.")
