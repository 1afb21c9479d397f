"""Convert the windows of all meters to a record's metrics, facts and diagnostics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from perfexp.meters import Reading
from perfexp.meters.track import Track, Window, difference
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric
from perfexp.statistics.estimators import Interval, differ

#: Counter and integral may differ by this fraction, or this multiple of the integral's uncertainty; beyond the last
#: value of that tolerance, the integral cannot check the counter.
_DISAGREEMENT, _SIGMAS, _BLIND = 0.03, 4.0, 0.1
#: Tolerated uncertainty of the window's length, and tolerated change of a call's time.
_COARSE, _PACE = 0.01, 0.03


class Part(NamedTuple):
    """The reliable figures of one meter; `estimated`: the integral of a meter without a counter."""

    watts: Reading
    doubts: list[Diagnostic]
    estimated: bool = False


class Power:
    """The mean power of everything that is metered; `difference` is that of the integral from the counter, relative."""

    def __init__(self, windows: Sequence[Window], tracks: Sequence[Track]) -> None:
        self.windows, self._tracks = windows, tracks
        self.parts = [_part(window, track) for window, track in zip(windows, tracks, strict=True)]
        self.mean_watts = total([part.watts for part in self.parts])
        self.counter_watts = total([window.counter_watts for window in windows])
        self.integral_watts = total([window.integral_watts for window in windows])
        self.difference = difference(self.counter_watts, self.integral_watts)
        self.estimated = any(part.estimated for part in self.parts)
        of_meters = [doubt for track in tracks for doubt in (*track.meter.doubts(), *track.doubts)]
        self.doubts = [*(doubt for part in self.parts for doubt in part.doubts), *of_meters]

    @property
    def integral_uncertainty(self) -> Reading:
        """Relative standard uncertainty of the sum of the integrals."""
        parts = [(window.integral_watts.value, window.integral_uncertainty) for window in self.windows]
        pairs = [(watts, relative) for watts, relative in parts if watts is not None and relative is not None]
        total_watts = sum(watts for watts, _ in pairs)
        if len(pairs) < len(parts) or not total_watts:
            return Reading(None, self.integral_watts.reason or "there is no integral")
        return Reading(math.hypot(*(watts * relative for watts, relative in pairs)) / total_watts)

    def facts(self) -> list[dict[str, Any]]:
        """Facts of each meter: identity, window, and all answers by time since the window began."""
        return [
            {
                "name": track.meter.name,
                "covers": track.meter.covers,
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
            for each, track in zip(self.windows, self._tracks, strict=True)
        ]


def _part(window: Window, track: Track) -> Part:
    doubts: list[Diagnostic] = []
    counter, integral, name = window.counter_watts, window.integral_watts, track.meter.name
    if counter.value is None and integral.value is not None and not track.readings:
        # the board has no counter, rather than a failed one
        return Part(integral, [diagnostics.make("meter_no_counter", meter=name)], estimated=True)
    if (uncertainty := window.uncertainty) is not None and uncertainty > _COARSE:
        doubts.append(diagnostics.make("meter_coarse", meter=name, uncertainty=uncertainty, window=window.seconds))
    apart = window.difference
    tolerance = max(_DISAGREEMENT, _SIGMAS * (window.integral_uncertainty or 0.0))
    if apart is not None and abs(apart) > tolerance and counter.value and integral.value:
        doubts.append(
            diagnostics.make(
                "meter_disagrees",
                meter=name,
                counter=counter.value,
                integral=integral.value,
                difference=apart,
                tolerance=tolerance,
            )
        )
        counter = Reading(None, f"energy counter and integral of {name}'s power differ by {apart:+.1%}")
    elif apart is not None and tolerance > _BLIND:
        doubts.append(diagnostics.make("meter_unchecked", meter=name, difference=apart, tolerance=tolerance))
    return Part(counter, doubts)


def total(readings: Sequence[Reading]) -> Reading:
    """The sum of all meters; None if one of them has no value."""
    reasons = dict.fromkeys(reading.reason for reading in readings if reading.value is None)
    if reasons or not readings:
        return Reading(None, "; ".join(reasons))
    return Reading(sum(reading.value or 0.0 for reading in readings))


def metric(name: str, reading: Reading, unit: str, *, estimated: bool = False) -> Metric:
    """A metric of the record; `estimated`: it is derived from another quantity than its name."""
    missing = reading.value is None
    reason = (reading.reason or "not measured") if missing else None
    estimated = estimated and not missing
    return Metric(name=f"energy/{name}", value=reading.value, unit=unit, reason=reason, estimated=estimated)


def another_pace(call_seconds: float | None, clean: Interval | None) -> list[Diagnostic]:
    """A diagnostic where calls took another time during metering (`call_seconds`) than before (`clean`)."""
    if not call_seconds or not clean or not differ(Interval(value=call_seconds, low=None, high=None), clean, _PACE):
        return []
    metered_ms, timed_ms = call_seconds * 1e3, clean.value * 1e3
    difference = metered_ms / timed_ms - 1
    return [diagnostics.make("energy_pace", metered_ms=metered_ms, timed_ms=timed_ms, difference=difference)]


def _columns(samples: Sequence[tuple[float, float]], start: float, name: str) -> dict[str, list[float]]:
    return {
        "seconds": [round(seconds - start, 6) for seconds, _ in samples],
        name: [round(value, 6) for _, value in samples],
    }
