"""Depth: how many calls fit the launch queue of an asynchronous device, and the host time of issuing one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from perfexp.devices import Device
from perfexp.probes.queue import Chain
from perfexp.probes.timing import Call
from perfexp.statistics import estimators

#: Share of the launch queue that is filled: beyond its depth the host has to wait, which looks like a slow launch.
_QUEUE_SHARE = 0.8
#: Times for which the queue is held to find its depth, one attempt after the other until a call fits.
_PROBE_HOLDS_SECONDS = (0.03, 0.06, 0.06, 1.0)
#: Limit on the enqueued work of such an attempt, all of which has to be waited for, and its least number of samples. A
#: graph of 60 ms is launched 600 times while the queue is held for 0.03 s.
_PROBE_WORK_SECONDS, _PROBE_LEAST_SAMPLES = 0.05, 5
#: Calls whose median is the rough time of one.
_ROUGH_CALLS = 5
#: Fills of the queue that the host time of issuing a call is the median of, and the device's work on one.
_ISSUE_FILLS, _ISSUE_WORK_SECONDS = 3, 0.02


def samples_in_queue(
    call: Call,
    device: Device,
    calls_per_sample: int = 1,
    *,
    flush: Call | None = None,
    most: int = 2000,
    hold_seconds: float = _PROBE_HOLDS_SECONDS[0],
) -> int:
    """Return how many samples fit the launch queue with room to spare, found by filling it while it is held.

    The result is 0 if not even one fits an asynchronous device: the call has more launches than the queue has places,
    it synchronizes, or the host needs longer than `hold_seconds` to issue it.

    Args:
        calls_per_sample: k; each sample also has an event.
        flush: enqueued before each sample, with one more event; or None.
        most: most samples to try.
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
        if device.passed(held):  # the host had to wait until the hold was over
            break
        fit += 1
    device.synchronize()
    return max(1, int(_QUEUE_SHARE * fit)) if fit else 0


class Fit(NamedTuple):
    """How the calls of a point are grouped.

    Attributes:
        calls_per_sample: k of a `Chain`.
        chunk: samples that fit the launch queue; 0 if not even one call fits.
        call_seconds: rough device time of a call; 0 if unknown.
    """

    calls_per_sample: int
    chunk: int
    call_seconds: float = 0.0


def fit(call: Call, device: Device, flush: Call | None = None) -> Fit:
    """Return how many calls a sample needs on an asynchronous device, and how many such samples fit its launch queue.

    With `flush`, which is enqueued before each sample, every sample is one call.
    """
    # the first calls may still allocate memory, which synchronizes, and data from the host may be slow to issue
    fits = (
        samples_in_queue(call, device, flush=flush, hold_seconds=seconds)
        for seconds in _PROBE_HOLDS_SECONDS
    )
    single = next(filter(None, fits), 0)
    if single == 0 or flush is not None:
        return Fit(1, single)
    # by the device's own time: a call that waits for its host seems longer than the clock has to resolve
    rough = max(
        float(np.median(Chain(call, device, min(single, _ROUGH_CALLS))(_ROUGH_CALLS))), 1e-9
    )
    k = min(
        single, estimators.calls_per_sample(rough, device.event_tick_seconds, device.record_seconds)
    )
    return Fit(k, single // k, rough)


def issue_seconds(call: Call, device: Device, calls: int, call_seconds: float = 0.0) -> float:
    """Return the host time of issuing a call while the launch queue is never full, seconds per call.

    `calls` of them fit the launch queue of an asynchronous device, which works on each for `call_seconds`.
    """
    calls = min(calls, max(1, math.ceil(_ISSUE_WORK_SECONDS / max(call_seconds, 1e-9))))
    fills = []
    for _ in range(_ISSUE_FILLS):
        device.synchronize()
        start = device.now_ns()
        for _ in range(calls):
            call()
        fills.append((device.now_ns() - start) * 1e-9 / calls)
    device.synchronize()
    return float(np.median(fills))
