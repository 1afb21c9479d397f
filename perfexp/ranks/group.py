"""Group: the ranks of torch.distributed, and a session's training in DistributedDataParallel."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from perfexp.devices import Device
from perfexp.ranks import Place

#: Ranks of one host find one another here; its name need not be known to anybody.
_LOOPBACK = "lo"
#: A rank may compile or search while the others wait. One that is gone is noticed by its launcher, a silent one by
#: `timeout_seconds`.
_PATIENCE = timedelta(days=1)
#: Otherwise NCCL's watchdog ends a process whose device failed, before that can say how (ProcessGroupNCCL.hpp).
_NO_RETHROW = ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
#: What the environment says to the libraries below, by how it begins.
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_")


class TorchGroup:
    """All ranks: NCCL between CUDA devices, gloo between processors, and gloo for what the ranks tell one another.

    A rank ends by `os._exit`, after a last barrier: connections that are taken down one by one were seen to abort the
    slower of two ranks.

    Args:
        place: of this process.
        device: that it works on.
        threads: within an operation, as the plan says; None for this rank's part of those that torch would use.
    """

    def __init__(self, place: Place, device: Device, threads: int | None) -> None:
        self.backend = "nccl" if device.kind == "cuda" else "gloo"
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        if device.kind == "cpu" and threads is None:
            torch.set_num_threads(max(1, torch.get_num_threads() // place.size))
        os.environ.setdefault(*_NO_RETHROW)
        identifier = torch.device(str(device.identifier)) if device.kind == "cuda" else None
        dist.init_process_group(self.backend, device_id=identifier, timeout=_PATIENCE)
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def facts(self) -> dict[str, Any]:
        """What is to be recorded."""
        told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
        return {"backend": self.backend, "environment": told}

    def barrier(self) -> None:
        """See `Group`."""
        dist.barrier(self._control)

    def gather(self, value: Any) -> list[Any]:
        """See `Group`."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._control)
        return found
