"""Lock files in a folder of this user alone, which are released when their process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host.files import safe_name

#: A folder in which every process of every user may write.
TEMPORARY = Path("/tmp")
#: Descriptors of the lock files that this process has open.
_descriptors: set[int] = set()


@contextmanager
def opened(name: str, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """Open a lock file; closing it releases the lock, and a process that is forked in between does not hold it."""
    path = private_folder() / lock_path(name).name
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "it has an entry that is not a file")
    except OSError as error:
        why = error.strerror
        raise UserError(
            f"Lock files can't be kept in {path.parent}: {why}. Have that folder removed."
        ) from error
    _descriptors.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _descriptors:
            _descriptors.remove(descriptor)
            os.close(descriptor)


def taken(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Take a lock without waiting; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sign(descriptor: int, purpose: str) -> None:
    """Write into a lock file which process holds it, and for what."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"process": os.getpid(), "purpose": purpose}).encode(), 0)


def owner_of(descriptor: int) -> str | None:
    """Return process and purpose of a lock's holder without control characters; None if the file does not name them."""
    try:
        facts = json.loads(os.pread(descriptor, 65536, 0))
        return re.sub(
            r"[\x00-\x1f\x7f-\x9f]", "?", f"process {facts['process']} {facts['purpose']}"
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def lock_path(name: str) -> Path:
    """Return the file of a lock; it is never deleted, since a process may wait for it.

    It follows from the user alone, not from the environment: a session and a batch job of one user have to meet here.
    """
    return TEMPORARY / f"perfexp-{os.getuid()}" / f"{safe_name(name)}.lock"


def private_folder() -> Path:
    """Return a folder for temporary files of this user alone; `UserError` if another user could have prepared it."""
    path = TEMPORARY / f"perfexp-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        folder = path.lstat()
        if (
            not stat.S_ISDIR(folder.st_mode)
            or folder.st_uid != os.getuid()
            or stat.S_IMODE(folder.st_mode) & 0o077
        ):
            raise PermissionError(errno.EPERM, "it is not a folder of yours alone")
    except OSError as error:
        raise UserError(
            f"Files can't be kept in {path}: {error.strerror}. Have that folder removed."
        ) from error
    return path


def _forked() -> None:
    """Close the lock files in a forked process: the locks are its parent's."""
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
