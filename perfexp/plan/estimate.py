"""Estimate: the time that a timed point takes by the settings of its plan."""

from __future__ import annotations

from perfexp.plan.config import Plan, build
from perfexp.stopping import StoppingRule

#: Seconds of an energy window before it starts, and of the work that ranks do together besides timing.
_PLATEAU_SECONDS, _COLLECTIVE_SECONDS = 1.5, 4.0
#: Blocks of the stopping rule in a point: one time or three, and the phases.
_SYNCHRONOUS_BLOCKS, _ASYNCHRONOUS_BLOCKS = 2, 4


def point_seconds(plan: Plan) -> float | None:
    """Estimate the time of one timed point; None if the settings do not limit it."""
    rule: StoppingRule = build(plan.stopping)
    series_seconds = rule.longest_seconds()
    if series_seconds is None or plan.epochs:
        return None
    blocks = _SYNCHRONOUS_BLOCKS if plan.gpu.get("name") == "cpu" else _ASYNCHRONOUS_BLOCKS
    energy = (plan.probes.energy_seconds or 1.0) + _PLATEAU_SECONDS if plan.probes.energy else 0.0
    return float(blocks * series_seconds + energy + (_COLLECTIVE_SECONDS if plan.ranks > 1 else 0.0))
