"""Idleness: a diagnostic of a pipelined loop that does not keep the device busy, by what is known of its cause."""

from __future__ import annotations

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import DEVICE_TIMES, first_median
from perfexp.records.record import Point

#: Share of the loop's time for which a device is busy that needs no diagnostic.
_BUSY = 0.8
#: Share of the loop's time for issuing its calls from which the host sets the pace.
_HOST_BOUND = 0.9
#: Above this share the host was slower when it issued the calls alone than in the loop.
_HOST_CHANGED = 1.1
#: Share of loading in a call from which it is named as the cause.
_LOADING = 0.1
_FASTER_LAUNCHES = "use a larger batch, execution.cuda_graph=true or execution=compile to keep the device busy"
_FASTER_LOADING = "load faster (data.workers=N), or leave loading out (data=synthetic)"


def judge(point: Point) -> list[Diagnostic]:
    """Compare the device's own time with the loop's; a loop that the host limits has `launch_bound` already."""
    busy, wall = first_median(point, *DEVICE_TIMES), first_median(point, "throughput")
    is_named = any(diagnostic.code == "launch_bound" for diagnostic in point.doubts)
    if busy is None or wall is None or busy >= _BUSY * wall or is_named:
        return []
    cause, advice = _cause(point, wall)
    return [diagnostics.make("device_idle", device=busy / wall, cause=cause, advice=advice)]


def _cause(point: Point, wall_seconds: float) -> tuple[str, str]:
    loading, host = (_value(point, name) for name in ("data_share", "loop/host_seconds"))
    if loading is not None and loading >= _LOADING:
        return f"loading takes {loading:.0%} of a call", _FASTER_LOADING
    if host is None:
        return "the host's time to issue the calls is unknown", _FASTER_LAUNCHES
    share = host / wall_seconds
    pace = "it sets the pace" if share >= _HOST_BOUND else "neither sets the pace alone"
    return f"{issuing(share)}: {pace}" if share <= _HOST_CHANGED else issuing(share), _FASTER_LAUNCHES


def issuing(share: float) -> str:
    """Return what the host needs to issue the calls, in words, by its share of the loop's time."""
    if share > _HOST_CHANGED:
        return (
            f"issuing the calls took {share:.1f} times the loop's time when it was measured alone, so the pace of the "
            "host changed in between"
        )
    return f"the host needs {min(share, 1.0):.0%} to issue the calls"


def _value(point: Point, name: str) -> float | None:
    metric = point.metric(name)
    return metric.value if metric else None
