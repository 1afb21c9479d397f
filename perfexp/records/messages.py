"""Messages from a worker to its parent process: lines of JSON through a pipe."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import msgspec

from perfexp.host.process import MessageError
from perfexp.records.record import Key, Point, Status

#: Why inferences with trained weights are not tried; the training has its own reason.
UNTRAINED = "the training failed"


def cut(text: str, most_bytes: int) -> str:
    """Return the beginning of a text that takes at most this many bytes in a message, quotes and escapes included."""
    ends = accumulate(len(json.dumps(letter)) - 2 for letter in text[:most_bytes])
    return text[: bisect_right(list(ends), most_bytes - 2)]


class _Fields(msgspec.Struct):
    """Fields of an event that are used, by all kinds."""

    event: str
    key: Key | None = None
    status: Status = Status.OK
    text: str = ""
    message: str = ""
    exit_code: int = 0
    name: str = ""
    answer: dict[str, Any] = {}
    profile: dict[str, Any] = {}
    training: Point | None = None


#: Fields that events of a kind must have.
_REQUIRED = {
    "point": ("key",),
    "done": ("key", "status"),
    "block": ("text",),
    "failed": ("message",),
    "refused": ("message", "exit_code"),
    "part": ("name", "answer"),
}


def check(event: dict[str, Any]) -> None:
    """Raise `MessageError` for an event that lacks a field, or has one of another type."""
    try:
        fields = msgspec.convert(event, _Fields)
    except msgspec.ValidationError as error:
        raise MessageError(str(error)) from error
    lacking = [name for name in _REQUIRED.get(fields.event, ()) if event.get(name) is None]
    if lacking or (fields.training is not None and not fields.training.epochs):
        raise MessageError(f"{fields.event} lacks {', '.join(lacking) or 'epochs'}")


class Events:
    """Sender of progress messages to the parent process through a pipe; the descriptor None sends nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor, self._process = descriptor, os.getpid()

    def __call__(self, event: str, **details: Any) -> None:
        """Send one message. It is never called while a call is timed."""
        self.end_copy()
        if self.descriptor is None:
            return
        try:
            os.write(self.descriptor, json.dumps({"event": event, **details}).encode() + b"\n")
        except OSError:  # the parent has terminated, and this process follows
            self.descriptor = None

    def end_copy(self) -> None:
        """End a process that the measured code has forked from the one that reports: only that one writes results."""
        if os.getpid() != self._process:
            os._exit(1)

    def block(self, text: str, **details: Any) -> None:
        """Report what this process does now."""
        self("block", text=text, **details)

    def point(self, key: Key) -> None:
        """Report that the measurement of a point begins."""
        self("point", key=msgspec.to_builtins(key))

    def done(self, key: Key, status: str) -> None:
        """Report that a point has its result."""
        self("done", key=msgspec.to_builtins(key), status=status)
