"""Depth: how many calls an asynchronous device's queue takes, and what issuing one costs the host."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from perfexp.devices import Device
from perfexp.probes.queue import Chain
from perfexp.probes.timing import Call
from perfexp.statistics import estimators

#: So much of the device's queue is filled at the most: beyond its depth the host is made to wait, which looks like a
#: call that is slow to launch.
_QUEUE_SHARE = 0.8
#: To find the depth, the queue is held for so long, one attempt after the other, until a call fits.
_PROBE_HOLDS_SECONDS = (0.03, 0.06, 0.06, 1.0)
#: More calls than so many seconds of the device's work are not enqueued to find it, since all of it has to be waited
#: for, but this many samples at least: a graph of 60 ms is launched 600 times while the queue is held for 0.03 s.
_PROBE_WORK_SECONDS, _PROBE_LEAST_SAMPLES = 1.0, 10
#: Fills of the queue from which the host time of issuing a call is taken.
_ISSUE_FILLS = 5


def samples_in_queue(
    call: Call,
    device: Device,
    calls_per_sample: int = 1,
    *,
    flush: Call | None = None,
    most: int = 2000,
    hold_seconds: float = _PROBE_HOLDS_SECONDS[0],
) -> int:
    """How many samples the device's queue takes with room to spare, found by filling it while it is held.

    Args:
        call: to be timed.
        device: asynchronous.
        calls_per_sample: k; each sample also has an event.
        flush: enqueued before each sample, with one more event; or None.
        most: no more than so many are of interest.
        hold_seconds: for how long the queue is held.

    Returns:
        0 where not even one sample fits: the call has more launches than the queue has places, it waits inside, or the
        host needs longer to issue it.
    """
    held, mark = device.new_event(), device.new_event()

    def enqueue() -> None:
        if flush is not None:
            flush()
            device.record(mark)
        for _ in range(calls_per_sample):
            call()
        device.record(mark)

    device.synchronize()
    begun_ns = device.now_ns()
    enqueue()
    device.synchronize()
    sample_seconds = max((device.now_ns() - begun_ns) * 1e-9, 1e-9)
    most = min(most, max(_PROBE_LEAST_SAMPLES, math.ceil(_PROBE_WORK_SECONDS / sample_seconds)))
    device.hold(hold_seconds)
    device.record(held)
    fit = 0
    while fit < most:
        enqueue()
        if device.passed(held):  # the host was made to wait until the hold was over
            break
        fit += 1
    device.synchronize()
    return max(1, int(_QUEUE_SHARE * fit)) if fit else 0


class Fit(NamedTuple):
    """How the calls of a point are grouped.

    Attributes:
        calls_per_sample: k of a `Chain`.
        chunk: its samples that the device's queue takes; 0 where not even one call fits.
        call_seconds: rough device time of a call; 0 where that is not known.
    """

    calls_per_sample: int
    chunk: int
    call_seconds: float = 0.0


def fit(call: Call, device: Device, flush: Call | None = None) -> Fit:
    """How many calls a sample needs on an asynchronous device, and how many such samples its queue takes.

    Args:
        call: to be timed.
        device: asynchronous.
        flush: enqueued before each sample, or None; with it every sample is one call.
    """
    # The first calls may still make the allocator ask the driver for memory, which waits for the device; and a call
    # whose data comes from the host may take that host long to issue.
    fits = (samples_in_queue(call, device, flush=flush, hold_seconds=seconds) for seconds in _PROBE_HOLDS_SECONDS)
    single = next(filter(None, fits), 0)
    if single == 0 or flush is not None:
        return Fit(1, single)
    # of the device's own time: a call that waits for its host seems longer than the clock has to resolve
    rough = max(float(np.median(Chain(call, device, min(single, 10))(10))), 1e-9)
    k = estimators.calls_per_sample(rough, device.event_tick_seconds, device.record_seconds)
    while k > 1:
        if chunk := samples_in_queue(call, device, k):
            return Fit(k, chunk, rough)
        k //= 2
    return Fit(1, single, rough)


def issue_seconds(call: Call, device: Device, calls: int) -> float:
    """Host time of issuing a call, where the queue is never full: beyond its depth the host is made to wait.

    Args:
        call: to be issued.
        device: asynchronous.
        calls: that its queue takes.

    Returns:
        The median over a few fills of the queue, seconds per call.
    """
    taken = []
    for _ in range(_ISSUE_FILLS):
        device.synchronize()
        start = device.now_ns()
        for _ in range(calls):
            call()
        taken.append((device.now_ns() - start) * 1e-9 / calls)
    device.synchronize()
    return float(np.median(taken))
