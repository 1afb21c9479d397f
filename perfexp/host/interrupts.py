"""Interrupts: Ctrl-C and the signals that end a process, held back while work must not be left half done."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class _State:
    """State for the signal handler; there is one of each signal in a process.

    Attributes:
        held: whether an interrupt has to wait.
        came: whether an interrupt is waiting.
        last: number of the latest signal; None before the first.
        receive: descriptor that becomes readable when an interrupt comes; None while signals are not handled.
        send: its other end.
    """

    held = False
    came = False
    last: int | None = None
    receive: int | None = None
    send: int | None = None


@contextmanager
def handled() -> Iterator[None]:
    """While entered, the signals raise KeyboardInterrupt as Ctrl-C does, and can be held; main thread only."""
    _State.receive, _State.send = os.pipe()
    _State.last = None
    for descriptor in (_State.receive, _State.send):
        os.set_blocking(descriptor, False)
    previous = {number: signal.signal(number, _arrived) for number in _numbers()}
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
    """While entered, an interrupt waits for the end of this block, or for a `check`; then it is a KeyboardInterrupt."""
    before = _State.held
    try:
        _State.held = True
        yield
    finally:
        _State.held = before
        if not before:
            check()


def check() -> None:
    """Raise the KeyboardInterrupt of an interrupt that came while it was held."""
    if _State.came:
        _State.came = False
        if _State.receive is not None:
            with suppress(BlockingIOError):
                os.read(_State.receive, 65536)
        raise KeyboardInterrupt


def ignore() -> None:
    """Ignore interrupts in a process whose exit code is settled."""
    for number in _numbers():
        signal.signal(number, signal.SIG_IGN)


def last() -> int | None:
    """Return the number of the latest signal that interrupted this process; None before the first."""
    return _State.last


def descriptors() -> list[int]:
    """Return descriptors that become readable when a held interrupt comes, to wait for together with others."""
    return [] if _State.receive is None else [_State.receive]


def _numbers() -> list[int]:
    """The signals that interrupt; SIGHUP is not among them if nohup has it ignored.

    SIGUSR2 is a cluster's warning before the time limit of a job.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, *([] if is_ignored else [signal.SIGHUP])]


def _arrived(number: int, frame: FrameType | None) -> None:
    _State.last = number
    if not _State.held:
        raise KeyboardInterrupt
    if not _State.came and _State.send is not None:
        os.write(_State.send, b"!")
    _State.came = True
