"""Estimate: how long what is left of a plan takes; every remaining time that is shown comes from here.

Plans are plain data: those of strangers are estimated too, and nothing that they name is run.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from perfexp.profilers import is_profile
from perfexp.records.record import Key, Status, is_layers

#: Until a worker has loaded torch and the model, and until a fresh process has its first prediction.
_LOADING_SECONDS, _COLD_START_SECONDS = 5.0, 5.0
#: What a window of energy takes before it begins, what looking into the layers of a point takes, and a profile.
_PLATEAU_SECONDS, _LAYERS_SECONDS, _PROFILE_SECONDS = 1.5, 4.0, 60.0
#: What ranks do together beside what is timed.
_STRETCHES_SECONDS = 4.0
#: How many blocks of the stopping rule a point has: one time or three, and the phases.
_SYNCHRONOUS_BLOCKS, _ASYNCHRONOUS_BLOCKS = 2, 4


class Measured(Protocol):
    """What counts of a point that has a result."""

    @property
    def key(self) -> Key: ...  # noqa: D102

    @property
    def status(self) -> Status: ...  # noqa: D102

    @property
    def wall_seconds(self) -> float | None: ...  # noqa: D102


def measured_seconds(results: Iterable[Measured]) -> list[float]:
    """How long those timed points took that were measured well.

    Args:
        results: points with a result.
    """
    return [
        result.wall_seconds
        for result in results
        if result.key.is_timed and result.status is Status.OK and result.wall_seconds is not None
    ]


def pace(seconds: Sequence[float]) -> float | None:
    """Seconds that a timed point takes; None where none has been measured.

    Args:
        seconds: wall time of each point measured so far.
    """
    return statistics.median(seconds) if seconds else None


def seconds_left(
    plan: Mapping[str, Any],
    left: Collection[Key],
    *,
    series_seconds: float | None,
    point_seconds: float | None = None,
) -> float | None:
    """About how long it takes to measure what is left, loading and cold start included; None where it is unknown.

    Args:
        plan: as plain data.
        left: what has no result yet.
        series_seconds: about how long the stopping rule lets one series take; None where it limits calls only.
        point_seconds: how long a timed point takes, where some of the plan have been measured.
    """
    timed = [key for key in left if key.is_timed]
    layers = [key for key in left if is_layers(key)]
    profiles = [key for key in left if is_profile(key)]
    cold_starts = len(left) - len(timed) - len(layers) - len(profiles)
    each = point_seconds if point_seconds is not None else _point_seconds(plan, series_seconds)
    if timed and each is None:
        return None
    workers = len({key.replicate for key in timed}) + len({key.replicate for key in layers})
    return (
        workers * _LOADING_SECONDS
        + len(timed) * (each or 0.0)
        + cold_starts * _COLD_START_SECONDS
        + len(layers) * _LAYERS_SECONDS
        + len(profiles) * _PROFILE_SECONDS
    )


def _point_seconds(plan: Mapping[str, Any], series_seconds: float | None) -> float | None:
    """About how long a timed point takes by its settings."""
    if series_seconds is None or plan.get("epochs"):
        return None
    gpu, probes = (node if isinstance(node := plan.get(name), Mapping) else {} for name in ("gpu", "probes"))
    blocks = _SYNCHRONOUS_BLOCKS if gpu.get("name") == "cpu" else _ASYNCHRONOUS_BLOCKS
    energy = (probes.get("energy_seconds") or 1.0) + _PLATEAU_SECONDS if probes.get("energy") else 0.0
    stretches = 0.0 if gpu.get("count", 1) == 1 else _STRETCHES_SECONDS
    return float(blocks * series_seconds + energy + stretches)
