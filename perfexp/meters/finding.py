"""Finding: which meters count the energy of a device, or why there is none."""

from __future__ import annotations

from pathlib import Path

from perfexp.meters import Found, amdsmi, none_because, nvml, rapl


def find_meters(
    kind: str,
    *,
    uuid: str | None = None,
    pci_bus_id: str | None = None,
    rocm: bool = False,
    powercap: Path = rapl.POWERCAP,
) -> Found:
    """The meters of one device; those of several devices are put together by `perfexp.meters.together`.

    A CUDA device is found by what identifies it, never by its index: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make
    torch and the driver count differently.

    Args:
        kind: `Device.kind`.
        uuid: of a CUDA device, as torch tells it.
        pci_bus_id: of a CUDA device, `domain:bus:device.function`.
        rocm: whether it is AMD's.
        powercap: where Linux shows the counters of the processor.
    """
    if kind == "cpu":
        return rapl.find(powercap)
    if kind == "cuda":
        return amdsmi.find(pci_bus_id) if rocm else nvml.find(uuid, pci_bus_id)
    if kind == "mps":
        return none_because("macOS tells a GPU's energy to root only (powermetrics), which perfexp does not ask")
    return none_because(f"a device of kind {kind} has none of its own; perfexp.meters.fake has one that is scripted")
