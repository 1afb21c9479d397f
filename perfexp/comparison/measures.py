"""Measures that runs are compared by, with the figures of each process."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from perfexp.records import priors, quantities
from perfexp.records.cold_starts import first_predictions
from perfexp.records.point_times import GRAPH
from perfexp.records.record import Key, Point, Record, Status, without_replicate
from perfexp.records.summary import rows
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.prior import Prior


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One kind of figure.

    Attributes:
        unit: SI unit.
        is_better_if_lower: direction.
        better: verdict for the better side, `worse` for the other.
        metric: name of the record's metric; None for a time.
        is_exact: whether the figure itself decides, with the margin as a difference of shares, not a ratio.
    """

    unit: str
    is_better_if_lower: bool = True
    better: str = "FASTER"
    worse: str = "SLOWER"
    metric: str | None = None
    is_exact: bool = False


#: Measures by name, in the order of reports.
MEASURES = {
    "device": Measure(unit="seconds"),
    GRAPH: Measure(unit="seconds"),
    "cycles": Measure(unit="cycles", better="FEWER", worse="MORE", metric=quantities.CYCLES),
    "latency": Measure(unit="seconds"),
    "p95": Measure(unit="seconds"),
    "throughput": Measure(unit="samples/s", is_better_if_lower=False),
    "epoch": Measure(unit="seconds"),
    "runtime": Measure(unit="seconds"),
    "ttfp": Measure(unit="seconds"),
    "memory": Measure(unit="bytes", better="LESS", worse="MORE", metric=quantities.PEAK_MEMORY),
    "energy": Measure(unit="joules", better="LESS", worse="MORE", metric=quantities.IMAGE_ENERGY),
    "accuracy": Measure(
        unit="1", is_better_if_lower=False, better="HIGHER", worse="LOWER", metric=quantities.ACCURACY, is_exact=True
    ),
}


def repeats(record: Record) -> dict[Key, dict[str, Repeats]]:
    """The figures of each timed point of a record by measure; those with a ratio are above 0, exact ones may be 0."""
    points: dict[Key, list[Point]] = {}
    for point in record.points:
        if point.key.is_timed and point.status is Status.OK:
            points.setdefault(without_replicate(point.key), []).append(point)
    known = priors.of_record(record)
    found: dict[Key, dict[str, Repeats]] = {}
    for row in rows(record):
        if (of := points.get(row.key)) and any(point.key == row.key for point in of):
            prior = partial(priors.find, known, of)
            times = {name: one for name, one in row.figures.items() if name != "throughput"}
            if rate := times.pop("samples_per_second", None):
                times["throughput"] = rate
            found[row.key] = times | _metrics(of, prior) | _of_epochs(of, prior)
    for first in first_predictions(record):
        key = without_replicate(msgspec.structs.replace(first.key, phase="inference"))
        found.setdefault(key, {})["ttfp"] = Repeats(values=first.totals)
    return {
        key: {name: one for name, one in of.items() if min(one.values) > 0 or MEASURES[name].is_exact}
        for key, of in found.items()
    }


def _metrics(points: list[Point], prior: Callable[[str], Prior | None]) -> dict[str, Repeats]:
    """The single figures of the processes of a point."""
    found = {}
    for name, measure in MEASURES.items():
        metrics = [metric for point in points if measure.metric and (metric := point.metric(measure.metric))]
        figures = [Interval(value=one.value, low=one.low, high=one.high) for one in metrics if one.value is not None]
        if figures:
            is_estimate = any(one.estimated for one in metrics)
            known = None if measure.is_exact else prior(name)
            sampled = replace(Repeats.of(figures, known), is_estimate=is_estimate)
            found[name] = sampled if name == "energy" else replace(sampled, within=0.0)
    return found


def _of_epochs(points: list[Point], prior: Callable[[str], Prior | None]) -> dict[str, Repeats]:
    """The times of whole epochs of the first process that has any.

    `epoch` is the mean pass over the training data, `runtime` all passes with evaluations and checkpoints.
    """
    epochs = next((point.epochs for point in points if point.epochs), [])
    if not epochs:
        return {}
    passes = [epoch.seconds for epoch in epochs]
    whole = [epoch.seconds + epoch.evaluation_seconds + epoch.checkpoint_seconds for epoch in epochs]
    return {
        name: Repeats(values=(value,), within=_variance_of_mean(seconds), prior=prior(name))
        for name, seconds, value in (("epoch", passes, statistics.fmean(passes)), ("runtime", whole, sum(whole)))
    }


def _variance_of_mean(seconds: list[float]) -> float:
    """Variance of the logarithm of a mean of epochs; a single one counts as exact, since it has many calls."""
    if len(seconds) < 2:
        return 0.0
    return statistics.variance(seconds) / len(seconds) / statistics.fmean(seconds) ** 2
