"""Estimates: the times and rates of a row that have no interval, and the metrics that are computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perfexp.records import quantities
from perfexp.records.quantities import Pooled
from perfexp.records.record import Metric
from perfexp.statistics import estimators

if TYPE_CHECKING:
    from perfexp.records.summary import Row


def is_estimate(row: Row, kind: str) -> bool:
    """Whether the median of a row's time has no interval."""
    return row.times[kind].median.low is None


def is_rate_estimate(row: Row) -> bool:
    """Whether the rate of a row has no interval."""
    rate = row.samples_per_second
    return rate is not None and rate.low is None


def basis(row: Row, metric: Metric) -> estimators.Interval | None:
    """Return the time or rate of a row that a metric is computed from; None for metrics of their own."""
    pooled = quantities.of(metric).pooled
    if pooled is Pooled.BY_TIME:
        return row.time.median if row.time else None
    return row.samples_per_second if pooled is Pooled.BY_RATE else None


def marked(row: Row) -> tuple[Metric, ...]:
    """Return the metrics of a row; those that are computed from an estimate are estimated, too."""
    return tuple(
        msgspec.structs.replace(one, estimated=True)
        if one.value is not None and (of := basis(row, one)) and of.low is None
        else one
        for one in row.metrics
    )
