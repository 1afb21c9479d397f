"""Times: a point's undisturbed calls, by one clock or by three, and the parts of a call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from perfexp.devices import Cache, Device
from perfexp.errors import Unsupported
from perfexp.measure import verdicts
from perfexp.modes import Step
from perfexp.probes import depth, queue, timing
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Key, Metric, Point, Series
from perfexp.statistics import estimators
from perfexp.stopping import StoppingRule

#: The sum of a call's phases may differ from the whole call by this fraction before the point says so.
_PHASES_TOLERANCE = 0.05
#: A call that is timed alone has a diagnostic if timer and events take more than this share of it.
_RESOLUTION_TOLERANCE = 0.01
#: A device that has been idle for so long is no longer warm.
_COOLING_SECONDS = 1.0


class _Counted:
    """A call that counts how often it is called."""

    def __init__(self, call: timing.Call) -> None:
        self._call, self.calls = call, 0

    def __call__(self) -> None:
        self._call()
        self.calls += 1


@dataclass(kw_only=True)
class Times:
    """Takes the times of points, one after the other; what the device did for one warms it up for the next.

    Attributes:
        device: that works.
        stopping: when enough has been measured.
        percentiles: that the latency is asked for.
        cache: what a call finds in the device's caches.
        progress: told what comes next, between timed blocks.
    """

    device: Device
    stopping: StoppingRule
    percentiles: Sequence[float]
    cache: Cache
    progress: Callable[[str], None]
    _last: tuple[Key, float, int] | None = None

    def whole(self, point: Point, call: timing.Call) -> None:
        """Add the series of the undisturbed call: one on a synchronous device, three on an asynchronous one.

        Args:
            point: under way.
            call: of it.
        """
        if self.device.asynchronous:
            self._asynchronous(point, call)
        else:
            self._synchronous(point, call)

    def worked(self, point: Point, seconds: float) -> None:
        """The device has worked on a point's calls until now, though nobody timed them.

        Args:
            point: under way.
            seconds: for how long.
        """
        self._last = (point.key, verdicts.device_seconds(point) + seconds, time.perf_counter_ns())

    def worked_seconds(self, point: Point) -> float:
        """For how long the device has worked on a point's calls, if it did until now.

        Args:
            point: under way.
        """
        fresh = self._last is not None and self._last[0] == point.key and self._idle_seconds() < _COOLING_SECONDS
        return self._last[1] if self._last is not None and fresh else 0.0

    def device_otherwise(
        self, point: Point, call: timing.Call, capture: timing.Capture, left_out: Sequence[Diagnostic]
    ) -> None:
        """The device's time of a call that its queue did not take: as one launch, if it can be captured.

        Args:
            point: under way.
            call: of it.
            capture: makes one launch of it.
            left_out: what it does without, of the call that the queue did not take, so that the queue may take it now.

        Raises:
            Waits: the call waits for the device inside.
            Unsupported: it can't be captured for another reason.
        """
        k, chunk, method = 1, 0, "queue"
        if left_out:
            k, chunk, *_ = depth.fit(call, self.device, self._flush())
        if not chunk:
            self.progress("capturing a graph")
            if self.cache is Cache.rotate:
                raise Unsupported("a graph always reads the same inputs, which cache=rotate does not want")
            method, call = "graph", capture()
            k, chunk, *_ = depth.fit(call, self.device, self._flush())
            if not chunk:
                raise Unsupported("neither does the queue take the call as a graph")
        self._device(point, call, k, chunk)
        point.facts["device_method"] = method
        point.doubts += [*left_out, *([diagnostics.make("device_of_graph")] if method == "graph" else [])]

    def phases(self, point: Point, step: Step, *, held: bool) -> None:
        """Add the call's parts, from a pass of their own; their sum has to be the whole call.

        With data that is on the device already they are the device's times, as `device` is; with data that comes from
        elsewhere the waiting for it is a part.

        Args:
            point: whose whole call has been timed.
            step: its call.
            held: whether its data is on the device already.
        """
        self.progress("phases")
        chunk = 0
        if held and self.device.asynchronous:
            chunk = depth.samples_in_queue(queue.Segments(step.segments, self.device).once, self.device)
        block = queue.Segments(step.segments, self.device, chunk)
        monitor = self.stopping.begin(busy_seconds=verdicts.busy_seconds(point))
        sums, warmup, stop = timing.collect(block, monitor, self.device.now_ns)
        for name, seconds in block.parts().items():
            point.series.append(Series(name=f"phase/{name}", samples=seconds.tolist(), warmup=warmup, stop=stop))
        data = point.find_series("phase/data")
        if data is not None:
            share = sum(data.measured) / float(sums[warmup:].sum())
            point.metrics.append(Metric(name="data_share", value=share, unit="1"))
        names = ("device", "throughput", "latency") if chunk else ("throughput", "latency")
        whole = next((series for name in names if (series := point.find_series(name)) and series.measured), None)
        if whole is None or self.cache is Cache.flush:  # the phases follow one another, with warm caches
            return
        # a loader brings its batches in bursts, of which medians know nothing; means know of every hitch
        middle = estimators.median_interval if held else estimators.mean_interval
        sum_of_parts, undisturbed = middle(sums[warmup:]), middle(whole.measured)
        ratio = sum_of_parts.value / undisturbed.value
        point.metrics.append(Metric(name="phases_over_whole", value=ratio, unit="1"))
        if estimators.differ(sum_of_parts, undisturbed, _PHASES_TOLERANCE):
            point.doubts.append(diagnostics.make("phases_disagree", ratio=ratio))

    def _synchronous(self, point: Point, call: timing.Call) -> None:
        self.progress("latency")
        monitor = self.stopping.begin(percentiles=self.percentiles)
        chain = timing.HostChain(call, self.device, self._flush())
        point.series.append(timing.series("latency", chain, monitor, now=self.device.now_ns))

    def _asynchronous(self, point: Point, call: timing.Call) -> None:
        counted = _Counted(call)
        k, chunk, call_seconds = depth.fit(counted, self.device, self._flush())
        if self.cache is not Cache.flush:  # a loop with something between its calls is not the loop that is meant
            host = depth.issue_seconds(counted, self.device, chunk * k) if chunk else None
            reason = None if chunk else "a call does not fit into the device's queue: the host waits meanwhile"
            point.metrics.append(Metric(name="loop/host_seconds", value=host, unit="seconds", reason=reason))
            self.progress("throughput")
            loop = queue.Loop(call, self.device, k)
            self._take(point, "throughput", loop, k, busy_seconds=counted.calls * call_seconds)
        self.progress("latency")
        latency = timing.Latency(call, self.device, self._flush())
        self._take(point, "latency", latency, percentiles=self.percentiles)
        point.facts["device_method"] = "queue" if chunk else "none"
        if chunk:
            self._device(point, call, k, chunk)

    def _take(
        self,
        point: Point,
        name: str,
        block: Callable[[int], timing.Samples],
        k: int = 1,
        percentiles: Sequence[float] = (),
        busy_seconds: float = 0.0,
    ) -> Series:
        """A series until the stopping rule has enough; the blocks before it, and other calls, have warmed it up."""
        busy_seconds += self._carried_seconds(point.key) + verdicts.busy_seconds(point)
        monitor = self.stopping.begin(calls_per_sample=k, percentiles=percentiles, busy_seconds=busy_seconds)
        series = timing.series(name, block, monitor, k, now=self.device.now_ns)
        point.series.append(series)
        self.worked(point, 0.0)
        return series

    def _carried_seconds(self, key: Key) -> float:
        """For how long the device has worked on the point before, if that was of the same kind and has just ended."""
        if self._last is None:
            return 0.0
        before, busy_seconds, _ = self._last
        alike = before != key and msgspec.structs.replace(before, input_size=key.input_size) == key
        return busy_seconds if alike and self._idle_seconds() < _COOLING_SECONDS else 0.0

    def _idle_seconds(self) -> float:
        """Since it was last said that the device worked."""
        return math.inf if self._last is None else (time.perf_counter_ns() - self._last[2]) * 1e-9

    def _device(self, point: Point, call: timing.Call, k: int, chunk: int) -> None:
        """The device's own time, and what it says of the loop."""
        self.progress("device time")
        device, flush = self.device, self._flush()
        held = queue.Chain(call, device, chunk, k, flush=flush)
        series = self._take(point, "device", held, k)
        verdicts.judge_bound(point)
        if held.held.starved:
            point.doubts.append(diagnostics.make("queue_starved", blocks=held.held.starved))
        if flush is not None and series.measured:
            call_us = float(np.median(series.measured)) * 1e6
            overhead_us = (device.event_tick_seconds + device.record_seconds) * 1e6
            if overhead_us > _RESOLUTION_TOLERANCE * call_us:
                point.doubts.append(diagnostics.make("below_resolution", call_us=call_us, overhead_us=overhead_us))

    def _flush(self) -> timing.Call | None:
        return self.device.flush_cache if self.cache is Cache.flush else None
