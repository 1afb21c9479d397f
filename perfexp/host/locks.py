"""Lock files in a private user folder, released when their process ends.

They serialize what concurrent runs share: a device, the host, a download, a tracking store.
"""

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

#: Folder where all users may write.
TEMPORARY = Path("/tmp")
#: Descriptors of open lock files in this process.
_descriptors: set[int] = set()


@contextmanager
def opened(name: str, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """Open a lock file and yield its descriptor, without locking it; closing it releases the lock.

    A process forked in between does not hold the lock.

    Args:
        name: name of the lock, such as `host-turns`.
        flags: flags for `os.open`.

    Raises:
        UserError: the lock folder is unusable.
    """
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


def try_lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Take a lock without waiting; return whether this process has it now.

    Locks for devices and turns on the host use it.

    Args:
        operation: `fcntl.LOCK_EX`, or `LOCK_SH` for a lock that several processes may share.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sign(descriptor: int, purpose: str) -> None:
    """Write this process's id and purpose into a lock file, for messages of processes that wait."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"process": os.getpid(), "purpose": purpose}).encode(), 0)


def owner_of(descriptor: int) -> str | None:
    """Return process and purpose of the lock holder, without control characters.

    None means that the file does not name them, for example because it is new. A process that waits
    for a device or a tracking store shows it to the user.
    """
    try:
        facts = json.loads(os.pread(descriptor, 65536, 0))
        return re.sub(
            r"[\x00-\x1f\x7f-\x9f]", "?", f"process {facts['process']} {facts['purpose']}"
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def lock_path(name: str) -> Path:
    """Return the file of a lock.

    The path depends only on the user, not on the environment, so that a login session and a batch
    job use the same file. The file is never deleted, since a process may be waiting for it.
    """
    return TEMPORARY / f"perfexp-{os.getuid()}" / f"{safe_name(name)}.lock"


def private_folder() -> Path:
    """Return this user's private folder for temporary files.

    Lock files, and caches of users without a home, are there.

    Raises:
        UserError: the folder cannot be made, or another user could have prepared it.
    """
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
    """Close the lock files in a forked process: the parent holds the locks."""
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
