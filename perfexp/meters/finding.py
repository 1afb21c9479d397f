"""Find the meters of a device, or the reason why there are none."""

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
    """The meters of one device; `perfexp.meters.together` combines those of several.

    A CUDA device is identified by UUID or bus id, never by index: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make
    torch's and the driver's indices differ.

    Args:
        pci_bus_id: `domain:bus:device.function` of a CUDA device.
    """
    if kind == "cpu":
        return rapl.find(powercap)
    if kind == "cuda":
        return amdsmi.find(pci_bus_id) if rocm else nvml.find(uuid, pci_bus_id)
    if kind == "mps":
        return none_because("macOS reports a GPU's energy to root only (powermetrics), which perfexp does not use")
    return none_because(f"a device of kind {kind} has none of its own; perfexp.meters.fake has one that is scripted")
