"""CUDA devices, NVIDIA's and AMD's, through torch: finding the one that the configuration names."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import torch

from perfexp.devices.cpu import processor_name
from perfexp.errors import DeviceMismatch, UserError


def open_device(*, name: str, match: str | None = None, index: int = 0, **_: Any) -> NoReturn:
    """Find the device that a file of the gpu group names. This version can't measure on it yet.

    Args:
        name: name of the group's file (`h200`).
        match: regular expression for the name that the driver reports.
        index: number of the device.

    Raises:
        DeviceMismatch: the machine has no such device; both are named.
        UserError: it has, but perfexp measures only the CPU so far.
    """
    found = _device_name(index)
    if match is None or not re.search(match, found, re.IGNORECASE):
        raise DeviceMismatch(
            f"gpu={name} asks for a device whose name fits '{match or name}'; this job runs on: {found}. "
            "Choose gpu=auto, or the machine that has it."
        )
    raise UserError(f"gpu={name}: {found} is here, but this version of perfexp measures only the CPU. Choose gpu=cpu.")


def _device_name(index: int) -> str:
    if not torch.cuda.is_available():
        return f"{processor_name()} (no CUDA device)"
    if index >= torch.cuda.device_count():
        return f"{torch.cuda.device_count()} CUDA devices, none with index {index}"
    return torch.cuda.get_device_name(index)
