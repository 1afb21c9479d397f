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
    of = "in the precision of each point"
    if len(precisions) == 1:
        of = f"in {precisions.pop()}"
    notes = dict.fromkeys(quantities.of(metric).note for metric in shown)
    if text := "; ".join(filter(None, notes)):
        yield text.replace("{precision}", of)


def estimated(shown: Sequence[Metric], kinds: Sequence[str]) -> Iterator[str]:
    """Yield why metrics are marked `≈`: they follow an estimated time or rate, or are estimates.

    Args:
        kinds: names of the points' representative times.
    """
    titles, others = [], []
    for metric in {metric.name: metric for metric in shown if metric.estimated}.values():
        if quantities.of(metric).pooled in FOLLOWING:
            titles.append(wording.metric_title(metric, kinds))
        else:
            others.append(metric.name)
    if titles:
        yield f"≈ {', '.join(titles)}: computed from a figure that has ≈ itself"
    if others:
        subject = "others are " if titles else ""
        yield f"≈ {subject}estimated from what was measured, not itself measured"


def energies(rows: Sequence[Row], shown: Sequence[Metric]) -> Iterator[str]:
    """Yield which loops the energies belong to, and how accurate the meter's scale is."""
    names = {metric.name for metric in shown}
    if quantities.ENERGY in names:
        text = "energies are of a loop of calls back to back"
        if quantities.QUEUED_ENERGY in names:
            text += "; queued: of CUDA graphs that keep the device busy"
        yield text
    scales = [scale for row in rows if (scale := row.value(quantities.METER_ACCURACY)) is not None]
    if scales:
        accuracy = wording.percent(max(scales))
        yield (
            "± of energies is repeatability; the scale of the board's meter is known to about "
            f"±{accuracy}"
        )


def speedups(analysis: Analysis, shown: Sequence[Metric]) -> Iterator[str]:
    """Yield which speedups come from a single process, and whether the loop idles the device."""
    names = {metric.name for metric in shown if quantities.of(metric).pooled is Pooled.SPEEDUP}
    processes = by_point(analysis.record)
    single, pooled, is_idle = set[str](), set[str](), False
    for row in analysis.rows:
        own = names.intersection(metric.name for metric in row.metrics)
        is_idle = is_idle or bool(own and diagnostics.has(row.doubts, "device_idle"))
        for name in own if row.processes > 1 else ():
            has_none = pooled_speedup(processes[row.key], name) is None
            (single if has_none else pooled).add(name)
    pooled -= single
    if single:
        promised = {name for name in pooled | single if "promised" in name}
        but = ", but for the promised ones," if pooled and promised == pooled else ""
        yield (
            f"speedups{but} are of the first process, ± of its calls: another one may choose other "
            "algorithms"
        )
    if is_idle:
        yield (
            "speedups are of the time on the device: a loop that leaves it idle gains less, or "
            "nothing"
        )
