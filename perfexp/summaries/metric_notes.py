"""Metric notes: lines below the metrics table that define its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfexp.records import diagnostics, quantities
from perfexp.records.quantities import FOLLOWING, Pooled
from perfexp.records.record import Metric
from perfexp.records.summary import Row, by_point, pooled_speedup
from perfexp.summaries import wording
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.subject import number_format


def peaks(analysis: Analysis, shown: Sequence[Metric]) -> Iterator[str]:
    """Yield the peaks that MFUs are relative to, with the precision."""
    names = {row.key.precision.removeprefix("amp_") for row in analysis.rows}
    precisions = {number_format(name, [analysis.record.environment]) for name in names}
    of = f"in {precisions.pop()}" if len(precisions) == 1 else "in the precision of each point"
    notes = dict.fromkeys(quantities.of(metric).note for metric in shown)
    if text := "; ".join(filter(None, notes)):
        yield text.replace("{precision}", of)


def estimated(shown: Sequence[Metric], kinds: Sequence[str]) -> Iterator[str]:
    """Yield why metrics are marked `≈`: they follow an estimated time or rate, or are estimates.

    Args:
        kinds: names of the points' representative times.
    """
    marked = {metric.name: metric for metric in shown if metric.estimated}
    derived = [metric for metric in marked.values() if quantities.of(metric).pooled in FOLLOWING]
    if derived:
        titles = ", ".join(wording.metric_title(metric, kinds) for metric in derived)
        yield f"≈ {titles}: computed from a figure that has ≈ itself"
    if len(marked) > len(derived):
        yield f"≈ {'others are ' if derived else ''}estimated from what was measured, not itself measured"


def energies(rows: Sequence[Row], shown: Sequence[Metric]) -> Iterator[str]:
    """Yield which loops the energies belong to, and how accurate the meter's scale is."""
    names = {metric.name for metric in shown}
    if quantities.ENERGY in names:
        is_queued = quantities.QUEUED_ENERGY in names
        busy = "; queued: of CUDA graphs that keep the device busy" if is_queued else ""
        yield f"energies are of a loop of calls back to back{busy}"
    scales = [scale for row in rows if (scale := row.value(quantities.METER_ACCURACY)) is not None]
    if scales:
        accuracy = wording.percent(max(scales))
        yield f"± of energies is repeatability; the scale of the board's meter is known to about ±{accuracy}"


def speedups(analysis: Analysis, shown: Sequence[Metric]) -> Iterator[str]:
    """Yield which speedups come from a single process, and whether the loop idles the device."""
    names = {metric.name for metric in shown if quantities.of(metric).pooled is Pooled.SPEEDUP}
    processes = by_point(analysis.record)
    having = [
        (row, metric.name)
        for row in analysis.rows
        for metric in row.metrics
        if metric.name in names
    ]
    several = [(row, name) for row, name in having if row.processes > 1]
    single = {name for row, name in several if pooled_speedup(processes[row.key], name) is None}
    if single:
        pooled = {name for _, name in several} - single
        are_promised = bool(pooled) and all(
            ("promised" in name) == (name in pooled) for name in pooled | single
        )
        but = ", but for the promised ones," if are_promised else ""
        yield f"speedups{but} are of the first process, ± of its calls: another one may choose other algorithms"
    if any(diagnostics.has(row.doubts, "device_idle") for row, _ in having):
        yield "speedups are of the time on the device: a loop that leaves it idle gains less, or nothing"
