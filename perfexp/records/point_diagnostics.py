"""Point diagnostics: reasons to distrust a point's times, found in its facts and samples.

The process that measures a point calls `judge` right afterwards and stores the result. The other
functions compute diagnostics from stored samples each time a record is analyzed (`summary.row`),
so older records get today's rules. A process is one of the repetitions of a point (a replicate).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from statistics import median
from typing import Any

from perfexp.records import diagnostics, units
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.point_times import (
    DEVICE_TIMES,
    first_median,
    first_median_interval,
    loop_interval,
    summary_of,
)
from perfexp.records.quantities import DATA_SHARE, HOST_SECONDS
from perfexp.records.record import Point
from perfexp.statistics import estimators
from perfexp.statistics.moderated import Repeats

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

#: A device that is busy for this share of the loop needs no diagnostic.
_BUSY = 0.8
#: The host sets the pace if issuing the calls takes this share of the loop.
_HOST_BOUND = 0.9
#: Above this share, the host was slower when it issued calls alone than in the loop.
_HOST_CHANGED = 1.1
#: Loading is named as the cause if it takes this share of a call.
_LOADING = 0.1
#: Difference between two shares of the loop that is too small to report.
_ALIKE = 0.02
_FASTER_LAUNCHES = "larger batch_size, execution.cuda_graph=true or execution=compile"
_FASTER_LOADING = "load faster (data.workers=N), or leave loading out (data=synthetic)"

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
_MORE_TIME = "use more time or calls (stopping.max_seconds, stopping.measure)"


def judge(
    before: Mapping[str, Any], after: Mapping[str, Any], facts: Mapping[str, Any]
) -> list[Diagnostic]:
    """Return diagnostics for clock changes, throttling and other work on the device.

    The measuring procedure stores them with each successful point. A race between convolution
    engines calls it without device states to learn whether its own times are steady.

    Args:
        before: `Device.state()` before the point was measured; empty if unknown.
        after: `Device.state()` afterwards.
        facts: the point's facts, with those from `perfexp.timing.conditions`.
    """
    doubts = [*judge_clocks([facts]), *_judge_throttling(facts)]
    if evidence := _evidence_of_sharing(before, after):
        doubts.append(diagnostics.make("shared_device", evidence="; ".join(evidence)))
    return doubts


def judge_pace(point: Point) -> list[Diagnostic]:
    """Return `pace_changed` if the pipelined loop is slower than waiting for each call.

    Pipelining can only save time, so the host must have been slower during one of the two loops.
    """
    pipelined = first_median(point, "throughput")
    waiting_seconds = first_median(point, "latency")
    if (
        pipelined is None
        or waiting_seconds is None
        or pipelined <= _LOOP_TOLERANCE * waiting_seconds
    ):
        return []
    return [
        diagnostics.make(
            "pace_changed", pipelined_ms=1e3 * pipelined, waiting_ms=1e3 * waiting_seconds
        )
    ]


def confirmed(point: Point) -> list[Diagnostic]:
    """Return the stored diagnostics, without a `clock_moved` that the readings do not confirm.

    Earlier versions stored `clock_moved` under stricter limits. The readings are in the facts.
    """
    if point.facts.get("clock_hertz") and not judge_clocks([point.facts]):
        return diagnostics.without(point.doubts, "clock_moved")
    return list(point.doubts)


def judge_clocks(processes: Sequence[Mapping[str, Any]]) -> list[Diagnostic]:
    """Return `clock_moved` if clocks differ after the blocks of device time.

    Clocks within the tolerance are one clock state; several states give the diagnostic.

    Args:
        processes: a point's facts from each process that measured it. `clock_hertz` has the
            readings by series, and `clock_noise` their relative standard deviation.
    """
    clocks, noise = list[float](), 0.0
    for facts in processes:
        clocks += chain.from_iterable(facts.get("clock_hertz", {}).values())
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
    """Return `throttled` for the series with the largest throttled share of its time.

    `facts["throttled_share"]` has, by series and reason, the share of time from 0 to 1.
    """
    most, throttled = _THROTTLE_TOLERANCE, list[Diagnostic]()
    for series, reasons in facts.get("throttled_share", {}).items():
        # several reasons may hold at the same time
        if reasons and max(reasons.values()) > most:
            most = max(reasons.values())
            ordered = ", ".join(sorted(reasons, key=lambda reason: -reasons[reason]))
            throttled = [diagnostics.make("throttled", share=most, series=series, reasons=ordered)]
    return throttled


def _evidence_of_sharing(*states: Mapping[str, Any]) -> list[str]:
    """Return signs of other work on the device: its processes, and a slow calibration kernel.

    The calibration kernel takes a known number of cycles, so its duration gives the clock that it
    reached (`canary_hertz`). Below the driver's clock, the device was shared.
    """
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


def with_device_idle(point: Point, doubts: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Return the diagnostics with `device_idle` if the pipelined loop leaves the device idle.

    A `device_idle` from a record of an earlier version is replaced. Without a device time or a
    loop, the diagnostics are returned as they are.
    """
    busy, wall = first_median(point, *DEVICE_TIMES), first_median(point, "throughput")
    if busy is None or wall is None:
        return list(doubts)
    if busy >= _BUSY * wall and point.facts.get("bound_by") != "launch":
        return list(doubts)
    cause, advice = _cause_of_idling(point, wall)
    of_mean = _idle_share_of_mean(point, busy, wall)
    idle = max(1 - busy / wall, 0.0)
    return [
        *diagnostics.without(doubts, "device_idle"),
        diagnostics.make("device_idle", idle=idle, of_mean=of_mean, cause=cause, advice=advice),
    ]


def _idle_share_of_mean(point: Point, busy_seconds: float, wall_seconds: float) -> str:
    """Return the mean call's idle share in words, unless it is close to the median call's."""
    mean = loop_interval(point)
    if mean is None or abs(busy_seconds / mean.value - busy_seconds / wall_seconds) <= _ALIKE:
        return ""
    return f" ({1 - busy_seconds / mean.value:.0%} of its mean call, which samples/s are by)"


def _cause_of_idling(point: Point, wall_seconds: float) -> tuple[str, str]:
    """Return why the device idles, and advice: data loading, or the host that issues the calls.

    Args:
        wall_seconds: median seconds per call of the pipelined loop.
    """
    metrics = {metric.name: metric.value for metric in point.metrics}
    loading, host = metrics.get(DATA_SHARE), metrics.get(HOST_SECONDS)
    if loading is not None and loading >= _LOADING:
        return f"loading takes {loading:.0%} of a call", _FASTER_LOADING
    if host is None:
        return "the host's time to issue the calls is unknown", _FASTER_LAUNCHES
    share = host / wall_seconds
    if share > _HOST_CHANGED:
        cause = (
            f"issuing the calls took {share:.1f} times the loop's time when it was measured "
            "alone, so the pace of the host changed in between"
        )
        return cause, _FASTER_LAUNCHES
    verdict = "it sets the pace" if share >= _HOST_BOUND else "neither sets the pace alone"
    cause = f"the host needs {min(share, 1.0):.0%} to issue the calls: {verdict}"
    return cause, _FASTER_LAUNCHES


def judge_samples(point: Point, kind: str | None) -> list[Diagnostic]:
    """Return diagnostics about one process's samples: drift, and a wide interval.

    Args:
        kind: series to judge, the point's representative time; None if nothing was measured.
    """
    series = point.find_series(kind) if kind else None
    if series is None or not series.measured:
        return []
    time = summary_of(series, ())
    raised = []
    if time.drift is not None:
        raised.append(
            _moved(time.drift.relative, "from the first third of the samples to the last")
        )
    target, reason = None, ""
    if series.stop:
        target, reason = series.stop.target, series.stop.reason
    achieved = time.median.relative_half_width
    # correlated samples count less: tau of them are worth an independent sample
    effective = time.n / time.tau
    # an interval from few effective samples may be this many times too narrow
    narrow = 1.0
    if effective < estimators.FEW and reason != "precision":
        narrow = estimators.FEW_TOO_NARROW
    if achieved is None or (target is not None and narrow * achieved > target):
        raised.append(
            diagnostics.make(
                "too_few_samples",
                n=time.n,
                effective=int(effective),
                width=achieved,
                reached=_reached(achieved, target),
                advice=_MORE_SAMPLES.get(reason, _MORE_TIME),
            )
        )
    return raised


def _reached(achieved: float | None, target: float | None) -> str:
    """Describe the reached relative half-width beside the requested one, as fractions."""
    if achieved is None:
        return "too few for an interval of their own"
    if target is None:
        return f"±{achieved:.1%}"
    if achieved <= target:
        return f"±{achieved:.1%}, which with few effective samples may be several times too narrow"
    return f"±{achieved:.1%} instead of ±{target:.1%}"


def judge_processes(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    """Return diagnostics about the medians of the processes that measured a point.

    They are `drift` for a trend over the processes, and `process_apart` or `processes_differ` for
    medians that differ beyond the intervals within the processes.

    Args:
        kind: series with the representative time.
    """
    return [*_trend(processes, kind), *_differences(processes, kind)]


def _trend(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    """Return `drift` if the process medians only rise, or only fall, in measured order.

    Such a run has not settled.
    """
    in_order = sorted(processes, key=lambda point: point.key.replicate)
    medians = [first_median(point, kind) or 0.0 for point in in_order]
    # signs of the changes from process to process: 1, 0 or -1
    steps = {(later > earlier) - (later < earlier) for earlier, later in pairwise(medians)}
    if len(medians) < _TREND_PROCESSES or not min(medians) or steps not in ({1}, {-1}):
        return []
    relative = medians[-1] / medians[0] - 1
    if abs(relative) < _TREND_FLOOR:
        return []
    return [_moved(relative, f"in one direction over {len(medians)} processes")]


def _moved(relative: float, between: str) -> Diagnostic:
    """Return `drift` for a relative change of the median, for example 0.02 for +2 %."""
    return diagnostics.make(
        "drift", relative=relative, changes=f"the median moved by {relative:+.1%} {between}"
    )


def _differences(processes: Sequence[Point], kind: str) -> list[Diagnostic]:
    """Return a diagnostic if the process medians spread beyond their intervals.

    It is `process_apart` if one process differs by half and the others agree with each other,
    otherwise `processes_differ`.
    """
    medians, within = dict[int, float](), 0.0
    for point in processes:
        interval = first_median_interval(point, kind)
        if interval and interval.value > 0:
            medians[point.key.replicate] = interval.value
            within = max(within, interval.relative_half_width or 0.0)
    component = Repeats(values=tuple(medians.values())).own if medians else None
    if component is None or component.spread <= max(_PROCESSES_DIFFER * within, _PROCESSES_FLOOR):
        return []
    # per process: distance from the others (of equal distances the slower counts as apart)
    distances = list[tuple[float, float, int, list[float]]]()
    for number, value in medians.items():
        others = [other for replicate, other in medians.items() if replicate != number]
        distance = round(abs(math.log(value / median(others))), 9)
        distances.append((distance, value, number, others))
    _, value, number, others = max(distances, key=lambda process: process[:2])
    ratio = value / median(others)
    if max(ratio, 1 / ratio) >= _PROCESS_APART > max(others) / min(others):
        diagnostic = diagnostics.make(
            "process_apart",
            ratio=ratio,
            median=units.format_seconds(value, 3),
            number=number + 1,
            others=units.format_seconds(median(others), 3),
        )
    else:
        texts = [units.format_seconds(seconds, 3) for seconds in medians.values()]
        diagnostic = diagnostics.make(
            "processes_differ",
            processes=len(medians),
            medians=", ".join(texts),
            spread=component.spread,
        )
    return [diagnostic]
