"""Metric notes: the peaks, paces and processes of the figures beside the times, as lines below their table."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records import diagnostics, quantities, units
from perfexp.records.quantities import FOLLOWING, Pooled
from perfexp.records.record import Metric, Record
from perfexp.records.summary import Row, by_point, pooled_speedup
from perfexp.summaries import wording
from perfexp.summaries.subject import number_format

#: Least ratio of the first calls' memory to that of the timed ones for which there is a note.
_MORE_MEMORY = 1.02


def peaks(record: Record, rows: Sequence[Row], shown: Sequence[Metric]) -> list[str]:
    """Which peak each MFU is a share of, in which precision."""
    precisions = {number_format(row.key.precision.removeprefix("amp_"), [record.environment]) for row in rows}
    of = f"in {precisions.pop()}" if len(precisions) == 1 else "in the precision of each point"
    notes = dict.fromkeys(quantities.of(metric).note for metric in shown if metric.value is not None)
    text = "; ".join(filter(None, notes)).replace("{precision}", of)
    return [text] if text else []


def memories(rows: Sequence[Row]) -> list[str]:
    """How much more memory the first calls took than the timed ones, of the point with the largest difference."""
    found = [
        [wording.find_metric(row, name) for name in (quantities.FIRST_MEMORY, quantities.PEAK_MEMORY)] for row in rows
    ]
    known = [(first.value, peak.value) for first, peak in found if first and peak and first.value and peak.value]
    first, peak = max(known, key=lambda pair: pair[0] / pair[1], default=(0.0, 1.0))
    if first <= _MORE_MEMORY * peak:
        return []
    most = f"{'up to ' if len(rows) > 1 else ''}{units.format_bytes(first)} instead of {units.format_bytes(peak)}"
    return [f"memory is of the timed calls; the first calls, which choose kernels, took {most}"]


def estimated(shown: Sequence[Metric], kinds: Sequence[str]) -> list[str]:
    """Which metrics follow `≈` because their time or rate does, and that others are not measured themselves.

    Args:
        kinds: names of the points' representative times.
    """
    marked = {metric.name: metric for metric in shown if metric.estimated}
    derived = [name for name, metric in marked.items() if quantities.of(metric).pooled in FOLLOWING]
    titles = ", ".join(wording.metric_title(marked[name], kinds) for name in derived)
    notes = [f"≈ {titles}: computed from a figure that has ≈ itself"] if derived else []
    others = "others are " if derived else ""
    return notes + [f"≈ {others}estimated from what was measured, not itself measured"] * (len(marked) > len(derived))


def energies(rows: Sequence[Row], shown: Sequence[Metric]) -> list[str]:
    """Which loop's pace the energies belong to, and how far the scale of the meter is known."""
    names = {metric.name for metric in shown if metric.value is not None}
    notes = []
    if quantities.ENERGY in names:
        loop, queued = (_pace(rows, name) for name in (quantities.CALL_SECONDS, quantities.QUEUED_SECONDS))
        is_queued = quantities.QUEUED_ENERGY in names
        busy = f"; queued: of CUDA graphs that keep the device busy{queued}" if is_queued else ""
        notes.append(f"energies are of a loop of calls back to back{loop}{busy}")
    scales = [metric.value for row in rows for metric in row.metrics if metric.name == quantities.METER_ACCURACY]
    if known := [scale for scale in scales if scale is not None]:
        scale = wording.percent(max(known))
        notes.append(f"± of energies is repeatability; the scale of the board's meter is known to about ±{scale}")
    return notes


def _pace(rows: Sequence[Row], name: str) -> str:
    """The time of a call during metering; empty for several points."""
    metric = wording.find_metric(rows[0], name) if len(rows) == 1 else None
    return "" if metric is None or metric.value is None else f", {units.format_seconds(metric.value)} per call"


def speedups(record: Record, rows: Sequence[Row], shown: Sequence[Metric]) -> list[str]:
    """Which speedups are of one process beside times of several, and whether the loop leaves their device idle."""
    names = {metric.name for metric in shown if _is_speedup(metric) and metric.value is not None}
    groups, notes = by_point(record), []
    having = [row for row in rows if any(metric.name in names for metric in row.metrics)]
    several = {(row.key, one.name) for row in having if row.processes > 1 for one in row.metrics if one.name in names}
    single = {name for key, name in several if pooled_speedup(groups[key], name) is None}
    if single:
        pooled = {name for _, name in several} - single
        are_promised = bool(pooled) and all(("promised" in name) == (name in pooled) for name in pooled | single)
        but = ", but for the promised ones," if are_promised else ""
        notes.append(f"speedups{but} are of the first process, ± of its calls: another one may choose other algorithms")
    if any(diagnostics.has(row.doubts, "device_idle") for row in having):
        notes.append("speedups are of the time on the device: a loop that leaves it idle gains less, or nothing")
    return notes


def _is_speedup(metric: Metric) -> bool:
    return quantities.of(metric).pooled is Pooled.SPEEDUP
