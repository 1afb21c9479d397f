"""Convert divided calls to times of rows, in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.layers import Kernel, Key, LayerTimes, Method, RowTimes
from perfexp.layers.partition import CallTimes, Spent

_NS = 1e-9


def times_of(calls: Sequence[CallTimes], method: Method, starved: int = 0) -> LayerTimes:
    """The times of all rows over several usable calls of the same step."""
    keys = dict.fromkeys(key for call in calls for key in call.rows)
    names = dict.fromkeys(name for call in calls for name in call.unattributed)
    return LayerTimes(
        method=method,
        rows=[_row(key, [call.rows.get(key, Spent()) for call in calls]) for key in keys],
        unattributed=[_row(None, [call.unattributed.get(name, Spent()) for call in calls]) for name in names],
        call_seconds=[call.span_ns * _NS for call in calls],
        starved=starved,
    )


def _row(key: Key | None, spent: Sequence[Spent]) -> RowTimes:
    names = dict.fromkeys(name for times in spent for name in times.kernels)
    kernels = [(name, [times.kernels.get(name, (0, 0)) for times in spent]) for name in names]
    return RowTimes(
        key=key,
        seconds=[times.busy_ns * _NS for times in spent],
        gap_seconds=[times.gap_ns * _NS for times in spent],
        kernels=[
            Kernel(name=name, count=sum(count for count, _ in ran), seconds=sum(busy for _, busy in ran) * _NS)
            for name, ran in kernels
        ],
    )
