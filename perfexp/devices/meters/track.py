"""One meter's answers over time, and the energy in a window from tick to tick.

A tick is a change of the energy counter. Counters change only every 1 ms to 100 ms, so a window
that begins and ends at ticks has the most precise energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perfexp.devices.meters import Meter, Reading
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.statistics.distributions import Z95
from perfexp.statistics.estimators import windows_half_width

#: Counter and integral may differ by this fraction, or by this multiple of the integral's
#: standard uncertainty, whichever is larger.
_DISAGREEMENT, _SIGMAS = 0.03, 4.0
#: With a larger tolerance, the integral cannot check the counter.
_MOST_TOLERANCE = 0.1
#: Number of ticks needed to measure the counter's period.
_TICKS = 4
#: Minimum number of power readings inside an integral's window.
_LEAST_POWERS = 5


class Tick(NamedTuple):
    """A counter change, between the reading before it and the reading that shows it.

    Attributes:
        seconds: middle of that interval by the host's clock.
        width_seconds: length of that interval.
    """

    seconds: float
    width_seconds: float
    joules: float


class Track:
    """Queries a meter and stores each answer with the time in the middle of the query.

    Args:
        now: host's clock, seconds.
        tick_seconds: the counter's period from an earlier track; None if it is unknown.

    Attributes:
        readings: seconds and joules, continued across counter wraps.
        no_energy: why the counter is no longer queried; empty while it is.
        no_power: why the power is no longer queried; empty while it is.
        powers: seconds and watts.
        wraps: how often the counter wrapped.
        query_seconds: longest query so far.
    """

    def __init__(
        self, meter: Meter, now: Callable[[], float], tick_seconds: float | None = None
    ) -> None:
        self.meter, self._now = meter, now
        self.readings: list[tuple[float, float]] = []
        self.ticks: list[Tick] = []
        self.powers: list[tuple[float, float]] = []
        self.doubts: list[Diagnostic] = []
        self.wraps, self.query_seconds = 0, 0.0
        self.no_energy = self.no_power = ""
        self._known_tick_seconds = meter.tick_seconds or tick_seconds
        self._is_tick_fixed = False
        self._last_joules: float | None = None
        self._wrapped_joules = 0.0

    @property
    def tick_seconds(self) -> float | None:
        """Return the counter's period, known or measured; None if it is unknown.

        It is measured once there are enough ticks. After `fix_tick_seconds` it no longer changes.
        """
        if self._known_tick_seconds is not None or self._is_tick_fixed or len(self.ticks) < _TICKS:
            return self._known_tick_seconds
        times, widths, _ = np.asarray(self.ticks).T
        steps = np.diff(times)
        (precise,) = np.nonzero(widths <= 2 * np.quantile(widths, 0.25))
        times, are_neighbors = times[precise], np.diff(precise) == 1
        # a tick that is seen late shifts the steps on both sides
        about_seconds = np.median(np.diff(times)[are_neighbors] if are_neighbors.any() else steps)
        # without the less precise ticks, a step may span several periods
        periods = np.round(np.diff(times) / about_seconds).sum()
        if not periods:
            return None
        return float((times[-1] - times[0]) / periods)

    def fix_tick_seconds(self) -> None:
        """Stop deriving the period from ticks: from now on only some ticks are observed."""
        self._known_tick_seconds, self._is_tick_fixed = self.tick_seconds, True

    def read_energy(self) -> bool:
        """Read the counter and return whether it has changed since the last reading.

        A change becomes a tick. After a failure, or a decrease without a known range, the counter
        is no longer read.
        """
        if self.no_energy:
            return False
        seconds, reading = self._timed(self.meter.energy_joules)
        if reading.value is None:
            self.no_energy = reading.reason
            return False
        before, self._last_joules = self._last_joules, reading.value
        if before is not None and reading.value < before:
            if self.meter.wrap_joules is None:
                self._refuse_decrease(before, reading.value)
                return False
            self.wraps += 1
            self._wrapped_joules += self.meter.wrap_joules
        joules = reading.value + self._wrapped_joules
        changed = bool(self.readings) and joules != self.readings[-1][1]
        if changed:
            # the counter never stands still for longer than its period
            width = min(seconds - self.readings[-1][0], self.tick_seconds or math.inf)
            self.ticks.append(Tick(seconds - width / 2, width, joules))
        self.readings.append((seconds, joules))
        return changed

    def read_power(self) -> None:
        """Read the power; the first failure ends these readings.

        `watch` calls it at regular intervals, and once at the end of the last window.
        """
        if self.no_power:
            return
        seconds, reading = self._timed(self.meter.power_watts)
        if reading.value is None:
            self.no_power = reading.reason
        else:
            self.powers.append((seconds, reading.value))

    def abandon_counter(self, seconds: float) -> None:
        """Stop querying a counter that did not change for `seconds`."""
        self.no_energy = f"the energy counter of {self.meter.name} stood still for {seconds:.1f} s"
        fault = f"the energy counter did not change in {seconds:.1f} s"
        self.doubts.append(diagnostics.make("meter_fault", meter=self.meter.name, fault=fault))

    def integral_joules(self, start_seconds: float, end_seconds: float) -> Reading:
        """Return the power integral by the trapezoid rule.

        The sum is Σ (Pᵢ + Pᵢ₊₁)/2 · Δtᵢ, interpolated to both ends.
        """
        times, watts = np.asarray(self.powers).reshape(-1, 2).T
        inside = (start_seconds < times) & (times < end_seconds)
        if self.no_power or inside.sum() < _LEAST_POWERS:
            too_few = f"{inside.sum()} readings of the power are too few for an integral"
            return Reading(None, self.no_power or too_few)
        points = np.concatenate([[start_seconds], times[inside], [end_seconds]])
        heights = np.interp(points, times, watts)
        return Reading(float(((heights[:-1] + heights[1:]) / 2 * np.diff(points)).sum()))

    def integral_uncertainty(self, start_seconds: float, end_seconds: float) -> float | None:
        """Return the integral's relative standard uncertainty; None without an integral.

        It is the uncertainty of the mean reading, from neighbor differences: s² = Σ (Pᵢ₊₁ - Pᵢ)² /
        2(n - 1) (von Neumann 1941). A slow drift adds little, and the trapezoids follow it.
        """
        watts = np.asarray(
            [power for seconds, power in self.powers if start_seconds < seconds < end_seconds]
        )
        if self.no_power or watts.size < _LEAST_POWERS or not watts.mean():
            return None
        deviation = math.sqrt(float((np.diff(watts) ** 2).sum()) / 2 / (watts.size - 1))
        return deviation / math.sqrt(watts.size) / float(watts.mean())

    def _timed(self, query: Callable[[], Reading]) -> tuple[float, Reading]:
        """Run a query; return the time in its middle (seconds) and its answer.

        An error in a foreign library counts as no answer.
        """
        begun = self._now()
        try:
            reading = query()
        except Exception as error:
            reason = f"{self.meter.name} failed: {type(error).__name__}: {error}".strip()
            reading = Reading(None, reason)
        ended = self._now()
        self.query_seconds = max(self.query_seconds, ended - begun)
        return (begun + ended) / 2, reading

    def _refuse_decrease(self, before: float, after: float) -> None:
        """Stop querying a counter that decreased from `before` to `after` joules.

        It may have wrapped, but its range is unknown.
        """
        name = self.meter.name
        self.no_energy = f"the energy counter of {name} went back, and its range is not known"
        change = f"the energy counter went from {before:.6g} back to {after:.6g} J"
        fault = f"{change}, its range is unknown"
        self.doubts.append(diagnostics.make("meter_fault", meter=name, fault=fault))


@dataclass(frozen=True, kw_only=True)
class Windows:
    """One meter's values over consecutive windows, from tick to tick.

    A tick lies within an interval of width w, and a uniform distribution over it has the standard
    deviation w/√12. Each confidence interval is the larger of two: from the windows (Student's t),
    and from both ends or the integral's readings.

    Attributes:
        edges: window ends, seconds.
        watts: mean power per window, from the counter or else the integral; empty without either.
        counter_watts: mean power over all windows by the energy counter.
        integral_watts: the same by the trapezoidal integral over power readings.
        uncertainty: relative standard uncertainty of the length; None without a counter.
        integral_uncertainty: relative standard uncertainty of the integral; None without an
            integral.
    """

    edges: tuple[float, ...]
    watts: tuple[float, ...]
    counter_watts: Reading
    integral_watts: Reading
    uncertainty: float | None = None
    integral_uncertainty: float | None = None

    @property
    def seconds(self) -> float:
        """Return the length of all windows together."""
        return self.edges[-1] - self.edges[0]

    @property
    def difference(self) -> float | None:
        """Return the relative difference between integral and counter."""
        return difference(self.counter_watts, self.integral_watts).value

    @property
    def tolerance(self) -> float:
        """Return the tolerated relative difference between counter and integral."""
        return max(_DISAGREEMENT, _SIGMAS * (self.integral_uncertainty or 0.0))

    @property
    def disagrees(self) -> bool:
        """Return whether counter and integral differ by more than the tolerance."""
        return self.difference is not None and abs(self.difference) > self.tolerance

    @property
    def is_unchecked(self) -> bool:
        """Return whether the integral is too uncertain to check the counter."""
        return (
            self.difference is not None and not self.disagrees and self.tolerance > _MOST_TOLERANCE
        )


def difference(counter_watts: Reading, integral_watts: Reading) -> Reading:
    """Return the relative difference between an integral and a counter, or why it is missing."""
    if not counter_watts.value or integral_watts.value is None:
        return Reading(None, counter_watts.reason or integral_watts.reason)
    return Reading(integral_watts.value / counter_watts.value - 1)


def uncertainty(start: Tick, end: Tick) -> float:
    """Return the relative standard uncertainty of a window's length between two ticks."""
    deviation = math.hypot(start.width_seconds, end.width_seconds) / math.sqrt(12)
    return deviation / (end.seconds - start.seconds)


def windows_between(track: Track, edges: Sequence[Tick]) -> Windows:
    """Return a track's windows between ticks.

    With a counter, the mean power and its interval come from the counter; without one, from the
    integral, whose windows start at the first power reading.
    """
    start, end = edges[0], edges[-1]
    seconds, times = end.seconds - start.seconds, tuple(edge.seconds for edge in edges)
    if seconds <= 0:
        ended_early = f"{track.meter.name} was not watched to the end of its window"
        missing = Reading(None, track.no_energy or ended_early)
        return Windows(edges=times, watts=(), counter_watts=missing, integral_watts=missing)
    joules = track.integral_joules(start.seconds, end.seconds)
    integral = joules if joules.value is None else Reading(joules.value / seconds)
    integral_uncertainty = track.integral_uncertainty(start.seconds, end.seconds)
    if not track.no_energy:
        length_uncertainty = uncertainty(start, end)
        watts = [(b.joules - a.joules) / (b.seconds - a.seconds) for a, b in pairwise(edges)]
        mean_watts = (end.joules - start.joules) / seconds
        counter = _with_interval(mean_watts, watts, times, length_uncertainty)
    else:
        length_uncertainty, counter = None, Reading(None, track.no_energy)
        parts = [(track.integral_joules(a, b).value, b - a) for a, b in pairwise(times)]
        watts = [part / length for part, length in parts if part is not None]
        if integral.value is not None:
            # the scatter of some windows alone would be too optimistic
            complete = watts if len(watts) == len(parts) else []
            integral = _with_interval(integral.value, complete, times, integral_uncertainty or 0.0)
    return Windows(
        edges=times,
        watts=tuple(watts),
        counter_watts=counter,
        integral_watts=integral,
        uncertainty=length_uncertainty,
        integral_uncertainty=integral_uncertainty,
    )


def _with_interval(
    mean_watts: float, watts: Sequence[float], edges: Sequence[float], uncertainty: float
) -> Reading:
    """Return a mean power with a 95 % interval, or without one for too few windows.

    The half-width is the larger of two: from the scatter between windows, and from the given
    uncertainty.

    Args:
        watts: mean power per window.
        edges: window ends, seconds.
        uncertainty: relative standard uncertainty of `mean_watts`.
    """
    half_width = windows_half_width(watts, np.diff(edges).tolist()) if watts else None
    if half_width is not None:
        half_width = max(half_width, Z95 * uncertainty * abs(mean_watts))
    return Reading(mean_watts, half_width=half_width)
