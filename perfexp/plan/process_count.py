"""Number of processes: how many a run needs for the precision that its stopping rule asks for, by results so far."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

from perfexp.records.record import Key, Point, Status, without_replicate
from perfexp.records.summary import row
from perfexp.stopping import StoppingRule, measurements


def wanted(results: Collection[Point], rule: StoppingRule) -> int:
    """Return how many processes are to measure a run: one more than have, until its times are precise enough.

    The representative time of each point counts: of the device where it has a time of its own, otherwise the latency.
    Processes count that have a result of each point of the first one, so that an unfinished one changes nothing.
    """
    of_process: dict[int, dict[Key, Point]] = {}
    for point in results:
        if point.key.is_timed and point.status is not Status.INTERRUPTED:
            of_process.setdefault(point.key.replicate, {})[without_replicate(point.key)] = point
    keys = of_process.get(0, {}).keys()
    done = 0
    while keys and keys <= of_process.get(done, {}).keys():
        done += 1
    if done < rule.processes or rule.epsilon is None:
        return rule.processes
    groups = [[of_process[number][key] for number in range(done)] for key in keys]
    if all(_is_precise(points, rule.epsilon) for points in groups):
        return done
    one = median(sum(_seconds(point) for point in of_process[number].values()) for number in range(done))
    is_affordable = (done + 1) * one <= rule.budget_seconds * measurements(len(keys))
    return min(done + 1, rule.most_processes) if is_affordable else done


def _is_precise(points: list[Point], epsilon: float) -> bool:
    """Whether further processes would not help: the interval is narrow enough, or the point has no time."""
    if points[0].status is not Status.OK:
        return True
    found = row(points, ())
    half_width = found.figures[found.time_kind].half_width if found.time_kind in found.figures else 0.0
    return half_width is not None and half_width <= epsilon


def _seconds(point: Point) -> float:
    """The time of a point, with that until its process began to measure if it was the first one."""
    return (point.wall_seconds or 0.0) + float(point.facts.get("start_seconds") or 0.0)
