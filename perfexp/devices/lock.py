"""Lock: one measurement at a time on a device, among the processes of a user."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perfexp.errors import UserError
from perfexp.host import locks
from perfexp.host.locks import lock_path as lock_path


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
    with locks.opened(name) as descriptor:
        if not locks.taken(descriptor):
            owner = _owner(descriptor)
            if not wait:
                raise UserError(f"The device is in use: {owner}. Wait for it, or let perfexp do so: device_lock=wait.")
            waiting(owner)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        locks.sign(descriptor, f"measures {purpose}")
        yield


def holder(name: str) -> str | None:
    """Who has a device's lock at this moment; None if it is free.

    Args:
        name: of the device.

    Raises:
        UserError: locks can't be kept here.
    """
    if not lock_path(name).exists():
        return None
    with locks.opened(name, os.O_RDONLY) as descriptor:
        return None if locks.taken(descriptor, fcntl.LOCK_SH) else _owner(descriptor)


def _owner(descriptor: int) -> str:
    return locks.owner_of(descriptor) or "another process measures"
