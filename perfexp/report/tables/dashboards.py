"""Dashboards: figures of runs as JSON for Bencher and for GitHub's benchmark action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import KEY_FIELDS, label, measured
from perfexp.records.analysis import Analysis
from perfexp.statistics.moderated import Repeats

#: Figures by point, which has the same name in every run, and measure.
Figures = dict[tuple[str, str], Repeats]
#: Bencher's own measures with the factor to their units: nanoseconds, and operations/s.
_BUILT_IN = {"latency": ("latency", 1e9), "throughput": ("throughput", 1.0)}


def figures(analysis: Analysis) -> Figures:
    """Return all figures of a run."""
    values = {}
    for measurement in measured(analysis):
        for measure, figure in measurement.figures.items():
            values[label(measurement, (*measurement.features, *KEY_FIELDS)), measure] = figure
    return values


def _bencher(every: Figures) -> dict[str, dict[str, Any]]:
    """Return a Bencher Metric Format document."""
    document: dict[str, dict[str, Any]] = defaultdict(dict)
    for (point, measure), figure in every.items():
        named = f"{measure} ({MEASURES[measure].unit})", 1.0
        key, factor = _BUILT_IN.get(measure, named)
        value = figure.interval
        ends = {"value": value.value, "lower_value": value.low, "upper_value": value.high}
        metric = {end: factor * bound for end, bound in ends.items() if bound is not None}
        document[point][key] = metric
    return document


def _smaller_is_better(every: Figures) -> list[dict[str, Any]]:
    """Return entries for the action's tool `customSmallerIsBetter`, without rates and accuracy."""
    entries = []
    for (point, measure), figure in every.items():
        kind, value = MEASURES[measure], figure.interval
        if kind.is_better_if_lower:
            entry = {"name": f"{point} · {measure}", "unit": kind.unit, "value": value.value}
            if value.relative_half_width is not None:
                entry["range"] = f"± {value.relative_half_width * value.value:.3g}"
            entries.append({**entry, "extra": f"processes: {len(figure.values)}"})
    return entries


#: Documents by `perfexp export --format`.
FORMATS: dict[str, Callable[[Figures], Any]] = {
    "bencher": _bencher,
    "github-action-benchmark": _smaller_is_better,
}
