"""Models that a command line names as `module:Name`."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.models import torchvision_names
from perfexp.plan.override_keys import key_of

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)")


def nodes(typed: Sequence[str]) -> dict[str, Any]:
    """Return a model option for each `module:Name` that the user typed.

    For example, `model=mine:TinyNet model.width=32` gives the option `mine:TinyNet` with a null
    `width`, which Hydra then sets. The current folder joins the module path if it has the module.
    Pass typed words only: a stored command must not choose code.

    Raises:
        UserError: there is no such module.
    """
    words = [text.partition("=")[2] for text in typed if key_of(text) == "model"]
    names = {
        name.strip(): _NAME.fullmatch(name.strip()) for text in words for name in text.split(",")
    }
    found = {
        name: match
        for name, match in names.items()
        if match and not torchvision_names.is_name(name)
    }
    for match in found.values():
        _find(match[1])
    settings = typed_settings(typed) if found else {}
    return {
        name: {"_target_": f"{match[1]}.{match[2]}", "_partial_": True, **settings}
        for name, match in found.items()
    }


def _find(module: str) -> None:
    top, here = module.partition(".")[0], Path.cwd()
    if str(here) not in sys.path and ((here / f"{top}.py").is_file() or (here / top).is_dir()):
        sys.path.append(str(here))  # last, so that no file here hides an installed module
    try:
        is_found = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        is_found = False
    if not is_found:
        raise UserError(
            f"model={module}:…: there is no module {top}. Go to the folder with {top}.py, or set PYTHONPATH to it."
        )


def typed_settings(typed: Sequence[str], prefix: str = "model.") -> dict[str, Any]:
    """Return the typed keys below a prefix, as nested mappings with null values."""
    settings: dict[str, Any] = {}
    for text in typed:
        if not (key := key_of(text)).startswith(prefix) or text[0] in "+~":
            continue
        *parents, last = key.removeprefix(prefix).split(".")
        node = settings
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node.setdefault(last)
    return settings
