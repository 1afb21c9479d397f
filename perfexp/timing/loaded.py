"""Loaded: a device's clock and power, read by a thread while the device drains its queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from perfexp.records.record import Point

#: Minimum time between two readings.
_INTERVAL_SECONDS = 0.1


class LoadReader:
    """Reads device quantities in a thread while the queue drains; otherwise the thread sleeps.

    While the queue drains, the host only waits. The drain ends no earlier than a reading in
    progress, so readings never overlap with other host work. A reading is discarded if the device
    became idle before its end.

    Args:
        queries: functions by fact name, for example `loaded_sm_clock_hertz`. Each returns a
            quantity, or None if the driver refuses.
        now: the host's clock, in seconds.
        wait: waits for a notification, with a time limit in seconds or None.
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
        """Run the thread while entered; at the end add its readings to the point's facts.

        Args:
            series: the series of device times being taken; None for no readings.
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
        """Allow readings while entered: the host only waits.

        Args:
            held_seconds: time until the device is released and begins its work.
        """
        with self._changed:
            self._due_seconds = max(self._due_seconds, self._now() + held_seconds)
            self._is_draining = True
            self._changed.notify()
        try:
            yield
        finally:
            # before the lock is free, so that a reading in progress is discarded
            self._is_draining = False
            with self._changed:
                self._changed.notify()  # a timed wait would end during host work

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
