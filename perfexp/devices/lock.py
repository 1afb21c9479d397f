"""One measurement at a time on a device, among the processes of a user."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perfexp.errors import UserError
from perfexp.host import locks
from perfexp.host.locks import lock_path as lock_path


@contextmanager
def held(
    name: str | None, *, wait: bool, purpose: str, waiting: Callable[[str], None]
) -> Iterator[None]:
    """While entered, no other process of this user measures on the device. The lock ends with the process.

    Processes forked in between do not hold the lock: one that outlives this process does not block the device. It
    raises `UserError` if another process has the lock and `wait` is false, or if locks are impossible here.

    Args:
        name: unique name of the device on this machine; None for no lock.
        purpose: description of this measurement for other processes' messages.
        waiting: called with the lock's owner before this process waits.
    """
    if name is None:
        yield
        return
    with locks.opened(name) as descriptor:
        if not locks.taken(descriptor):
            owner = _owner(descriptor)
            if not wait:
                raise UserError(
                    f"The device is in use: {owner}. Wait for it, or let perfexp wait with device_lock=wait."
                )
            waiting(owner)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        locks.sign(descriptor, f"measures {purpose}")
        yield


def holder(name: str) -> str | None:
    """Owner of a device's lock, None if it is free; raises `UserError` if locks are impossible here."""
    if not lock_path(name).exists():
        return None
    with locks.opened(name, os.O_RDONLY) as descriptor:
        return None if locks.taken(descriptor, fcntl.LOCK_SH) else _owner(descriptor)


def _owner(descriptor: int) -> str:
    return locks.owner_of(descriptor) or "another process measures"
