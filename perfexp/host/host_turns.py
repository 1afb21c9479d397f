"""Host turns: among processes that measure on one host, one at a time does the work that needs the whole host."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from perfexp.host import locks

#: Lock that every process shares while it works, and that one has alone for its turn; and the entrance to both.
_HOST, _ENTRANCE = "host-turns", "host-turns-entrance"

Turn = Callable[[], AbstractContextManager[None]]


@contextmanager
def joined(*, waiting: Callable[[str], None]) -> Iterator[Turn]:
    """While entered, this process works beside others, except during their turns; gives the function that has a turn.

    A process that wants a turn keeps others from entering, so that it is reached even if there are always some at work.

    Args:
        waiting: called with the reason before this process waits.
    """
    with locks.opened(_HOST) as host, locks.opened(_ENTRANCE) as entrance:
        _enter(host, entrance, fcntl.LOCK_SH, waiting)
        yield lambda: _turn(host, entrance, waiting)


@contextmanager
def _turn(host: int, entrance: int, waiting: Callable[[str], None]) -> Iterator[None]:
    """While entered, all other processes wait, except for work that the kernel or a device does without them."""
    fcntl.flock(host, fcntl.LOCK_UN)
    _enter(host, entrance, fcntl.LOCK_EX, waiting)
    try:
        yield
    finally:
        fcntl.flock(host, fcntl.LOCK_SH)  # not by the entrance, where the next one waits for this process


def _enter(host: int, entrance: int, kind: int, waiting: Callable[[str], None]) -> None:
    """Take the lock of the host in this way, one process after the other."""
    if not locks.taken(entrance):
        waiting("waiting for the host: another run of the sweep has its turn")
        fcntl.flock(entrance, fcntl.LOCK_EX)
    try:
        if not locks.taken(host, kind):
            waiting("waiting for the host: other runs of the sweep are at work")
            fcntl.flock(host, kind)
    finally:
        fcntl.flock(entrance, fcntl.LOCK_UN)


def free() -> AbstractContextManager[None]:
    """Return a turn for a process that measures alone."""
    return nullcontext()
