"""Verdicts: conclusions from a point's measurements: status, bottleneck, cycles, epoch time.

Most functions here add a fact, a metric or a diagnostic to the point that they are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from perfexp.convolution import AppliedAlgorithm
from perfexp.devices import Device
from perfexp.doctor import environment
from perfexp.errors import OutOfMemory, Unsupported, line_of
from perfexp.records import diagnostics, units
from perfexp.records.point_times import DEVICE_TIMES, first_series
from perfexp.records.quantities import CYCLES, EPOCH_SECONDS, HOST_SECONDS
from perfexp.records.record import Metric, Point, Status
from perfexp.statistics import estimators

#: Share of the machine's cores that other processes may use without a diagnostic.
_BUSY_SHARE = 0.1


def verdict(error: Exception, device: Device) -> tuple[Status, str]:
    """Return the status and error text of a point after an exception.

    The status is `unsupported`, `oom` if memory ran out on host or device, or else `failed`.
    """
    if isinstance(error, Unsupported):
        return Status.UNSUPPORTED, str(error)
    text = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, OutOfMemory) or device.is_out_of_memory(error):
        return Status.OOM, text
    return Status.FAILED, text + line_of(error)


def bound_by(host_seconds: float | None, wall_seconds: float, device_seconds: float) -> str | None:
    """Return what limits a loop of calls in which host and device overlap.

    Args:
        host_seconds: H, host time to issue a call; None if unknown.
        wall_seconds: W, the loop's wall time per call.
        device_seconds: D, device time per call.

    Returns:
        `gpu` if D/W ≥ 0.95; `launch` if H/W ≥ 0.95 and D/W < 0.90; otherwise `mixed`. Without H,
            `gpu` or None.
    """
    if device_seconds / wall_seconds >= 0.95:
        return "gpu"
    if host_seconds is None:
        return None
    if host_seconds / wall_seconds >= 0.95 and device_seconds / wall_seconds < 0.90:
        return "launch"
    return "mixed"


@contextmanager
def watching_the_host(point: Point, *, of_ranks: bool = False) -> Iterator[None]:
    """Measure wall time and the CPU cores that other processes use while entered.

    Both are added to the point, with a diagnostic if others use more than a tenth of the cores. A
    point may be measured in several parts; the parts add up. For example, a cold start waits for
    the device between two parts.

    Args:
        of_ranks: whether ranks of the same run are excluded from the other processes.
    """
    earlier_seconds = point.wall_seconds or 0.0
    earlier_cpu_seconds = earlier_seconds * point.facts.get("other_cpu_cores", 0.0)
    start_ns, before = time.perf_counter_ns(), environment.other_cpu_seconds(of_ranks=of_ranks)
    yield
    point.wall_seconds = earlier_seconds + (time.perf_counter_ns() - start_ns) * 1e-9
    used = environment.other_cpu_seconds(of_ranks=of_ranks) - before
    other_cores = (earlier_cpu_seconds + used) / point.wall_seconds
    point.facts["other_cpu_cores"] = round(other_cores, 3)
    point.doubts = diagnostics.without(point.doubts, "busy_host")
    if point.status is Status.OK and other_cores > _BUSY_SHARE * environment.cores():
        point.doubts.append(
            diagnostics.make("busy_host", load=other_cores, cores=environment.cores())
        )


def busy_seconds(point: Point) -> float:
    """Return the seconds of a point's timed calls so far, waits for the host included.

    An epoch is the sum of its steps, so it is not counted again.
    """
    return sum(
        sum(series.samples) * series.calls_per_sample
        for series in point.series
        if series.name != "epoch"
    )


def device_seconds(point: Point) -> float:
    """Return the seconds that the device itself has worked on a point's timed calls.

    Waits for the host are excluded. The result is 0 if the device time of a call is unknown.
    """
    device = first_series(point, *DEVICE_TIMES)
    if device is None:
        return 0.0
    calls = sum(
        len(series.samples) * series.calls_per_sample
        for series in point.series
        if series.name != "epoch"
    )
    return calls * float(np.median(device.measured))


def add_launched_share(point: Point, algorithm: AppliedAlgorithm) -> None:
    """Add the share of cuDNN passes that were launched as captured, if there were such passes."""
    if share := algorithm.launched_share():
        point.metrics.append(share)


def prove(point: Point, call: Callable[[], object], algorithm: AppliedAlgorithm) -> None:
    """Replace the algorithm's report by a report on the kernels that ran, if the plan requests it.

    That is the proof that the requested algorithm computed the layers.

    Args:
        call: call of the whole model, not captured as a graph.
    """
    if algorithm.prove(call):
        report = algorithm.report()
        point.facts[algorithm.group] = report.facts()
        proven = {metric.name: metric for metric in report.metrics()}
        point.metrics = [proven.get(metric.name, metric) for metric in point.metrics]
        point.doubts += diagnostics.without(report.doubts(), f"{algorithm.group}_fallback")


def judge_bound(point: Point) -> None:
    """Store what limits the loop as the fact `bound_by`, from the medians of all three times.

    Nothing is stored if the device time is unknown.
    """
    device, loop = first_series(point, *DEVICE_TIMES), point.find_series("throughput")
    if device is None or loop is None or not loop.measured:
        return
    host = metric.value if (metric := point.metric(HOST_SECONDS)) else None
    wall, busy = (estimators.median_interval(series.measured).value for series in (loop, device))
    bound = bound_by(host, wall, busy)
    if bound is not None:
        point.facts["bound_by"] = bound


def judge_loader(point: Point, device: Device, *, workers: int, threads: int) -> None:
    """Add a diagnostic if image loading takes cores from a model that computes on the CPU.

    Args:
        workers: number of loader processes.
        threads: number of model threads.
    """
    if not device.asynchronous and workers and workers + threads > environment.cores():
        counts = [units.counted(workers, "loading worker"), units.counted(threads, "model thread")]
        cores = units.counted(environment.cores(), "CPU core")
        point.doubts.append(
            diagnostics.make("loader_competes", workers=counts[0], threads=counts[1], cores=cores)
        )


def add_cycles(point: Point) -> None:
    """Add the device time in clock cycles under load, or the reason why they are unknown."""
    if (series := first_series(point, *DEVICE_TIMES)) is None:
        return
    clocks = point.facts.get("loaded_sm_clock_hertz", {}).get(series.name)
    if clocks:
        cycles = float(np.median(series.measured)) * float(np.median(clocks))
        point.metrics.append(Metric.of(CYCLES, cycles, estimated=True))
        return
    reason = (
        "the clock could not be read during the calls; that needs an NVIDIA driver and "
        "probes.loaded_clock=true"
    )
    point.metrics.append(Metric.of(CYCLES, None, reason=reason))


def epoch_metric(point: Point, steps_per_epoch: int | None) -> Metric:
    """Return the seconds per epoch: measured over whole epochs, or else extrapolated from the step.

    Args:
        steps_per_epoch: None for endless data.
    """
    measured = point.find_series("epoch")
    if measured is not None:
        value = estimators.median_interval(measured.samples).value
        return Metric.of(EPOCH_SECONDS, value)
    step = point.find_series("throughput") or point.find_series("latency")
    if steps_per_epoch is None or step is None or not step.measured:
        no_end = "the data has no end; set data.num_samples to define an epoch"
        reason = no_end if steps_per_epoch is None else "no step was timed"
        return Metric.of(EPOCH_SECONDS, None, reason=reason)
    value = steps_per_epoch * float(np.mean(step.measured))
    return Metric.of(EPOCH_SECONDS, value, estimated=True)
