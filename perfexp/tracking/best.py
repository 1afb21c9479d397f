"""Best figures of a sweep, or of a run with several phases and batch sizes, and the run that wins a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from perfexp.records.growth import is_clearly_below
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import without_replicate
from perfexp.records.summary import Row
from perfexp.records.sweep_record import SweepChild
from perfexp.statistics.estimators import Interval
from perfexp.summaries.subject import label, varying
from perfexp.tracking.descriptions import metric_part

#: Times of a call that can be best; the fastest run of one size and batch size is that of the first one.
_TIMES = (*DEVICE_TIMES, "latency")
_RATE = "throughput/samples_per_second"


def figures(table: Sequence[Row]) -> Iterator[tuple[str, Row, float]]:
    """Yield name, row and value of the best figures of each phase; the name has the phase if there are several."""
    phases = dict.fromkeys(row.key.phase for row in table)
    for phase in phases:
        of_phase = [row for row in table if row.key.phase == phase]
        prefix = f"best/{metric_part(phase)}_" if len(phases) > 1 else "best/"
        for kind in _TIMES:
            if timed := [row for row in of_phase if kind in row.times]:
                best = min(timed, key=lambda row: row.times[kind].median.value)
                yield f"{prefix}{metric_part(kind)}_p50_ms", best, best.times[kind].median.value * 1e3
        if rated := [(row.samples_per_second.value, row) for row in of_phase if row.samples_per_second]:
            rate, best = max(rated, key=lambda one: one[0])
            yield f"{prefix}samples_per_second", best, rate


def winner(table: Sequence[tuple[SweepChild, Row]]) -> dict[str, str]:
    """Return tags of the best run of a sweep: its axes, the deciding metric, and runs that are not clearly worse.

    If all measurements have the same size and samples per call, the first time that all of them have decides, otherwise
    the rate. A sweep over phases, or with one measured run, has no winner.
    """
    found = [(child, row) for child, row in table if row.time]
    keys = list(dict.fromkeys(without_replicate(row.key) for _, row in found))
    if len({child.job for child, _ in found}) < 2 or "phase" in varying(keys):
        return {}
    kind = next((kind for kind in _TIMES if all(kind in row.times for _, row in found)), None)
    is_alike = len({(row.key.input_size, row.samples_per_call) for _, row in found}) == 1
    metric = f"{kind}/p50_ms" if kind and is_alike else _RATE
    measured = [(_label(child, row, varying(keys)), figure) for child, row in found if (figure := _of(row, metric))]
    if not measured:
        return {}
    name, best = min(measured, key=lambda one: -one[1].value if metric == _RATE else one[1].value)
    is_worse = partial(is_clearly_below, other=best) if metric == _RATE else partial(is_clearly_below, best)
    ties = dict.fromkeys(other for other, figure in measured if other != name and not is_worse(figure))
    return {"perfexp.best": name, "perfexp.best_by": metric, "perfexp.best_ties": "; ".join(ties)}


def _of(row: Row, metric: str) -> Interval | None:
    return row.samples_per_second if metric == _RATE else row.times[metric.removesuffix("/p50_ms")].median


def _label(child: SweepChild, row: Row, fields: Sequence[str]) -> str:
    """The axes of a run, and what distinguishes its points if an axis does not show it."""
    axes = [f"{axis}={text}" for axis, text in child.axes.items()]
    return ", ".join([*axes, *filter(None, [label(row.key, [one for one in fields if one not in child.axes])])])
