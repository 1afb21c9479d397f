"""Time equivalent calls in alternating turns, so that all of them run at the same clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from perfexp.devices import Device
from perfexp.probes import depth, queue, timing

#: Turns of each call.
_ROUNDS = 5
#: Minimum duration of a turn, and of a sample on an asynchronous device, which groups calls to reach it.
_TURN_SECONDS, _SAMPLE_SECONDS = 2e-3, 100e-6
_MOST_SAMPLES = 16
#: A call that is slower than the best by this factor in both of the first rounds is dropped.
_HOPELESS = 1.5


def race(
    calls: Mapping[str, timing.Call], device: Device, where: Callable[[str], Callable[[Callable[[], Any]], Any]]
) -> dict[str, float]:
    """Median seconds of each call, in device time where available; hopeless calls stop after two rounds.

    Args:
        calls: calls by name, each of which has run before; the first one is never dropped.
        where: maps a name to the function that runs its work, in this thread or an isolated one.
    """
    blocks = {name: where(name)(partial(_block, call, device)) for name, call in calls.items()}
    first = next(iter(calls))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    running = list(calls)
    with timing.undisturbed():
        for round_ in range(_ROUNDS):
            for name in running:
                taken[name].append(where(name)(blocks[name]))
            if round_ == 1:
                best = min(min(seconds) for seconds in taken.values())
                running = [name for name in running if name == first or min(taken[name]) <= _HOPELESS * best]
    return {name: float(np.median(seconds)) for name, seconds in taken.items()}


def _block(call: timing.Call, device: Device) -> Callable[[], float]:
    """One turn of a call: the median of a few samples."""
    if not device.asynchronous:
        chain = timing.HostChain(call, device)
        chain(1)
        rough = max(float(chain(1)[0]), 1e-9)
        samples = max(1, min(_MOST_SAMPLES, math.ceil(_TURN_SECONDS / rough)))
        return lambda: float(np.median(chain(samples)))
    fits = depth.samples_in_queue(call, device, most=_MOST_SAMPLES)
    if not fits:  # thousands of launches exceed the queue: time them as the host issues them
        loop = queue.Loop(call, device)
        return lambda: float(np.median(loop(2)))
    single = queue.Chain(call, device, min(fits, 4))
    single(2)
    rough = max(float(np.median(single(3))), 1e-9)
    k = max(1, min(_MOST_SAMPLES, math.ceil(_SAMPLE_SECONDS / rough)))
    samples = max(2, min(_MOST_SAMPLES // k + 2, math.ceil(_TURN_SECONDS / (k * rough))))
    held = queue.Chain(call, device, max(1, min(samples, fits // k)), k if fits >= k else 1)
    return lambda: float(np.median(held(samples)))
