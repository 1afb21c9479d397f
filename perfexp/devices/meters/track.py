"""One meter's answers over time, and the energy in a window from tick to tick."""

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
#: uncertainty. If that tolerance exceeds the last value, the integral cannot check the counter.
_DISAGREEMENT, _SIGMAS, _BLIND = 0.03, 4.0, 0.1
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

    Attributes:
        readings: seconds and joules, continued across counter wraps.
        no_energy: why the counter is no longer queried; empty while it is.
        no_power: why the power is no longer queried; empty while it is.
        powers: seconds and watts.
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
        self._skips_ticks = False
        self._last_joules: float | None = None
        self._wrapped_joules = 0.0

    @property
    def tick_seconds(self) -> float | None:
        """Return the counter's period, known or measured; None if it is unknown.

        It is measured once there are enough ticks. After `skip_ticks` it no longer changes.
        """
        if self._known_tick_seconds is not None or self._skips_ticks or len(self.ticks) < _TICKS:
            return self._known_tick_seconds
        times, widths, _ = np.asarray(self.ticks).T
        times = times[widths <= 2 * np.quantile(widths, 0.25)]  # most precise ticks
        steps = np.diff(times)
        # without the less precise ticks, a step may span several periods
        periods = np.round(steps / np.median(steps)).sum() if len(steps) else 0
        if not periods:
            return None
        return float((times[-1] - times[0]) / periods)

    def skip_ticks(self) -> None:
        """Stop deriving the period from ticks: from now on only some ticks are observed."""
        self._known_tick_seconds, self._skips_ticks = self.tick_seconds, True

    def ask_energy(self) -> bool:
        """Read the counter and return whether it has changed since the last reading."""
        if self.no_energy:
            return False
        seconds, reading = self._ask(self.meter.energy_joules)
        if reading.value is None:
            self.no_energy = reading.reason
            return False
        before, self._last_joules = self._last_joules, reading.value
        if (
            before is not None
            and reading.value < before
            and not self._unwrap(before, reading.value)
        ):
            return False
        joules = reading.value + self._wrapped_joules
        changed = bool(self.readings) and joules != self.readings[-1][1]
        if changed:
            # the counter never stands still for longer than its period
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
        fault = f"the energy counter did not change in {seconds:.1f} s"
        self.doubts.append(diagnostics.make("meter_fault", meter=self.meter.name, fault=fault))

    def integral_joules(self, start_seconds: float, end_seconds: float) -> Reading:
        """Return the power integral by the trapezoid rule.

        The sum is Σ (Pᵢ + Pᵢ₊₁)/2 · Δtᵢ, interpolated to both ends.
        """
        times, watts = map(np.asarray, zip(*self.powers, strict=True)) if self.powers else ((), ())
        inside = [start_seconds < time < end_seconds for time in times]
        if self.no_power or sum(inside) < _LEAST_POWERS:
            return Reading(
                None,
                self.no_power or f"{sum(inside)} readings of the power are too few for an integral",
            )
        whole = np.concatenate([[start_seconds], np.asarray(times)[inside], [end_seconds]])
        heights = np.interp(whole, times, watts)
        return Reading(float(((heights[:-1] + heights[1:]) / 2 * np.diff(whole)).sum()))

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

    def _ask(self, question: Callable[[], Reading]) -> tuple[float, Reading]:
        """Return the middle of a query, and its answer.

        An error in a foreign library counts as no answer.
        """
        begun = self._now()
        try:
            reading = question()
        except Exception as error:
            reading = Reading(
                None, f"{self.meter.name} failed: {type(error).__name__}: {error}".strip()
            )
        ended = self._now()
        self.query_seconds = max(self.query_seconds, ended - begun)
        return (begun + ended) / 2, reading

    def _unwrap(self, before: float, after: float) -> bool:
        """Handle a counter that decreased.

        If its range is known, it wrapped. Otherwise it is not queried any more.
        """
        if self.meter.wrap_joules is None:
            name = self.meter.name
            self.no_energy = f"the energy counter of {name} went back, and its range is not known"
            fault = (
                f"the energy counter went from {before:.6g} back to {after:.6g} J, its range is "
                "unknown"
            )
            self.doubts.append(diagnostics.make("meter_fault", meter=name, fault=fault))
            return False
        self.wraps += 1
        self._wrapped_joules += self.meter.wrap_joules
        return True


@dataclass(frozen=True, kw_only=True)
class Windows:
    """One meter's values over consecutive windows, from tick to tick.

    A tick lies within an interval of width w, and a uniform distribution over it has the standard
    deviation w/√12. Each confidence interval is the larger of two: from the windows (Student's t),
    and from both ends or the integral's readings.

    Attributes:
        edges: window ends, seconds.
        watts: mean power per window, from the counter or else the integral; empty without either.
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
        return self.difference is not None and not self.disagrees and self.tolerance > _BLIND


def difference(counter_watts: Reading, integral_watts: Reading) -> Reading:
    """Return the relative difference between an integral and a counter."""
    if not counter_watts.value or integral_watts.value is None:
        return Reading(None, counter_watts.reason or integral_watts.reason)
    return Reading(integral_watts.value / counter_watts.value - 1)


def uncertainty(start: Tick, end: Tick) -> float:
    """Return the relative standard uncertainty of a window's length between two ticks."""
    return (
        math.hypot(start.width_seconds, end.width_seconds)
        / math.sqrt(12)
        / (end.seconds - start.seconds)
    )


def windows_between(track: Track, edges: Sequence[Tick]) -> Windows:
    """Return a track's windows between ticks.

    Without a counter they start at the first power reading.
    """
    start, end = edges[0], edges[-1]
    seconds, times = end.seconds - start.seconds, tuple(edge.seconds for edge in edges)
    if seconds <= 0:
        missing = Reading(
            None, track.no_energy or f"{track.meter.name} was not watched to the end of its window"
        )
        return Windows(edges=times, watts=(), counter_watts=missing, integral_watts=missing)
    integral = track.integral_joules(start.seconds, end.seconds)
    spread = track.integral_uncertainty(start.seconds, end.seconds)
    if not track.no_energy:
        own = uncertainty(start, end)
        each = tuple((b.joules - a.joules) / (b.seconds - a.seconds) for a, b in pairwise(edges))
        counter = _mean((end.joules - start.joules) / seconds, each, times, own)
        watts = integral if integral.value is None else Reading(integral.value / seconds)
    else:
        own, counter = None, Reading(None, track.no_energy)
        parts = [(track.integral_joules(a, b).value, b - a) for a, b in pairwise(times)]
        each = tuple(joules / length for joules, length in parts if joules is not None)
        complete = each if len(each) == len(parts) else ()
        watts = integral
        if integral.value is not None:
            watts = _mean(integral.value / seconds, complete, times, spread or 0.0)
    return Windows(
        edges=times,
        watts=each,
        counter_watts=counter,
        integral_watts=watts,
        uncertainty=own,
        integral_uncertainty=spread,
    )


def _mean(watts: float, each: Sequence[float], edges: Sequence[float], own: float) -> Reading:
    """Return a mean power with an interval.

    The interval is the larger of two, from the window powers and from the relative standard
    uncertainty `own`.
    """
    half_width = windows_half_width(each, np.diff(edges).tolist()) if each else None
    return Reading(
        watts, half_width=None if half_width is None else max(half_width, Z95 * own * abs(watts))
    )
