"""Meter: what the measuring code asks of the thing that counts energy; one module for each kind beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from perfexp.records.diagnostics import Diagnostic


class PowerKind(StrEnum):
    """What a meter's `power_watts` is: of that moment, an average over the last second or so, or nothing."""

    instantaneous = "instantaneous"
    average = "average"
    absent = "absent"


class Reading(NamedTuple):
    """An answer of a meter.

    Attributes:
        value: in the unit that the question names; None where there is no answer.
        reason: why there is none, and what would help.
    """

    value: float | None
    reason: str = ""


class Meter(Protocol):
    """Something that counts the energy of a board, a package or a part of one.

    Attributes:
        name: identifies it on this machine.
        covers: what its energy is the energy of.
        power_kind: what `power_watts` is.
    """

    name: str
    covers: str
    power_kind: PowerKind

    @property
    def tick_seconds(self) -> float | None:
        """From one change of the counter to the next, where that is documented; None where it has to be found."""

    @property
    def wrap_joules(self) -> float | None:
        """The counter begins anew after so much; None where that is not known."""

    def energy_joules(self) -> Reading:
        """What the counter says now; only differences mean anything."""

    def power_watts(self) -> Reading:
        """The power now, or its average over the last second: see `power_kind`."""

    def doubts(self) -> list[Diagnostic]:
        """What is to be said against its figures, as things are now."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The meters of what is measured.

    Attributes:
        meters: their energies add up to that of the whole, nothing is counted twice; none where there is a reason.
        reason: why there is none, and what would help.
        doubts: what is to be said about that.
    """

    meters: tuple[Meter, ...] = ()
    reason: str = ""
    doubts: tuple[Diagnostic, ...] = ()


def none_because(reason: str, *doubts: Diagnostic) -> Found:
    """No meter.

    Args:
        reason: why, and what would help.
        doubts: what is to be said about that.
    """
    return Found(reason=f"no meter: {reason}", doubts=doubts)


def together(founds: list[Found]) -> Found:
    """The meters of several devices as those of one; where one of them has none, the whole has none.

    Args:
        founds: of each device.
    """
    doubts = tuple(doubt for found in founds for doubt in found.doubts)
    reasons = dict.fromkeys(found.reason for found in founds if not found.meters)
    if reasons or not founds:
        return Found(reason="; ".join(reasons) or "no meter: no device", doubts=doubts)
    unique = {meter.name: meter for found in founds for meter in found.meters}
    return Found(meters=tuple(unique.values()), doubts=doubts)
