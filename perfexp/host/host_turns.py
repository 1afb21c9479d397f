"""Host turns: among processes that measure on one host, one at a time does the work that needs the whole host."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from perfexp.host import locks

#: Lock that every process shares while it works, and that one has alone for its turn.
_HOST = "host-turns"

Turn = Callable[[], AbstractContextManager[None]]


@contextmanager
def joined(*, waiting: Callable[[str], None]) -> Iterator[Turn]:
    """While entered, this process works beside others, except during their turns; gives the function that has a turn.

    A turn begins when every other process waits for its own, which all that join do sooner or later.

    Args:
        waiting: called with the reason before this process waits.
    """
    with locks.opened(_HOST) as host:
        _take(host, fcntl.LOCK_SH, waiting)
        yield lambda: _turn(host, waiting)


@contextmanager
def _turn(host: int, waiting: Callable[[str], None]) -> Iterator[None]:
    """While entered, all other processes wait, except for work that the kernel or a device does without them."""
    fcntl.flock(host, fcntl.LOCK_UN)
    _take(host, fcntl.LOCK_EX, waiting)
    try:
        yield
    finally:
        fcntl.flock(host, fcntl.LOCK_SH)


def _take(host: int, kind: int, waiting: Callable[[str], None]) -> None:
    if not locks.taken(host, kind):
        waiting("waiting for the host: other runs of the sweep are at work")
        fcntl.flock(host, kind)


def free() -> AbstractContextManager[None]:
    """Return a turn for a process that measures alone."""
    return nullcontext()
