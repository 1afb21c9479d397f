"""Disturbances: doubts about what went on beside a measurement, on its device and its host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfexp.records.record import Diagnostic

#: Other processes may use this share of the machine's cores before a point says so.
BUSY_SHARE = 0.1
#: A clock may move by this fraction from before a point to after it before the point says so.
_CLOCK_TOLERANCE = 0.02
#: A spin of known cycles may show this fraction of the clock that the driver names before others are suspected.
_CANARY_SHARE = 0.85


def of_device(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Diagnostic]:
    """What the states of a device before and after a point say against it.

    Args:
        before: as `Device.state` gives it.
        after: likewise.
    """
    found = [_clock_moved(before.get("canary_hertz"), after.get("canary_hertz")), _throttled(before, after)]
    return [doubt for doubt in (*found, _shared(before, after)) if doubt is not None]


def _clock_moved(before: float | None, after: float | None) -> Diagnostic | None:
    if not before or not after or abs(after / before - 1) <= _CLOCK_TOLERANCE:
        return None
    return Diagnostic(
        code="clock_moved",
        detail=f"the device's clock went from {before / 1e6:.0f} to {after / 1e6:.0f} MHz while this was measured "
        f"({after / before - 1:+.1%})",
        remedy="a longer warm-up (stopping.warmup_seconds); compare cycles_per_call, which the clock does not change",
    )


def _throttled(before: Mapping[str, Any], after: Mapping[str, Any]) -> Diagnostic | None:
    reasons = list(dict.fromkeys([*(before.get("throttling") or []), *(after.get("throttling") or [])]))
    if not reasons:
        return None
    return Diagnostic(
        code="throttled",
        detail=f"the driver slowed the device down: {', '.join(reasons)}",
        remedy="let it cool, or read the figure as one under this limit; perfexp changes no limits",
    )


def _shared(before: Mapping[str, Any], after: Mapping[str, Any]) -> Diagnostic | None:
    others = max(state.get("processes") or 1 for state in (before, after)) - 1
    shares = [
        state["canary_hertz"] / state["sm_clock_hertz"]
        for state in (before, after)
        if state.get("canary_hertz") and state.get("sm_clock_hertz")
    ]
    slowest = min(shares, default=1.0)
    if others <= 0 and slowest >= _CANARY_SHARE:
        return None
    seen = [f"processes on the device beside this one: {others}"] if others > 0 else []
    if slowest < _CANARY_SHARE:
        seen.append(f"a spin of known cycles ran at {slowest:.0%} of the clock that the driver names")
    return Diagnostic(
        code="shared_device",
        detail="; ".join(seen),
        remedy="measure when nobody else uses the device",
    )


def busy_host(other_cores: float, cores: int) -> Diagnostic:
    """Other processes worked while a point was measured.

    Args:
        other_cores: cores' worth of time that they used.
        cores: of the machine.
    """
    return Diagnostic(
        code="busy_host",
        detail=f"other processes used {other_cores:.1f} of {cores} cores while this was measured",
        remedy="end other work on this machine, then measure again",
    )


def loader_competes(workers: int, threads: int, cores: int) -> Diagnostic:
    """The processes that load pictures and the model's threads want more cores than there are.

    Args:
        workers: processes of the loader.
        threads: of the model's operations.
        cores: of the machine.
    """
    return Diagnostic(
        code="loader_competes",
        detail=f"{workers} {'process that loads' if workers == 1 else 'processes that load'} pictures and {threads} "
        f"thread{'' if threads == 1 else 's'} of the model share {cores} core{'' if cores == 1 else 's'}: each slows "
        "the other down",
        remedy="fewer threads for the model (execution.threads=N), or fewer processes (data.workers=0 loads between "
        "the calls)",
    )
