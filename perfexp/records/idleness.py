"""Idleness: the diagnostic for a pipelined loop that leaves the device idle, with its cause."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import DEVICE_TIMES, first_median, loop_interval
from perfexp.records.quantities import DATA_SHARE, HOST_SECONDS
from perfexp.records.record import Point

#: A device that is busy for this share of the loop needs no diagnostic.
_BUSY = 0.8
#: The host sets the pace if issuing the calls takes this share of the loop.
_HOST_BOUND = 0.9
#: Above this share, the host was slower when it issued calls alone than in the loop.
_HOST_CHANGED = 1.1
#: Loading is named as the cause if it takes this share of a call.
_LOADING = 0.1
#: Difference between two shares of the loop that is too small to report.
_ALIKE = 0.02
_FASTER_LAUNCHES = "larger batch_size, execution.cuda_graph=true or execution=compile"
_FASTER_LOADING = "load faster (data.workers=N), or leave loading out (data=synthetic)"


def judge(point: Point, doubts: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Return the diagnostics with a current `device_idle`, if the loop leaves the device idle.

    It replaces any `device_idle` stored by an earlier version.
    """
    others = diagnostics.without(doubts, "device_idle")
    busy, wall = first_median(point, *DEVICE_TIMES), first_median(point, "throughput")
    if (
        busy is None
        or wall is None
        or (busy >= _BUSY * wall and point.facts.get("bound_by") != "launch")
    ):
        return list(doubts)
    cause, advice = _cause(point, wall)
    of_mean = _of_mean(point, busy, wall)
    idle = max(1 - busy / wall, 0.0)
    return [
        *others,
        diagnostics.make("device_idle", idle=idle, of_mean=of_mean, cause=cause, advice=advice),
    ]


def _of_mean(point: Point, busy_seconds: float, wall_seconds: float) -> str:
    """Return the mean call's idle share in words, unless it is close to the median call's."""
    mean = loop_interval(point)
    if mean is None or abs(busy_seconds / mean.value - busy_seconds / wall_seconds) <= _ALIKE:
        return ""
    return f" ({1 - busy_seconds / mean.value:.0%} of its mean call, which samples/s are by)"


def _cause(point: Point, wall_seconds: float) -> tuple[str, str]:
    loading, host = _value(point, DATA_SHARE), _value(point, HOST_SECONDS)
    if loading is not None and loading >= _LOADING:
        return f"loading takes {loading:.0%} of a call", _FASTER_LOADING
    if host is None:
        return "the host's time to issue the calls is unknown", _FASTER_LAUNCHES
    share = host / wall_seconds
    cause = _issuing(share)
    if _HOST_BOUND <= share <= _HOST_CHANGED:
        cause += ": it sets the pace"
    elif share <= _HOST_CHANGED:
        cause += ": neither sets the pace alone"
    return cause, _FASTER_LAUNCHES


def _issuing(share: float) -> str:
    """Describe the host time to issue the calls, as a share of the loop."""
    if share > _HOST_CHANGED:
        return (
            f"issuing the calls took {share:.1f} times the loop's time when it was measured "
            "alone, so the pace of the host changed in between"
        )
    return f"the host needs {min(share, 1.0):.0%} to issue the calls"


def _value(point: Point, name: str) -> float | None:
    metric = point.metric(name)
    if metric:
        return metric.value
    return None
