"""Let processes on one host take turns at work that needs the whole host.

On a cluster, the runs of a sweep share a node. Each measures on its own GPU, but energy and other
host-wide measurements need a quiet host. All processes share one lock while they work, and one
process holds it exclusively during its turn.
"""

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
    """Join the processes that take turns; used by a worker for as long as it measures.

    Yield a function that returns a context manager: this process's turn. A turn begins when all
    other processes have paused, each because it waits for its own turn or has ended.

    Args:
        waiting: called with a status line before this process waits.
    """
    with locks.opened(_HOST) as host:
        _take(host, fcntl.LOCK_SH, waiting)
        yield lambda: _turn(host, waiting)


@contextmanager
def _turn(host: int, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock exclusively while entered: no other process measures.

    Work that the kernel or a device does for them goes on.
    """
    fcntl.flock(host, fcntl.LOCK_UN)
    _take(host, fcntl.LOCK_EX, waiting)
    try:
        yield
    finally:
        fcntl.flock(host, fcntl.LOCK_SH)


def _take(host: int, kind: int, waiting: Callable[[str], None]) -> None:
    """Take the lock, after waiting if needed.

    Args:
        kind: `fcntl.LOCK_SH` to work beside others, `LOCK_EX` for a turn.
    """
    if not locks.try_lock(host, kind):
        waiting("waiting for the host: other runs of the sweep are at work")
        fcntl.flock(host, kind)


def free() -> AbstractContextManager[None]:
    """Return a turn that waits for nobody, for a process that measures alone."""
    return nullcontext()
