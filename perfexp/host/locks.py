"""Locks: lock files in a folder that is this user's alone, and that go with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfexp.errors import PerfexpError, UserError
from perfexp.host import interrupts
from perfexp.host.files import safe_name

#: Where every process of every user may write.
TEMPORARY = Path("/tmp")
#: How often a lock that another process holds is tried again.
_POLL_SECONDS = 0.1
#: Descriptors of the lock files that this process has open.
_descriptors: set[int] = set()


class LockTimeout(PerfexpError):
    """Another process still held the lock at the deadline."""


@contextmanager
def opened(name: str, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """A descriptor of a lock file; closing it releases the lock, and a process forked meanwhile does not hold it.

    Args:
        name: name of the lock, unique among this user's locks.
        flags: flags as for `os.open`.

    Raises:
        UserError: the folder of the locks is missing, or another user could have prepared it.
    """
    descriptor = _open(lock_path(name), flags)
    _descriptors.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _descriptors:
            _descriptors.remove(descriptor)
            os.close(descriptor)


@contextmanager
def held_until(name: str, deadline: float, *, purpose: str) -> Iterator[None]:
    """Hold a lock while entered; wait for it until a deadline.

    Args:
        name: name of the lock.
        deadline: end of the wait, on the clock `time.monotonic`.
        purpose: verb and object of the holder's work, for the messages of others.

    Raises:
        LockTimeout: another process still holds it.
        KeyboardInterrupt: the wait was interrupted.
    """
    with opened(name) as descriptor:
        while not taken(descriptor):
            if time.monotonic() >= deadline:
                owner = owner_of(descriptor) or "another process has the lock"
                raise LockTimeout(f"{owner} (lock {lock_path(name)}); wait for that process, or end it")
            time.sleep(_POLL_SECONDS)
            interrupts.check()
        sign(descriptor, purpose)
        yield


def taken(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Take a lock without waiting; returns False where another process holds it."""
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
    """Process and purpose of a lock's holder, free of control characters; None where the file does not name them."""
    try:
        facts = json.loads(os.pread(descriptor, 65536, 0))
        return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", f"process {facts['process']} {facts['purpose']}")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def lock_path(name: str) -> Path:
    """The file of a lock; it is never deleted, since a process may wait for it.

    It follows from the user alone, not from the environment: a session and a batch job of one user have to meet here.

    Args:
        name: name of the lock.
    """
    return TEMPORARY / f"perfexp-{os.getuid()}" / f"{safe_name(name)}.lock"


def private_folder() -> Path:
    """A folder of this user alone for files that need not outlive the machine's next start.

    Raises:
        UserError: another user could have prepared it.
    """
    path = TEMPORARY / f"perfexp-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        folder = path.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "it is not a folder of yours alone")
    except OSError as error:
        raise UserError(f"Files can't be kept in {path}: {error.strerror}. Have that folder removed.") from error
    return path


def _open(path: Path, flags: int) -> int:
    private_folder()
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "it holds something that is no file")
    except OSError as error:
        raise UserError(
            f"Lock files can't be kept in {path.parent}: {error.strerror}. Have that folder removed."
        ) from error
    return descriptor


def _forked() -> None:
    """In a process that was forked: the locks are its parent's."""
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
