"""Write files atomically, make safe file names, and explain file system errors."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from perfexp.errors import PerfexpError, UserError


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file so that readers see either the old or the new content, even after a crash.

    Records, plans, caches and all reports are written this way.

    Args:
        content: bytes, or for large content a function that writes them to an open file.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with temporary.open("xb") as file:  # the umask sets who may read it
        try:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def refuse_deleted_cwd() -> None:
    """Raise `UserError` if the current folder has been deleted.

    Commands and runs check this before they start.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UserError(
            "The current folder has been deleted: change to one that exists (cd DIR)."
        ) from error


def disk_error(error: OSError) -> PerfexpError:
    """Return the error to report for a failed write into a run's folder, with the remedy.

    Runs and workers raise it. If the folder itself was removed, the message names the first missing
    folder.
    """
    file_text = f": {error.filename}" if error.filename else ""
    if (
        error.errno == errno.ENOENT
        and error.filename
        and not (folder := Path(error.filename).parent).is_dir()
    ):
        while not folder.parent.is_dir():  # up to the folder that was removed
            folder = folder.parent
        return PerfexpError(
            f"The output folder {folder} is gone: it was removed while perfexp measured into it. "
            "Repeat the command to measure everything again."
        )
    return PerfexpError(
        f"{error.strerror or error}{file_text}. Every finished point is on disk; "
        "fix the cause and repeat the command with output_dir=DIR of this run to measure the rest."
    )


def safe_name(text: str) -> str:
    """Return a text as a file name; empty text becomes `unnamed`.

    Letters, digits and `._-` stay; everything else becomes a hyphen. Run folders, lock files and
    reports are named by it.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"
