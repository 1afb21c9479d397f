"""The user's own models, which a command line names as `module:Name`.

`model=mine:TinyNet` is the class or function TinyNet in mine.py. Hydra needs an option and keys for
it, which `nodes` makes from the command line.
"""

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


def named(arguments: Sequence[str]) -> dict[str, str]:
    """Return the modules of own models in a command line, for example `{"mine:Net": "mine"}`."""
    models = {}
    for text in arguments:
        if key_of(text) != "model":
            continue
        for name in map(str.strip, text.partition("=")[2].split(",")):
            match = _NAME.fullmatch(name)
            if match and not torchvision_names.is_name(name):
                models[name] = match[1]
    return models


def nodes(arguments: Sequence[str]) -> dict[str, Any]:
    """Return a configuration node for each own model, by its name.

    For example, `model=mine:TinyNet model.width=32` gives the option `mine:TinyNet` with a null
    `width`, which Hydra then sets. Pass only what this user typed, now or when the run began. Hydra
    gets them as options of the group `model`.

    Raises:
        UserError: there is no such module.
    """
    find(arguments)
    return {
        name: {
            "_target_": name.replace(":", "."),
            "_partial_": True,
            **settings(arguments),
        }
        for name in named(arguments)
    }


def find(arguments: Sequence[str]) -> None:
    """Check that the modules of own models exist.

    If a module is in the current folder, Python searches that folder from now on. `main` calls it
    before composing, since Hydra's error would be unclear.

    Raises:
        UserError: there is no such module.
    """
    folder = Path.cwd()
    for module in named(arguments).values():
        top = module.partition(".")[0]
        if str(folder) not in sys.path and (
            (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        ):
            sys.path.append(str(folder))  # last, so that no file here hides an installed module
        try:
            is_found = importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            is_found = False
        if not is_found:
            raise UserError(
                f"model={module}:…: there is no module {top}. Go to the folder with {top}.py, "
                "or set PYTHONPATH to it."
            )


def settings(arguments: Sequence[str], prefix: str = "model.") -> dict[str, Any]:
    """Return the typed keys below a prefix, as nested mappings with null values.

    Keys with `+` or `~` are left out: Hydra adds or removes those itself.
    """
    nested: dict[str, Any] = {}
    for text in arguments:
        if not (key := key_of(text)).startswith(prefix) or text[0] in "+~":
            continue
        *parents, last = key.removeprefix(prefix).split(".")
        node = nested
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node.setdefault(last)
    return nested
