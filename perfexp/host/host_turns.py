"""Host turns: processes on one host take turns at work that needs the whole host."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from perfexp.host import locks

#: Lock that processes share while they work, and that a turn holds exclusively.
_HOST = "host-turns"

Turn = Callable[[], AbstractContextManager[None]]


@contextmanager
def joined(*, waiting: Callable[[str], None]) -> Iterator[Turn]:
    """Let this process work beside others, and pause during their turns.

    Yield the function that takes a turn. A turn begins when every other process waits for its own
    turn, which all of them do sooner or later.

    Args:
        waiting: called with the reason before this process waits.
    """
    with locks.opened(_HOST) as host:
        _take(host, fcntl.LOCK_SH, waiting)
        yield lambda: _turn(host, waiting)


@contextmanager
def _turn(host: int, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the host alone; all other processes wait.

    Work that the kernel or a device does for them goes on.
    """
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
