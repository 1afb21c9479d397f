"""Detect torch's build and this machine's usable devices, and try their clocks and energy meters.

The functions run in a worker, by name (`worker.answers`), since they import torch and use the
device. Each returns one part of the doctor's survey, as JSON values.
"""

from __future__ import annotations

from typing import Any

import torch

from perfexp.devices import cuda, lock
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.nvml import find_board
from perfexp.doctor.meter_selftest import try_meters
from perfexp.errors import UserError

#: Duration of the load under which the driver's clock is read.
_BUSY_SECONDS = 0.2


def torch_build() -> dict[str, Any]:
    """Return the versions of torch and its GPU libraries.

    A library is None if torch was built without it.
    """
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
    }


def cuda_devices() -> dict[str, Any]:
    """Return all devices with a torch name `cuda:N`, or torch's `reason` for having none.

    They are NVIDIA devices or, with a ROCm build, AMD devices.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return {"devices": []}
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return {"devices": [], "reason": str(error)}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts = {"index": index, "name": properties.name, "uuid": str(properties.uuid)}
        facts["memory_bytes"] = properties.total_memory
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        devices.append(facts)
    return {"devices": devices}


def apple_gpu() -> dict[str, Any]:
    """Return whether torch can use Apple's GPU."""
    return {"available": torch.backends.mps.is_available()}


def try_clocks(index: int) -> dict[str, Any]:
    """Return how precisely a CUDA device measures time, and its clock under load.

    These are the event tick and the cost of recording an event, in seconds; the clock that a
    calibration kernel measures, in Hz; and the driver's state while the device is busy. Instead,
    `not_tried` has the reason if torch has no such device or another process measures on it.
    """
    if not cuda.is_available(index):
        return {"not_tried": f"torch has no cuda:{index}"}
    device = cuda.CudaDevice(index=index)
    board, _ = find_board(str(device.lock_name))
    try:
        with lock.held(
            device.lock_name, wait=False, purpose="for perfexp doctor", waiting=lambda _: None
        ):
            device.start()
            facts = {
                name: getattr(device, name) for name in ("event_tick_seconds", "record_seconds")
            }
            device.hold(_BUSY_SECONDS)
            busy = board.state() if board else {}
            device.synchronize()
            return {**facts, "canary_hertz": device.state()["canary_hertz"], "busy": busy}
    except UserError as error:  # from the lock
        return {"not_tried": str(error)}


def try_energy(index: int | None) -> dict[str, Any]:
    """Return a self-test of idle energy meters; see `meter_selftest.try_meters`.

    The survey for `perfexp doctor` calls it.

    Args:
        index: number of the CUDA device; None, or a number that does not exist, tests the CPU's
            meters.
    """
    if index is not None and cuda.is_available(index):
        return try_meters(cuda.CudaDevice(index=index).meters())
    return try_meters(CpuDevice().meters())
