"""A scripted meter: a power over time that is known, behind a counter that ticks, wraps, stands still or fails."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from perfexp.meters import PowerKind, Reading
from perfexp.meters.feeding import Feeder
from perfexp.meters.watch import Watch
from perfexp.records.diagnostics import Diagnostic

if TYPE_CHECKING:
    from perfexp.devices.fake import FakeDevice


class Curve(Protocol):
    """A power over time."""

    def watts(self, seconds: float) -> float:
        """The power at a time."""

    def joules(self, seconds: float) -> float:
        """The energy from the time 0 on."""


class Polyline:
    """A power that goes straight from point to point, and stays what it was before the first and after the last.

    Args:
        points: times and watts, in order of time.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._points = list(points)
        self._before = [0.0]
        for (t0, p0), (t1, p1) in pairwise(points):
            self._before.append(self._before[-1] + (t1 - t0) * (p0 + p1) / 2)
        self._offset = 0.0
        self._offset = self.joules(0.0)

    def watts(self, seconds: float) -> float:
        """See `Curve`."""
        index = bisect_right(self._points, seconds, key=lambda point: point[0])
        if index in (0, len(self._points)):
            return self._points[max(index - 1, 0)][1]
        (t0, p0), (t1, p1) = self._points[index - 1 : index + 1]
        return p0 + (p1 - p0) * (seconds - t0) / (t1 - t0)

    def joules(self, seconds: float) -> float:
        """See `Curve`."""
        index = max(bisect_right(self._points, seconds, key=lambda point: point[0]) - 1, 0)
        since, watts = self._points[index]
        return self._before[index] + (seconds - since) * (watts + self.watts(seconds)) / 2 - self._offset


def steady(watts: float) -> Polyline:
    """A power that never changes.

    Args:
        watts: it.
    """
    return Polyline([(0.0, watts)])


class FakeMeter:
    """A meter whose truth is known.

    Args:
        now: the clock that whoever scripts it drives, seconds.
        curve: the true power.
        spend: lets that clock go on; a query does so for `query_seconds`. None where queries cost nothing.
        name: identifies it.
        covers: what its energy is the energy of.
        tick_seconds: from one change of the counter to the next.
        tells_tick: whether it says so.
        phase_seconds: when it ticks for the first time.
        query_seconds: of each of the two questions.
        start_joules: what the counter says at the time 0.
        wrap_joules: where the counter begins anew.
        tells_wrap: whether it says so.
        stuck_seconds: from when on the counter stands still.
        fails_seconds: from when on it answers no question.
        gain: the factor by which its power is wrong.
        power_kind: what its power is; it is of the moment in any case.
        has_counter: whether it answers for the energy.
        found_doubts: what it says against itself.
    """

    def __init__(
        self,
        now: Callable[[], float],
        curve: Curve,
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
        found_doubts: Sequence[Diagnostic] = (),
    ) -> None:
        self.name, self.covers, self.power_kind = name, covers, power_kind
        self.tick_seconds = tick_seconds if tells_tick else None
        self.wrap_joules = wrap_joules if tells_wrap else None
        self.queries = 0
        self._now, self._curve, self._spend = now, curve, spend
        self._true_tick_seconds, self._phase_seconds, self._query_seconds = tick_seconds, phase_seconds, query_seconds
        self._start_joules, self._true_wrap_joules = start_joules, wrap_joules
        self._stuck_seconds, self._fails_seconds = stuck_seconds, fails_seconds
        self._gain, self._has_counter, self._doubts = gain, has_counter, list(found_doubts)

    def energy_joules(self) -> Reading:
        """See `Meter`; the energy at the last tick, as of the middle of the query."""
        seconds = self._pass_query()
        if not self._has_counter:
            return Reading(None, "scripted: it has no energy counter")
        if seconds >= self._fails_seconds:
            return Reading(None, "scripted: it has failed")
        whole = math.floor((min(seconds, self._stuck_seconds) - self._phase_seconds) / self._true_tick_seconds + 1e-9)
        joules = self._start_joules + self._curve.joules(self._phase_seconds + whole * self._true_tick_seconds)
        return Reading(joules % self._true_wrap_joules if self._true_wrap_joules else joules)

    def power_watts(self) -> Reading:
        """See `Meter`; the true power in the middle of the query, times the gain."""
        if self.power_kind is PowerKind.absent:
            return Reading(None, "scripted: it has no power sensor")
        seconds = self._pass_query()
        if seconds >= self._fails_seconds:
            return Reading(None, "scripted: it has failed")
        return Reading(self._gain * self._curve.watts(seconds))

    def doubts(self) -> list[Diagnostic]:
        """See `Meter`."""
        return self._doubts

    def _pass_query(self) -> float:
        """Let a query's time pass; returns when its answer was true."""
        self.queries += 1
        if self._spend is None or not self._query_seconds:
            return self._now()
        self._spend(self._query_seconds / 2)
        seconds = self._now()
        self._spend(self._query_seconds / 2)
        return seconds


class Turns:
    """Lets a scripted device be fed while scripted meters are asked, on the device's own clock (a `Beside`).

    Args:
        device: whose clock it is.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._feeder: Feeder | None = None

    def __call__(self, watch: Watch, feeder: Feeder) -> tuple[int, float]:
        """See `Beside`."""
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
        """Let the host's time go on, in which the device is fed if it is to be at work.

        Args:
            seconds: at least.
        """
        if self._feeder is None:
            self._device.launch(0.0, host_seconds=seconds)
            return
        until = self._device.now_ns() + round(seconds * 1e9)
        while (left := until - self._device.now_ns()) > 0:
            self._feeder.feed((left + 1) * 1e-9)


def pass_time(device: FakeDevice) -> Callable[[float], None]:
    """A function that lets the host's time of a scripted device go on; the device is given no work.

    Args:
        device: whose clock it is.
    """

    def spend(seconds: float) -> None:
        device.launch(0.0, host_seconds=seconds)

    return spend
