"""Conditions: a device's clock, throttling and temperature during each series."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from perfexp.devices import Device
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import Point

#: Decimal digits of a clock in the record: rounded to 10 kHz.
_CLOCK_DIGITS = -4


@dataclass
class _Observed:
    seconds: float = 0.0
    throttled_seconds: dict[str, float] | None = None
    temperatures: list[float] = field(default_factory=list)
    clocks: list[tuple[float, ...]] = field(default_factory=list)


class Observer:
    """Observes a device between blocks of series that take turns; inside a block it does nothing.

    The clock is read only after `device` blocks, which load the device until the last moment.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._last = device, device.conditions()
        self._series: dict[str, _Observed] = {}

    def block_ended(self, name: str, seconds: float) -> None:
        """Read the clock and the driver's counters right after a block.

        Args:
            name: series of the block.
            seconds: duration of the block.
        """
        seen = self._series.setdefault(name, _Observed())
        if name in DEVICE_TIMES and (
            clocks := self._device.clock_readings()
        ):  # first, while the device is loaded
            seen.clocks.append(clocks)
        before, after = self._last, self._device.conditions()
        self._last, seen.seconds = after, seen.seconds + seconds
        throttled: dict[str, float] | None = None
        if after.throttled_ns is not None:
            earlier = before.throttled_ns or {}
            throttled = {
                name: (ns - earlier.get(name, ns)) * 1e-9 for name, ns in after.throttled_ns.items()
            }
        elif after.reasons is not None:  # one sample stands for the whole block
            throttled = dict.fromkeys(after.reasons, seconds)
        if throttled is not None:
            sums = seen.throttled_seconds = seen.throttled_seconds or {}
            sums |= {
                reason: sums.get(reason, 0.0) + more
                for reason, more in throttled.items()
                if more > 0
            }
        seen.temperatures += [
            one.temperature for one in (before, after) if one.temperature is not None
        ]

    def add_to(self, point: Point) -> None:
        """Add everything that the device reports to a point's facts, by series."""
        for fact, values in self.facts().items():
            point.facts.setdefault(fact, {}).update(values)

    def facts(self) -> dict[str, dict[str, object]]:
        """Return everything that the device reports, by fact (e.g. `clock_hertz`) and series."""
        facts: dict[str, dict[str, object]] = {}
        for name, seen in self._series.items():
            found: dict[str, object] = {}
            if seen.throttled_seconds is not None:
                shares = {
                    reason: more / max(seen.seconds, 1e-9)
                    for reason, more in seen.throttled_seconds.items()
                }
                found["throttled_share"] = {
                    reason: round(min(share, 1.0), 4) for reason, share in shares.items()
                }
            if seen.temperatures:
                found["temperature_celsius"] = [seen.temperatures[0], seen.temperatures[-1]]
            if seen.clocks:
                found["clock_hertz"] = [
                    round(sum(clocks) / len(clocks), _CLOCK_DIGITS) for clocks in seen.clocks
                ]
                found["clock_noise"] = round(_noise(seen.clocks), 6)
            for fact, value in found.items():
                facts.setdefault(fact, {})[name] = value
        return facts


def _noise(pairs: list[tuple[float, ...]]) -> float:
    """Return the relative standard deviation of a mean of two readings.

    It is estimated from the differences within all pairs.
    """
    squares = [((first - last) / (first + last)) ** 2 for first, last in pairs]
    return math.sqrt(sum(squares) / len(squares))
