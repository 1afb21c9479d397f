"""Idleness: a diagnostic of a pipelined loop that does not keep the device busy, by what is known of its cause."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import DEVICE_TIMES, first_median, loop_interval
from perfexp.records.quantities import DATA_SHARE, HOST_SECONDS
from perfexp.records.record import Point

#: Share of the loop's time for which a device is busy that needs no diagnostic.
_BUSY = 0.8
#: Share of the loop's time for issuing its calls from which the host sets the pace.
_HOST_BOUND = 0.9
#: Above this share the host was slower when it issued the calls alone than in the loop.
_HOST_CHANGED = 1.1
#: Share of loading in a call from which it is named as the cause.
_LOADING = 0.1
#: Difference between two shares of the loop's time that is not worth a word.
_ALIKE = 0.02
_FASTER_LAUNCHES = "use a larger batch, execution.cuda_graph=true or execution=compile to keep the device busy"
_FASTER_LOADING = "load faster (data.workers=N), or leave loading out (data=synthetic)"


def judge(point: Point, doubts: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Return diagnostics of a point with one of its pipelined loop, if that leaves the device idle.

    `launch_bound` remains where the host's launches are the cause; of a loop that waits for its data they are not.
    """
    others = [diagnostic for diagnostic in doubts if diagnostic.code != "launch_bound"]
    busy, wall = first_median(point, *DEVICE_TIMES), first_median(point, "throughput")
    if busy is None or wall is None or busy >= _BUSY * wall:
        return list(doubts)
    if len(others) < len(doubts) and (_value(point, DATA_SHARE) or 0.0) < _LOADING:
        return list(doubts)
    cause, advice = _cause(point, wall)
    return [*others, diagnostics.make("device_idle", busy=busy_share(point, busy, wall), cause=cause, advice=advice)]


def busy_share(point: Point, busy_seconds: float, wall_seconds: float) -> str:
    """Return the share of the loop's median call for which the device is busy, in words, with that of its mean call.

    The mean, which samples per second are by, is left out where it gives nearly the same percentage.
    """
    mean, share = loop_interval(point), busy_seconds / wall_seconds
    of_mean = busy_seconds / mean.value if mean else share
    with_mean = f" ({of_mean:.0%} of its mean call, which samples/s are by)" if abs(of_mean - share) > _ALIKE else ""
    return f"{share:.0%} of the loop's median call{with_mean}"


def _cause(point: Point, wall_seconds: float) -> tuple[str, str]:
    loading, host = (_value(point, name) for name in (DATA_SHARE, HOST_SECONDS))
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
