"""Messages from a worker to its parent process: JSON lines through a pipe.

The worker is the process that measures. It sends an event at the beginning and end of each point
and between blocks of calls (`Events`). The parent checks it (`check`) and shows the progress.
Results do not go through the pipe, but to points.jsonl.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import msgspec

from perfexp.host.process import MessageError
from perfexp.records.record import Key, Point, Status

#: Error for inferences whose training failed; the training itself records the reason.
UNTRAINED = "the training failed"


def cut(text: str, most_bytes: int) -> str:
    """Return a text's beginning that takes at most `most_bytes` in a message.

    Quotes and escapes count. Ranks shorten error texts this way, as their messages are limited.
    """
    # 2 is for the quotes, which each encoded letter and the whole text have
    ends = accumulate(len(json.dumps(letter)) - 2 for letter in text[:most_bytes])
    return text[: bisect_right(list(ends), most_bytes - 2)]


class _Fields(msgspec.Struct):
    """Event fields that the parent uses, for all kinds of events."""

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


#: Fields that each kind of event must have.
_REQUIRED = {
    "point": ("key",),
    "done": ("key", "status"),
    "block": ("text",),
    "failed": ("message",),
    "refused": ("message", "exit_code"),
    "part": ("name", "answer"),
}


def check(event: dict[str, Any]) -> None:
    """Raise `MessageError` for an event that lacks a field or has a field with the wrong type.

    The parent checks each event from the pipe before it acts on it.
    """
    try:
        fields = msgspec.convert(event, _Fields)
    except msgspec.ValidationError as error:
        raise MessageError(str(error)) from error
    missing = [name for name in _REQUIRED.get(fields.event, ()) if event.get(name) is None]
    if missing or (fields.training is not None and not fields.training.epochs):
        raise MessageError(f"{fields.event} lacks {', '.join(missing) or 'epochs'}")


class Events:
    """Sender of progress messages to the parent process; without a descriptor it sends nothing.

    Attributes:
        descriptor: pipe to the parent, opened for writing; None once the parent has terminated.
    """

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor, self._process = descriptor, os.getpid()

    def __call__(self, event: str, **details: Any) -> None:
        """Send one message; never called while a call is timed."""
        self.end_copy()
        if self.descriptor is None:
            return
        try:
            os.write(self.descriptor, json.dumps({"event": event, **details}).encode() + b"\n")
        except OSError:  # the parent has terminated, and this process will follow
            self.descriptor = None

    def end_copy(self) -> None:
        """Exit if the measured code forked this process: only the original writes results.

        Such a copy would otherwise go on measuring and write every result a second time.
        """
        if os.getpid() != self._process:
            os._exit(1)

    def block(self, text: str, **details: Any) -> None:
        """Report the current activity between blocks of calls, for the progress display.

        Args:
            text: status line for users.
            details: further event fields.
        """
        self("block", text=text, **details)

    def point(self, key: Key) -> None:
        """Report that a point's measurement begins."""
        self("point", key=msgspec.to_builtins(key))

    def done(self, key: Key, status: str) -> None:
        """Report that a point has its result in points.jsonl."""
        self("done", key=msgspec.to_builtins(key), status=status)
