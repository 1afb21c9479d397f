"""Live: the epochs of a training reach a tracking store while it runs, for a bounded share of its time.

A thread of the parent process waits for the sending process, so that the worker never does. After each delivery it is
silent for 199 times as long: the sending process may compute on cores that a training on the CPU uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

import msgspec

from perfexp.records.record import Epoch, Point, Record
from perfexp.tracking.payload import Payload, of_training

#: Largest share of the time in which something is sent, the run's creation apart.
_SHARE = 0.005
#: Limit on the wait for a delivery when the training has ended.
_END_SECONDS = 5.0


class Follower:
    """Sends the epochs of one training as they come; a delivery that fails ends this, and the record comes anyway.

    Args:
        record: function that returns the record of the run, whose identity and experiment count.
        send: delivers a payload; called in a thread.
        abort: ends a delivery that is in progress.
    """

    def __init__(
        self, record: Callable[[], Record], send: Callable[[Payload], object], abort: Callable[[], None]
    ) -> None:
        self._record, self._send, self._abort = record, send, abort
        self._point: Point | None = None
        self._epochs: list[Epoch] = []
        self._last_sent = 0
        self._changed, self._is_over = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def add(self, point: Point) -> None:
        """Take a point with its next epoch."""
        with self._changed:
            self._point = point
            self._epochs += point.epochs
            self._changed.notify()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._abort()
            self._thread.join()
        elif kind is not None and self._last_sent:  # the run would stay open if no record follows
            self._deliver("KILLED")

    def _run(self) -> None:
        pause = 0.0
        while self._wait(pause):
            start, is_first = time.monotonic(), not self._last_sent
            if not self._deliver("RUNNING"):
                return
            pause = 0.0 if is_first else (time.monotonic() - start) * (1 - _SHARE) / _SHARE

    def _wait(self, seconds: float) -> bool:
        """Wait for that time, and for an epoch that has not been sent; return False at the end of the training."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, seconds)
            self._changed.wait_for(lambda: self._is_over or self._last > self._last_sent)
            return not self._is_over

    @property
    def _last(self) -> int:
        """Number of the last epoch, 0 before the first one."""
        return self._epochs[-1].number if self._epochs else 0

    def _deliver(self, status: str) -> bool:
        """Send the epochs since the last delivery; return whether that worked."""
        assert self._point is not None
        with self._changed:
            whole, last = msgspec.structs.replace(self._point, epochs=list(self._epochs)), self._last
        try:
            self._send(of_training(self._record(), whole, after=self._last_sent, status=status))
        except Exception:  # of the store; sending the record reports it
            return False
        self._last_sent = last
        return True
