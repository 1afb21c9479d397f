"""gpu=auto: the best device of this machine."""

from __future__ import annotations

from typing import Any

from perfexp.devices import Device
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import DeviceMismatch


def open_device(*, index: int = 0, **_: Any) -> Device:
    """The CUDA device of that number where torch has one, otherwise the CPU.

    Args:
        index: number of the device.

    Raises:
        DeviceMismatch: torch has CUDA devices, but none of that number.
    """
    from perfexp.devices import cuda

    if cuda.is_available(index):
        return cuda.CudaDevice(index=index)
    if cuda.is_available():
        raise DeviceMismatch(
            f"gpu.index={index} names no CUDA device of this job: they are numbered from 0 to {cuda.last()}."
        )
    return CpuDevice()
