"""Events: what a worker tells the process that started it, as lines of JSON through a pipe."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

from perfexp.records.record import Key


class Events:
    """Tells the parent what goes on, as lines of JSON; silent where nobody listens.

    Args:
        descriptor: of a pipe, or None.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, event: str, **details: Any) -> None:
        """Send one event; never called while something is timed.

        Args:
            event: its name.
            details: JSON values.
        """
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps({"event": event, **details}).encode() + b"\n")
        except OSError:  # the parent is gone; so will this process be
            self._descriptor = None

    def point(self, key: Key) -> None:
        """A point begins.

        Args:
            key: of the point.
        """
        self("point", key=msgspec.to_builtins(key))

    def done(self, key: Key, status: str) -> None:
        """A point has its result.

        Args:
            key: of the point.
            status: of the point.
        """
        self("done", key=msgspec.to_builtins(key), status=status)
