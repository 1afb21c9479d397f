"""Energy counter and power of an NVIDIA board by NVML."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from perfexp.meters import Found, PowerKind, Reading, none_because
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic

#: The counter is an unsigned 64-bit number of millijoules. Source: nvml.h, nvmlDeviceGetTotalEnergyConsumption.
_WRAP_JOULES = 2**64 * 1e-3
#: Compute capability of GA100, the last chip with an instantaneous plain power reading. Source: nvml.h,
#: nvmlDeviceGetPowerUsage: "On Ampere (except GA100) or newer GPUs, the API returns power averaged over 1 sec".
_LAST_INSTANTANEOUS = (8, 0)
_NO_COUNTER = "boards since Volta have a counter, vGPUs and some containers hide it"


class NvmlMeter:
    """One whole board, through the initialized module `pynvml`."""

    def __init__(self, nvml: Any, handle: Any, name: str) -> None:
        self._nvml, self._handle = nvml, handle
        self.name = f"nvml {name}"
        self.covers = f"the board {_text(self._ask(nvml.nvmlDeviceGetName, handle)) or name}"
        self._question, self.power_kind = self._choose_power()

    @property
    def tick_seconds(self) -> float | None:
        """See `Meter`; not documented, and different between boards."""
        return None

    @property
    def wrap_joules(self) -> float | None:
        """See `Meter`; half a billion years at 1 kW."""
        return _WRAP_JOULES

    def energy_joules(self) -> Reading:
        """See `Meter`; NVML counts millijoules since the driver was loaded."""
        try:
            return Reading(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) * 1e-3)
        except self._nvml.NVMLError as error:
            return Reading(None, f"NVML does not report the energy: {error}; {_NO_COUNTER}")

    def power_watts(self) -> Reading:
        """See `Meter`; NVML reports milliwatts."""
        try:
            return Reading(self._question() * 1e-3)
        except self._nvml.NVMLError as error:
            return Reading(None, f"NVML does not report the power: {error}; some boards have no sensor, vGPUs hide it")

    def doubts(self) -> list[Diagnostic]:
        """See `Meter`; other processes on the board, an average power."""
        doubts = []
        processes = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        others = len(processes or []) - 1  # this process is among them, perhaps under another number
        if others > 0:
            who = f"other processes on the board ({others})"
            doubts.append(diagnostics.make("meter_shared", meter=self.name, others=who))
        if self.power_kind is PowerKind.average:
            doubts.append(diagnostics.make("meter_average", meter=self.name))
        return doubts

    def _choose_power(self) -> tuple[Callable[[], float], PowerKind]:
        """The query for instantaneous power, or the board's substitute."""
        with suppress(self._nvml.NVMLError, AttributeError):  # an older driver, an older nvidia-ml-py
            self._instantaneous_milliwatts()
            return self._instantaneous_milliwatts, PowerKind.instantaneous
        if self._ask(self._nvml.nvmlDeviceGetPowerUsage, self._handle) is None:
            return self._usage_milliwatts, PowerKind.absent
        capability = self._ask(self._nvml.nvmlDeviceGetCudaComputeCapability, self._handle)
        of_the_moment = capability is not None and tuple(capability) <= _LAST_INSTANTANEOUS
        return self._usage_milliwatts, PowerKind.instantaneous if of_the_moment else PowerKind.average

    def _instantaneous_milliwatts(self) -> float:
        nvml = self._nvml
        [answer] = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if answer.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(answer.nvmlReturn)
        return int(answer.value.uiVal)

    def _usage_milliwatts(self) -> float:
        return int(self._nvml.nvmlDeviceGetPowerUsage(self._handle))

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        with suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None


def find(uuid: str | None, pci_bus_id: str | None = None) -> Found:
    """The meter of a board by torch's UUID (a MIG slice has its own), or by `domain:bus:device.function`."""
    try:
        import pynvml
    except ImportError:
        return none_because("nvidia-ml-py is not installed; pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        if uuid is not None:
            handle = _by_uuid(pynvml, uuid)
        elif pci_bus_id is not None:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        else:
            return none_because("the device has neither a UUID nor a PCI bus id; an index may mean another board")
    except pynvml.NVMLError as error:
        return none_because(f"NVML does not answer for {uuid or pci_bus_id}: {error}; check nvidia-smi -L")
    name = str(uuid or pci_bus_id)
    if handle is None or _is_sliced(pynvml, handle):
        mig = diagnostics.make("meter_mig", meter=name)
        return none_because("the board's counter holds all of its MIG slices", mig)
    return _readable(NvmlMeter(pynvml, handle, name))


def _readable(meter: NvmlMeter) -> Found:
    """The meter, if it answers at least one of the two queries."""
    energy = meter.energy_joules()
    if energy.value is None and meter.power_kind is PowerKind.absent:
        return none_because(f"{energy.reason}, nor has it a power sensor")
    return Found(meters=(meter,))


def _by_uuid(nvml: Any, uuid: str) -> Any:
    """The handle of a whole board; None for the UUID of a slice."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    if not uuid.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
        except nvml.NVMLError:
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")
                return None
            raise
    nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")
    return None


def _is_sliced(nvml: Any, handle: Any) -> bool:
    """Whether MIG is on; boards without MIG refuse the query."""
    with suppress(nvml.NVMLError):
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        return bool(current)
    return False


def _text(value: str | bytes | None) -> str | None:
    """Text of a value, which is bytes in older versions of nvidia-ml-py."""
    return value.decode() if isinstance(value, bytes) else value
