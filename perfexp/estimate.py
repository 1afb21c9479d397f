"""Estimate: how long measuring a plan may take, before it begins."""

from __future__ import annotations

from collections.abc import Collection

from perfexp import config
from perfexp.record import Key

#: What a window of energy takes before it begins, what looking into the layers of a point takes, and a profile.
_PLATEAU_SECONDS, _LAYERS_SECONDS, _PROFILE_SECONDS = 1.5, 4.0, 60.0
#: What ranks do together beside what is timed.
_STRETCHES_SECONDS = 4.0
#: How many blocks of the stopping rule a point has: one time or three, and the phases.
_SYNCHRONOUS_BLOCKS, _ASYNCHRONOUS_BLOCKS = 2, 4


def longest_seconds(plan: config.Plan, left: Collection[Key] | None = None) -> float | None:
    """About how long measuring a plan may take, or None where its stopping rule has no limit of time.

    Args:
        plan: to be measured.
        left: what has no result yet; all of it if not given.
    """
    timed, layers, profiles = (
        sum(left is None or key in left for key in keys)
        for keys in (plan.timed_keys(), plan.layer_keys(), plan.profile_keys())
    )
    longest = config.build(plan.stopping).longest_seconds() if timed else 0.0
    if longest is None or (plan.epochs and timed):
        return None
    blocks = _SYNCHRONOUS_BLOCKS if plan.gpu_name == "cpu" else _ASYNCHRONOUS_BLOCKS
    energy = (plan.probes.energy_seconds or 1.0) + _PLATEAU_SECONDS if plan.probes.energy else 0.0
    stretches = _STRETCHES_SECONDS if plan.ranks > 1 else 0.0
    return float(
        timed * (blocks * longest + energy + stretches) + layers * _LAYERS_SECONDS + profiles * _PROFILE_SECONDS
    )
