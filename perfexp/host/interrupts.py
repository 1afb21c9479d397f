"""Interrupts: Ctrl-C, SIGTERM and SIGHUP, which wait while something is done that must not be left half done."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class _State:
    """What a signal's handler has to know; there is one of each signal in a process.

    Attributes:
        held: whether an interrupt has to wait.
        came: whether one waits.
        receive: becomes readable when one comes; None while nobody handles them.
        send: its other end.
    """

    held = False
    came = False
    receive: int | None = None
    send: int | None = None


@contextmanager
def handled() -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP are a KeyboardInterrupt as Ctrl-C is, and can be held; for the main thread."""
    _State.receive, _State.send = os.pipe()
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
    """While entered, an interrupt waits for the end of this block, or for a `check` in it.

    Raises:
        KeyboardInterrupt: one came.
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
    """Let an interrupt through that came while it was held.

    Raises:
        KeyboardInterrupt: one did.
    """
    if _State.came:
        _State.came = False
        if _State.receive is not None:
            with suppress(BlockingIOError):
                os.read(_State.receive, 65536)
        raise KeyboardInterrupt


def ignore() -> None:
    """For a process whose exit code is settled: no interrupt changes it any more."""
    for number in _numbers():
        signal.signal(number, signal.SIG_IGN)


def descriptors() -> list[int]:
    """What becomes readable when an interrupt comes that is held: to be waited for beside other things."""
    return [] if _State.receive is None else [_State.receive]


def _numbers() -> list[int]:
    """The signals that interrupt; SIGHUP is not among them where nohup has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


def _arrived(number: int, frame: FrameType | None) -> None:
    if not _State.held:
        raise KeyboardInterrupt
    if not _State.came and _State.send is not None:
        os.write(_State.send, b"!")
    _State.came = True
