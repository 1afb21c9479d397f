"""Energy counter and power of a GPU board, from NVML (NVIDIA) or AMD SMI.

Both are the management libraries of the driver. The code for AMD follows the documentation and is
untested on hardware. Sources: amdsmi 7.0.2, amdsmi_interface.py (amdsmi_get_energy_count,
amdsmi_get_power_info), and amdsmi.h for the counter's resolution in microjoules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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

#: The counter is an unsigned 64-bit number of millijoules.
#: Source: nvml.h, nvmlDeviceGetTotalEnergyConsumption.
_WRAP_JOULES = 2**64 * 1e-3
#: Compute capability of GA100, the last chip with an instantaneous plain power reading. Source:
#: nvml.h, nvmlDeviceGetPowerUsage: "On Ampere (except GA100) or newer GPUs, the API returns power
#: averaged over 1 sec".
_LAST_INSTANTANEOUS = (8, 0)
#: The scale error is proportional to the power and differs from board to board. Sources: nvml.h,
#: nvmlDeviceGetPowerUsage, "accurate to within +/- 5% of current power draw" for Fermi and Kepler,
#: without a value for later boards; Yang, Adámek and Armour, "Part-time Power Measurements" (2024,
#: arXiv:2312.02741), also about 5 % on later boards, against external meters.
_ACCURACY = 0.05
_NO_COUNTER = "boards since Volta have a counter, vGPUs and some containers hide it"
_INSTALL = "install the amdsmi package of your ROCm (the driver's libamd_smi.so belongs to it)"
#: Packages with two dies. The first die reports the power of both, the second none or 0 W.
_TWO_DIES = "MI250"


class NvmlMeter(Meter):
    """One whole board, through the initialized module `pynvml`."""

    wrap_joules, accuracy = _WRAP_JOULES, _ACCURACY

    def __init__(self, nvml: Any, handle: Any, name: str) -> None:
        self._nvml, self._handle = nvml, handle
        self.name = f"nvml {name}"
        self.covers = f"the board {self._query('Name') or name}"
        self._read_milliwatts, self.power_kind = self._choose_power()

    def energy_joules(self) -> Reading:
        """Return the counter in joules since the driver was loaded, or why NVML reports none."""
        try:
            return Reading(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) * 1e-3)
        except self._nvml.NVMLError as error:
            return Reading(None, f"NVML does not report the energy: {error}; {_NO_COUNTER}")

    def power_watts(self) -> Reading:
        """Return the power, or why NVML refuses; NVML reports milliwatts."""
        try:
            return Reading(self._read_milliwatts() * 1e-3)
        except self._nvml.NVMLError as error:
            return Reading(
                None,
                f"NVML does not report the power: {error}; some boards have no sensor, vGPUs hide "
                "it",
            )

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics: other processes on the board, or a power that is an average."""
        # without this process, whatever its number there
        others = len(self._query("ComputeRunningProcesses") or []) - 1
        who = f"other processes on the board ({others})"
        doubts = super().doubts()
        if others > 0:
            doubts = [diagnostics.make("meter_shared", meter=self.name, others=who), *doubts]
        return doubts

    def _choose_power(self) -> tuple[Callable[[], float], PowerKind]:
        """Return the query for the power in milliwatts, and what it means.

        Instantaneous power is preferred; older drivers and boards have a substitute.
        """
        # fails with an older driver or an older nvidia-ml-py
        with suppress(self._nvml.NVMLError, AttributeError):
            self._instantaneous_milliwatts()
            return self._instantaneous_milliwatts, PowerKind.instantaneous
        if self._query("PowerUsage") is None:
            return self._usage_milliwatts, PowerKind.absent
        capability = self._query("CudaComputeCapability")
        if capability is not None and tuple(capability) <= _LAST_INSTANTANEOUS:
            return self._usage_milliwatts, PowerKind.instantaneous
        return self._usage_milliwatts, PowerKind.average

    def _instantaneous_milliwatts(self) -> float:
        """Return the board's power now; raise an NVML error if it has none."""
        nvml = self._nvml
        [answer] = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if answer.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(answer.nvmlReturn)
        return int(answer.value.uiVal)

    def _usage_milliwatts(self) -> float:
        """Return the board's plain power, which newer boards average over a second."""
        return int(self._nvml.nvmlDeviceGetPowerUsage(self._handle))

    def _query(self, subject: str) -> Any:
        """Return NVML's answer about a subject, for example `PowerUsage`; None if it refuses."""
        return answer(self._nvml, getattr(self._nvml, f"nvmlDeviceGet{subject}"), self._handle)


def initialized() -> Any:
    """Return the module `pynvml`, ready for queries.

    Raises `ImportError`, or an NVML error without a driver.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def answer(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if it refuses."""
    with suppress(nvml.NVMLError):
        return query(*arguments)
    return None


def find_nvidia(uuid: str) -> DeviceMeters:
    """Return the meter for an NVIDIA board by torch's UUID, or the reason for none.

    A MIG slice, a part of a board, has its own UUID and no meter.
    """
    try:
        nvml = initialized()
        handle = _board_handle(nvml, uuid)
    except ImportError:
        return none_because("nvidia-ml-py is not installed; pip install nvidia-ml-py")
    except Exception as error:  # from NVML
        return none_because(f"NVML does not answer for {uuid}: {error}; check nvidia-smi -L")
    # None for a board without MIG
    mode = None if handle is None else answer(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if handle is None or (mode and mode[0]):
        return none_because(
            "the board's counter holds all of its MIG slices; measure on a whole board (-mig 0)"
        )
    return if_readable(NvmlMeter(nvml, handle, uuid), ", nor has it a power sensor")


def _board_handle(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle for a whole board; None for a slice's UUID.

    torch reports UUIDs without their prefix, so both are tried.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    prefix = "MIG" if uuid.startswith("MIG-") else "GPU"
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{bare}")
    except nvml.NVMLError:
        if answer(nvml, nvml.nvmlDeviceGetHandleByUUID, f"MIG-{bare}") is None:
            raise
        return None
    return None if prefix == "MIG" else handle


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


def find_amd(pci_bus_id: str | None) -> DeviceMeters:
    """Return the meter for an AMD board, or the reason for none.

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
