"""gpu=auto: the best device of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfexp.devices.cpu import CpuDevice
from perfexp.record import Doubt


class _UnusedGpu(CpuDevice):
    """The CPU of a machine that has a GPU as well; says so."""

    def doubts(self) -> list[Doubt]:
        """See `Device`."""
        found = Doubt(
            code="gpu_unused",
            detail="this machine has an NVIDIA GPU, but this version of perfexp measures the CPU only",
            remedy="say gpu=cpu if the CPU is what you mean",
        )
        return [found, *super().doubts()]


def open_device(**_: Any) -> CpuDevice:
    """The CPU, which is all that this version measures; a GPU that lies idle beside it is a doubt."""
    return _UnusedGpu() if Path("/dev/nvidiactl").exists() else CpuDevice()
