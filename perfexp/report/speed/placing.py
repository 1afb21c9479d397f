"""Placing: writing of speed files without overwriting other files.

A speed file may replace an earlier speed file with its name, but no other file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.records.paths import RunPaths
from perfexp.report.speed.result import KEYS, Speed

#: Larger files are not read, because they cannot be speed files.
_LARGEST_BYTES = 100_000


def put(speed: Speed, folder: Path, *, remedy: str) -> Path:
    """Write a speed file, replacing an earlier speed file with its name, and return its path.

    If the folder is a run's, its manifest lists the file. Raises `UserError` if another file is in
    its place or the folder is not writable.

    Args:
        remedy: sentence that ends the error message: what the user can do.
    """
    path = folder / speed.file_name
    refuse_foreign(path, remedy)
    try:
        paths = RunPaths(folder)
        if paths.manifest.is_file():
            paths.claim(path.absolute())
        write_atomically(path, speed.to_json())
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}. {remedy}") from error
    return path


def refuse_foreign(path: Path, remedy: str) -> None:
    """Raise `UserError`, which ends with the remedy, if anything but a speed file is at a path."""
    if (path.exists() or path.is_symlink()) and whose(path) is None:
        raise UserError(f"{path} can't be written: the file there is not a speed file. {remedy}")


def whose(path: Path) -> str | None:
    """Return the path of the log that a speed file describes; None if it is not a speed file."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
            return None
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(values, dict) and values.keys() == set(KEYS):
        return str(values["log_file"])
    return None


def numbered(speed: Speed) -> Iterator[Speed]:
    """Yield a training unchanged, then with a number in its file name: `MODEL_2_…`, `MODEL_3_…`.

    Callers take the first name that is free.
    """
    yield speed
    for number in count(2):
        yield replace(speed, label=f"{speed.label}_{number}" if speed.label else str(number))
