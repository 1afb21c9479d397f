"""Measures that runs are compared by, with the figures of each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfexp.records.point_times import blocks_of, samples_per_call
from perfexp.records.record import EarlierTime, Key, Point, Record, Series, Status
from perfexp.records.summary import series_of_processes
from perfexp.statistics import blockwise, variance
from perfexp.statistics.distributions import Z95
from perfexp.statistics.estimators import Interval
from perfexp.statistics.ratios import Repeats

_P95 = 95.0


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One kind of figure.

    Attributes:
        unit: SI unit.
        is_better_if_lower: direction.
        better: verdict for the better side, `worse` for the other.
        metric: name of the record's metric; None for a time.
    """

    unit: str
    is_better_if_lower: bool = True
    better: str = "FASTER"
    worse: str = "SLOWER"
    metric: str | None = None


#: Measures by name, in the order of reports.
MEASURES = {
    "device": Measure(unit="seconds"),
    "latency": Measure(unit="seconds"),
    "p95": Measure(unit="seconds"),
    "throughput": Measure(unit="samples/s", is_better_if_lower=False),
    "memory": Measure(unit="bytes", better="LESS", worse="MORE", metric="memory/peak_bytes"),
    "energy": Measure(unit="joules", better="LESS", worse="MORE", metric="energy/per_image_joules"),
    "accuracy": Measure(unit="1", is_better_if_lower=False, better="HIGHER", worse="LOWER", metric="accuracy"),
}


class _Place(NamedTuple):
    key: Key
    measure: str


def repeats(record: Record) -> dict[Key, dict[str, Repeats]]:
    """The figures of each timed point of a record by measure, for those that are above 0."""
    points = {point.key: point for point in record.points if point.key.is_timed and point.status is Status.OK}
    earlier = {(time.key, time.time, time.method): time for time in record.earlier}
    found: dict[_Place, Repeats] = {}
    for key, name, series in series_of_processes(record):
        if key not in points:
            continue
        method = points[key].facts.get("device_method") if name == "device" else None
        history = earlier.get((key, name, method))
        if name != "throughput":
            found[_Place(key, name)] = _medians(series, history)
        if name == "latency":
            found[_Place(key, "p95")] = _percentiles(series, found[_Place(key, name)])
        if name != "device":  # `throughput` comes last and replaces `latency`, as in a row's samples_per_second
            found[_Place(key, "throughput")] = _rates(series, history, points[key])
    found |= {
        _Place(key, name): Repeats(values=(value,))
        for key, point in points.items()
        if key.replicate == 0
        for name, measure in MEASURES.items()
        if measure.metric and (value := _value(point, measure.metric)) is not None
    }
    return _by_key(_with_components({place: one for place, one in found.items() if min(one.values) > 0}))


def _value(point: Point, name: str) -> float | None:
    metric = point.metric(name)
    return metric.value if metric else None


def _medians(series: list[Series], history: EarlierTime | None) -> Repeats:
    earlier = tuple(tuple(median for median, _ in run) for run in history.runs) if history else ()
    return _repeats([blockwise.block_median(blocks_of(one)) for one in series], earlier)


def _rates(series: list[Series], history: EarlierTime | None, point: Point) -> Repeats:
    """Samples per second; their intervals are as wide as those of the mean time."""
    samples = samples_per_call(point)
    earlier = tuple(tuple(samples / mean for _, mean in run) for run in history.runs) if history else ()
    times = _repeats([blockwise.block_mean(blocks_of(one)) for one in series], ())
    return replace(times, values=tuple(samples / value for value in times.values), earlier=earlier)


def _percentiles(series: list[Series], medians: Repeats) -> Repeats:
    """95th percentiles; a history has medians only, so that percentiles vary between runs as medians do."""
    values = tuple(float(np.percentile(one.measured, _P95)) for one in series)
    scale = float(np.exp(np.mean(np.log(values) - np.log(medians.values)))) if min(values) > 0 else 1.0
    return Repeats(values=values, earlier=tuple(tuple(scale * median for median in run) for run in medians.earlier))


def _repeats(processes: list[Interval], earlier: tuple[tuple[float, ...], ...]) -> Repeats:
    widths = [one.relative_half_width or 0.0 for one in processes]
    within = sum((width / Z95) ** 2 for width in widths) / len(widths) ** 2
    usable = all(value > 0 for run in earlier for value in run)
    return Repeats(values=tuple(one.value for one in processes), within=within, earlier=earlier if usable else ())


def _with_components(found: Mapping[_Place, Repeats]) -> dict[_Place, Repeats]:
    """Give each figure the variance between processes of the figures of its phase and measure (anchors)."""
    groups: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for place, one in found.items():
        groups.setdefault((place.key.phase, place.measure), []).append(one.values)
    components = {group: variance.between_processes(values) for group, values in groups.items()}
    return {place: replace(one, between=components[place.key.phase, place.measure]) for place, one in found.items()}


def _by_key(found: Mapping[_Place, Repeats]) -> dict[Key, dict[str, Repeats]]:
    by_key: dict[Key, dict[str, Repeats]] = {}
    for place in sorted(found, key=lambda place: list(MEASURES).index(place.measure)):
        by_key.setdefault(place.key, {})[place.measure] = found[place]
    return by_key
