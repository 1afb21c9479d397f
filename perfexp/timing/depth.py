"""Launch-queue depth: how many calls fit an asynchronous device's queue, and host time per call.

A GPU works through a queue that the host fills. If a block's calls fit, the host can fill the queue
while the device waits. The block then shows the device's time alone. Each point asks for the depth
once, before its series begin.
"""

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
_ATTEMPT_HOLDS_SECONDS = (0.03, 0.06, 0.06, 1.0)
#: Limit on the work enqueued in an attempt, because all of it has to finish, and the minimum number
#: of samples. For example, a 60 ms graph could be launched 600 times within 0.03 s.
_ATTEMPT_WORK_SECONDS, _ATTEMPT_LEAST_SAMPLES = 0.05, 5
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
    hold_seconds: float = _ATTEMPT_HOLDS_SECONDS[0],
) -> int:
    """Return how many samples fit the launch queue, with some room to spare.

    It is found by filling the queue while the device waits. The result is 0 if not even a single
    sample fits. Possible causes: the call has more launches than the queue has places, it
    synchronizes, or the host needs longer than `hold_seconds` to issue it.

    Args:
        calls_per_sample: k, calls in a sample; an event follows them.
        flush: enqueued before each sample, with an additional event; or None.
        most: maximum number of samples to try.
        hold_seconds: time that the device waits while the host fills the queue.
    """
    held, mark = device.new_event(), device.new_event()

    def enqueue() -> None:
        """Enqueue one sample with its events, as `Chain` does."""
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
    most_work = math.ceil(_ATTEMPT_WORK_SECONDS / sample_seconds)
    most = min(most, max(_ATTEMPT_LEAST_SAMPLES, most_work))
    device.hold(hold_seconds)
    device.record(held)
    enqueued = 0
    while enqueued < most:
        enqueue()
        if device.passed(held):  # the host had to wait until the hold ended
            break
        enqueued += 1
    device.synchronize()
    return max(1, int(_QUEUE_SHARE * enqueued)) if enqueued else 0


class Grouping(NamedTuple):
    """How a point's calls are grouped into samples, and samples into fills of the launch queue.

    Attributes:
        calls_per_sample: k of a `Chain`.
        chunk: samples that fit the launch queue; 0 if not even a single call fits.
        call_seconds: rough device seconds per call; 0 if unknown.
    """

    calls_per_sample: int
    chunk: int
    call_seconds: float = 0.0


def group_calls(call: Call, device: Device, flush: Call | None = None) -> Grouping:
    """Find how many calls make a sample, and how many samples fit the launch queue.

    `measuring.times` needs both before it can time a call on an asynchronous device. With `flush`,
    which is enqueued before each sample, a sample is a single call.
    """
    # first calls may still allocate memory, which synchronizes; host data may be slow to issue
    attempts = (
        samples_in_queue(call, device, flush=flush, hold_seconds=seconds)
        for seconds in _ATTEMPT_HOLDS_SECONDS
    )
    calls_in_queue = next(filter(None, attempts), 0)
    if calls_in_queue == 0 or flush is not None:
        return Grouping(1, calls_in_queue)
    # device time, not host time: calls that wait for the host take longer, so k would be too small
    rough_chain = Chain(call, device, min(calls_in_queue, _ROUGH_CALLS))
    call_seconds = max(float(np.median(rough_chain(_ROUGH_CALLS))), 1e-9)
    k = estimators.calls_per_sample(call_seconds, device.event_tick_seconds, device.record_seconds)
    k = min(calls_in_queue, k)
    return Grouping(k, calls_in_queue // k, call_seconds)


def issue_seconds(call: Call, device: Device, calls: int, call_seconds: float = 0.0) -> float:
    """Return the host seconds that issuing a call takes while the launch queue is not full.

    It is the median over a few fills of the queue; the point's metric `host_seconds`.

    Args:
        calls: calls that fit the launch queue of an asynchronous device.
        call_seconds: device seconds per call, which limit the work of a fill; 0 for no limit.
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
