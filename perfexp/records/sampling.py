"""Sampling: diagnostics that a point's samples raise about their own statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from perfexp.records import diagnostics, units
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import first_median, first_median_interval, summary_of
from perfexp.records.record import Point
from perfexp.statistics import estimators
from perfexp.statistics.moderated import Repeats

#: Spread between processes up to which no note appears, in half-widths within a process and as a
#: fraction.
_PROCESSES_DIFFER, _PROCESSES_FLOOR = 1.5, 0.01
#: Processes needed for a trend (fewer than 2 % of runs show it by chance), and its smallest change.
_TREND_PROCESSES, _TREND_FLOOR = 5, 0.005
#: A process gets a warning if its median differs from the others by this factor, up or down.
_PROCESS_APART = 1.5
#: How to get more samples, by the reason why a block ended.
_MORE_SAMPLES = {
    "fixed": (
        "use more calls (stopping.measure=N; ITERATIONS of perfexp train-speed) or stopping=normal"
    ),
    "max_seconds": "use more time (stopping.max_seconds=N)",
    "max_calls": "use more calls (stopping.max_calls=N)",
    "epochs": "use more epochs, or more data",
}


def judge(point: Point, kind: str | None) -> list[Diagnostic]:
    """Return diagnostics about one process's samples: drift, and a wide interval."""
    series = point.find_series(kind) if kind else None
    if series is None or not series.measured:
        return []
    time = summary_of(series, ())
    found = []
    if time.drift is not None:
        found.append(_moved(time.drift.relative, "from the first third of the samples to the last"))
    target, achieved = series.stop.target if series.stop else None, time.median.relative_half_width
    effective, reason = time.n / time.tau, series.stop.reason if series.stop else None
    narrow = (
        estimators.FEW_TOO_NARROW if effective < estimators.FEW and reason != "precision" else 1.0
    )
    if achieved is None or (target is not None and narrow * achieved > target):
        reached = _reached(achieved, target)
        advice = _MORE_SAMPLES.get(
            reason or "", "use more time or calls (stopping.max_seconds, stopping.measure)"
        )
        whole = int(effective)
        found.append(
            diagnostics.make(
                "too_few_samples",
                n=time.n,
                effective=whole,
                width=achieved,
                reached=reached,
                advice=advice,
            )
        )
    return found


def judge_processes(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    """Return diagnostics if process medians differ beyond their intervals or follow a trend.

    A single process far off is named, if the others agree with each other.
    """
    return [*_trend(processes, kind), *_differences(processes, kind)]


def _trend(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    medians = [
        first_median(point, kind) or 0.0
        for point in sorted(processes, key=lambda point: point.key.replicate)
    ]
    steps = {
        math.copysign(1, later - earlier) if later != earlier else 0
        for earlier, later in pairwise(medians)
    }
    if len(medians) < _TREND_PROCESSES or not min(medians) or steps not in ({1}, {-1}):
        return []
    relative = medians[-1] / medians[0] - 1
    if abs(relative) < _TREND_FLOOR:
        return []
    return [_moved(relative, f"in one direction over {len(medians)} processes")]


def _moved(relative: float, between: str) -> Diagnostic:
    return diagnostics.make(
        "drift", relative=relative, changes=f"the median moved by {relative:+.1%} {between}"
    )


def _differences(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    found = {point.key.replicate: first_median_interval(point, kind) for point in processes}
    intervals = {
        number: interval for number, interval in found.items() if interval and interval.value > 0
    }
    values = {number: interval.value for number, interval in intervals.items()}
    component = Repeats(values=tuple(values.values())).own if values else None
    within = [interval.relative_half_width or 0.0 for interval in intervals.values()]
    if component is None or component.spread <= max(
        _PROCESSES_DIFFER * max(within), _PROCESSES_FLOOR
    ):
        return []
    others = {
        number: median(value for other, value in values.items() if other != number)
        for number in values
    }
    number = max(
        values,
        key=lambda number: (
            round(abs(math.log(values[number] / others[number])), 9),
            values[number],
        ),
    )
    ratio = values[number] / others[number]
    rest = [value for other, value in values.items() if other != number]
    if max(ratio, 1 / ratio) >= _PROCESS_APART > max(rest) / min(rest):
        own, typical = (
            units.format_seconds(seconds, 3) for seconds in (values[number], others[number])
        )
        return [
            diagnostics.make(
                "process_apart", ratio=ratio, median=own, number=number + 1, others=typical
            )
        ]
    medians = ", ".join(units.format_seconds(value, 3) for value in values.values())
    return [
        diagnostics.make(
            "processes_differ", processes=len(values), medians=medians, spread=component.spread
        )
    ]


def _reached(achieved: float | None, target: float | None) -> str:
    if achieved is None:
        return "too few for an interval of their own"
    if target is None:
        return f"±{achieved:.1%}"
    if achieved <= target:
        return f"±{achieved:.1%}, which with few effective samples may be several times too narrow"
    return f"±{achieved:.1%} instead of ±{target:.1%}"
