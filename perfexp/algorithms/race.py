"""Race: which of several calls that do the same is the fastest, in turns, so that all of them see the same clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from perfexp.devices import Device
from perfexp.probes import depth, queue, timing

#: So often each one has its turn.
_ROUNDS = 5
#: So long a turn lasts at least; a sample of an asynchronous device spans so many calls of it that it lasts a part.
_TURN_SECONDS, _SAMPLE_SECONDS = 2e-3, 100e-6
_MOST_SAMPLES = 16
#: Whoever is so many times slower than the best in both of the first rounds has lost.
_HOPELESS = 1.5


def race(
    calls: Mapping[str, timing.Call], device: Device, where: Callable[[str], Callable[[Callable[[], Any]], Any]]
) -> dict[str, float]:
    """Median time of each call, the device's own where it has one, seconds; those that lost early have two rounds.

    Args:
        calls: by name; each has run before; the first one stays until the end.
        device: that computes.
        where: what runs the work of a name, in a thread of its own or in this one.
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
    """A turn of a call: the median of a few samples."""
    if not device.asynchronous:
        chain = timing.HostChain(call, device)
        chain(1)
        rough = max(float(chain(1)[0]), 1e-9)
        samples = max(1, min(_MOST_SAMPLES, math.ceil(_TURN_SECONDS / rough)))
        return lambda: float(np.median(chain(samples)))
    fits = depth.samples_in_queue(call, device, most=_MOST_SAMPLES)
    if not fits:  # thousands of launches: it is timed as the host issues it
        loop = queue.Loop(call, device)
        return lambda: float(np.median(loop(2)))
    single = queue.Chain(call, device, min(fits, 4))
    single(2)
    rough = max(float(np.median(single(3))), 1e-9)
    k = max(1, min(_MOST_SAMPLES, math.ceil(_SAMPLE_SECONDS / rough)))
    samples = max(2, min(_MOST_SAMPLES // k + 2, math.ceil(_TURN_SECONDS / (k * rough))))
    held = queue.Chain(call, device, max(1, min(samples, fits // k)), k if fits >= k else 1)
    return lambda: float(np.median(held(samples)))
