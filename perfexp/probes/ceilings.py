"""Ceilings: the rates that a device reaches at best, by a matrix product and by a copy; measured once and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from perfexp.devices import Device
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.models import Precision
from perfexp.probes import queue, timing

#: Sides of the square matrices of which the fastest counts, and bytes that are copied: far more than caches hold.
_SIDES = {"cuda": (4096, 8192), "cpu": (512, 1024, 2048)}
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
#: Calls of which the fastest counts, after those that warm up; as STREAM does (McCalpin, 1995).
_CALLS, _WARMUP = 10, 2
#: A call that takes so long is the only one, and the last size.
_SLOW_SECONDS = 0.2


def ceilings(device: Device, precision: Precision, *, kept: JsonCache | None = None) -> dict[str, float]:
    """FLOP/s of a matrix product in the precision, and bytes per second (read and written) of a copy.

    They are measured where nobody has done so on this device with this torch, which takes a second or two.

    Args:
        device: that torch knows, with nothing running.
        precision: in effect.
        kept: where they are looked up and kept; by default in the user's cache.
    """
    where = kept or JsonCache(cache_folder("ceilings"), _identity(device))
    found: dict[str, float] = {}
    measured: dict[str, Callable[[], float]] = {
        f"flops_per_second {precision.name}": lambda: _flops_per_second(device, precision),
        "bytes_per_second": lambda: _bytes_per_second(device),
    }
    for name, measure in measured.items():
        value = where.find(name)
        if not isinstance(value, int | float):
            value = measure()
            where.add(name, value)
        found[name.partition(" ")[0]] = float(value)
    return found


def _identity(device: Device) -> Mapping[str, Any]:
    """On what the rates depend."""
    return {
        "device": device.name,
        "lock_name": device.lock_name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads() if device.kind == "cpu" else None,
    }


def _flops_per_second(device: Device, precision: Precision) -> float:
    data_type = getattr(torch, precision.autocast or precision.storage)
    rates = []
    for side in _SIDES[device.kind]:
        first, second = (torch.randn(side, side, device=device.identifier).to(data_type) for _ in range(2))
        out = torch.empty_like(first)
        seconds = _fastest(_product(first, second, out), device)
        rates.append(2 * side**3 / seconds)
        if seconds > _SLOW_SECONDS:
            break
    return max(rates)


def _product(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.mm(first, second, out=out)


def _bytes_per_second(device: Device) -> float:
    source = torch.empty(_COPIED_BYTES[device.kind], dtype=torch.uint8, device=device.identifier).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / _fastest(lambda: target.copy_(source), device)


def _fastest(call: Callable[[], object], device: Device) -> float:
    """Seconds of the fastest of a few calls, by the device's own clock."""
    block = queue.Chain(call, device, _CALLS) if device.asynchronous else timing.HostChain(call, device)
    with torch.inference_mode(), timing.undisturbed():
        first = float(np.min(block(_WARMUP)))
        return first if first > _SLOW_SECONDS else float(np.min(block(_CALLS)))
