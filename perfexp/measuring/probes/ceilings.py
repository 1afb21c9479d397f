"""Ceilings: a device's highest sustained rates for a matrix product and a copy, cached.

They are what this device reaches in practice, below the peaks of its data sheet. The worker
measures them before the first point (probes.ceilings=true), and work rates are compared with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from perfexp.devices import Device
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.models import tf32
from perfexp.records.number_formats import Formats
from perfexp.timing import collecting, queue

#: Sides of the square matrices (the fastest counts), and bytes to copy, far more than caches hold.
_SIDES = {"cuda": (4096, 8192), "mps": (1024, 2048, 4096), "cpu": (512, 1024, 2048)}
_COPIED_BYTES = {"cuda": 2**30, "mps": 2**28, "cpu": 2**28}
#: Name of the copy rate.
_COPY = "bytes_per_second"
#: Data types by number format.
_DATA_TYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
#: Seconds of work until the clock settles to the power limit, then seconds that count, and per
#: block.
_SETTLED_SECONDS, _COUNTED_SECONDS, _BLOCK_SECONDS = 1.0, 0.5, 0.1
#: First calls, and maximum calls per block.
_WARMUP, _MOST_CALLS = 2, 100
#: Number of products in `host_flops_per_second`.
_HOST_PRODUCTS = 10
#: After a call longer than this, no larger matrix is tried.
_SLOW_SECONDS = 0.2
#: Board facts that limit its rates. A clock locked by nvidia-smi is missing, because no driver
#: reports it.
_LIMITS = (
    "power_limit_watts",
    "max_sm_clock_hertz",
    "max_memory_clock_hertz",
    "application_clock_hertz",
    "auto_boost",
)


def ceilings(
    device: Device, formats: Formats, *, cache: JsonCache | None = None
) -> dict[str, float]:
    """Return FLOP/s of a matrix product by number format, and a copy's `bytes_per_second`.

    Number formats are, for example, `tf32` and `bf16`. The copy counts bytes read and written.
    Rates are sustained: the power limit has slowed the clock down as in long runs. They are
    measured once per device, limits and torch version, in about five seconds on an idle device.
    Earlier results come from a cache.

    Args:
        formats: number formats of the model's contractions.
        cache: by default, the user's cache for this device.
    """
    cache = cache or JsonCache(cache_folder("ceilings"), _identity(device))
    rates: dict[str, float] = {}
    for name in (*formats, _COPY):
        value = cache.find(name)
        if not isinstance(value, int | float):
            value = _bytes_per_second(device) if name == _COPY else _flops_per_second(device, name)
            cache.add(name, value)
        rates[name] = float(value)
    return rates


def _identity(device: Device) -> Mapping[str, Any]:
    """Return what the rates depend on: a change of any value makes the cache start empty."""
    facts = device.facts()
    return {
        "device": device.name,
        "lock_name": device.lock_name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads() if device.kind == "cpu" else None,
        **{name: facts.get(name) for name in _LIMITS},
    }


@tf32.unchanged()
def _flops_per_second(device: Device, number_format: str) -> float:
    """Return the sustained FLOP/s of a square matrix product, the best of several sides."""
    tf32.allow(number_format == "tf32")
    data_type, rates = _DATA_TYPES[number_format], []
    for side in _SIDES[device.kind]:
        first, second = (
            torch.randn(side, side, device=device.identifier).to(data_type) for _ in range(2)
        )
        out = torch.empty_like(first)
        seconds = _sustained(partial(torch.mm, first, second, out=out), device)
        rates.append(2 * side**3 / seconds)
        if seconds > _SLOW_SECONDS:
            break
    return max(rates)


def host_flops_per_second(number_format: str) -> float:
    """Return the FLOP/s of the fastest of a few matrix products on the CPU, after about 50 ms.

    A model that seems to compute several times faster did not do its work (`work_rates`).
    """
    data_type, side = _DATA_TYPES[number_format], _SIDES["cpu"][0]
    generator = torch.Generator().manual_seed(0)  # leaves the model's random numbers alone
    first, second = (torch.randn(side, side, generator=generator).to(data_type) for _ in range(2))
    seconds = []
    with torch.inference_mode():
        for _ in range(_HOST_PRODUCTS):
            start = time.perf_counter_ns()
            torch.mm(first, second)
            seconds.append((time.perf_counter_ns() - start) * 1e-9)
    return 2 * side**3 / min(seconds)


def _bytes_per_second(device: Device) -> float:
    """Return the sustained bytes/s of a copy within the device's memory, read plus written."""
    shape = (_COPIED_BYTES[device.kind],)
    source = torch.ones(shape, dtype=torch.uint8, device=device.identifier)
    target = torch.empty_like(source)
    return 2 * source.numel() / _sustained(lambda: target.copy_(source), device)


def _sustained(call: Callable[[], object], device: Device) -> float:
    """Return the median seconds per call at a settled clock, in device time if available."""
    block: Callable[[int], collecting.Samples] = collecting.HostChain(call, device)
    if device.asynchronous:
        block = queue.Chain(call, device, _MOST_CALLS)
    with torch.inference_mode(), collecting.undisturbed():
        call_seconds = max(float(np.min(block(_WARMUP))), 1e-9)
        calls = min(max(int(_BLOCK_SECONDS / call_seconds), 1), _MOST_CALLS)
        worked_seconds, counted = 0.0, []
        while worked_seconds < _SETTLED_SECONDS + _COUNTED_SECONDS:
            seconds = block(calls)
            if worked_seconds >= _SETTLED_SECONDS:
                counted.append(seconds)
            worked_seconds += float(seconds.sum())
    # a single call may take longer than all of that
    return float(np.median(np.concatenate(counted or [seconds])))
