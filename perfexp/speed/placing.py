"""Placing: speed files in a folder, each over nothing that is no speed file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.records.paths import RunPaths
from perfexp.speed.result import Speed, log_file_of

#: A larger file is no speed JSON, and need not be read to know that.
_LARGEST_BYTES = 100_000


def put(speed: Speed, folder: Path, *, remedy: str) -> Path:
    """Write a speed file; an earlier one of that name is replaced. What a manifest is there for is entered in it.

    Args:
        speed: of a training.
        folder: that is there.
        remedy: what to do where it can't be written.

    Returns:
        Where it is.

    Raises:
        UserError: something is in its place that is no speed file, or the folder can't be written.
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
    """See that nothing is in a place but, maybe, a speed file.

    Args:
        path: of the speed file that is to be.
        remedy: what to do where it can't be.

    Raises:
        UserError: something else is there; it stays.
    """
    if (path.exists() or path.is_symlink()) and whose(path) is None:
        raise UserError(f"{path} can't be written: what is there is no speed file, and stays. {remedy}")


def whose(path: Path) -> str | None:
    """The log that a speed file is of; None where there is no such file, or one of another kind.

    Args:
        path: of any file.
    """
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
            return None
        return log_file_of(path.read_bytes())
    except OSError:
        return None


def refuse_no_folder(folder: Path, remedy: str) -> None:
    """See that there is a folder, and that a file can be made in it.

    Args:
        folder: where speed files are to go.
        remedy: what to do beside making it: `choose another …`.

    Raises:
        UserError: there is none, or it can't be written.
    """
    if not folder.is_dir():
        what = f"{folder} is no folder" if folder.exists() else f"There is no folder {folder}"
        raise UserError(f"{what}. Make it, or {remedy}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            return  # one that is made says more than its permissions: of root, and of what is mounted read-only
    except OSError as error:
        raise UserError(
            f"The folder {folder} can't be written: {error.strerror}. Make it writable, or {remedy}"
        ) from error
