"""Group: the ranks of torch.distributed, and the collective operations that direct them."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from perfexp.devices import Device
from perfexp.ranks import Place

#: Interface over which the ranks of one host connect; no other name has to be resolved.
_LOOPBACK = "lo"
#: A rank may compile or search while the others wait. The launcher notices a rank that is gone, and `timeout_seconds`
#: a silent one.
_PATIENCE = timedelta(days=1)
#: NCCL's watchdog otherwise aborts a process whose device failed before it can report the error (ProcessGroupNCCL.hpp).
_NO_RETHROW = ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
#: Prefixes of the environment variables that set up these libraries.
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_")


class TorchGroup:
    """All ranks: NCCL between CUDA devices, gloo between CPUs, and gloo for small values.

    A rank ends by `os._exit` after a last barrier: tearing connections down one by one aborted the slower of two ranks.
    Without a number of threads, a rank has its share of those that torch would use.
    """

    def __init__(self, place: Place, device: Device, threads: int | None) -> None:
        self.backend = "nccl" if device.kind == "cuda" else "gloo"
        if sys.platform.startswith("linux"):
            interface = (
                _LOOPBACK if place.size == place.per_host else _interface(os.environ["MASTER_ADDR"])
            )
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if device.kind == "cpu" and threads is None:
            torch.set_num_threads(max(1, torch.get_num_threads() // place.per_host))
        os.environ.setdefault(*_NO_RETHROW)
        identifier = torch.device(str(device.identifier)) if device.kind == "cuda" else None
        dist.init_process_group(self.backend, device_id=identifier, timeout=_PATIENCE)
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def facts(self) -> dict[str, Any]:
        """Return the facts to record."""
        settings = {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)
        }
        return {"backend": self.backend, "environment": settings}

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self._control)

    def gather(self, value: Any) -> list[Any]:
        """Return the small values of all ranks to each of them, in the order of ranks."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._control)
        return values


def _interface(host: str) -> str:
    """Return the interface of the route to a host; gloo takes that of the host's own name, which may be loopback's."""
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
    names = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if own in {one.address for one in addresses}
    )
    return next(names, _LOOPBACK)
