"""Apple's GPU through torch: detected, but not yet supported."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from perfexp.devices.cpu import processor_name
from perfexp.errors import DeviceMismatch, UserError


def open_device(**_: Any) -> NoReturn:
    """Detect Apple's GPU; raises `DeviceMismatch` without one, and otherwise `UserError`: it is not supported yet."""
    if not torch.backends.mps.is_available():
        raise DeviceMismatch(f"gpu=mps asks for Apple's GPU; this job runs on: {processor_name()}. Choose gpu=auto.")
    raise UserError("gpu=mps: Apple's GPU is here, but this version of perfexp measures only the CPU. Choose gpu=cpu.")
