"""Lock: one measurement at a time on a device, among the processes of a user."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perfexp.errors import UserError
from perfexp.paths import safe_name

#: Where every process of every user may write.
TEMPORARY = Path("/tmp")
#: Descriptors of the locks that this process holds.
_descriptors: set[int] = set()


@contextmanager
def held(name: str | None, *, wait: bool, purpose: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """While entered, no other process of this user measures on the device. The lock goes with the process.

    A process that is forked meanwhile does not hold it: one that outlives this one keeps no device from others.

    Args:
        name: of the device, unique on this machine; None for one that needs no lock.
        wait: whether to wait until the device is free, or to refuse.
        purpose: what this process is about to do, for the messages of others.
        waiting: told who has the device, before this process waits.

    Raises:
        UserError: another process has it, and this one is not to wait; or locks can't be kept here.
    """
    if name is None:
        yield
        return
    descriptor = _open(name, os.O_RDWR | os.O_CREAT)
    _descriptors.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _owner(os.read(descriptor, 65536))
            if not wait:
                raise UserError(
                    f"The device is in use: {owner}. Wait for it, or let perfexp do so: device_lock=wait."
                ) from error
            waiting(owner)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"process": os.getpid(), "purpose": purpose}).encode(), 0)
        yield
    finally:
        if descriptor in _descriptors:
            _descriptors.remove(descriptor)
            os.close(descriptor)


def _forked() -> None:
    """In a process that was forked: the locks are its parent's."""
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def holder(name: str) -> str | None:
    """Who has a device's lock at this moment; None if it is free.

    Args:
        name: of the device.

    Raises:
        UserError: locks can't be kept here.
    """
    if not lock_path(name).exists():
        return None
    descriptor = _open(name, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(os.read(descriptor, 65536))
    finally:
        os.close(descriptor)
    return None


def lock_path(name: str) -> Path:
    """The file of a device's lock.

    It follows from the user alone, not from the environment: a session and a batch job of one user have to meet here.

    Args:
        name: of the device.
    """
    return TEMPORARY / f"perfexp-{os.getuid()}" / f"{safe_name(name)}.lock"


def _open(name: str, flags: int) -> int:
    """A lock's file, in a folder that is this user's alone.

    Raises:
        UserError: there is none, or somebody else could have put it there.
    """
    path = lock_path(name)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        folder = path.parent.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "it is not a folder of yours alone")
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "it holds something that is no file")
    except OSError as error:
        raise UserError(
            f"The lock of the device can't be kept in {path.parent}: {error.strerror}. Have that folder removed."
        ) from error
    return descriptor


def _owner(content: bytes) -> str:
    try:
        facts = json.loads(content)
        return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", f"process {facts['process']} measures {facts['purpose']}")
    except (ValueError, KeyError, TypeError):
        return "another process measures"
