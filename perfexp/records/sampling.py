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
    target, reason = None, ""
    if series.stop:
        target, reason = series.stop.target, series.stop.reason
    achieved = time.median.relative_half_width
    effective = time.n / time.tau
    narrow = 1.0
    if effective < estimators.FEW and reason != "precision":
        narrow = estimators.FEW_TOO_NARROW
    if achieved is None or (target is not None and narrow * achieved > target):
        more = "use more time or calls (stopping.max_seconds, stopping.measure)"
        found.append(
            diagnostics.make(
                "too_few_samples",
                n=time.n,
                effective=int(effective),
                width=achieved,
                reached=_reached(achieved, target),
                advice=_MORE_SAMPLES.get(reason, more),
            )
        )
    return found


def judge_processes(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    """Return diagnostics if process medians differ beyond their intervals or follow a trend.

    A single process far off is named, if the others agree with each other.
    """
    return [*_trend(processes, kind), *_differences(processes, kind)]


def _trend(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    in_order = sorted(processes, key=lambda point: point.key.replicate)
    medians = [first_median(point, kind) or 0.0 for point in in_order]
    steps = {(later > earlier) - (later < earlier) for earlier, later in pairwise(medians)}
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
    values, within = dict[int, float](), 0.0
    for point in processes:
        interval = first_median_interval(point, kind)
        if interval and interval.value > 0:
            values[point.key.replicate] = interval.value
            within = max(within, interval.relative_half_width or 0.0)
    component = Repeats(values=tuple(values.values())).own if values else None
    if component is None or component.spread <= max(_PROCESSES_DIFFER * within, _PROCESSES_FLOOR):
        return []
    apart = list[tuple[float, float, int, list[float]]]()
    for number, value in values.items():
        rest = [other for replicate, other in values.items() if replicate != number]
        apart.append((round(abs(math.log(value / median(rest))), 9), value, number, rest))
    _, value, number, rest = max(apart, key=lambda process: process[:2])
    ratio = value / median(rest)
    if max(ratio, 1 / ratio) >= _PROCESS_APART > max(rest) / min(rest):
        found = diagnostics.make(
            "process_apart",
            ratio=ratio,
            median=units.format_seconds(value, 3),
            number=number + 1,
            others=units.format_seconds(median(rest), 3),
        )
    else:
        medians = ", ".join(units.format_seconds(value, 3) for value in values.values())
        found = diagnostics.make(
            "processes_differ", processes=len(values), medians=medians, spread=component.spread
        )
    return [found]


def _reached(achieved: float | None, target: float | None) -> str:
    if achieved is None:
        return "too few for an interval of their own"
    if target is None:
        return f"±{achieved:.1%}"
    if achieved <= target:
        return f"±{achieved:.1%}, which with few effective samples may be several times too narrow"
    return f"±{achieved:.1%} instead of ±{target:.1%}"
