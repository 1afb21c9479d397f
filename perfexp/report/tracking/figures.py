"""Figures: a run's metrics, and the best metrics across several runs, phases or batch sizes.

`payload` sends them to MLflow. A `Charted` (`tables.flat`) is a figure that MLflow charts; a
`Figure` is the same in the letters and types that MLflow accepts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from perfexp.comparison import sweep_verdicts
from perfexp.comparison.sweep_verdicts import Winner
from perfexp.records.analysis import SweepAnalysis
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import Point, Record, without_replicate
from perfexp.records.rows import Row
from perfexp.records.subject import MODEL_AXES, label, varying
from perfexp.report.tables.flat import Charted
from perfexp.report.tracking.delivery import Figure, to_ms
from perfexp.report.tracking.descriptions import reasons
from perfexp.report.tracking.store import NAME_LENGTH, allowed

#: Call times that `best` ranks.
_TIMES = (*DEVICE_TIMES, "latency")
#: Name endings of interval bounds: for medians, and for any metric.
_MEDIAN_INTERVAL = re.compile(r"/ci_(low_ms|high_ms|half_width_percent)$")
_INTERVAL = re.compile(r"_(low|high)$")


def metric_part(text: str) -> str:
    """Return one part of a metric name. A slash would open another group, so it becomes a dot."""
    return allowed(text.replace("/", "."))


def of(
    found: Iterable[Charted], time_ms: Callable[[Charted], int]
) -> tuple[list[Figure], dict[str, str]]:
    """Return the figures that a tracking store accepts, and tags about the metrics.

    One tag lists dropped metrics with reasons. The other tag lists estimated metrics.

    Args:
        found: metrics, including those without a value.
        time_ms: returns a metric's time, in ms since 1970.
    """
    sent: dict[tuple[str, int], Figure] = {}
    dropped: dict[str, str] = {}
    estimated: dict[str, None] = {}
    for quantity in found:
        # MLflow rejects a whole batch of metrics for one bad name
        name = f"{metric_part(quantity.group)}/{metric_part(quantity.name)}"
        name, step = name[:NAME_LENGTH].rstrip(" ."), quantity.step
        if quantity.value is None or not math.isfinite(quantity.value):
            dropped.setdefault(name, quantity.reason or f"the value is {quantity.value}")
        elif (name, step) in sent:
            reason = "two metrics have this name in MLflow's letters; the first one is shown"
            dropped.setdefault(name, reason)
        else:
            sent[name, step] = Figure(name, float(quantity.value), step, time_ms(quantity))
            if quantity.estimated:
                estimated[name] = None
    outdated = _outdated(sent)  # names of interval bounds
    reason = "the last measurement has no interval; see tables/points.json"
    dropped |= dict.fromkeys(outdated, reason)
    tags = {
        "perfexp.dropped_metrics": reasons(dropped),
        "perfexp.estimated_metrics": ", ".join(estimated),
    }
    return [one for one in sent.values() if one.name not in outdated], tags


def _outdated(sent: Iterable[tuple[str, int]]) -> list[str]:
    """Return interval bounds whose last step comes before the last step of their metric.

    A store would show such bounds beside another point's value.
    """
    last: dict[str, int] = {}
    for name, step in sent:
        last[name] = max(step, last.get(name, step))
    outdated = []
    for name, step in last.items():
        metric = _INTERVAL.sub("", _MEDIAN_INTERVAL.sub("/p50_ms", name))
        if step < last.get(metric, step):
            outdated.append(name)
    return outdated


def times(record: Record) -> Callable[[Charted], int]:
    """Return a function that maps a figure to the end of its epoch or point, in ms since 1970.

    Points without a start get the record's end. With several processes a point ends with the last.
    A store shows the latest value, so figures from more processes replace figures from fewer. `of`
    calls it for each figure.
    """
    ends: dict[tuple[object, int | None], int] = {}
    for point in record.points:
        start = to_ms(point.started)
        end = to_ms(record.ended) or 0
        if start is not None:
            end = start + round(1e3 * (point.wall_seconds or 0.0))
        for key in (point.key, without_replicate(point.key)):
            ends[key, None] = max(end, ends.get((key, None), 0))
        for number, epoch_end in ends_of_epochs(point).items():
            ends[point.key, number] = epoch_end
    return lambda one: ends[one.key, one.step if one.group == "epoch" else None]


def ends_of_epochs(point: Point, seconds: float = 0.0) -> dict[int, int]:
    """Return a training's epoch end times in ms since 1970, by epoch number.

    They are computed as if training began at the point's start, after `seconds` of earlier epochs.
    Epochs sent during a training then have the same times as in the record.

    Args:
        seconds: duration of earlier epochs, which the point does not contain.
    """
    start = to_ms(point.started) or 0
    ends = {}
    for epoch in point.epochs:
        seconds += epoch.total_seconds
        ends[epoch.number] = start + round(1e3 * seconds)
    return ends


def best(table: Sequence[Row]) -> Iterator[Charted]:
    """Yield the best figures per phase: the smallest median of each time in ms, and the best rate.

    The runs of a sweep, or of several points, show them in place of all figures. With several
    phases names begin with the phase.

    Args:
        table: rows of all points.
    """
    phases: dict[str, list[Row]] = {}
    for row in table:
        phases.setdefault(row.key.phase, []).append(row)
    for phase, rows in phases.items():
        prefix = ""
        if len(phases) > 1:
            prefix = f"{phase}_"
        for kind in _TIMES:
            if timed := [row for row in rows if kind in row.times]:
                row = min(timed, key=lambda row: row.times[kind].median.value)
                median = row.times[kind].median
                name, milliseconds = f"{prefix}{kind}_p50_ms", median.value * 1e3
                is_estimated = median.low is None
                yield Charted("best", name, milliseconds, row.key, 0, estimated=is_estimated)
        if rated := [(rate, row) for row in rows if (rate := row.samples_per_second)]:
            rate, row = max(rated, key=lambda one: one[0].value)
            name, is_estimated = f"{prefix}samples_per_second", rate.low is None
            yield Charted("best", name, rate.value, row.key, 0, estimated=is_estimated)


def winner(whole: SweepAnalysis) -> dict[str, str]:
    """Return tags that name a sweep's fastest runs, by the verdicts in its table.

    * `perfexp.best`: the fastest run.
    * `perfexp.best_ties`: other runs, not shown to be slower.
    * `perfexp.best_by`: the metric that decides.
    * `perfexp.best_undecided`: runs without a decided verdict.

    If the winner depends on the point or model, each text names its points or models in
    parentheses. There are no tags if the runs share no point. They are set once all runs of the
    sweep have ended.
    """
    found = sweep_verdicts.winners(whole)
    fields = varying(one.key for one in found)
    names = ("best", "best_ties", "best_undecided", "best_by")
    places: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for one in found:
        where = " · ".join(filter(None, (one.model, label(one.key, fields) if fields else "")))
        best = one.best and _axes(one.best, one)
        others = "; ".join(_axes(axes, one) for axes in one.ties)
        texts = {"best": best, "best_by": _metric(one.measure)}
        texts["best_ties" if best else "best_undecided"] = others
        for name, text in texts.items():
            if text:
                places[name].setdefault(text, []).append(where)
    tags = {}
    for name, by_text in places.items():
        if by_text:
            tags[f"perfexp.{name}"] = _joined(name, by_text, len(found))
    return tags


def _joined(name: str, places: Mapping[str, Collection[str]], num_points: int) -> str:
    """Return texts in one line, each with the places where it holds.

    Texts that hold everywhere have no places.

    Args:
        name: name of the tag, without `perfexp.`.
        places: points or models by text.
        num_points: number of all places.
    """
    texts = []
    for text, where in places.items():
        if name != "best_by" and len(where) != num_points:
            text += f" ({', '.join(where)})"
        texts.append(text)
    return " | ".join(texts)


def _metric(measure: str) -> str:
    """Return the name of the MLflow metric that shows a compared measure."""
    if measure == "throughput":
        return "throughput/samples_per_second"
    return f"{metric_part(measure)}/p50_ms"


def _axes(every: Mapping[str, str], of_winner: Winner) -> str:
    """Return a group's axes as text.

    The model is left out if each model has its own winner. A single option shows its value alone.
    """
    axes = dict(every)
    if of_winner.model:
        for axis in MODEL_AXES:
            axes.pop(axis, None)
    if len(axes) == 1 and "." not in "".join(axes):
        return "".join(axes.values())
    return ", ".join(f"{axis}={text}" for axis, text in axes.items())
