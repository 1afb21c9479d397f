"""Measures that runs are compared by, and a record's figures by measure.

A measure is a kind of figure, such as `latency`, with its unit and its words for better and worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from perfexp.records.analysis import Analysis
from perfexp.records.point_times import GRAPH
from perfexp.records.record import Key, Status, without_replicate
from perfexp.statistics.moderated import Repeats


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Kind of figure that is compared.

    Attributes:
        unit: SI unit.
        is_better_if_lower: whether a lower value is better.
        better: word for a better figure in reports.
        worse: word for a worse figure.
        is_time: whether every further process measures it.
        is_exact: whether the figure itself decides, unless it varies with a training's seed. The
            margin is a difference between shares instead of a ratio.
    """

    unit: str
    is_better_if_lower: bool = True
    better: str = "FASTER"
    worse: str = "SLOWER"
    is_time: bool = True
    is_exact: bool = False


#: Measures by name, in report order.
MEASURES = {
    "device": Measure(unit="seconds"),
    GRAPH: Measure(unit="seconds"),
    "cycles": Measure(unit="cycles", better="FEWER", worse="MORE", is_time=False),
    "latency": Measure(unit="seconds"),
    "p95": Measure(unit="seconds"),
    "throughput": Measure(unit="samples/s", is_better_if_lower=False),
    "epoch": Measure(unit="seconds"),
    "runtime": Measure(unit="seconds"),
    "time_to_accuracy": Measure(unit="seconds"),
    "ttfp": Measure(unit="seconds"),
    "memory": Measure(unit="bytes", better="LESS", worse="MORE", is_time=False),
    "energy": Measure(unit="joules", better="LESS", worse="MORE", is_time=False),
    "accuracy": Measure(
        unit="1",
        is_better_if_lower=False,
        better="HIGHER",
        worse="LOWER",
        is_time=False,
        is_exact=True,
    ),
}


def repeats(analysis: Analysis) -> dict[Key, dict[str, Repeats]]:
    """Return each timed point's figures by measure, as pairing needs them.

    Figures compared by ratio are > 0; exact figures may be 0. A cold start's time (`ttfp`) belongs
    to the inference of the same size.
    """
    by_point = {row.key: dict(row.figures) for row in analysis.rows if row.status is Status.OK}
    for figures in by_point.values():
        figures.pop("throughput", None)  # a time; its rate is compared instead
        if rate := figures.pop("samples_per_second", None):
            figures["throughput"] = rate
    for cold_start in analysis.cold_starts:
        key = without_replicate(msgspec.structs.replace(cold_start.key, phase="inference"))
        by_point.setdefault(key, {})["ttfp"] = Repeats(values=cold_start.totals)
    for figures in by_point.values():
        for name, figure in list(figures.items()):
            if min(figure.values) <= 0 and not MEASURES[name].is_exact:
                del figures[name]
    return by_point
