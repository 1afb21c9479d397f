"""Disturbances: diagnostics of other work on the device during a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic

#: Largest relative change of the clock during a measurement that is not reported.
_CLOCK_TOLERANCE = 0.02
#: A calibration kernel that reaches less than this share of the driver's clock shares the device.
_LEAST_CLOCK_SHARE = 0.85


def judge_device(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Diagnostic]:
    """Compare the states of a device before and after a measurement, each as `Device.state` returns it."""
    doubts = []
    first, last = before.get("canary_hertz"), after.get("canary_hertz")
    if first and last and abs(last / first - 1) > _CLOCK_TOLERANCE:
        change = last / first - 1
        doubts.append(diagnostics.make("clock_moved", before_mhz=first / 1e6, after_mhz=last / 1e6, change=change))
    reasons = dict.fromkeys([*(before.get("throttling") or []), *(after.get("throttling") or [])])
    if reasons:
        doubts.append(diagnostics.make("throttled", reasons=", ".join(reasons)))
    if evidence := _sharing(before, after):
        doubts.append(diagnostics.make("shared_device", evidence="; ".join(evidence)))
    return doubts


def _sharing(*states: Mapping[str, Any]) -> list[str]:
    """Evidence that other processes use the device."""
    others = max(state.get("processes") or 1 for state in states) - 1
    clocks = [(state.get("canary_hertz"), state.get("sm_clock_hertz")) for state in states]
    slowest = min((reached / nominal for reached, nominal in clocks if reached and nominal), default=1.0)
    evidence = [f"other processes on the device: {others}"] if others > 0 else []
    if slowest < _LEAST_CLOCK_SHARE:
        evidence.append(f"a calibration kernel ran at {slowest:.0%} of the clock that the driver reports")
    return evidence
