"""Estimates: the times and rates of a row that `≈` precedes in reports, and the metrics that are computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perfexp.records.record import Metric
from perfexp.statistics import estimators

if TYPE_CHECKING:
    from perfexp.records.summary import Row

#: Metric that is computed from the median of a row's time, and those from its samples per second.
WORK_RATE, LOOP_SHARES = "work/flops_per_second", ("mfu", "mfu_of_ceiling")


def is_narrow(row: Row) -> bool:
    """Whether the interval of a row's time may be too narrow: one process with few effective samples, as is noted."""
    return row.time is not None and row.time.median.low is not None and _has_few_samples(row)


def _has_few_samples(row: Row) -> bool:
    if row.time is None or row.processes > 1 or row.is_pooled or row.runs:
        return False
    is_noted = any(diagnostic.code == "too_few_samples" for diagnostic in row.doubts)
    return is_noted and row.time.n / row.time.tau < estimators.FEW


def is_narrow_rate(row: Row) -> bool:
    """Whether the interval of a row's rate may be too narrow, as that of the row's time: both are of the same calls."""
    rate = row.samples_per_second
    if rate is None or rate.low is None or row.time_kind not in ("throughput", "latency"):
        return False
    is_of_time = row.time_kind == "throughput" or "throughput" not in row.times
    return is_of_time and _has_few_samples(row)


def is_estimate(row: Row, kind: str) -> bool:
    """Whether the median of a row's time has no interval, or one that may be too narrow."""
    return row.times[kind].median.low is None or (kind == row.time_kind and is_narrow(row))


def is_rate_estimate(row: Row) -> bool:
    """Whether the rate of a row has no interval, or one that may be too narrow."""
    rate = row.samples_per_second
    return rate is not None and (rate.low is None or is_narrow_rate(row))


def basis(row: Row, metric: str) -> estimators.Interval | None:
    """Return the time or rate of a row that a metric is computed from; None for metrics of their own."""
    if metric == WORK_RATE:
        return row.time.median if row.time else None
    return row.samples_per_second if metric in LOOP_SHARES else None


def marked(row: Row) -> tuple[Metric, ...]:
    """Return the metrics of a row; those that are computed from an estimate are estimated, too."""
    names = {*LOOP_SHARES} if is_rate_estimate(row) else set[str]()
    if row.time_kind and is_estimate(row, row.time_kind):
        names.add(WORK_RATE)
    return tuple(
        msgspec.structs.replace(one, estimated=True) if one.name in names and one.value is not None else one
        for one in row.metrics
    )
