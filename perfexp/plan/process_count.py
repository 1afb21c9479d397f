"""How many processes a run needs for its stopping rule's precision, based on results so far."""

from __future__ import annotations

from collections.abc import Collection, Set
from statistics import median

from perfexp.records.record import Key, Point, Status, without_replicate
from perfexp.records.summary import row
from perfexp.timing.stopping import StoppingRule, measurements


def wanted(results: Collection[Point], rule: StoppingRule, planned: Set[Key]) -> int:
    """Return the process count for a run: one more than finished, until its times are precise.

    Each point's representative time counts: the device time if there is one, otherwise the latency.

    Args:
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
    for key in planned:
        if not _is_precise([points[key] for points in finished], rule.target):
            break
    else:
        return done
    one = median(sum(map(_seconds, map(points.__getitem__, planned))) for points in finished)
    is_affordable = (done + 1) * one <= rule.budget_seconds * measurements(len(planned))
    if is_affordable:
        return min(done + 1, rule.most_processes)
    return done


def _is_precise(points: list[Point], target: float) -> bool:
    """Return whether further processes would not help: a narrow interval, or no time at all."""
    if points[0].status is not Status.OK:
        return True
    found = row(points, ())
    if found.time_kind is None:
        return True
    half_width = found.figures[found.time_kind].without_server().half_width
    return half_width is not None and half_width <= target


def _seconds(point: Point) -> float:
    """Return a point's time; a process's first point includes the start-up."""
    return (point.wall_seconds or 0.0) + float(point.facts.get("start_seconds") or 0.0)
