"""Decide how many processes a run needs for its stopping rule's precision.

Times differ between processes, so a run repeats its points in further processes until the interval
of the mean over processes is narrow enough.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from statistics import median

from perfexp.records.record import Key, Point, Status, without_replicate
from perfexp.records.summary import row
from perfexp.timing.stopping import StoppingRule, measurements


def wanted(results: Collection[Point], rule: StoppingRule, planned: Set[Key]) -> int:
    """Return a run's process count: one more than finished, until its times are precise.

    Each point's representative time counts: the device time if there is one, otherwise the latency.
    `Plan.processes_by` calls it after each process.

    Args:
        results: points measured so far.
        rule: stopping rule with the target (relative half-width), a budget in seconds, and limits.
        planned: points per process; a process counts after measuring all of them.
    """
    of_process: dict[int, dict[Key, Point]] = {}
    for point in results:
        if point.key.is_timed and point.status is not Status.INTERRUPTED:
            of_process.setdefault(point.key.replicate, {})[without_replicate(point.key)] = point
    done = 0
    while planned and planned <= of_process.get(done, {}).keys():
        done += 1
    if done < rule.processes or rule.target is None:
        return rule.processes
    finished = [of_process[number] for number in range(done)]
    target = rule.target
    if all(_is_precise([points[key] for points in finished], target) for key in planned):
        return done
    process_seconds = median(sum(_seconds(points[key]) for key in planned) for points in finished)
    if (done + 1) * process_seconds <= rule.budget_seconds * measurements(len(planned)):
        return min(done + 1, rule.most_processes)
    return done


def _is_precise(points: list[Point], target: float) -> bool:
    """Return whether further processes would not help: a narrow interval, or no time at all.

    Args:
        points: the same point in each process.
        target: relative half-width of the interval.
    """
    if points[0].status is not Status.OK:
        return True
    pooled = row(points, ())
    if pooled.time_kind is None:
        return True
    half_width = pooled.figures[pooled.time_kind].without_server().half_width
    return half_width is not None and half_width <= target


def _seconds(point: Point) -> float:
    """Return the seconds that a point took; a process's first point includes the start-up."""
    return (point.wall_seconds or 0.0) + float(point.facts.get("start_seconds") or 0.0)
