"""The answers of one meter over time, and the energy of a window from tick to tick."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfexp.meters import Meter, Reading
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic

#: Number of ticks that are needed to measure the counter's period.
_TICKS = 4
#: Least number of power readings inside the window of an integral.
_LEAST_POWERS = 5


class Tick(NamedTuple):
    """A change of the counter, within an interval from the reading before it to the reading that shows it.

    `seconds` is the middle of that interval by the host's clock, `width_seconds` its length.
    """

    seconds: float
    width_seconds: float
    joules: float


class Track:
    """Queries a meter and stores every answer with the time of the middle of the query.

    Attributes:
        readings: seconds and joules, continued across wraps of the counter.
        no_energy, no_power: why the counter, or the power, is no longer queried; empty while it is.
        powers: seconds and watts.
    """

    def __init__(self, meter: Meter, now: Callable[[], float], tick_seconds: float | None = None) -> None:
        self.meter, self._now = meter, now
        self.readings: list[tuple[float, float]] = []
        self.ticks: list[Tick] = []
        self.powers: list[tuple[float, float]] = []
        self.doubts: list[Diagnostic] = []
        self.wraps, self.query_seconds = 0, 0.0
        self.no_energy = self.no_power = ""
        self._known_tick_seconds = meter.tick_seconds or tick_seconds
        self._last_joules: float | None = None
        self._wrapped_joules = 0.0

    @property
    def tick_seconds(self) -> float | None:
        """Period of the counter, known or measured; None before there are enough ticks."""
        if self._known_tick_seconds is not None or len(self.ticks) < _TICKS:
            return self._known_tick_seconds
        times, widths, _ = np.asarray(self.ticks).T
        times = times[widths <= 2 * np.quantile(widths, 0.25)]  # the most precise ticks
        steps = np.diff(times)
        periods = np.round(steps / np.median(steps)).sum() if len(steps) else 0
        return float((times[-1] - times[0]) / periods) if periods else None

    def ask_energy(self) -> bool:
        """Read the counter; returns whether it has changed since the last reading."""
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
            # the counter did not stand still for longer than its period
            width = min(seconds - self.readings[-1][0], self.tick_seconds or math.inf)
            self.ticks.append(Tick(seconds - width / 2, width, joules))
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
        """Stop querying a counter that did not change for `seconds`."""
        self.no_energy = f"the energy counter of {self.meter.name} stood still for {seconds:.1f} s"
        self.doubts.append(diagnostics.make("meter_stuck", meter=self.meter.name, seconds=seconds))

    def integral_joules(self, start_seconds: float, end_seconds: float) -> Reading:
        """Integral of the power by the trapezoid rule: Σ (Pᵢ + Pᵢ₊₁)/2 · Δtᵢ, interpolated to both ends."""
        times, watts = (np.asarray(column) for column in zip(*self.powers, strict=True)) if self.powers else ((), ())
        inside = [start_seconds < time < end_seconds for time in times]
        if self.no_power or sum(inside) < _LEAST_POWERS:
            return Reading(None, self.no_power or f"{sum(inside)} readings of the power are too few for an integral")
        whole = np.concatenate([[start_seconds], np.asarray(times)[inside], [end_seconds]])
        heights = np.interp(whole, times, watts)
        return Reading(float(((heights[:-1] + heights[1:]) / 2 * np.diff(whole)).sum()))

    def integral_uncertainty(self, start_seconds: float, end_seconds: float) -> float | None:
        """Relative standard uncertainty of the integral, that of the mean of the readings; None without an integral.

        From neighbours' differences, s² = Σ (Pᵢ₊₁ - Pᵢ)² / 2(n - 1) (von Neumann 1941); a slow drift, which trapezoids
        follow, adds little to it.
        """
        watts = np.asarray([power for seconds, power in self.powers if start_seconds < seconds < end_seconds])
        if self.no_power or watts.size < _LEAST_POWERS or not watts.mean():
            return None
        deviation = math.sqrt(float((np.diff(watts) ** 2).sum()) / 2 / (watts.size - 1))
        return deviation / math.sqrt(watts.size) / float(watts.mean())

    def _ask(self, question: Callable[[], Reading]) -> tuple[float, Reading]:
        """The middle of a query, and its answer; an error of a foreign library counts as no answer."""
        begun = self._now()
        try:
            reading = question()
        except Exception as error:
            reading = Reading(None, f"{self.meter.name} failed: {type(error).__name__}: {error}".strip())
        ended = self._now()
        self.query_seconds = max(self.query_seconds, ended - begun)
        return (begun + ended) / 2, reading

    def _unwrap(self, before: float, after: float) -> bool:
        """Handle a counter that decreased: a wrap if its range is known, otherwise the end of its queries."""
        if self.meter.wrap_joules is None:
            name = self.meter.name
            self.no_energy = f"the energy counter of {name} went back, and its range is not known"
            self.doubts.append(diagnostics.make("meter_wrapped", meter=name, before=before, after=after))
            return False
        self.wraps += 1
        self._wrapped_joules += self.meter.wrap_joules
        return True


@dataclass(frozen=True, kw_only=True)
class Window:
    """Figures of a meter between two ticks, with relative standard uncertainties of the length and of the integral.

    Each end lies within a width, and a uniform distribution of width w has the standard deviation w/√12.
    """

    start_seconds: float
    seconds: float
    counter_watts: Reading
    integral_watts: Reading
    uncertainty: float | None = None
    integral_uncertainty: float | None = None

    @property
    def difference(self) -> float | None:
        """Relative difference of the integral from the counter."""
        return difference(self.counter_watts, self.integral_watts).value


def difference(counter_watts: Reading, integral_watts: Reading) -> Reading:
    """Relative difference of an integral from a counter."""
    if not counter_watts.value or integral_watts.value is None:
        return Reading(None, counter_watts.reason or integral_watts.reason)
    return Reading(integral_watts.value / counter_watts.value - 1)


def uncertainty(start: Tick, end: Tick) -> float:
    """Relative standard uncertainty of the length of a window between two ticks."""
    return math.hypot(start.width_seconds, end.width_seconds) / math.sqrt(12) / (end.seconds - start.seconds)


def window(track: Track, start: Tick, end: Tick | None) -> Window:
    """The window of a track between two ticks; without a counter it starts with the first power reading."""
    if end is None or end.seconds <= start.seconds:
        missing = Reading(None, track.no_energy or f"{track.meter.name} was not watched to the end of its window")
        return Window(start_seconds=start.seconds, seconds=0.0, counter_watts=missing, integral_watts=missing)
    seconds = end.seconds - start.seconds
    integral = track.integral_joules(start.seconds, end.seconds)
    counter = Reading(None, track.no_energy) if track.no_energy else Reading((end.joules - start.joules) / seconds)
    return Window(
        start_seconds=start.seconds,
        seconds=seconds,
        counter_watts=counter,
        integral_watts=integral if integral.value is None else Reading(integral.value / seconds),
        uncertainty=None if track.no_energy else uncertainty(start, end),
        integral_uncertainty=track.integral_uncertainty(start.seconds, end.seconds),
    )
