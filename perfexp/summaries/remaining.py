"""Remaining time: an estimate for points without a result; every remaining time that is shown comes from here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

from perfexp.profilers import is_profile
from perfexp.records import units
from perfexp.records.record import Key, Point, Status, is_layers, without_replicate

#: Seconds until a worker has loaded torch and the model, and of a cold start.
_LOADING_SECONDS, _COLD_START_SECONDS = 5.0, 5.0
#: Seconds of timing a point's layers, and of a profile.
_LAYERS_SECONDS, _PROFILE_SECONDS = 4.0, 60.0


class Result(msgspec.Struct, kw_only=True):
    """A line of points.jsonl without its samples, which are most of it."""

    key: Key
    status: Status
    wall_seconds: float | None = None


def measured_seconds(results: Iterable[Result | Point]) -> list[float]:
    """Wall time of each timed point that succeeded."""
    return [
        result.wall_seconds
        for result in results
        if result.key.is_timed and result.status is Status.OK and result.wall_seconds is not None
    ]


def median_seconds(seconds: Sequence[float]) -> float | None:
    """Median, or None of nothing."""
    return statistics.median(seconds) if seconds else None


def counted_points(*runs: Iterable[Key]) -> str:
    """Return the timed points of all runs: `1 point in 3 processes`, `10 points, 3 of them in 3 processes`."""
    processes = Counter((run, without_replicate(key)) for run, keys in enumerate(runs) for key in keys if key.is_timed)
    several = [number for number in processes.values() if number > 1]
    points = units.counted(len(processes), "point")
    if not several:
        return points
    some = "" if len(several) == len(processes) else f", {len(several)} of them"
    return f"{points}{some} in {max(several)} processes"


def seconds_left(left: Collection[Key], point_seconds: float | None) -> float | None:
    """Estimate the time of measuring points, loading and cold starts included, by that of one; None if unknown."""
    timed = [key for key in left if key.is_timed]
    layers = [key for key in left if is_layers(key)]
    num_profiles = sum(map(is_profile, left))
    if timed and point_seconds is None:
        return None
    workers = len({key.replicate for key in timed}) + len({key.replicate for key in layers})
    return (
        workers * _LOADING_SECONDS
        + len(timed) * (point_seconds or 0.0)
        + (len(left) - len(timed) - len(layers) - num_profiles) * _COLD_START_SECONDS
        + len(layers) * _LAYERS_SECONDS
        + num_profiles * _PROFILE_SECONDS
    )
