"""Conditions during a series: a device's clock, power, throttling and temperature.

`Observer` reads them between blocks, when no call is timed. `LoadReader` reads clock and power in a
thread while the device works through a filled launch queue and the host only waits. Both write to
`facts` of the point, by fact and series; `measuring.times` uses them for every point.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from perfexp.devices import Device
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import Point

#: Decimal digits of a clock in the record: rounded to 10 kHz.
_CLOCK_DIGITS = -4
#: Minimum time between two readings.
_INTERVAL_SECONDS = 0.1


@dataclass
class _SeriesConditions:
    """What was read during one series so far.

    Attributes:
        seconds: host seconds in the blocks.
        throttled_seconds: seconds by throttle reason; None if the driver reports none of them.
        temperatures: degrees Celsius before and after each block.
        clocks: readings in Hz after each block.
    """

    seconds: float = 0.0
    throttled_seconds: dict[str, float] | None = None
    temperatures: list[float] = field(default_factory=list)
    clocks: list[tuple[float, ...]] = field(default_factory=list)


class Observer:
    """Reads a device's conditions between the blocks of series that take turns.

    Inside a block it does nothing. The clock is read only after blocks of device time, because
    these keep the device busy until their end; an idle device lowers its clock.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._last = device, device.conditions()
        self._series: dict[str, _SeriesConditions] = {}

    def block_ended(self, name: str, seconds: float) -> None:
        """Read the clock and the driver's counters; `collect` calls this right after each block.

        Args:
            name: series that the block belongs to.
            seconds: host seconds in the block.
        """
        seen = self._series.setdefault(name, _SeriesConditions())
        # the clock first, while the device is still loaded
        if name in DEVICE_TIMES and (clocks := self._device.clock_readings()):
            seen.clocks.append(clocks)
        before, after = self._last, self._device.conditions()
        self._last, seen.seconds = after, seen.seconds + seconds
        throttled: dict[str, float] | None = None
        if after.throttled_ns is not None:  # counters that grow while the device is throttled
            earlier = before.throttled_ns or {}
            throttled = {
                reason: (ns - earlier.get(reason, ns)) * 1e-9
                for reason, ns in after.throttled_ns.items()
            }
        elif after.reasons is not None:  # the reasons at this moment stand for the whole block
            throttled = dict.fromkeys(after.reasons, seconds)
        if throttled is not None:
            sums = seen.throttled_seconds = seen.throttled_seconds or {}
            for reason, more in throttled.items():
                if more > 0:
                    sums[reason] = sums.get(reason, 0.0) + more
        seen.temperatures += [
            reading.temperature for reading in (before, after) if reading.temperature is not None
        ]

    def add_to(self, point: Point) -> None:
        """Add everything that the device reported to a point's facts, by series."""
        for fact, values in self.facts().items():
            point.facts.setdefault(fact, {}).update(values)

    def facts(self) -> dict[str, dict[str, object]]:
        """Return everything that the device reported, by fact and series.

        - `throttled_share`: share of the time, by reason.
        - `temperature_celsius`: first and last.
        - `clock_hertz`: mean for each block, and `clock_noise`: see `_clock_noise`.

        A fact that the device cannot report is left out.
        """
        facts: dict[str, dict[str, object]] = {}
        for name, seen in self._series.items():
            values: dict[str, object] = {}
            if seen.throttled_seconds is not None:
                total = max(seen.seconds, 1e-9)
                values["throttled_share"] = {
                    reason: round(min(seconds / total, 1.0), 4)
                    for reason, seconds in seen.throttled_seconds.items()
                }
            if seen.temperatures:
                values["temperature_celsius"] = [seen.temperatures[0], seen.temperatures[-1]]
            if seen.clocks:
                values["clock_hertz"] = [
                    round(sum(clocks) / len(clocks), _CLOCK_DIGITS) for clocks in seen.clocks
                ]
                values["clock_noise"] = round(_clock_noise(seen.clocks), 6)
            for fact, value in values.items():
                facts.setdefault(fact, {})[name] = value
        return facts


def _clock_noise(pairs: list[tuple[float, ...]]) -> float:
    """Return the relative standard deviation of a block's clock, the mean of two readings.

    It is estimated from the differences within all blocks' pairs, so that a clock that changes
    from block to block does not count as noise.
    """
    squares = [((first - last) / (first + last)) ** 2 for first, last in pairs]
    return math.sqrt(sum(squares) / len(squares))


class LoadReader:
    """Reads clock and power in a thread while the launch queue drains; otherwise the thread sleeps.

    The queue drains while the device works through enqueued calls and the host only waits. The
    drain ends no earlier than a reading in progress, so readings never overlap with other host
    work. A reading is discarded if the device became idle before its end.

    Args:
        queries: functions by fact name, for example `loaded_sm_clock_hertz`. Each returns a
            reading in SI units, or None if the driver refuses.
        now: the host's clock, in seconds; tests pass a simulated clock.
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
        """Allow readings while entered; `queue.Chain` enters this while it waits for the device.

        Args:
            held_seconds: time until the device is released and begins its work. Readings begin
                after that.
        """
        with self._changed:
            self._due_seconds = max(self._due_seconds, self._now() + held_seconds)
            self._is_draining = True
            self._changed.notify()
        try:
            yield
        finally:
            # without the lock, which a reading in progress holds: that reading is discarded
            self._is_draining = False
            with self._changed:
                self._changed.notify()  # a timed wait would end during host work

    def _run(self) -> None:
        """Read every `_INTERVAL_SECONDS` while the queue drains; the thread's function."""
        with self._changed:
            while not self._is_ended:
                pause = self._due_seconds - self._now() if self._is_draining else None
                if pause is None or pause > 0:
                    self._wait(self._changed, pause)
                else:
                    self._read()
                    self._due_seconds = self._now() + _INTERVAL_SECONDS

    def _read(self) -> None:
        """Store a reading for each query; stop as soon as the device may be idle."""
        for name, query in self._queries.items():
            value = query()
            if not self._is_draining:
                return
            if value is not None:
                self._readings[name].append(value)
