"""Apple's GPU through torch: found and named; this version can't measure on it yet."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from perfexp.devices.cpu import processor_name
from perfexp.errors import DeviceMismatch, UserError


def open_device(**_: Any) -> NoReturn:
    """Find Apple's GPU.

    Raises:
        DeviceMismatch: the machine has none.
        UserError: it has, but perfexp measures only the CPU so far.
    """
    if not torch.backends.mps.is_available():
        raise DeviceMismatch(f"gpu=mps asks for Apple's GPU; this job runs on: {processor_name()}. Choose gpu=auto.")
    raise UserError("gpu=mps: Apple's GPU is here, but this version of perfexp measures only the CPU. Choose gpu=cpu.")
