"""Track: what one meter says while it is watched, and the energy of a window from tick to tick."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfexp.meters import Meter, Reading
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic

#: So many ticks have to be seen before the counter's period is known.
_TICKS = 4
#: An integral needs so many readings of the power inside of its window.
_LEAST_POWERS = 5


class Tick(NamedTuple):
    """A moment at which the counter changed.

    Attributes:
        seconds: the middle of the time in which it did, by the host's clock.
        width_seconds: of that time: from the reading before to the reading that shows the change.
        joules: what the counter says from then on.
    """

    seconds: float
    width_seconds: float
    joules: float


class Track:
    """Asks a meter and remembers every answer with the time of the middle of the query.

    Args:
        meter: that is asked.
        now: the host's clock, seconds.
        tick_seconds: the counter's period, where it is known from before.

    Attributes:
        meter: that is asked.
        readings: seconds and joules; where the counter began anew it goes on.
        ticks: changes of the counter.
        powers: seconds and watts.
        wraps: how often the counter began anew.
        query_seconds: the longest that an answer took.
        no_energy: why the counter is not asked any more; empty while it is.
        no_power: likewise of the power.
        doubts: what was seen that speaks against the figures.
    """

    def __init__(self, meter: Meter, now: Callable[[], float], tick_seconds: float | None = None) -> None:
        self.meter = meter
        self.readings: list[tuple[float, float]] = []
        self.ticks: list[Tick] = []
        self.powers: list[tuple[float, float]] = []
        self.wraps = 0
        self.query_seconds = 0.0
        self.no_energy = ""
        self.no_power = ""
        self.doubts: list[Diagnostic] = []
        self._now = now
        self._known_tick_seconds = meter.tick_seconds or tick_seconds
        self._last_joules: float | None = None
        self._wrapped_joules = 0.0

    @property
    def tick_seconds(self) -> float | None:
        """The counter's period, as it is known or was seen so far; None before enough ticks were."""
        if self._known_tick_seconds is not None or len(self.ticks) < _TICKS:
            return self._known_tick_seconds
        times, widths, _ = np.asarray(self.ticks).T
        times = times[widths <= 2 * np.quantile(widths, 0.25)]  # those whose moment is known best
        steps = np.diff(times)
        periods = np.round(steps / np.median(steps)).sum() if len(steps) else 0
        return float((times[-1] - times[0]) / periods) if periods else None

    def ask_energy(self) -> bool:
        """Read the counter; returns whether it has changed since it was read before."""
        if self.no_energy:
            return False
        seconds, reading = self._ask(self.meter.energy_joules)
        if reading.value is None:
            self.no_energy = reading.reason
            return False
        before, self._last_joules = self._last_joules, reading.value
        if before is not None and reading.value < before and not self._unwrap(before, reading.value):
            return False
        joules = reading.value + self._wrapped_joules
        changed = bool(self.readings) and joules != self.readings[-1][1]
        if changed:
            self.ticks.append(self._tick(self.readings[-1][0], seconds, joules))
        self.readings.append((seconds, joules))
        return changed

    def ask_power(self) -> None:
        """Read the power."""
        if self.no_power:
            return
        seconds, reading = self._ask(self.meter.power_watts)
        if reading.value is None:
            self.no_power = reading.reason
        else:
            self.powers.append((seconds, reading.value))

    def stand_still(self, seconds: float) -> None:
        """The counter did not change for so long; it is not asked any more.

        Args:
            seconds: for how long.
        """
        self.no_energy = f"the energy counter of {self.meter.name} stood still for {seconds:.1f} s"
        self.doubts.append(diagnostics.make("meter_stuck", meter=self.meter.name, seconds=seconds))

    def integral_joules(self, start_seconds: float, end_seconds: float) -> Reading:
        """The integral of the power by the trapezoid rule: Σ (Pᵢ + Pᵢ₊₁)/2 · Δtᵢ, straight lines up to both ends.

        Args:
            start_seconds: of the window.
            end_seconds: likewise.
        """
        times, watts = (np.asarray(column) for column in zip(*self.powers, strict=True)) if self.powers else ((), ())
        inside = [start_seconds < time < end_seconds for time in times]
        if self.no_power or sum(inside) < _LEAST_POWERS:
            return Reading(None, self.no_power or f"{sum(inside)} readings of the power are too few for an integral")
        whole = np.concatenate([[start_seconds], np.asarray(times)[inside], [end_seconds]])
        heights = np.interp(whole, times, watts)
        return Reading(float(((heights[:-1] + heights[1:]) / 2 * np.diff(whole)).sum()))

    def integral_uncertainty(self, start_seconds: float, end_seconds: float) -> float | None:
        """Standard uncertainty of the integral, relative: that of the mean of so many readings of a power that changes.

        From neighbours' differences, s² = Σ (Pᵢ₊₁ - Pᵢ)² / 2(n - 1) (von Neumann 1941), to which a slow drift, that
        trapezoids follow, adds little.

        Args:
            start_seconds: of the window.
            end_seconds: likewise.

        Returns:
            None where there is no integral.
        """
        watts = np.asarray([power for seconds, power in self.powers if start_seconds < seconds < end_seconds])
        if self.no_power or watts.size < _LEAST_POWERS or not watts.mean():
            return None
        deviation = math.sqrt(float((np.diff(watts) ** 2).sum()) / 2 / (watts.size - 1))
        return deviation / math.sqrt(watts.size) / float(watts.mean())

    def _ask(self, question: Callable[[], Reading]) -> tuple[float, Reading]:
        """The middle of a query, and its answer; whatever a foreign library raises is no answer."""
        begun = self._now()
        try:
            reading = question()
        except Exception as error:
            reading = Reading(None, f"{self.meter.name} failed: {type(error).__name__}: {error}".strip())
        ended = self._now()
        self.query_seconds = max(self.query_seconds, ended - begun)
        return (begun + ended) / 2, reading

    def _tick(self, before: float, now: float, joules: float) -> Tick:
        """A change between two readings; no earlier than a period before the later one."""
        width = min(now - before, self.tick_seconds or math.inf)
        return Tick(now - width / 2, width, joules)

    def _unwrap(self, before: float, after: float) -> bool:
        """The counter went back: it has begun anew, if its range is known; else it is not asked any more."""
        if self.meter.wrap_joules is None:
            self.no_energy = f"the energy counter of {self.meter.name} went back, and its range is not known"
            name = self.meter.name
            self.doubts.append(diagnostics.make("meter_wrapped", meter=name, before=before, after=after))
            return False
        self.wraps += 1
        self._wrapped_joules += self.meter.wrap_joules
        return True


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a meter counted from one tick to another.

    Attributes:
        name: of the meter.
        covers: what its energy is the energy of.
        start_seconds: when it began, by the host's clock.
        seconds: length of the window.
        counter_watts: mean power by the counter.
        integral_watts: mean power by the integral of the power.
        uncertainty: standard uncertainty of the length, relative; both ends are known to lie within a width each, and
            a uniform distribution of width w has the standard deviation w/√12.
        integral_uncertainty: standard uncertainty of the integral, relative.
    """

    name: str
    covers: str
    start_seconds: float
    seconds: float
    counter_watts: Reading
    integral_watts: Reading
    uncertainty: float | None = None
    integral_uncertainty: float | None = None

    @property
    def difference(self) -> float | None:
        """Of the integral from the counter, relative."""
        if not self.counter_watts.value or self.integral_watts.value is None:
            return None
        return self.integral_watts.value / self.counter_watts.value - 1


def uncertainty(start: Tick, end: Tick) -> float:
    """Standard uncertainty of the length of a window, relative.

    Args:
        start: its first tick.
        end: its last.
    """
    return math.hypot(start.width_seconds, end.width_seconds) / math.sqrt(12) / (end.seconds - start.seconds)


def window(track: Track, start: Tick, end: Tick | None) -> Window:
    """What a track holds from one tick to another.

    Args:
        track: that was watched.
        start: first tick; or the time from which the power was read, of a meter without a counter.
        end: last tick; None where it never came.
    """
    name, covers = track.meter.name, track.meter.covers
    if end is None or end.seconds <= start.seconds:
        missing = Reading(None, track.no_energy or f"{name} was not watched to the end of its window")
        return Window(
            name=name,
            covers=covers,
            start_seconds=start.seconds,
            seconds=0.0,
            counter_watts=missing,
            integral_watts=missing,
        )
    seconds = end.seconds - start.seconds
    integral = track.integral_joules(start.seconds, end.seconds)
    counter = Reading(None, track.no_energy) if track.no_energy else Reading((end.joules - start.joules) / seconds)
    return Window(
        name=name,
        covers=covers,
        start_seconds=start.seconds,
        seconds=seconds,
        counter_watts=counter,
        integral_watts=integral if integral.value is None else Reading(integral.value / seconds),
        uncertainty=None if track.no_energy else uncertainty(start, end),
        integral_uncertainty=track.integral_uncertainty(start.seconds, end.seconds),
    )
