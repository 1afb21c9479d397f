"""Detect torch's build and the usable devices of this machine."""

from __future__ import annotations

from typing import Any

import torch

from perfexp.devices import cuda, lock
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.nvml import find_board
from perfexp.diagnosis.meter_selftest import try_meters
from perfexp.errors import UserError

#: Duration of the load during which the driver's clock is read.
_BUSY_SECONDS = 0.2


def torch_build() -> dict[str, Any]:
    """Version of torch and of its GPU libraries; None for libraries that it was built without."""
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def cuda_devices() -> dict[str, Any]:
    """All devices with a torch name `cuda:N` (NVIDIA's, or AMD's with a ROCm build), or torch's reason for none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return {"devices": []}
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
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
    """Whether torch can use Apple's GPU."""
    return {"available": torch.backends.mps.is_available()}


def try_clocks(index: int) -> dict[str, Any]:
    """Tick and cost of events, and the clock of the calibration kernel; `not_tried` while another process measures."""
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
    except UserError as error:  # of the lock
        return {"not_tried": str(error)}


def try_energy(index: int | None) -> dict[str, Any]:
    """Self-test of the energy meters of a CUDA device, or else of the CPU, at rest; see `meter_selftest.try_meters`."""
    here = index is not None and cuda.is_available(index)
    device = cuda.CudaDevice(index=index or 0) if here else CpuDevice()
    return try_meters(device.meters())
