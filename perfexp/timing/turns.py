"""Turns: short blocks of competing calls, each round in another order.

A race compares several ways to compute the same, such as convolution algorithms. It calls each
competitor's `Turn` once per round, in an order from `balanced`, so that drifts and neighbors affect
all of them alike. `convolution.race` and `measuring.baselines` run such races.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from perfexp.devices import Device
from perfexp.timing import collecting, depth, queue

T = TypeVar("T")

#: Minimum seconds of a turn and of a sample; asynchronous devices group calls into samples.
_TURN_SECONDS, _SAMPLE_SECONDS = 2e-3, 100e-6
_MOST_SAMPLES = 16
#: Seed for the orders.
_SEED = 0


class Turn:
    """Repeatable short timing of one competitor: each turn returns the median of a few samples.

    An asynchronous device is timed behind a pre-filled queue.

    Args:
        call: the competitor's call; it must have run before.
        is_short: whether a call is at most a few launches, so that a turn fits any launch queue and
            the queue depth need not be found.
    """

    def __init__(self, call: collecting.Call, device: Device, *, is_short: bool = False) -> None:
        #: Hold of the pre-filled queue; None on a synchronous device.
        self._held: queue.Hold | None = None
        self._samples, self._block = self._prepare(call, device, is_short)

    def __call__(self) -> float:
        """Take a turn and return its median, in seconds per call."""
        return float(np.median(self._block(self._samples)))

    @property
    def starved(self) -> bool:
        """Return whether an asynchronous device had to wait for the host in any turn so far."""
        return self._held is not None and self._held.starved > 0

    def _prepare(
        self, call: collecting.Call, device: Device, is_short: bool
    ) -> tuple[int, Callable[[int], collecting.Samples]]:
        """Return the number of samples in a turn, and the timer that takes them.

        Both depend on the call's rough duration, so that a turn takes about `_TURN_SECONDS`.
        """
        if not device.asynchronous:
            by_clock = collecting.HostChain(call, device)
            by_clock(1)
            rough_seconds = max(float(by_clock(1)[0]), 1e-9)
            return max(1, min(_MOST_SAMPLES, math.ceil(_TURN_SECONDS / rough_seconds))), by_clock
        calls_in_queue = _MOST_SAMPLES
        if not is_short:
            calls_in_queue = depth.samples_in_queue(call, device, most=_MOST_SAMPLES)
        if not calls_in_queue:
            # thousands of launches exceed the queue: time them as the host issues them
            self._held = queue.Hold(starved=1)
            return 2, queue.Loop(call, device)
        rough_chain = queue.Chain(call, device, min(calls_in_queue, 4))
        rough_chain(2)  # untimed: the hold is learned
        rough_seconds = max(float(np.median(rough_chain(3))), 1e-9)
        # a sample of k calls is long enough for the clock
        k = max(1, min(_MOST_SAMPLES, math.ceil(_SAMPLE_SECONDS / rough_seconds)))
        enough = math.ceil(_TURN_SECONDS / (k * rough_seconds))
        samples = max(2, min(_MOST_SAMPLES // k + 2, enough))
        chunk = max(1, min(samples, calls_in_queue // k))
        chain = queue.Chain(call, device, chunk, k if calls_in_queue >= k else 1)
        self._held = chain.held
        return samples, chain


def balanced(names: Sequence[T]) -> Iterator[list[T]]:
    """Yield an order of the names for each round, without end: a random order, then its reverse.

    Over every two rounds all names have the same mean place, and over many rounds their neighbors
    change. No order returns before all have been used. The seed is fixed.
    """
    shuffler, used = random.Random(_SEED), set[tuple[T, ...]]()
    while True:
        order = shuffler.sample(names, len(names))
        if tuple(order) not in used or len(used) == math.factorial(len(names)):
            yield order
            yield order[::-1]
            used |= {tuple(order), tuple(order[::-1])}
