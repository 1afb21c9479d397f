"""Interface of energy meters. Each kind of meter has its own module here.

A meter has an energy counter (joules), a power sensor (watts), or both. `track` stores a meter's
answers, `watch` decides when to query it and keeps the device busy, and `energy_metrics` turns the
answers into metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic


class PowerKind(StrEnum):
    """Meaning of `power_watts`: instantaneous, an average over about a second, or no sensor."""

    instantaneous = "instantaneous"
    average = "average"
    absent = "absent"


class Reading(NamedTuple):
    """A meter's answer, or a value derived from answers.

    Attributes:
        value: the value; None if it is unknown.
        reason: why the value is unknown, and a remedy.
        half_width: half-width of the 95 % interval, in the value's unit; None without an interval.
    """

    value: float | None
    reason: str = ""
    half_width: float | None = None


class Meter(Protocol):
    """An energy counter or power sensor, for example for a board, a package or part of a package.

    Attributes:
        name: unique name for the record, for example `rapl intel-rapl:0`.
        covers: what the energy includes, for example "the board NVIDIA H100".
        accuracy: largest relative scale error according to a source; None if no source is known.
    """

    name: str
    covers: str
    power_kind: PowerKind
    accuracy: float | None = None

    @property
    def tick_seconds(self) -> float | None:
        """Return the counter's documented update period; None if it must be measured."""
        return None

    @property
    def wrap_joules(self) -> float | None:
        """Return the energy range of the counter, after which it wraps; None if unknown."""
        return None

    def energy_joules(self) -> Reading:
        """Return the current counter in joules; only differences are meaningful."""

    def power_watts(self) -> Reading:
        """Return the current power, or the average over the last second: see `power_kind`."""

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics about the meter's values now, such as a power that is an average."""
        limit = "its power is an average over about a second, whose integral follows changes late"
        if self.power_kind is not PowerKind.average:
            return []
        return [diagnostics.make("meter_limited", meter=self.name, limit=limit)]


@dataclass(frozen=True, kw_only=True)
class DeviceMeters:
    """A device's meters. Their energies add up to the whole, without overlap.

    Attributes:
        reason: why there are no meters, and a remedy.
        doubts: diagnostics about the choice of meters.
    """

    meters: tuple[Meter, ...] = ()
    reason: str = ""
    doubts: tuple[Diagnostic, ...] = ()


def none_because(reason: str, *doubts: Diagnostic) -> DeviceMeters:
    """Return no meters, with a reason."""
    return DeviceMeters(reason=f"no meter: {reason}", doubts=doubts)


def if_readable(meter: Meter, suffix: str = "") -> DeviceMeters:
    """Return the meter if it answers at least one of its two queries, otherwise the reason.

    Args:
        suffix: text to append to the reason.
    """
    energy = meter.energy_joules()
    if energy.value is None and meter.power_kind is PowerKind.absent:
        return none_because(energy.reason + suffix)
    return DeviceMeters(meters=(meter,))


def combine(founds: list[DeviceMeters]) -> DeviceMeters:
    """Return the meters of several devices; if any device has no meter, return none.

    The energy of a run must include all its devices. A meter that two devices share counts once.
    """
    doubts = tuple(doubt for device in founds for doubt in device.doubts)
    reasons = dict.fromkeys(device.reason for device in founds if not device.meters)
    if reasons or not founds:
        return DeviceMeters(reason="; ".join(reasons) or "no meter: no device", doubts=doubts)
    unique = {meter.name: meter for device in founds for meter in device.meters}
    return DeviceMeters(meters=tuple(unique.values()), doubts=doubts)
