"""A scripted meter of a known power over time, whose counter ticks, wraps, stands still or fails."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from perfexp.devices.meters import PowerKind, Reading
from perfexp.devices.meters.watch import Feeder, Watch
from perfexp.records.diagnostics import Diagnostic

if TYPE_CHECKING:
    from perfexp.devices.fake import FakeDevice


class Polyline:
    """A power linear between points of time and watts, constant before the first and after the last."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._points = list(points)
        self._before = [0.0]
        for (t0, p0), (t1, p1) in pairwise(points):
            self._before.append(self._before[-1] + (t1 - t0) * (p0 + p1) / 2)
        self._offset = 0.0
        self._offset = self.joules(0.0)

    def watts(self, seconds: float) -> float:
        """The power at a time."""
        times, watts = zip(*self._points, strict=True)
        return float(np.interp(seconds, times, watts))

    def joules(self, seconds: float) -> float:
        """The energy since time 0."""
        index = max(bisect_right(self._points, seconds, key=lambda point: point[0]) - 1, 0)
        since, watts = self._points[index]
        return (
            self._before[index]
            + (seconds - since) * (watts + self.watts(seconds)) / 2
            - self._offset
        )


def steady(watts: float) -> Polyline:
    """A constant power in watts."""
    return Polyline([(0.0, watts)])


class FakeMeter:
    """A meter with known truth, which is that in the middle of a query.

    Args:
        now: scripted clock, seconds.
        spend: advances that clock; a query advances it by `query_seconds`. None for queries without cost.
        tick_seconds: period of the counter's updates.
        phase_seconds: time of the first tick.
        stuck_seconds: time at which the counter stops.
        fails_seconds: time from which queries fail.
        gain: factor of the wrong power.
        power_kind: reported kind of the power, which is always instantaneous.
    """

    def __init__(
        self,
        now: Callable[[], float],
        curve: Polyline,
        *,
        spend: Callable[[float], None] | None = None,
        name: str = "fake",
        covers: str = "a scripted board",
        tick_seconds: float = 0.1,
        tells_tick: bool = False,
        phase_seconds: float = 0.0,
        query_seconds: float = 0.0,
        start_joules: float = 0.0,
        wrap_joules: float | None = None,
        tells_wrap: bool = True,
        stuck_seconds: float = math.inf,
        fails_seconds: float = math.inf,
        gain: float = 1.0,
        power_kind: PowerKind = PowerKind.instantaneous,
        has_counter: bool = True,
        accuracy: float | None = None,
        found_doubts: Sequence[Diagnostic] = (),
    ) -> None:
        self.name, self.covers, self.power_kind, self.accuracy = name, covers, power_kind, accuracy
        self.tick_seconds = tick_seconds if tells_tick else None
        self.wrap_joules = wrap_joules if tells_wrap else None
        self.queries = 0
        self._now, self._curve, self._spend = now, curve, spend
        self._true_tick_seconds, self._phase_seconds, self._query_seconds = (
            tick_seconds,
            phase_seconds,
            query_seconds,
        )
        self._start_joules, self._true_wrap_joules = start_joules, wrap_joules
        self._stuck_seconds, self._fails_seconds = stuck_seconds, fails_seconds
        self._gain, self._has_counter, self._doubts = gain, has_counter, list(found_doubts)

    def energy_joules(self) -> Reading:
        seconds = self._pass_query()
        if not self._has_counter:
            return Reading(None, "scripted: it has no energy counter")
        if seconds >= self._fails_seconds:
            return Reading(None, "scripted: it has failed")
        whole = math.floor(
            (min(seconds, self._stuck_seconds) - self._phase_seconds) / self._true_tick_seconds
            + 1e-9
        )
        joules = self._start_joules + self._curve.joules(
            self._phase_seconds + whole * self._true_tick_seconds
        )
        return Reading(joules % self._true_wrap_joules if self._true_wrap_joules else joules)

    def power_watts(self) -> Reading:
        if self.power_kind is PowerKind.absent:
            return Reading(None, "scripted: it has no power sensor")
        seconds = self._pass_query()
        if seconds >= self._fails_seconds:
            return Reading(None, "scripted: it has failed")
        return Reading(self._gain * self._curve.watts(seconds))

    def doubts(self) -> list[Diagnostic]:
        return self._doubts

    def _pass_query(self) -> float:
        """Advance the clock by a query; returns the time for which its answer is true."""
        self.queries += 1
        if self._spend is None or not self._query_seconds:
            return self._now()
        self._spend(self._query_seconds / 2)
        seconds = self._now()
        self._spend(self._query_seconds / 2)
        return seconds


class Turns:
    """Feeds a scripted device and queries scripted meters in turns, on the device's own clock (a `Beside`)."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._feeder: Feeder | None = None

    def __call__(self, watch: Watch, feeder: Feeder) -> tuple[int, float]:
        self._feeder, begun = feeder, False
        try:
            for pause in watch.steps():
                if watch.begun and not begun:
                    begun = True
                    feeder.begin()
                self.spend(pause)
            return feeder.end()
        finally:
            self._feeder = None

    def spend(self, seconds: float) -> None:
        """Advance the host's time by at least `seconds`, with the device at work if there is a feeder."""
        if self._feeder is None:
            self._device.launch(0.0, host_seconds=seconds)
            return
        until = self._device.now_ns() + round(seconds * 1e9)
        while (left := until - self._device.now_ns()) > 0:
            self._feeder.feed((left + 1) * 1e-9)
