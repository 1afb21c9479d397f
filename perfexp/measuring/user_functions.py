"""Functions that a user names on the command line, as `FILE.py:NAME` or `MODULE:NAME`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from perfexp.errors import UserError, did_you_mean


def load(place: str) -> tuple[Callable[..., Any], ModuleType]:
    """Import a function from `FILE.py:NAME` or `MODULE:NAME`; return it with its module.

    `perfexp ab` and `perfexp apply --check` name functions this way.

    Raises:
        UserError: there is no such file, module or function.
    """
    where, _, name = place.rpartition(":")
    if not (where and name.isidentifier()):
        raise UserError(f"'{place}' does not name a function; write FILE.py:NAME or MODULE:NAME.")
    file = Path(where).resolve()
    is_file = where.endswith(".py")
    if is_file and not file.is_file():
        known = [one.name for one in file.parent.glob("*.py")]
        raise UserError(f"{where} not found. {did_you_mean(file.name, known)}".rstrip())
    sys.path.append(str(file.parent))
    try:
        module = _import_file(file) if is_file else importlib.import_module(where)
    except Exception as error:
        raise UserError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, (one for one in vars(module) if callable(getattr(module, one))))
        raise UserError(f"{where} has no function '{name}'. {near}".rstrip())
    return function, module


def _import_file(file: Path) -> ModuleType:
    """Import a file under its own name, or under another one if a module has the name."""
    name, spec = file.stem, importlib.util.find_spec(file.stem)
    if spec is None or spec.origin != str(file):
        name = f"{file.stem}_{file.parent.name}"
        spec = importlib.util.spec_from_file_location(name, file)
    if name not in sys.modules:
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
