"""The process group: ranks in torch.distributed and their collective operations.

Control messages say what to do; this group exchanges what ranks compute (gradients, by torch) and
small values.
"""

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
from perfexp.measuring.ranks import Place

#: Interface between ranks on one host; no other name must be resolved.
_LOOPBACK = "lo"
#: A rank may compile or search while the others wait. The launcher detects a dead rank, and
#: `timeout_seconds` a silent rank.
_PATIENCE = timedelta(days=1)
#: Otherwise NCCL's watchdog aborts a process with a failed device before it can report the error
#: (ProcessGroupNCCL.hpp).
_NO_RETHROW = ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
#: Prefixes of environment variables for these libraries.
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_")


class TorchGroup:
    """All ranks: NCCL between CUDA devices, gloo between CPUs and for small values.

    Creating it waits for all ranks. A rank ends with `os._exit` after a last barrier, because
    closing connections in turn aborted the slower of two ranks.

    Args:
        threads: threads per rank on a CPU; None for an equal share of torch's default.
    """

    def __init__(self, place: Place, device: Device, threads: int | None) -> None:
        self.backend = "nccl" if device.kind == "cuda" else "gloo"
        if sys.platform.startswith("linux"):
            interface = _LOOPBACK
            if place.size != place.per_host:
                interface = _interface(os.environ["MASTER_ADDR"])
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # otherwise each rank on a CPU would use all of its cores
        if device.kind == "cpu" and threads is None:
            torch.set_num_threads(max(1, torch.get_num_threads() // place.per_host))
        os.environ.setdefault(*_NO_RETHROW)
        identifier = torch.device(str(device.identifier)) if device.kind == "cuda" else None
        dist.init_process_group(self.backend, device_id=identifier, timeout=_PATIENCE)
        #: Group for small values, which never use the devices.
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def facts(self) -> dict[str, Any]:
        """Return the facts to record: the backend, and the environment variables that change it."""
        settings = {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)
        }
        return {"backend": self.backend, "environment": settings}

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self._control)

    def gather(self, value: Any) -> list[Any]:
        """Return the small values of all ranks, in rank order, to each rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._control)
        return values


def _interface(host: str) -> str:
    """Return the name of the network interface on the route to a host, for example `eth0`.

    By default gloo uses the interface of the host's own name, which may be loopback.
    """
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if address in {entry.address for entry in addresses}:
            return str(name)
    return _LOOPBACK
