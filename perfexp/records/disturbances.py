"""Disturbances: diagnostics for clock changes, throttling, other work, and a changed host pace."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import first_median
from perfexp.records.record import Point

#: Readings of the same clock state differ by up to this fraction, and by up to this many standard
#: deviations of reading noise. In 95 % of cases the range of 60 normal readings is below 6 of them.
_CLOCK_TOLERANCE, _NOISE_TOLERANCE = 0.01, 6.0
#: Most clock states in a message.
_NAMED_STATES = 3
#: Largest share of time that throttling may take without a diagnostic.
_THROTTLE_TOLERANCE = 0.01
#: A calibration kernel below this share of the driver's clock shares the device with other work.
_LEAST_CLOCK_SHARE = 0.85
#: By chance, a pipelined loop may take this factor longer than a loop that waits for each call.
_LOOP_TOLERANCE = 1.1


def judge(
    before: Mapping[str, Any], after: Mapping[str, Any], facts: Mapping[str, Any]
) -> list[Diagnostic]:
    """Return diagnostics, given a device's `state` before and after, and the point's facts."""
    doubts = [*judge_clocks([facts]), *_judge_throttling(facts)]
    if evidence := _sharing(before, after):
        doubts.append(diagnostics.make("shared_device", evidence="; ".join(evidence)))
    return doubts


def judge_pace(point: Point) -> list[Diagnostic]:
    """Return `pace_changed` if the pipelined loop is slower than waiting for each call."""
    pipelined = first_median(point, "throughput")
    waiting = first_median(point, "latency")
    if pipelined is None or waiting is None or pipelined <= _LOOP_TOLERANCE * waiting:
        return []
    return [
        diagnostics.make("pace_changed", pipelined_ms=1e3 * pipelined, waiting_ms=1e3 * waiting)
    ]


def confirmed(point: Point) -> list[Diagnostic]:
    """Return the stored diagnostics, without a `clock_moved` that the readings do not confirm."""
    if point.facts.get("clock_hertz") and not judge_clocks([point.facts]):
        return diagnostics.without(point.doubts, "clock_moved")
    return list(point.doubts)


def judge_clocks(processes: Sequence[Mapping[str, Any]]) -> list[Diagnostic]:
    """Return `clock_moved` if clocks differ after the blocks of device time.

    Args:
        processes: a point's facts from each process that measured it (see
            `perfexp.probes.conditions`).
    """
    clocks, noise = list[float](), 0.0
    for facts in processes:
        clocks += itertools.chain.from_iterable(facts.get("clock_hertz", {}).values())
        noise = max([noise, *facts.get("clock_noise", {}).values()])
    tolerance = _CLOCK_TOLERANCE + _NOISE_TOLERANCE * noise
    states: list[list[float]] = []
    for clock in sorted(clocks, reverse=True):
        if not states or states[-1][0] - clock > tolerance * states[-1][0]:
            states.append([])
        states[-1].append(clock)
    if len(states) < 2:
        return []
    named = sorted(states, key=len, reverse=True)[:_NAMED_STATES]
    texts = [f"{median(state) / 1e6:.0f} MHz after {len(state)}" for state in named]
    text = f"{', '.join(texts)} of {len(clocks)} blocks"
    if len(states) > _NAMED_STATES:
        text += ", others after the rest"
    change = 1 - min(clocks) / max(clocks)
    return [diagnostics.make("clock_moved", change=change, states=text)]


def _judge_throttling(facts: Mapping[str, Any]) -> list[Diagnostic]:
    """Return `throttled` for the series with the largest throttled share of its time."""
    most, found = _THROTTLE_TOLERANCE, list[Diagnostic]()
    for series, reasons in facts.get("throttled_share", {}).items():
        # several reasons may hold at the same time
        if reasons and max(reasons.values()) > most:
            most = max(reasons.values())
            ordered = ", ".join(sorted(reasons, key=lambda reason: -reasons[reason]))
            found = [diagnostics.make("throttled", share=most, series=series, reasons=ordered)]
    return found


def _sharing(*states: Mapping[str, Any]) -> list[str]:
    others = max(state.get("processes") or 1 for state in states) - 1
    slowest = 1.0
    for state in states:
        reached, nominal = state.get("canary_hertz"), state.get("sm_clock_hertz")
        if reached and nominal:
            slowest = min(slowest, reached / nominal)
    evidence = []
    if others > 0:
        evidence.append(f"other processes on the device: {others}")
    if slowest < _LEAST_CLOCK_SHARE:
        speed = f"{slowest:.0%} of the clock that the driver reports"
        evidence.append(f"a calibration kernel ran at {speed}")
    return evidence
