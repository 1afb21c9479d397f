"""Number of processes: how many a run needs for the precision that its stopping rule asks for, by results so far."""

from __future__ import annotations

from collections.abc import Collection, Set
from statistics import median

from perfexp.records.record import Key, Point, Status, without_replicate
from perfexp.records.summary import row
from perfexp.stopping import StoppingRule, measurements


def wanted(results: Collection[Point], rule: StoppingRule, planned: Set[Key]) -> int:
    """Return how many processes are to measure a run: one more than have, until its times are precise enough.

    The representative time of each point counts: of the device where it has a time of its own, otherwise the latency.

    Args:
        planned: the points that each process measures; those that have not measured all of them do not count.
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
    groups = [[of_process[number][key] for number in range(done)] for key in planned]
    if all(_is_precise(points, rule.target) for points in groups):
        return done
    one = median(
        sum(_seconds(of_process[number][key]) for key in planned) for number in range(done)
    )
    is_affordable = (done + 1) * one <= rule.budget_seconds * measurements(len(planned))
    return min(done + 1, rule.most_processes) if is_affordable else done


def _is_precise(points: list[Point], target: float) -> bool:
    """Whether further processes would not help: the interval is narrow enough, or the point has no time."""
    if points[0].status is not Status.OK:
        return True
    found = row(points, ())
    if found.time_kind is None:
        return True
    half_width = found.figures[found.time_kind].without_server().half_width
    return half_width is not None and half_width <= target


def _seconds(point: Point) -> float:
    """The time of a point, with that until its process began to measure if it was the first one."""
    return (point.wall_seconds or 0.0) + float(point.facts.get("start_seconds") or 0.0)
