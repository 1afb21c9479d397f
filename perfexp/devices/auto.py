"""gpu=auto: the best device on this machine.

The worker opens it. The parent process, which never imports torch, predicts its name and energy
meters for the plan.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from perfexp.devices import Device, nvml
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.meters import DeviceMeters, combine, rapl
from perfexp.devices.meters.boards import find_nvidia
from perfexp.errors import DeviceMismatch


def open_device(*, index: int = 0, **_: Any) -> Device:
    """Return the CUDA device with this index, or the CPU on a machine without CUDA.

    Raises `DeviceMismatch` if only other CUDA devices exist.
    """
    import torch

    from perfexp.devices import cuda

    if cuda.is_available(index):
        return cuda.CudaDevice(index=index)
    if cuda.is_available():
        last = torch.cuda.device_count() - 1
        raise DeviceMismatch(
            f"gpu.index={index} does not exist in this job; its CUDA devices are numbered from 0 "
            f"to {last}."
        )
    return CpuDevice()


@cache
def predicted_name(index: int = 0) -> str | None:
    """Predict the name of the GPU that `open_device` will return, or `cpu`; None if unknown.

    The prediction uses the driver and torch's version file, but neither torch nor the device. AMD
    GPUs are unknown.
    """
    built = _built_for()
    if built is None or "hip" in built:
        return None
    try:
        names = nvml.visible_names() if "cuda" in built else []
    except ImportError:
        return None
    except Exception:  # without a driver, torch finds no device
        names = []
    if names is None or index >= max(len(names), 1):
        return None
    return names[index] if names else "cpu"


def predicted_meters(name: str, indices: Iterable[int]) -> DeviceMeters | None:
    """Return the energy meters that a run would find, without torch; None if unknown.

    A dry run calls it to report why energy would be missing.

    Args:
        name: option in the group `gpu`.
        indices: numbers of the run's devices, in CUDA's order.
    """
    numbers = list(indices)
    if name == "auto":
        name = predicted_name(numbers[0]) or ""
    if name == "cpu":
        return rapl.find()
    try:
        boards = nvml.visible_boards() or []
        return combine([find_nvidia(boards[number]["uuid"]) for number in numbers])
    except Exception:  # no driver, no such board, or an AMD board
        return None


def _built_for() -> set[str] | None:
    """Return torch's build targets among `cuda` and `hip`; None without torch.

    The set is empty for a build that supports CPUs only.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    try:
        text = (Path(spec.origin or "").parent / "version.py").read_text()
    except OSError:
        return None
    if not text:
        return None
    return set(re.findall(r"^(cuda|hip)\b[^=\n]*= *'", text, re.MULTILINE))
