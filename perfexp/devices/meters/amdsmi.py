"""Energy counter and power of an AMD board from AMD SMI.

The code follows the documentation and is untested on hardware. Sources: amdsmi 7.0.2,
amdsmi_interface.py (amdsmi_get_energy_count, amdsmi_get_power_info), and amdsmi.h for the counter's
resolution in microjoules.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from perfexp.devices.meters import (
    DeviceMeters,
    Meter,
    PowerKind,
    Reading,
    if_readable,
    none_because,
)
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic

_INSTALL = "install the amdsmi package of your ROCm (the driver's libamd_smi.so belongs to it)"
#: Packages with two dies. The first die reports the power of both, the second none or 0 W.
_TWO_DIES = "MI250"


class AmdSmiMeter(Meter):
    """One board, or a die's package, through the initialized module `amdsmi`."""

    def __init__(self, smi: Any, handle: Any, name: str) -> None:
        self._smi, self._handle = smi, handle
        self.name = f"amdsmi {name}"
        product = ""
        with suppress(Exception):
            product = str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
        self._two_dies = _TWO_DIES in product
        part = "the package, both dies," if self._two_dies else "the socket"
        self.covers = f"{part} of {product or name}"
        self._key, self.power_kind = self._choose_power()

    @property
    def wrap_joules(self) -> float | None:
        """Return the range of a 64-bit counter in joules; None if AMD SMI does not answer."""
        with suppress(Exception):
            answer = self._smi.amdsmi_get_energy_count(self._handle)
            return float(2**64 * answer["counter_resolution"] * 1e-6)
        return None

    def energy_joules(self) -> Reading:
        """Return the counter in joules, or why AMD SMI reports none.

        It counts units of `counter_resolution` microjoules.
        """
        try:
            answer = self._smi.amdsmi_get_energy_count(self._handle)
        except self._smi.AmdSmiException as error:
            reason = f"AMD SMI does not report the energy: {_message(error)}"
            return Reading(None, f"{reason}; guests of a hypervisor have none")
        joules = answer["energy_accumulator"] * answer["counter_resolution"] * 1e-6
        if joules <= 0:
            return Reading(
                None,
                "AMD SMI reports an energy of 0 J; the other die of the package may have the "
                "counter",
            )
        return Reading(joules)

    def power_watts(self) -> Reading:
        """Return the socket's power, or why AMD SMI reports none."""
        if self._key is None:
            return Reading(
                None,
                "AMD SMI reports no socket power; the other die of the package may have the sensor",
            )
        try:
            watts = self._smi.amdsmi_get_power_info(self._handle)[self._key]
        except self._smi.AmdSmiException as error:
            return Reading(None, f"AMD SMI does not report the power: {_message(error)}")
        if _is_power(watts):
            return Reading(float(watts))
        return Reading(None, f"AMD SMI reports a power of {watts}")

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics: untested code, the package's other die, or an average power."""
        doubts = [diagnostics.make("untested", what=f"the meter {self.name}")]
        if self._two_dies:
            others = "the package's other die"
            doubts.append(diagnostics.make("meter_shared", meter=self.name, others=others))
        return [*doubts, *super().doubts()]

    def _choose_power(self) -> tuple[str | None, PowerKind]:
        """Return the available power's key and kind: current on MI300 and later, else average.

        AMD SMI reports the other power as `N/A`. Without either, the key is None.
        """
        with suppress(Exception):
            answer = self._smi.amdsmi_get_power_info(self._handle)
            for age, kind in (("current", PowerKind.instantaneous), ("average", PowerKind.average)):
                if _is_power(answer.get(f"{age}_socket_power")):
                    return f"{age}_socket_power", kind
        return None, PowerKind.absent


def find(pci_bus_id: str | None) -> DeviceMeters:
    """Return the meter for a board, or the reason for none.

    Args:
        pci_bus_id: for example `0000:c1:00.0`; None if torch does not report it.
    """
    if pci_bus_id is None:
        return none_because(
            "AMD boards are found by their PCI bus id, which this build of torch does not report"
        )
    try:
        smi = importlib.import_module("amdsmi")
    except Exception as error:  # a KeyError if its library is missing
        return none_because(
            f"amdsmi can't be imported ({type(error).__name__}: {error}); {_INSTALL}"
        )
    try:
        smi.amdsmi_init()
        handle = smi.amdsmi_get_processor_handle_from_bdf(pci_bus_id)
        meter = AmdSmiMeter(smi, handle, pci_bus_id)
    except Exception as error:
        return none_because(
            f"AMD SMI does not answer for {pci_bus_id}: {_message(error)}; {_INSTALL}"
        )
    return if_readable(meter)


def _is_power(value: Any) -> bool:
    """Return whether a value is a power.

    An active board draws more than 0 W. A missing value is `N/A` or has all bits set.
    """
    return isinstance(value, int | float) and 0 < value < 0xFFFF


def _message(error: Exception) -> str:
    """Return an error's message on one line, or its class."""
    return " ".join(str(error).split()) or type(error).__name__
