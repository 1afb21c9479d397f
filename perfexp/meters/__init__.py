"""Interface of an energy meter; each kind has a module beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic


class PowerKind(StrEnum):
    """Meaning of a meter's `power_watts`: instantaneous, an average over about a second, or no sensor."""

    instantaneous = "instantaneous"
    average = "average"
    absent = "absent"


class Reading(NamedTuple):
    """Answer of a meter, or a figure derived from answers; None with the reason, and how to fix it.

    `half_width` is that of the 95 % interval, in the unit of the value; None without an interval.
    """

    value: float | None
    reason: str = ""
    half_width: float | None = None


class Meter(Protocol):
    """A counter of the energy of a board, a package or a part of one.

    Attributes:
        accuracy: largest relative error of its scale, by a source; None if no source is known.
    """

    name: str
    covers: str
    power_kind: PowerKind
    accuracy: float | None = None

    @property
    def tick_seconds(self) -> float | None:
        """Documented period of the counter's updates; None where it must be measured."""
        return None

    @property
    def wrap_joules(self) -> float | None:
        """Energy at which the counter wraps; None if unknown."""
        return None

    def energy_joules(self) -> Reading:
        """Current counter; only differences are meaningful."""

    def power_watts(self) -> Reading:
        """Power now, or its average over the last second: see `power_kind`."""

    def doubts(self) -> list[Diagnostic]:
        """Diagnostics of its figures in the current situation."""
        limit = "its power is an average over about a second, whose integral follows changes late"
        is_average = self.power_kind is PowerKind.average
        return (
            [diagnostics.make("meter_limited", meter=self.name, limit=limit)] if is_average else []
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """Meters of a device, whose energies sum to that of the whole, without overlap.

    Where there are none, `reason` has why, and how to fix it.
    """

    meters: tuple[Meter, ...] = ()
    reason: str = ""
    doubts: tuple[Diagnostic, ...] = ()


def none_because(reason: str, *doubts: Diagnostic) -> Found:
    """No meters, for a reason."""
    return Found(reason=f"no meter: {reason}", doubts=doubts)


def if_readable(meter: Meter, suffix: str = "") -> Found:
    """The meter, if it answers at least one of its two queries; otherwise the reason, with a suffix."""
    energy = meter.energy_joules()
    if energy.value is None and meter.power_kind is PowerKind.absent:
        return none_because(energy.reason + suffix)
    return Found(meters=(meter,))


def together(founds: list[Found]) -> Found:
    """The meters of several devices as those of one; if one device has none, the whole has none."""
    doubts = tuple(doubt for device in founds for doubt in device.doubts)
    reasons = dict.fromkeys(device.reason for device in founds if not device.meters)
    if reasons or not founds:
        return Found(reason="; ".join(reasons) or "no meter: no device", doubts=doubts)
    unique = {meter.name: meter for device in founds for meter in device.meters}
    return Found(meters=tuple(unique.values()), doubts=doubts)
