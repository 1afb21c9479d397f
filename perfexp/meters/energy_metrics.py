"""Figures: the windows of all meters as a record's metrics, facts and doubts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from perfexp.meters import Reading
from perfexp.meters.track import Track, Window
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric
from perfexp.statistics.estimators import Interval, differ

#: Counter and integral may differ by this fraction, and by so many times what the integral is uncertain by; where that
#: is more than so much, the integral can't check the counter.
_DISAGREEMENT, _SIGMAS, _BLIND = 0.03, 4.0, 0.1
#: The window's length may be so uncertain before the point says so, and a call's time so far off what it was before.
_COARSE, _PACE = 0.01, 0.03


class Part(NamedTuple):
    """What can be believed of one meter.

    Attributes:
        watts: its mean power.
        doubts: about that.
        estimated: whether it is the integral of a meter that has no counter.
    """

    watts: Reading
    doubts: list[Diagnostic]
    estimated: bool


class Power:
    """The mean power of everything that is metered.

    Args:
        windows: of each meter.
        tracks: in the same order.

    Attributes:
        windows: of each meter.
        parts: what can be believed of each.
        mean_watts: by the counters; by the integral where a meter has no counter.
        counter_watts: by the counters alone.
        integral_watts: by the integrals alone.
        estimated: whether a meter has no counter.
        doubts: of meters and windows.
    """

    def __init__(self, windows: Sequence[Window], tracks: Sequence[Track]) -> None:
        self.windows, self._tracks = windows, tracks
        self.parts = [_part(each, track) for each, track in zip(windows, tracks, strict=True)]
        self.mean_watts = total([part.watts for part in self.parts])
        self.counter_watts = total([each.counter_watts for each in windows])
        self.integral_watts = total([each.integral_watts for each in windows])
        self.estimated = any(part.estimated for part in self.parts)
        of_meters = [doubt for track in tracks for doubt in (*track.meter.doubts(), *track.doubts)]
        self.doubts = [*(doubt for part in self.parts for doubt in part.doubts), *of_meters]

    @property
    def difference(self) -> Reading:
        """Of the integral from the counter, relative."""
        counter, integral = self.counter_watts, self.integral_watts
        if not counter.value or integral.value is None:
            return Reading(None, counter.reason or integral.reason)
        return Reading(integral.value / counter.value - 1)

    @property
    def integral_uncertainty(self) -> Reading:
        """Standard uncertainty of the sum of the integrals, relative."""
        parts = [(each.integral_watts.value, each.integral_uncertainty) for each in self.windows]
        known = [(watts, relative) for watts, relative in parts if watts is not None and relative is not None]
        total_watts = sum(watts for watts, _ in known)
        if len(known) < len(parts) or not total_watts:
            return Reading(None, self.integral_watts.reason or "there is no integral")
        return Reading(math.hypot(*(watts * relative for watts, relative in known)) / total_watts)

    def facts(self) -> list[dict[str, Any]]:
        """Each meter apart: identity, window, and every answer it gave, by the time since the window began."""
        return [_facts(*both) for both in zip(self.windows, self._tracks, strict=True)]


def _part(each: Window, track: Track) -> Part:
    """The mean power of one meter, if what it says can be believed."""
    said: list[Diagnostic] = []
    counter, integral = each.counter_watts, each.integral_watts
    if counter.value is None and integral.value is not None and not track.readings:
        # not a counter that has failed, but a board without one
        return Part(integral, [diagnostics.make("meter_no_counter", meter=each.name)], estimated=True)
    if each.uncertainty is not None and each.uncertainty > _COARSE:
        coarse = diagnostics.make("meter_coarse", meter=each.name, uncertainty=each.uncertainty, window=each.seconds)
        said.append(coarse)
    difference = each.difference
    tolerance = max(_DISAGREEMENT, _SIGMAS * (each.integral_uncertainty or 0.0))
    if difference is not None and abs(difference) > tolerance and counter.value and integral.value:
        said.append(
            diagnostics.make(
                "meter_disagrees",
                meter=each.name,
                counter=counter.value,
                integral=integral.value,
                difference=difference,
                tolerance=tolerance,
            )
        )
        counter = Reading(None, f"energy counter and integral of {each.name}'s power differ by {difference:+.1%}")
    elif difference is not None and tolerance > _BLIND:
        said.append(diagnostics.make("meter_unchecked", meter=each.name, difference=difference, tolerance=tolerance))
    return Part(counter, said, estimated=False)


def total(readings: Sequence[Reading]) -> Reading:
    """The sum of all meters; none where one of them has none.

    Args:
        readings: of each meter.
    """
    reasons = dict.fromkeys(reading.reason for reading in readings if reading.value is None)
    if reasons or not readings:
        return Reading(None, "; ".join(reasons))
    return Reading(sum(reading.value or 0.0 for reading in readings))


def metric(name: str, reading: Reading, unit: str, *, estimated: bool = False) -> Metric:
    """A figure of the record.

    Args:
        name: without its group.
        reading: value, or why there is none.
        unit: SI.
        estimated: whether it is computed from something else than what it is the name of.
    """
    missing = reading.value is None
    return Metric(
        name=f"energy/{name}",
        value=reading.value,
        unit=unit,
        reason=(reading.reason or "not measured") if missing else None,
        estimated=estimated and not missing,
    )


def another_pace(call_seconds: float | None, clean: Interval | None) -> list[Diagnostic]:
    """A diagnostic where calls took another time while the meters were read than before.

    Args:
        call_seconds: mean of the calls in the window; None for none.
        clean: mean seconds of a call while no meter was read; None where that is not known.
    """
    if not call_seconds or not clean:
        return []
    if not differ(Interval(value=call_seconds, low=None, high=None), clean, _PACE):
        return []
    metered_ms, timed_ms = call_seconds * 1e3, clean.value * 1e3
    difference = metered_ms / timed_ms - 1
    return [diagnostics.make("energy_pace", metered_ms=metered_ms, timed_ms=timed_ms, difference=difference)]


def _facts(each: Window, track: Track) -> dict[str, Any]:
    return {
        "name": each.name,
        "covers": each.covers,
        "power_kind": track.meter.power_kind.value,
        "window_seconds": each.seconds,
        "window_uncertainty": each.uncertainty,
        "counter_watts": each.counter_watts.value,
        "integral_watts": each.integral_watts.value,
        "difference": each.difference,
        "integral_uncertainty": each.integral_uncertainty,
        "tick_seconds": track.tick_seconds,
        "query_seconds": track.query_seconds,
        "wraps": track.wraps,
        "counter": _columns(track.readings, each.start_seconds, "joules"),
        "power": _columns(track.powers, each.start_seconds, "watts"),
    }


def _columns(samples: Sequence[tuple[float, float]], start: float, name: str) -> dict[str, list[float]]:
    """Times since the start, to the microsecond, and values."""
    return {
        "seconds": [round(seconds - start, 6) for seconds, _ in samples],
        name: [round(value, 6) for _, value in samples],
    }
