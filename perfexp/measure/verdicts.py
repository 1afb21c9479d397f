"""Verdicts: what follows from what a point has measured so far: its status, its bound, its cycles, its epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from perfexp.algorithms import Algorithm
from perfexp.devices import Device
from perfexp.diagnosis import environment
from perfexp.errors import OutOfMemory, Unsupported
from perfexp.records import diagnostics, units
from perfexp.records.record import Metric, Point, Status
from perfexp.statistics import estimators

#: Share of the machine's cores that other processes may use without a diagnostic.
_BUSY_SHARE = 0.1
#: Above this share of the loop's time for issuing its calls, the host was slower when that was timed by itself.
_HOST_CHANGED = 1.1


def verdict(error: Exception, device: Device) -> tuple[Status, str]:
    """What an exception makes of a point: its status and the text of the error.

    Args:
        error: raised while the point was measured.
        device: it was measured on.
    """
    if isinstance(error, Unsupported):
        return Status.UNSUPPORTED, str(error)
    text = f"{type(error).__name__}: {error}".strip()
    return Status.OOM if isinstance(error, OutOfMemory) or device.is_out_of_memory(error) else Status.FAILED, text


def bound_by(host_seconds: float | None, wall_seconds: float, device_seconds: float) -> str | None:
    """What limits a pipelined loop.

    Args:
        host_seconds: H, time per call that the host needs to issue it; None where that can't be known.
        wall_seconds: W, wall time per call of that loop.
        device_seconds: D, time that the device works on one call.

    Returns:
        `gpu` if D/W ≥ 0.95; `launch` if H/W ≥ 0.95 and D/W < 0.90; otherwise `mixed`; None without H, but for `gpu`.
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
    """While entered, what other processes use of the processors is counted; at the end the point says so, and how long.

    Where a point is watched more than once, in its parts, it says what was used in all of them.

    Args:
        point: under way.
        of_ranks: whether other ranks of the same run are not other processes.
    """
    seconds = point.wall_seconds or 0.0
    used = seconds * point.facts.get("other_cpu_cores", 0.0)
    start, others = time.perf_counter_ns(), environment.other_cpu_seconds(of_ranks=of_ranks)
    yield
    point.wall_seconds = seconds + (time.perf_counter_ns() - start) * 1e-9
    other_cores = (used + environment.other_cpu_seconds(of_ranks=of_ranks) - others) / point.wall_seconds
    point.facts["other_cpu_cores"] = round(other_cores, 3)
    point.doubts = [doubt for doubt in point.doubts if doubt.code != "busy_host"]
    if point.status is Status.OK and other_cores > _BUSY_SHARE * environment.cores():
        point.doubts.append(diagnostics.make("busy_host", load=other_cores, cores=environment.cores()))


def busy_seconds(point: Point) -> float:
    """For how long the device has worked on a point's calls so far; an epoch is the sum of its steps.

    Args:
        point: under way.
    """
    return sum(sum(series.samples) * series.calls_per_sample for series in point.series if series.name != "epoch")


def device_seconds(point: Point) -> float:
    """For how long the device itself has worked on a point's calls, in a loop that waits for its host less than that.

    Args:
        point: under way.
    """
    device = point.find_series("device")
    if device is None or not device.measured:
        return 0.0
    calls = sum(len(series.samples) * series.calls_per_sample for series in point.series if series.name != "epoch")
    return calls * float(np.median(device.measured))


def prove(point: Point, algorithm: Algorithm, call: Callable[[], object]) -> None:
    """Put which kernels computed the convolutions into a point, where that is asked for; a pass of its own.

    Args:
        point: that has been timed.
        algorithm: applied to the model.
        call: of the whole model, not captured.
    """
    if algorithm.prove(call) and (report := algorithm.report()):
        point.facts["algorithm"] = report.facts()
        now = {metric.name: metric for metric in report.metrics()}
        point.metrics = [now.get(metric.name, metric) for metric in point.metrics]
        point.doubts += [doubt for doubt in report.doubts() if doubt.code != "algorithm_fallback"]


def judge_bound(point: Point) -> None:
    """Add what limits the pipelined loop, where the device's time is known; by the medians of all three times.

    Args:
        point: whose loop has been timed.
    """
    device, loop = (point.find_series(name) for name in ("device", "throughput"))
    if device is None or loop is None or not device.measured or not loop.measured:
        return
    host = metric.value if (metric := point.metric("loop/host_seconds")) else None
    wall, busy = (estimators.median_interval(series.measured).value for series in (loop, device))
    bound = bound_by(host, wall, busy)
    if bound is None:
        return
    point.facts["bound_by"] = bound
    if bound == "launch" and host is not None:
        changed = " (its pace changed between the two measurements)" if host / wall > _HOST_CHANGED else ""
        point.doubts.append(diagnostics.make("launch_bound", device=busy / wall, host=host / wall, changed=changed))


def judge_loader(point: Point, device: Device, *, workers: int, threads: int) -> None:
    """Add a diagnostic where loading images takes cores from a model that computes on them.

    Args:
        point: whose call has been timed.
        device: that it was timed on.
        workers: processes that load images.
        threads: of the model.
    """
    if not device.asynchronous and workers and workers + threads > environment.cores():
        counts = [units.counted(workers, "loading worker"), units.counted(threads, "model thread")]
        cores = units.counted(environment.cores(), "CPU core")
        point.doubts.append(diagnostics.make("loader_competes", workers=counts[0], threads=counts[1], cores=cores))


def add_cycles(point: Point, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Add a call's time in cycles of the device's clock, which a lasting change of that clock does not change.

    Args:
        point: whose device time is known.
        before: the device's state before it.
        after: likewise, after it.
    """
    series = point.find_series("device")
    clocks = [hertz for state in (before, after) if (hertz := state.get("canary_hertz"))]
    if series is not None and series.measured and clocks:
        cycles = float(np.median(series.measured)) * float(np.mean(clocks))
        point.metrics.append(Metric(name="device/cycles_per_call", value=cycles, unit="1", estimated=True))


def epoch_metric(point: Point, batches_per_epoch: int | None) -> Metric:
    """Seconds of an epoch: measured where whole ones were run, otherwise extrapolated from the step.

    Args:
        point: a training.
        batches_per_epoch: None where the data has no end.
    """
    measured = point.find_series("epoch")
    if measured is not None:
        value = estimators.median_interval(measured.samples).value
        return Metric(name="epoch_seconds", value=value, unit="seconds")
    step = point.find_series("throughput") or point.find_series("latency")
    if batches_per_epoch is None or step is None or not step.measured:
        reason = "the data has no end: give data.num_samples to have an epoch"
        return Metric(name="epoch_seconds", value=None, unit="seconds", reason=reason)
    value = batches_per_epoch * float(np.mean(step.measured))
    return Metric(name="epoch_seconds", value=value, unit="seconds", estimated=True)
