"""Writing of speed files without overwriting other files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.records.paths import RunPaths
from perfexp.speed.result import KEYS, Speed

#: Folder that a container mounts.
_MOUNTED = Path("outputs")
#: Larger files are not read, because they cannot be speed files.
_LARGEST_BYTES = 100_000


def default_folder() -> str:
    """Return the default folder for speed files: the current folder, or `outputs` in a container.

    A container mounts `outputs`. Its current folder is not writable, or is lost when it ends.
    """
    if _MOUNTED.is_mount() or not os.access(Path(), os.W_OK):
        return str(_MOUNTED)
    return "."


def put(speed: Speed, folder: Path, *, remedy: str) -> Path:
    """Write a speed file, replacing an earlier file with its name, and return its path.

    The folder's manifest lists the file. Raises `UserError`, with a remedy, if another file is in
    its place or the folder is not writable.
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
    """Raise `UserError`, with a remedy, if anything but a speed file is at a path."""
    if (path.exists() or path.is_symlink()) and whose(path) is None:
        raise UserError(f"{path} can't be written: the file there is not a speed file. {remedy}")


def whose(path: Path) -> str | None:
    """Return the log that a speed file describes; None if it is not a speed file."""
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
    """Yield a training unchanged, then with a number: `MODEL_2_…`, `MODEL_3_…`."""
    yield speed
    for number in count(2):
        yield replace(speed, label=f"{speed.label}_{number}" if speed.label else str(number))


def refuse_no_folder(folder: Path, remedy: str) -> None:
    """Raise `UserError`, with a remedy, if a folder does not exist or is not writable."""
    if not folder.is_dir():
        what = f"There is no folder {folder}"
        if folder.exists():
            what = f"{folder} is not a folder"
        raise UserError(f"{what}. Create it, or {remedy}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass  # permissions do not show a read-only mount, or that root may write anyway
    except OSError as error:
        why = f"The folder {folder} can't be written: {error.strerror}"
        raise UserError(f"{why}. Make it writable, or {remedy}") from error
