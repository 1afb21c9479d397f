"""Depth: how many calls fit an asynchronous device's launch queue, and host time per call."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from perfexp.devices import Device
from perfexp.statistics import estimators
from perfexp.timing.collecting import Call
from perfexp.timing.queue import Chain

#: Share of the launch queue to fill: when it is full, the host waits, which looks like a slow
#: launch.
_QUEUE_SHARE = 0.8
#: Seconds to hold the device while finding the queue depth, attempt by attempt until a call fits.
_PROBE_HOLDS_SECONDS = (0.03, 0.06, 0.06, 1.0)
#: Limit on the work enqueued in an attempt, because all of it has to finish, and the minimum number
#: of samples. For example, a 60 ms graph could be launched 600 times within 0.03 s.
_PROBE_WORK_SECONDS, _PROBE_LEAST_SAMPLES = 0.05, 5
#: Number of calls for a rough median call time.
_ROUGH_CALLS = 5
#: Number of queue fills for the median host time per call, and device seconds per fill.
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
    """Return how many samples fit the launch queue, with some room to spare.

    It is found by filling the queue while the device waits. The result is 0 if not even a single
    sample fits. Possible causes: the call has more launches than the queue has places, it
    synchronizes, or the host needs longer than `hold_seconds` to issue it.

    Args:
        calls_per_sample: k; each sample also has an event.
        flush: enqueued before each sample, with an additional event; or None.
        most: maximum number of samples to try.
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
        if device.passed(held):  # the host had to wait until the hold ended
            break
        fit += 1
    device.synchronize()
    return max(1, int(_QUEUE_SHARE * fit)) if fit else 0


class Fit(NamedTuple):
    """How a point's calls are grouped into samples.

    Attributes:
        calls_per_sample: k of a `Chain`.
        chunk: samples that fit the launch queue; 0 if not even a single call fits.
        call_seconds: rough device time per call; 0 if unknown.
    """

    calls_per_sample: int
    chunk: int
    call_seconds: float = 0.0


def fit(call: Call, device: Device, flush: Call | None = None) -> Fit:
    """Return how many calls make a sample, and how many samples fit the launch queue.

    With `flush`, which is enqueued before each sample, a sample is a single call.
    """
    # first calls may still allocate memory, which synchronizes; host data may be slow to issue
    fits = (
        samples_in_queue(call, device, flush=flush, hold_seconds=seconds)
        for seconds in _PROBE_HOLDS_SECONDS
    )
    single = next(filter(None, fits), 0)
    if single == 0 or flush is not None:
        return Fit(1, single)
    # in device time: calls that wait for the host seem longer than the clock has to resolve
    rough = max(
        float(np.median(Chain(call, device, min(single, _ROUGH_CALLS))(_ROUGH_CALLS))), 1e-9
    )
    k = min(
        single, estimators.calls_per_sample(rough, device.event_tick_seconds, device.record_seconds)
    )
    return Fit(k, single // k, rough)


def issue_seconds(call: Call, device: Device, calls: int, call_seconds: float = 0.0) -> float:
    """Return the host seconds per call to issue it while the launch queue is not full.

    Args:
        calls: calls that fit the launch queue of an asynchronous device.
        call_seconds: device time per call.
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
