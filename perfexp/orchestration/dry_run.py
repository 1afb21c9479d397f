"""Dry run: print a command's points, estimated time and folder without creating anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from perfexp.devices import auto
from perfexp.orchestration.preparation import Assignment
from perfexp.orchestration.sweep_run import SweepRun
from perfexp.plan import config
from perfexp.records import units
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, missing, read_points
from perfexp.reports.console import Console
from perfexp.reports.run_status import counted_points, measured_seconds
from perfexp.summaries.subject import one_line, subject

#: Larger sweeps are summarized in one line.
_MOST_LINES = 20


def show(
    assignments: Sequence[Assignment],
    sweep_run: SweepRun | None,
    console: Console,
    *,
    is_here: bool = True,
) -> None:
    """Print points, time and folder for a run or for a sweep's runs.

    Also warn about missing energy meters.

    Args:
        is_here: whether this machine would measure, so that its meters count.
    """
    left, times = zip(*map(_left, assignments), strict=True)
    estimated = [seconds for seconds in times if seconds is not None]
    total = _text(left, sum(estimated) if len(estimated) == len(times) else None)
    if sweep_run is None:
        lines = [str(subject(assignments[0].plain)), total + assignments[0].plan.scope]
        folders = [assignments[0].folder]
    else:
        runs = zip(assignments, left, times, strict=True)
        listed = [
            f"{assignment.name}: {_text([keys], seconds)}" for assignment, keys, seconds in runs
        ]
        lines = [
            f"sweep over {sweep_run.sweep.name}",
            *(listed if len(listed) <= _MOST_LINES else []),
        ]
        lines += [f"{units.counted(len(listed), 'run')}, {total}"]
        folders = [
            sweep_run.paths.root,
            *(assignment.folder.parent.absolute() for assignment in assignments),
        ]
    into = ", ".join(f"{folder}{os.sep}" for folder in dict.fromkeys(folders))
    title, *details = map(one_line, (*lines, f"into {into}"))
    for line in (title, *(f"  {detail}" for detail in details), "Nothing has been measured."):
        console.note(line)
    for reason in dict.fromkeys(
        _why_no_energy(one.plan) for one in assignments if is_here and one.plan.probes.energy
    ):
        if reason:
            console.warning(
                f"no energy would be measured, {reason} (meter_missing)\n"
                "help: fix what is named (perfexp doctor checks it), or set probes.energy=false"
            )


def _why_no_energy(plan: config.Plan) -> str:
    """Return why the device has no meter.

    Empty if it has a meter, or if that is unknown without starting the device.
    """
    if not str(plan.gpu["_target_"]).startswith(
        tuple(f"perfexp.devices.{kind}." for kind in ("auto", "cpu", "cuda"))
    ):
        return ""
    first = plan.gpu.get("index") or 0
    found = auto.predicted_meters(plan.gpu_name, range(first, first + plan.devices))
    return "" if found is None or found.meters else found.reason


def _left(assignment: Assignment) -> tuple[Collection[Key], float | None]:
    """Return the points without a result, and their estimated time.

    Earlier results from the same run improve the estimate.
    """
    keys, points = assignment.plan.keys(), RunPaths(assignment.folder).points
    left = keys if assignment.overwrites else missing(keys, points)
    return left, assignment.seconds(left, measured_seconds(read_points(points)))


def _text(left: Sequence[Collection[Key]], seconds: float | None) -> str:
    points = counted_points(*left)
    if seconds is None:
        return f"{points}, time unknown"
    return (
        f"{points}, about {units.format_seconds(seconds, 2)}"
        if any(left)
        else "nothing is left to measure"
    )
