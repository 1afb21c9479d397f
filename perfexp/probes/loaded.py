"""Loaded: clock and power of a device, read by a thread while it works off its queue and the host waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from perfexp.records.record import Point

#: Least time between two readings.
_INTERVAL_SECONDS = 0.1


class LoadReader:
    """Reads quantities of a device by a thread while its queue drains; at other times the thread waits to be notified.

    A reading holds up the end of the drain until it is over, so that it never overlaps with other work of the host. It
    is discarded if the device has become idle before its end.

    Args:
        queries: functions that return a quantity, or None if the driver refuses, by the name of its fact.
        now: the host's clock, seconds.
        wait: waits for a notification for some seconds at most, or without a limit.
    """

    def __init__(
        self,
        queries: Mapping[str, Callable[[], float | None]],
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait,
    ) -> None:
        self._queries, self._now, self._wait = queries, now, wait
        self._changed = threading.Condition()
        self._is_draining = self._is_ended = False
        self._due_seconds = 0.0
        self._readings: dict[str, list[float]] = {}

    @contextmanager
    def observing(self, point: Point, series: str | None) -> Iterator[None]:
        """While entered, the thread lives; at the end add its readings to the facts of a point.

        Args:
            series: the series of the device's own time that is taken; None for no readings.
        """
        if series is None or not self._queries:
            yield
            return
        self._readings, self._is_ended = {name: [] for name in self._queries}, False
        self._due_seconds = self._now() + _INTERVAL_SECONDS
        thread = threading.Thread(target=self._run, name="load reader", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._is_ended = True
                self._changed.notify()
            thread.join()
            for name, readings in self._readings.items():
                if readings:
                    point.facts.setdefault(name, {})[series] = readings

    @contextmanager
    def draining(self, held_seconds: float) -> Iterator[None]:
        """While entered, the host only waits; the device begins its work when it is released after some seconds."""
        with self._changed:
            self._due_seconds = max(self._due_seconds, self._now() + held_seconds)
            self._is_draining = True
            self._changed.notify()
        try:
            yield
        finally:
            self._is_draining = False  # before the lock is free: a reading in progress is discarded
            with self._changed:
                self._changed.notify()  # a timed wait would end during work of the host

    def _run(self) -> None:
        with self._changed:
            while not self._is_ended:
                pause = self._due_seconds - self._now() if self._is_draining else None
                if pause is None or pause > 0:
                    self._wait(self._changed, pause)
                else:
                    self._read()
                    self._due_seconds = self._now() + _INTERVAL_SECONDS

    def _read(self) -> None:
        for name, query in self._queries.items():
            value = query()
            if not self._is_draining:
                return
            if value is not None:
                self._readings[name].append(value)
