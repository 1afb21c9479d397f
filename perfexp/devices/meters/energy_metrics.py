"""Conversion of all meters' windows to a record's metrics, facts and diagnostics.

A window is a time span of metered calls between two counter ticks. A meter's power comes from its
energy counter; the integral of its power readings checks the counter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from perfexp.devices.meters import Reading
from perfexp.devices.meters.track import Track, Windows, difference
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric
from perfexp.statistics.estimators import Interval, differ

#: Tolerated relative uncertainty of the window length, and tolerated relative change in call time.
_MOST_UNCERTAINTY, _MOST_CHANGE = 0.01, 0.03
_NO_COUNTER = "it has no energy counter: the energy is the integral of its power, without a check"


class Part(NamedTuple):
    """Reliable values from one meter.

    Attributes:
        estimated: whether the power is an integral because the meter has no counter.
    """

    watts: Reading
    doubts: list[Diagnostic]
    estimated: bool = False


class Power:
    """Mean power of everything that is metered.

    Attributes:
        parts: one entry per meter.
        mean_watts: sum of the meters' powers, with a 95 % interval.
        counter_watts: the same by energy counters alone.
        integral_watts: the same by integrated power readings alone.
        accuracy: largest scale error of the meters; None if it is unknown for any.
        difference: relative difference between integral and counter.
        estimated: whether any part is an integral because its meter has no counter.
    """

    def __init__(self, windows: Sequence[Windows], tracks: Sequence[Track]) -> None:
        self.windows, self._tracks = windows, tracks
        self.parts: list[Part] = []
        self.doubts: list[Diagnostic] = []
        of_meters: list[Diagnostic] = []
        accuracies = []
        for window, track in zip(windows, tracks, strict=True):
            part = _part(window, track)
            self.parts.append(part)
            self.doubts += part.doubts
            of_meters += (*track.meter.doubts(), *track.doubts)
            if track.meter.accuracy is not None:
                accuracies.append(track.meter.accuracy)
        self.doubts += of_meters
        self.mean_watts = total([part.watts for part in self.parts])
        self.counter_watts = total([window.counter_watts for window in windows])
        self.integral_watts = total([window.integral_watts for window in windows])
        self.accuracy = max(accuracies) if len(accuracies) == len(tracks) else None
        self.difference = difference(self.counter_watts, self.integral_watts)
        self.estimated = any(part.estimated for part in self.parts)

    @property
    def integral_uncertainty(self) -> Reading:
        """Return the relative standard uncertainty of the sum of integrals, or why it is missing.

        The meters' uncertainties in watts combine in quadrature.
        """
        watts, errors = [], []
        for window in self.windows:
            mean_watts, relative = window.integral_watts.value, window.integral_uncertainty
            if mean_watts is not None and relative is not None:
                watts.append(mean_watts)
                errors.append(mean_watts * relative)
        if len(errors) < len(self.windows) or not sum(watts):
            return Reading(None, self.integral_watts.reason or "there is no integral")
        return Reading(math.hypot(*errors) / sum(watts))

    def facts(self) -> list[dict[str, Any]]:
        """Return each meter's identity, window, and all answers since the window began.

        They are JSON values for the record; times are in seconds after the window's start.
        """
        facts = []
        for windows, track in zip(self.windows, self._tracks, strict=True):
            start = windows.edges[0]
            meter = {
                "name": track.meter.name,
                "covers": track.meter.covers,
                "power_kind": track.meter.power_kind.value,
                "window_seconds": windows.seconds,
                "window_uncertainty": windows.uncertainty,
                "edges": [round(edge - start, 6) for edge in windows.edges],
                "window_watts": list(windows.watts),
                "counter_watts": windows.counter_watts.value,
                "integral_watts": windows.integral_watts.value,
                "difference": windows.difference,
                "integral_uncertainty": windows.integral_uncertainty,
                "tick_seconds": track.tick_seconds,
                "query_seconds": track.query_seconds,
                "wraps": track.wraps,
                "counter": _columns(track.readings, start, "joules"),
                "power": _columns(track.powers, start, "watts"),
            }
            facts.append(meter)
        return facts


def _part(windows: Windows, track: Track) -> Part:
    """Return a meter's power by its counter, or by the integral if it has no counter.

    A counter that disagrees with the integral gives no power. A counter that cannot be checked
    gives its power and a diagnostic.
    """
    doubts: list[Diagnostic] = []
    counter, integral, name = windows.counter_watts, windows.integral_watts, track.meter.name
    if counter.value is None and integral.value is not None and not track.readings:
        # the board has no counter, rather than a failed one
        unchecked = diagnostics.make("meter_limited", meter=name, limit=_NO_COUNTER)
        return Part(integral, [unchecked], estimated=True)
    if (uncertainty := windows.uncertainty) is not None and uncertainty > _MOST_UNCERTAINTY:
        window = f"the window of {windows.seconds:.2f} s is uncertain by {uncertainty:.1%}"
        limit = f"its updates were seen so late between the calls that {window}"
        doubts.append(diagnostics.make("meter_limited", meter=name, limit=limit))
    seconds, deviation, tolerance = windows.seconds, windows.difference, windows.tolerance
    if windows.disagrees:
        fault = (
            f"{counter.value:.4g} W by the energy counter, {integral.value:.4g} W by integrated "
            f"power ({deviation:+.1%}, tolerated ±{tolerance:.0%}) after {seconds:.1f} s"
        )
        doubts.append(diagnostics.make("meter_fault", meter=name, fault=fault))
        reason = f"energy counter and integral of {name}'s power differ by {deviation:+.1%}"
        counter = Reading(None, reason)
    elif windows.is_unchecked:
        limit = (
            "the power varies so much that its integral cannot check the counter to better than "
            f"±{tolerance:.0%} in {seconds:.1f} s (they differ by {deviation:+.1%})"
        )
        doubts.append(diagnostics.make("meter_limited", meter=name, limit=limit))
    return Part(counter, doubts)


def total(readings: Sequence[Reading]) -> Reading:
    """Return the sum over all meters; None if a value is missing.

    Half-widths are added, since boards in one loop fluctuate together.
    """
    reasons = dict.fromkeys(reading.reason for reading in readings if reading.value is None)
    if reasons or not readings:
        return Reading(None, "; ".join(reasons))
    half_widths = [reading.half_width for reading in readings if reading.half_width is not None]
    half_width = sum(half_widths) if len(half_widths) == len(readings) else None
    return Reading(sum(reading.value or 0.0 for reading in readings), half_width=half_width)


def product(first: Reading, second: Reading) -> Reading:
    """Return the product of two readings, such as watts and seconds, or the missing one's reason.

    The relative half-width is √(a² + b²) (delta method). It is missing if a factor's half-width is
    missing; an exact factor has the half-width 0.
    """
    if first.value is None or second.value is None:
        return Reading(None, first.reason if first.value is None else second.reason)
    half_width = None
    if first.half_width is not None and second.half_width is not None:
        half_width = math.hypot(first.half_width * second.value, second.half_width * first.value)
    return Reading(first.value * second.value, half_width=half_width)


def above(watts: Reading, idle_watts: Reading) -> Reading:
    """Return the power above the idle power, or why it is missing.

    Half-widths add in quadrature.
    """
    if watts.value is None:
        return watts
    if idle_watts.value is None:
        return Reading(None, f"the idle power is not known: {idle_watts.reason}")
    if watts.value <= idle_watts.value:
        reason = f"the mean power is not above the idle power of {idle_watts.value:.4g} W"
        return Reading(None, reason)
    half_width = watts.half_width
    if half_width is not None:
        half_width = math.hypot(half_width, idle_watts.half_width or 0.0)
    return Reading(watts.value - idle_watts.value, half_width=half_width)


def midway(before: Reading, after: Reading) -> Reading:
    """Return the mean of the idle power before and after the calls, with a 95 % interval.

    The half-widths combine in quadrature. If the two differ by more than that, for example because
    of heat, the interval covers both intervals.
    """
    if after.value is None:
        return before
    if before.value is None:
        return after
    widths = (before.half_width or 0.0, after.half_width or 0.0)
    difference_watts, uncertainty = abs(after.value - before.value), math.hypot(*widths)
    half_width = uncertainty / 2
    if difference_watts > uncertainty:
        half_width = difference_watts / 2 + max(widths)
    return Reading((before.value + after.value) / 2, half_width=half_width)


def metric(name: str, reading: Reading, *, estimated: bool = False) -> Metric:
    """Return a metric for the record; missing, with the reason, if the reading is.

    Args:
        estimated: whether the value is derived from another quantity than its name says.
    """
    if reading.value is None:
        return Metric.of(name, None, reason=reading.reason or "not measured")
    low = high = None
    if reading.half_width is not None:
        low, high = reading.value - reading.half_width, reading.value + reading.half_width
    return Metric.of(name, reading.value, estimated=estimated, low=low, high=high)


def another_pace(call_seconds: Reading, clean: Interval | None) -> bool:
    """Return whether call times during metering and timing differ by more than 3 %.

    If so, power and timed seconds do not belong together.

    Args:
        call_seconds: call time during metering.
        clean: call time during timing.
    """
    if not call_seconds.value or clean is None:
        return False
    return differ(Interval(value=call_seconds.value, low=None, high=None), clean, _MOST_CHANGE)


def _columns(
    samples: Sequence[tuple[float, float]], start: float, name: str
) -> dict[str, list[float]]:
    """Return samples as two rounded columns, seconds after `start` and the values under `name`."""
    columns: dict[str, list[float]] = {"seconds": [], name: []}
    for seconds, value in samples:
        columns["seconds"].append(round(seconds - start, 6))
        columns[name].append(round(value, 6))
    return columns
