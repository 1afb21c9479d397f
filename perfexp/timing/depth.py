"""Launch-queue depth: how many calls fit an asynchronous device's queue, and host time per call.

A GPU works through a queue that the host fills. If a block's calls fit, the host can fill the queue
while the device waits. The block then shows the device's time alone. Each point asks for the depth
once, before its series begin.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perfexp.devices import Device
from perfexp.statistics import estimators
from perfexp.timing.collecting import Call

#: Share of the launch queue to fill: when it is full, the host waits, which looks like a slow
#: launch.
_QUEUE_SHARE = 0.8
#: Attempts to find the queue depth, until a call fits: seconds to hold the device, or a multiple of
#: the host time of a call if that is longer. First calls may still allocate memory, which
#: synchronizes, and a call may wait for data longer than the one before it.
_ATTEMPTS = ((0.03, 5.0), (0.06, 2.0), (1.0, 0.0))
#: Longest hold for the sake of the host time.
_MOST_HOLD_SECONDS = 1.0
#: Limit on the work enqueued in an attempt, because all of it has to finish, and the minimum number
#: of samples. For example, a 60 ms graph could be launched 600 times within 0.03 s.
_ATTEMPT_WORK_SECONDS, _ATTEMPT_LEAST_SAMPLES = 0.05, 5
#: Maximum number of calls in an attempt.
_MOST_SAMPLES = 2000
#: Number of calls for a rough median call time.
_ROUGH_CALLS = 5
#: Number of queue fills for the median host time per call, and device seconds per fill.
_ISSUE_FILLS, _ISSUE_WORK_SECONDS = 3, 0.02


def samples_in_queue(
    call: Call,
    device: Device,
    *,
    most: int = _MOST_SAMPLES,
    hold_seconds: float = _ATTEMPTS[0][0],
) -> int:
    """Return how many calls fit the launch queue, with some room to spare.

    It is found by filling the queue while the device waits. The result is 0 if not even a single
    call fits. Possible causes: the call has more launches than the queue has places, it
    synchronizes, or the host needs longer than `hold_seconds` to issue it.

    Args:
        most: maximum number of calls to try.
        hold_seconds: time that the device waits while the host fills the queue.
    """
    return _fill(call, device, None, most, hold_seconds, 0.0)[0]


def _fill(
    call: Call,
    device: Device,
    flush: Call | None,
    most: int,
    hold_seconds: float,
    hold_calls: float,
) -> tuple[int, float]:
    """Fill the launch queue once; see `samples_in_queue`.

    Args:
        flush: enqueued before each call, with an additional event; or None.
        hold_calls: minimum hold, as a multiple of the host time of a call, up to a second.

    Returns:
        The calls that fit, and the median device seconds of the first five of them, each with its
        flush and event; zeros if none fits.
    """
    mark, marks = device.new_event(), [device.new_event() for _ in range(_ROUGH_CALLS + 1)]

    def enqueue(number: int) -> None:
        """Enqueue a call with its events, as `Chain` does."""
        if flush is not None:
            flush()
            device.record(mark)
        call()
        device.record(marks[number] if number <= _ROUGH_CALLS else mark)

    device.synchronize()
    begun_ns = device.now_ns()
    enqueue(1)
    issue_seconds = (device.now_ns() - begun_ns) * 1e-9
    device.synchronize()
    call_seconds = max((device.now_ns() - begun_ns) * 1e-9, 1e-9)
    most = min(most, max(_ATTEMPT_LEAST_SAMPLES, math.ceil(_ATTEMPT_WORK_SECONDS / call_seconds)))
    device.hold(max(hold_seconds, min(hold_calls * issue_seconds, _MOST_HOLD_SECONDS)))
    device.record(marks[0])
    enqueued = 0
    while enqueued < most:
        enqueue(enqueued + 1)
        if device.passed(marks[0]):  # the host had to wait until the hold ended
            break
        enqueued += 1
    device.synchronize()
    if not enqueued:
        return 0, 0.0
    seconds = [
        device.elapsed_seconds(before, after)
        for before, after in pairwise(marks[: min(enqueued, _ROUGH_CALLS) + 1])
    ]
    return max(1, int(_QUEUE_SHARE * enqueued)), float(np.median(seconds))


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
    attempts = (_fill(call, device, flush, _MOST_SAMPLES, *holds) for holds in _ATTEMPTS)
    calls_in_queue, call_seconds = next((found for found in attempts if found[0]), (0, 0.0))
    if calls_in_queue == 0 or flush is not None:
        return Grouping(1, calls_in_queue)
    # device time, not host time: calls that wait for the host take longer, so k would be too small
    call_seconds = max(call_seconds, 1e-9)
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
