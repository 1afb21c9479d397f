"""The folder of the speed files (JSON files with training speeds): default and check."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from perfexp.errors import UserError

#: Folder that a container mounts.
_MOUNTED = Path("outputs")


def default_folder() -> str:
    """Return the default folder for speed files: the current folder, or `outputs` in a container.

    A container mounts `outputs`. Its current folder is not writable, or is lost when it ends. conf/
    calls it as the resolver `perfexp_speed_dir`.
    """
    if _MOUNTED.is_mount() or not os.access(Path(), os.W_OK):
        return str(_MOUNTED)
    return "."


def refuse_no_folder(folder: Path, remedy: str) -> None:
    """Raise `UserError`, with a remedy, if a folder does not exist or is not writable.

    Plans with `speed_dir` are checked before the training.
    """
    if not folder.is_dir():
        problem = f"There is no folder {folder}"
        if folder.exists():
            problem = f"{folder} is not a folder"
        raise UserError(f"{problem}. Create it, or {remedy}")
    try:
        # permissions do not show a read-only mount, or that root may write anyway
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"The folder {folder} can't be written: {error.strerror}"
        raise UserError(f"{why}. Make it writable, or {remedy}") from error
