"""Energy counter and power of an NVIDIA board from NVML, the driver's management library."""

from __future__ import annotations

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


def find(uuid: str) -> DeviceMeters:
    """Return the meter for a board by torch's UUID, or the reason for none.

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
