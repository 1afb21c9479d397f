"""Dashboards: figures of runs as JSON for Bencher and for GitHub's benchmark action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import KEY_FIELDS, label, measured
from perfexp.records.analysis import Analysis
from perfexp.statistics.moderated import Repeats

#: Figures by point, which has the same name in every run, and measure; empty for a failed point.
Figures = dict[str, dict[str, Repeats]]
#: Bencher's own measures with the factor to their units: nanoseconds, and operations/s.
_BUILT_IN = {"latency": ("latency", 1e9), "throughput": ("throughput", 1.0)}


def figures(analysis: Analysis) -> Figures:
    """Return all figures of a run."""
    return {label(one, (*one.features, *KEY_FIELDS)): one.figures for one in measured(analysis)}


def _bencher(every: Figures) -> dict[str, dict[str, Any]]:
    """Return a Bencher Metric Format document."""
    document = {}
    for point, measures in every.items():
        metrics = {}
        for measure, figure in measures.items():
            named = f"{measure} ({MEASURES[measure].unit})", 1.0
            key, factor = _BUILT_IN.get(measure, named)
            value = figure.interval
            ends = {"value": value.value, "lower_value": value.low, "upper_value": value.high}
            metrics[key] = {end: factor * one for end, one in ends.items() if one is not None}
        if metrics:
            document[point] = metrics
    return document


def _smaller_is_better(every: Figures) -> list[dict[str, Any]]:
    """Return entries for the action's tool `customSmallerIsBetter`, without rates and accuracy."""
    entries = []
    for point, measures in every.items():
        for measure, figure in measures.items():
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
