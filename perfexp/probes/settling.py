"""Settling: calls made before the series begin, until the device has reached a steady state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from perfexp.devices import Device
from perfexp.probes.timing import Collector, undisturbed

#: Seconds per block, and minimum seconds in total: slow changes show a slope by then.
_BLOCK_SECONDS, _LEAST_SECONDS = 0.5, 30.0
#: Largest relative difference between the middle and the last third of a steady quantity.
_SLOPE = 0.002
#: Largest change of a steady temperature in degrees Celsius, and the seconds that it must hold.
_CELSIUS, _TEMPERATURE_SECONDS = 1.0, 10.0


@dataclass
class _Trace:
    ends: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    def changes(self) -> list[str]:
        """Return descriptions of what still changes, for example `the clock by -1.20%`."""
        found = [
            f"{name} by {slope:+.2%}"
            for name, values, tolerance in (
                ("the time of a call", self.times, _SLOPE),
                # the clock jitters under a power limit, and a reading takes less than a millisecond
                ("the clock", self.clocks, max(_SLOPE, 2 * _slope_error(self.clocks))),
            )
            if abs(slope := _slope(values)) >= tolerance
        ]
        recent = [
            celsius
            for end, celsius in zip(
                self.ends, self.temperatures, strict=False
            )  # empty without a sensor
            if end >= self.ends[-1] - _TEMPERATURE_SECONDS
        ]
        if recent and (change := max(recent) - min(recent)) > _CELSIUS:
            found.append(f"the temperature by {change:.0f} °C in {_TEMPERATURE_SECONDS:.0f} s")
        return found


def settle(
    collectors: Sequence[Collector],
    device: Device,
    most_seconds: float,
    progress: Callable[[str], None],
) -> tuple[float, list[str]]:
    """Take blocks of several series in turns, as in the measurement, until the device is steady.

    Call times come from the `device` series, if there is one, otherwise from the first series.
    Samples are not stored.

    Args:
        progress: called with a status line between blocks.

    Returns:
        The seconds spent, and descriptions of what still changed at the end.
    """
    judged = next((one for one in collectors if one.name == "device"), collectors[0])
    counts, trace, start_ns = (
        dict.fromkeys((one.name for one in collectors), 1),
        _Trace(),
        device.now_ns(),
    )
    with undisturbed():
        while True:
            for collector in collectors:
                samples = collector.block(counts[collector.name])
                sample_seconds = max(float(np.median(samples)) * collector.calls_per_sample, 1e-9)
                counts[collector.name] = math.ceil(_BLOCK_SECONDS / sample_seconds)
                if collector is judged:
                    trace.times.append(float(np.median(samples)))
                    if clocks := device.clock_readings():
                        trace.clocks.append(float(np.mean(clocks)))
            celsius = device.conditions().temperature
            if celsius is not None:
                trace.temperatures.append(celsius)
            seconds = (device.now_ns() - start_ns) * 1e-9
            trace.ends.append(seconds)
            changes = trace.changes() if seconds >= min(_LEAST_SECONDS, most_seconds) else []
            if seconds >= most_seconds or (seconds >= _LEAST_SECONDS and not changes):
                return seconds, changes
            progress(f"warming up, {seconds:.0f} s")


def _slope(values: Sequence[float]) -> float:
    """Return the relative change of the median from the middle third to the last third.

    It is 0 for too few values.
    """
    third = len(values) // 3
    return (
        float(np.median(values[-third:]) / np.median(values[-2 * third : -third])) - 1
        if third
        else 0.0
    )


def _slope_error(values: Sequence[float]) -> float:
    """Return the standard error of `_slope`, √(π/2)·σ·√(2/n).

    σ follows from the median difference between neighbors, which is 0.954 σ.
    """
    third = len(values) // 3
    if not third:
        return 0.0
    scatter = (
        float(np.median(np.abs(np.diff(values[-2 * third :]))) / np.median(values[-2 * third :]))
        / 0.954
    )
    return math.sqrt(math.pi / third) * scatter
