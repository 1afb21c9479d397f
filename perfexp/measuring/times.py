"""Times: the series of a point's undisturbed calls (one or three), and the phases of a call.

A series is the list of samples of one time, in seconds per call. A synchronous device (CPU) gets
`latency`. An asynchronous device (GPU) gets `throughput` (calls in a loop), `latency` (isolated
calls) and `device` (the GPU alone, behind a pre-filled launch queue). The phases of a call, such as
forward and backward, are timed in a pass of their own. `measuring.procedure` owns a `Times`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from perfexp.devices import Cache, Device
from perfexp.errors import Unsupported
from perfexp.measuring import verdicts
from perfexp.measuring.modes import Step
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import DEVICE_TIMES, GRAPH
from perfexp.records.quantities import DATA_SHARE, HOST_SECONDS, PHASES
from perfexp.records.record import Key, Metric, Point
from perfexp.statistics import estimators
from perfexp.timing import collecting, depth, queue
from perfexp.timing.conditions import LoadReader, Observer
from perfexp.timing.stopping import Monitor, StoppingRule

#: Relative difference between a call's phase sum and the whole call that raises a diagnostic.
_PHASES_TOLERANCE = 0.05
#: Largest share of a single call's time that timer and events may take without a diagnostic.
_RESOLUTION_TOLERANCE = 0.01
#: Idle time after which a device no longer counts as warm.
_COOLING_SECONDS = 1.0


class _CountingCall:
    """A call that counts its invocations."""

    def __init__(self, call: collecting.Call) -> None:
        self._call, self.calls = call, 0

    def __call__(self) -> None:
        self._call()
        self.calls += 1


@dataclass(kw_only=True)
class Times:
    """Times points one after the other; the work on one point warms the device up for the next.

    Attributes:
        stopping: rule that ends each series.
        percentiles: latency percentiles to report, in percent.
        cache: state of the device's caches at the start of a call.
        progress: called with a status line between timed blocks.
        takes_call_times: whether an asynchronous device gets latency and device time in addition to
            the rate.
        reads_load: whether clock and power are read while the device works through its own timed
            blocks.
    """

    device: Device
    stopping: StoppingRule
    percentiles: Sequence[float]
    cache: Cache
    progress: Callable[[str], None]
    takes_call_times: bool = True
    reads_load: bool = True
    #: The last point, the seconds of work on its calls, and when that work ended in nanoseconds.
    _last: tuple[Key, float, int] | None = None

    def __post_init__(self) -> None:
        self._load = LoadReader(self.device.load_queries() if self.reads_load else {})

    def whole(self, point: Point, call: collecting.Call, *, on_device: bool) -> None:
        """Add the series of the undisturbed call to the point.

        Args:
            on_device: whether the data is already on the device. If it is not, the series do not
                take turns, because a data loader would catch up during the other series.
        """
        if self.device.asynchronous:
            self._time_asynchronous(point, call, takes_turns=on_device)
        else:
            self._time_synchronous(point, call)

    def worked(self, point: Point, seconds: float) -> None:
        """Remember that the device has worked on a point's calls until now.

        Args:
            seconds: untimed work to add to the timed calls.
        """
        self._last = (point.key, verdicts.device_seconds(point) + seconds, time.perf_counter_ns())

    def worked_seconds(self, point: Point) -> float:
        """Return the seconds that the device has worked on a point's calls, up to now.

        They shorten the plateau of the energy measurement. They are 0 after a pause of a second, in
        which the device cools, and for another point.
        """
        if (
            self._last is None
            or self._last[0] != point.key
            or self._idle_seconds() >= _COOLING_SECONDS
        ):
            return 0.0
        return self._last[1]

    def add_device_time(
        self,
        point: Point,
        call: collecting.Call,
        capture: collecting.Capture,
        changes: Sequence[Diagnostic],
    ) -> None:
        """Add the device time of a call that did not fit the launch queue, timed as a CUDA graph.

        `graph_fallback` calls this, after changing the call if necessary.

        Args:
            capture: captures the call as a single launch.
            changes: diagnostics about parts that the call now leaves out. With any of them, the
                queue is tried again first.

        Raises:
            Waits: the call synchronizes.
            Unsupported: the call can't be captured for another reason.
        """
        # calls per sample, and samples that fit the launch queue
        k, chunk, method = 1, 0, "queue"
        if changes:
            k, chunk, *_ = depth.group_calls(call, self.device, self._flush())
        if not chunk:
            self.progress("capturing a graph")
            if self.cache is Cache.rotate:
                raise Unsupported(
                    "a graph reads the same inputs in every call, which cache=rotate rules out"
                )
            method, call = "graph", capture()
            k, chunk, *_ = depth.group_calls(call, self.device, self._flush())
            if not chunk:
                raise Unsupported("the call does not fit the launch queue even as a CUDA graph")
        self._take_device(point, GRAPH if method == "graph" else "device", call, chunk, k)
        point.facts["device_method"] = method
        point.doubts += changes
        if method == "graph":
            message = "`device` is the time of the call"
            point.doubts.append(diagnostics.make("device_of_graph", what=message))

    def add_graph_time(self, point: Point, capture: collecting.Capture) -> None:
        """Add the call's device time as a CUDA graph, next to its time behind a pre-filled queue.

        Raises:
            Unsupported: the call can't be captured, or its graph does not fit the launch queue.
        """
        call = capture()
        k, chunk, *_ = depth.group_calls(call, self.device)
        if not chunk:
            raise Unsupported("the call does not fit the launch queue even as a CUDA graph")
        self._take_device(point, GRAPH, call, chunk, k)

    def _take_device(
        self, point: Point, name: str, call: collecting.Call, chunk: int, k: int
    ) -> None:
        """Take a series of device times behind a pre-filled queue, with its diagnostics.

        Args:
            name: series name.
            chunk: samples that fit the launch queue.
            k: calls per sample.
        """
        chain = self._chain(call, chunk, k)
        self._take(point, [self._collector(name, chain, k)])
        self._judge_device(point, chain, name)

    def phases(self, point: Point, step: Step, *, on_device: bool) -> None:
        """Time a call's phases in a separate pass and compare their sum with the whole call.

        A sum that deviates by more than 5 % gets a diagnostic.

        Args:
            point: a point with its whole call already timed.
            on_device: whether the data is already on the device. The phases then are device times,
                like `device`; otherwise waiting for data is a phase.
        """
        chunk = 0
        if on_device and self.device.asynchronous:
            once = queue.Segments(step.segments, self.device).once
            k, fills, _ = depth.group_calls(once, self.device)
            chunk = k * fills
        block = queue.Segments(step.segments, self.device, chunk)
        collector = self._collector("phases", block)
        collecting.collect([collector], self.device.now_ns, verdicts.busy_seconds(point))
        sums_series, sums = collector.series(), collector.samples
        for name, seconds in block.parts().items():
            point.series.append(
                msgspec.structs.replace(sums_series, name=f"phase/{name}", samples=seconds.tolist())
            )
        sums = sums[sums_series.warmup :]
        data = point.find_series("phase/data")
        if data is not None:
            share = sum(data.measured) / float(sums.sum())
            point.metrics.append(Metric.of(DATA_SHARE, share))
        whole_call = None
        for name in (*DEVICE_TIMES, "throughput", "latency"):
            series = point.find_series(name)
            if series and series.measured and (on_device or name not in DEVICE_TIMES):
                whole_call = series
                break
        # with cache=flush only the whole call begins with empty caches
        if whole_call is None or self.cache is Cache.flush:
            return
        # a loader delivers in bursts, which medians do not show but means do
        average = estimators.median_interval if on_device else estimators.mean_interval
        sum_of_phases, undisturbed = average(sums), average(whole_call.measured)
        ratio = sum_of_phases.value / undisturbed.value
        point.metrics.append(Metric.of(PHASES, ratio))
        if estimators.differ(sum_of_phases, undisturbed, _PHASES_TOLERANCE):
            why = ""
            if whole_call.name in DEVICE_TIMES and not chunk and ratio > 1:
                why = (
                    ": they do not fit the launch queue and include the device's waits for the host"
                )
            point.doubts.append(
                diagnostics.make("phases_disagree", ratio=ratio, whole=whole_call.name, why=why)
            )

    def _time_synchronous(self, point: Point, call: collecting.Call) -> None:
        """Take the only series of a synchronous device, `latency`."""
        chain = collecting.HostChain(call, self.device, self._flush())
        self._take(
            point, [self._collector("latency", chain, percentiles=self.percentiles, of_rate=True)]
        )

    def _time_asynchronous(self, point: Point, call: collecting.Call, *, takes_turns: bool) -> None:
        """Take throughput, latency and device time, as far as the plan and the call allow.

        The call has no device time if it does not fit the launch queue; see `graph_fallback`.

        Args:
            takes_turns: whether the series alternate block by block; if not, one follows another.
        """
        # k: calls per sample; chunk: samples that fit the launch queue, 0 if no call fits. Finding
        # them also warms the device up
        counting_call, flush = _CountingCall(call), self._flush()
        k, chunk, call_seconds = depth.group_calls(counting_call, self.device, flush)
        collector = partial(self._collector, takes_turns=takes_turns)
        collectors, warm_seconds = [], counting_call.calls * call_seconds
        if flush is None:  # flushing between the calls would break up the loop
            collectors.append(
                collector("throughput", queue.Loop(call, self.device, k), k, of_rate=True)
            )
        if self.takes_call_times or flush is not None:
            latency = collecting.Latency(call, self.device, flush)
            collectors.append(
                collector(
                    "latency", latency, percentiles=self.percentiles, of_rate=flush is not None
                )
            )
        if self.takes_call_times:
            point.facts["device_method"] = "queue" if chunk else "none"
            if flush is None:
                self._add_host_seconds(point, counting_call, chunk * k, call_seconds)
        else:
            chunk = 0  # no device time
        if chunk:
            chain = self._chain(call, chunk, k)
            collectors.append(collector("device", chain, k))
        for together in [collectors] if takes_turns else [[single] for single in collectors]:
            self._take(point, together, warm_seconds)
        if chunk:
            self._judge_device(point, chain, "device")

    def _add_host_seconds(
        self, point: Point, call: collecting.Call, calls: int, call_seconds: float
    ) -> None:
        """Add the host time to issue a call, or why it is unknown.

        Args:
            calls: calls that fit the launch queue; 0 if none does.
            call_seconds: device seconds per call.
        """
        host, reason = None, None
        if calls:
            host = depth.issue_seconds(call, self.device, calls, call_seconds)
        else:
            reason = (
                "the call does not fit the launch queue, so the host waits while it issues the call"
            )
        point.metrics.append(Metric.of(HOST_SECONDS, host, reason=reason))

    def _chain(self, call: collecting.Call, chunk: int, calls_per_sample: int) -> queue.Chain:
        """Return the timer of device times; while its queue drains, clock and power are read.

        Args:
            chunk: samples per queue fill.
            calls_per_sample: calls per sample.
        """
        return queue.Chain(
            call,
            self.device,
            chunk,
            calls_per_sample,
            flush=self._flush(),
            draining=self._load.draining,
        )

    def _collector(
        self,
        name: str,
        block: Callable[[int], collecting.Samples],
        calls_per_sample: int = 1,
        percentiles: Sequence[float] = (),
        **options: bool,
    ) -> collecting.Collector:
        """Return the collector of a series, with a monitor from the point's stopping rule.

        Args:
            block: timer that returns a number of samples, in seconds per call.
            calls_per_sample: calls per sample.
            percentiles: percentiles that need an interval before the series may end.
            options: further arguments for the rule's `begin`.
        """

        def begin(busy_seconds: float) -> Monitor:
            """Return a monitor from the stopping rule, and report the series as begun."""
            self.progress(name)
            return self.stopping.begin(
                calls_per_sample=calls_per_sample,
                percentiles=percentiles,
                busy_seconds=busy_seconds,
                **options,
            )

        return collecting.Collector(name, block, begin, calls_per_sample)

    def _take(
        self, point: Point, collectors: Sequence[collecting.Collector], warm_seconds: float = 0.0
    ) -> None:
        """Take several series in turns; add them and the device's conditions to the point.

        After an error, the samples so far are added, too.

        Args:
            warm_seconds: time that the device has just spent on the point's calls outside its
                series.
        """
        warm_seconds += self._settle(point, collectors)
        busy_seconds = (
            warm_seconds + self._carried_seconds(point.key) + verdicts.busy_seconds(point)
        )
        observer, names = Observer(self.device), (collector.name for collector in collectors)
        loaded = self._load.observing(
            point, next((name for name in names if name in DEVICE_TIMES), None)
        )
        try:
            with loaded:
                collecting.collect(
                    collectors, self.device.now_ns, busy_seconds, observer.block_ended
                )
        finally:
            observer.add_to(point)
            point.series += [
                collector.series() for collector in collectors if collector.is_measured
            ]
            self.worked(point, 0.0)

    def _settle(self, point: Point, collectors: Sequence[collecting.Collector]) -> float:
        """Warm the device up until it is steady, once per point, if the stopping rule asks for it.

        Returns:
            Seconds spent on calls; 0 without a warm-up.
        """
        most_seconds = self.stopping.settling_seconds
        if not most_seconds or "settling_seconds" in point.facts:
            return 0.0
        seconds, changes = collecting.settle(collectors, self.device, most_seconds, self.progress)
        point.facts["settling_seconds"] = round(seconds, 3)
        if changes:
            how = (
                f"not steady after {seconds:.0f} s of calls (stopping.steady_seconds): "
                f"{', '.join(changes)}"
            )
            point.doubts.append(diagnostics.make("drift", relative=None, changes=how))
        return seconds

    def _carried_seconds(self, key: Key) -> float:
        """Return the seconds of the previous point's work that count as this point's warm-up.

        They are 0 unless that point differs only in input size and has just ended.
        """
        if self._last is None:
            return 0.0
        before, busy_seconds, _ = self._last
        differs_in_size = (
            before != key and msgspec.structs.replace(before, input_size=key.input_size) == key
        )
        if differs_in_size and self._idle_seconds() < _COOLING_SECONDS:
            return busy_seconds
        return 0.0

    def _idle_seconds(self) -> float:
        """Return the seconds since the last work on a point; infinity before the first point."""
        if self._last is None:
            return math.inf
        return (time.perf_counter_ns() - self._last[2]) * 1e-9

    def _judge_device(self, point: Point, chain: queue.Chain, name: str) -> None:
        """Add what limits the loop (`bound_by`), and diagnostics about the series of device times.

        Args:
            chain: timer that took the series.
            name: series name.
        """
        device, series = self.device, point.find_series(name)
        if "bound_by" not in point.facts:  # once: `device/graph` may follow `device`
            verdicts.judge_bound(point)
        if chain.held.starved:
            point.doubts.append(diagnostics.make("queue_starved", blocks=chain.held.starved))
        # with flushes each call is timed by its own two events; else many calls share them
        if chain.flush is not None and series is not None and series.measured:
            call_us = float(np.median(series.measured)) * 1e6
            overhead_us = (device.event_tick_seconds + device.record_seconds) * 1e6
            if overhead_us > _RESOLUTION_TOLERANCE * call_us:
                point.doubts.append(
                    diagnostics.make("below_resolution", call_us=call_us, overhead_us=overhead_us)
                )

    def _flush(self) -> collecting.Call | None:
        """Return the function that empties the caches before a call; None unless cache=flush."""
        return self.device.flush_cache if self.cache is Cache.flush else None
