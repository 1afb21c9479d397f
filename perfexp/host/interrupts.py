"""Turn Ctrl-C and signals that end a process into KeyboardInterrupt, at a safe time.

The entry point and long commands enter `handled`. Work that must not be left half done, such as
moving a run's files, enters `held`, which delays the interrupt. Code that waits for descriptors
adds `descriptors`, so that a held interrupt wakes it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class _State:
    """State shared with the signal handler; a process has its signals only once.

    Attributes:
        held: whether an interrupt has to wait.
        came: whether an interrupt is waiting.
        last: number of the latest signal; None before the first.
        receive: descriptor that becomes readable at an interrupt; None while signals are not
            handled.
        send: the other end of that pipe.
    """

    held = False
    came = False
    last: int | None = None
    receive: int | None = None
    send: int | None = None


@contextmanager
def handled() -> Iterator[None]:
    """Raise KeyboardInterrupt at every signal of `_interrupting_signals`, and allow holding them.

    Works only in the main thread. On leaving, the former handlers return.
    """
    _State.receive, _State.send = os.pipe()
    _State.last = None
    for descriptor in (_State.receive, _State.send):
        os.set_blocking(descriptor, False)
    previous = {number: signal.signal(number, _arrived) for number in _interrupting_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for descriptor in (_State.receive, _State.send):
            os.close(descriptor)
        _State.receive = _State.send = None


@contextmanager
def held() -> Iterator[None]:
    """Hold interrupts while entered; an interrupt that came is raised at the end.

    `check` raises it earlier, at a place that the block has chosen. Blocks may be nested.
    """
    before = _State.held
    try:
        _State.held = True
        yield
    finally:
        _State.held = before
        if not before:
            check()


def check() -> None:
    """Raise KeyboardInterrupt if an interrupt came while it was held; the pipe is emptied.

    Loops that wait for a worker call it between two waits.
    """
    if _State.came:
        _State.came = False
        if _State.receive is not None:
            with suppress(BlockingIOError):
                os.read(_State.receive, 65536)
        raise KeyboardInterrupt


def ignore() -> None:
    """Ignore interrupts for the rest of the process.

    `__main__` does so once the exit code is settled.
    """
    for number in _interrupting_signals():
        signal.signal(number, signal.SIG_IGN)


def last() -> int | None:
    """Return the number of the latest signal; None before the first.

    A cluster job uses it to tell the warning before its time limit from Ctrl-C.
    """
    return _State.last


def descriptors() -> list[int]:
    """Return descriptors that become readable when a held interrupt comes; empty outside `handled`.

    Callers wait for them together with their own.
    """
    if _State.receive is None:
        return []
    return [_State.receive]


def _interrupting_signals() -> list[int]:
    """Return the signals that interrupt.

    SIGUSR2 is the cluster's warning before a job's time limit. SIGHUP is left out if nohup ignores
    it.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, *([] if is_ignored else [signal.SIGHUP])]


def _arrived(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise KeyboardInterrupt.

    While interrupts are held, record it instead, and wake the code that waits for descriptors.
    """
    _State.last = number
    if not _State.held:
        raise KeyboardInterrupt
    if not _State.came and _State.send is not None:
        os.write(_State.send, b"!")
    _State.came = True
