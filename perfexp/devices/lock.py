"""A lock that allows one measurement at a time on a device, among a user's processes.

The worker holds it while it measures. It is an `flock` on a file in the machine's lock folder,
named by the device.
"""

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
    """Lock the device against measurements in this user's other processes.

    The lock ends with the process. Forked processes do not hold it, so a child that outlives this
    process does not block the device.

    Args:
        name: machine-wide unique device name; None for no lock.
        wait: whether to wait if another process has the lock.
        purpose: description of this measurement for messages in other processes.
        waiting: called with the lock's owner before this process waits.

    Raises:
        UserError: another process has the lock and `wait` is false, or locks are impossible here.
    """
    if name is None:
        yield
        return
    with locks.opened(name) as descriptor:
        if not locks.try_lock(descriptor):
            owner = _owner(descriptor)
            if not wait:
                raise UserError(
                    f"The device is in use: {owner}. Wait for it, or let perfexp wait with "
                    "device_lock=wait."
                )
            waiting(owner)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        locks.sign(descriptor, f"measures {purpose}")
        yield


def holder(name: str) -> str | None:
    """Return a text about the process that holds a device lock; None if it is free.

    Raises `UserError` if locks are impossible here. `perfexp doctor` shows it.
    """
    if not lock_path(name).exists():
        return None
    with locks.opened(name, os.O_RDONLY) as descriptor:
        if locks.try_lock(descriptor, fcntl.LOCK_SH):
            return None
        return _owner(descriptor)


def _owner(descriptor: int) -> str:
    """Return the lock owner's signature, such as what it measures, for a message."""
    return locks.owner_of(descriptor) or "another process measures"
