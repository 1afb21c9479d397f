"""Dry run (`--dry-run`): print points, estimated time and folder without creating anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from perfexp.devices import auto
from perfexp.plan import config
from perfexp.records import units
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, missing, read_points
from perfexp.records.subject import headline, one_line, subject
from perfexp.report.console import Console
from perfexp.report.run_status import counted_points, measured_seconds
from perfexp.run.preparation import Assignment
from perfexp.run.sweep_run import SweepRun

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

    Also warn if energy is requested and the device has no meter. `main` calls it instead of
    measuring.

    Args:
        assignments: composed runs.
        sweep_run: the sweep; None for a single run.
        is_here: whether this machine would measure, so that its meters count.
    """
    left, times = zip(*map(_left, assignments), strict=True)
    total = _text(left, None if None in times else sum(filter(None, times)))
    total += ", more if calls are slow" if any(left) and None not in times else ""
    if sweep_run is None:
        plan, about = assignments[0].plan, subject(assignments[0].plain)
        title = f"{headline(about, plan.keys())} · gpu={plan.gpu_name}"
        lines = [title, total + plan.scope]
        folders = [assignments[0].folder]
    else:
        lines = [f"sweep over {sweep_run.sweep.name}"]
        folders = [sweep_run.paths.root]
        for assignment, keys, seconds in zip(assignments, left, times, strict=True):
            if len(assignments) <= _MOST_LINES:
                lines.append(f"{assignment.name}: {_text([keys], seconds)}")
            folders.append(assignment.folder.parent.absolute())
        lines.append(f"{units.counted(len(assignments), 'run')}, {total}")
    into = ", ".join(f"{folder}{os.sep}" for folder in dict.fromkeys(folders))
    title, *details = map(one_line, (*lines, f"into {into}"))
    console.note(title)
    for detail in details:
        console.note(f"  {detail}")
    console.note("Nothing has been measured.")
    reasons = dict[str, None]()
    for assignment in assignments:
        if is_here and assignment.plan.probes.energy:
            reasons[_why_no_energy(assignment.plan)] = None
    for reason in filter(None, reasons):
        console.warning(
            f"no energy would be measured, {reason} (meter_missing)\n"
            "help: fix what is named (perfexp doctor checks it), or set probes.energy=false"
        )


def _why_no_energy(plan: config.Plan) -> str:
    """Return why the device has no meter.

    Empty if it has a meter, or if that is unknown without starting the device.
    """
    known_targets = ("perfexp.devices.auto.", "perfexp.devices.cpu.", "perfexp.devices.cuda.")
    if not str(plan.gpu["_target_"]).startswith(known_targets):
        return ""
    first = plan.gpu.get("index") or 0
    meters = auto.predicted_meters(plan.gpu_name, range(first, first + plan.devices))
    if meters is None or meters.meters:
        return ""
    return meters.reason


def _left(assignment: Assignment) -> tuple[Collection[Key], float | None]:
    """Return the points without a result, and their estimated time in seconds; None if unknown.

    Earlier results from the same run improve the estimate.
    """
    keys, results = assignment.plan.keys(), read_points(RunPaths(assignment.folder).points)
    left = keys if assignment.overwrites else missing(keys, results)
    return left, assignment.seconds(left, measured_seconds(results))


def _text(left: Sequence[Collection[Key]], seconds: float | None) -> str:
    """Return the number of points and the time as text.

    Args:
        left: points without a result, by run.
        seconds: estimated time; None if unknown.
    """
    points = counted_points(*left)
    if seconds is None:
        return f"{points}, time unknown"
    if not any(left):
        return "nothing is left to measure"
    return f"{points}, about {units.format_seconds(seconds, 2)}"
