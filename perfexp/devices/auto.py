"""gpu=auto: the best device of this machine."""

from __future__ import annotations

from typing import Any

from perfexp.devices import Device
from perfexp.devices.cpu import CpuDevice


def open_device(*, index: int = 0, **_: Any) -> Device:
    """The CUDA device of that number where torch has one, otherwise the CPU.

    Args:
        index: number of the device.
    """
    from perfexp.devices import cuda

    return cuda.CudaDevice(index=index) if cuda.is_available(index) else CpuDevice()
