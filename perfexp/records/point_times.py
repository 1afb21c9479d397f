"""Point times: statistics of a point's series in one process.

A series holds the raw samples of one time, in seconds per call: `latency` (wait for each call),
`throughput` (pipelined loop) or `device` (device time alone). All rooms that judge, pool or show a
point's times start here. Intervals are 95 % confidence intervals.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records.record import Metric, Point, Series
from perfexp.statistics import blockwise, estimators

#: Device times: a call behind a pre-filled queue, and a call captured as one CUDA graph.
DEVICE_TIMES = ("device", GRAPH := "device/graph")


def blocks_of(series: Series) -> list[estimators.Samples]:
    """Return a series' samples without the warm-up, one list for each block of calls.

    Blocks of several series take turns, so samples within a block are closer in time.
    """
    return blockwise.split(series.samples, series.blocks, series.warmup)


def summary_of(
    series: Series, percentiles: Sequence[float] = (50.0, 95.0, 99.0)
) -> blockwise.Summary:
    """Return mean, median, percentiles and drift of a series, in seconds per call.

    The series must have samples after its warm-up.

    Args:
        percentiles: percentiles to compute, in percent.
    """
    return blockwise.summarise(blocks_of(series), percentiles)


def samples_per_call(point: Point) -> int:
    """Return the number of input samples per call: batch size times number of ranks."""
    return point.key.batch_size * int(point.facts.get("world_size", 1))


def is_forked(point: Point) -> bool:
    """Return whether the process that measured the point was forked from a fork server.

    Processes forked from one server share memory layout and library state, so they vary less.
    """
    return point.facts.get("process_start") == "forked"


def is_of_gpu(point: Point) -> bool:
    """Return whether an asynchronous device, such as a GPU, ran the calls."""
    return "device_method" in point.facts


def first_median_interval(point: Point, *names: str) -> estimators.Interval | None:
    """Return the median seconds per call from the first named series that has samples.

    None if no series has samples.
    """
    series = first_series(point, *names)
    if series:
        return blockwise.block_median(blocks_of(series))
    return None


def first_median(point: Point, *names: str) -> float | None:
    """Return the median seconds per call from the first named series that has samples, or None."""
    median = first_median_interval(point, *names)
    if median:
        return median.value
    return None


def interval_of(metric: Metric | None) -> estimators.Interval | None:
    """Return a metric's value with its interval, in the metric's unit; None without a value."""
    if metric is None or metric.value is None:
        return None
    return estimators.Interval(value=metric.value, low=metric.low, high=metric.high)


def loop_interval(point: Point) -> estimators.Interval | None:
    """Return the mean seconds per call in the pipelined loop, otherwise of the latency.

    Rates such as samples/s are computed from it. None without samples.

    Data loaders may deliver batches in bursts. The mean includes these, the median hides them.
    """
    series = first_series(point, "throughput", "latency")
    if series:
        return blockwise.block_mean(blocks_of(series))
    return None


def first_series(point: Point, *names: str) -> Series | None:
    """Return the first named series that has samples; None without samples.

    Callers name several series in order of preference, for example graph time before latency.
    """
    candidates = map(point.find_series, names)
    return next((series for series in candidates if series is not None and series.measured), None)


def series_of(point: Point, name: str) -> Series:
    """Return the series with this name.

    Callers know that the series exists, because they found the point by it.

    Raises:
        KeyError: the point has no such series.
    """
    series = point.find_series(name)
    if series is None:
        raise KeyError(f"{point.key} has no series {name}")
    return series
