"""Best figures of a sweep, or of a run with several phases and batch sizes, and the runs that win a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from perfexp.comparison import sweep_verdicts
from perfexp.comparison.sweep_verdicts import Winner
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import Record
from perfexp.records.summary import Row
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.subject import MODEL_AXES, label, varying
from perfexp.tracking.descriptions import metric_part

#: Times of a call that can be best.
_TIMES = (*DEVICE_TIMES, "latency")
_RATE = "throughput/samples_per_second"


class Best(NamedTuple):
    """The best figure of a phase, whose metric has the phase in its name if there are several.

    Attributes:
        is_estimated: whether it has no interval.
    """

    name: str
    row: Row
    value: float
    is_estimated: bool


def figures(table: Sequence[Row]) -> Iterator[Best]:
    """Yield the best figures of each phase: the smallest median of each time, and the largest rate."""
    phases = dict.fromkeys(row.key.phase for row in table)
    for phase in phases:
        of_phase = [row for row in table if row.key.phase == phase]
        prefix = f"best/{metric_part(phase)}_" if len(phases) > 1 else "best/"
        for kind in _TIMES:
            if timed := [row for row in of_phase if kind in row.times]:
                best = min(timed, key=lambda row: row.times[kind].median.value)
                value = best.times[kind].median.value * 1e3
                yield Best(f"{prefix}{metric_part(kind)}_p50_ms", best, value, best.times[kind].median.low is None)
        if rated := [(rate, row) for row in of_phase if (rate := row.samples_per_second)]:
            rate, best = max(rated, key=lambda one: one[0].value)
            yield Best(f"{prefix}samples_per_second", best, rate.value, rate.low is None)


def winner(sweep: Sweep, records: Sequence[Record]) -> dict[str, str]:
    """Return tags of the fastest runs of a sweep, by the verdicts of its table.

    `perfexp.best` names the fastest run, `perfexp.best_ties` the others that are not shown to be slower, and
    `perfexp.best_by` the metric that decides. `perfexp.best_undecided` names the runs of which no verdict is decided.
    Where points or models differ in their winners, they follow in parentheses. A sweep whose runs have no point in
    common has no tags.
    """
    found = sweep_verdicts.winners(sweep, records)
    fields = varying(one.key for one in found)
    texts: dict[str, dict[str, list[str]]] = {"best": {}, "best_ties": {}, "best_undecided": {}, "best_by": {}}
    for one in found:
        where = " · ".join(filter(None, (one.model, label(one.key, fields) if fields else "")))
        runs = "; ".join(_axes(axes, one) for axes in one.ties)
        best = {} if one.best is None else {"best": _axes(one.best, one)}
        decided = {**best, "best_ties" if best else "best_undecided": runs}
        for name, text in {**decided, "best_by": _metric(one.measure)}.items():
            if text:
                texts[name].setdefault(text, []).append(where)
    return {
        f"perfexp.{name}": " | ".join(
            text if len(places) == len(found) or name == "best_by" else f"{text} ({', '.join(places)})"
            for text, places in of_name.items()
        )
        for name, of_name in texts.items()
        if of_name
    }


def _metric(measure: str) -> str:
    return _RATE if measure == "throughput" else f"{metric_part(measure)}/p50_ms"


def _axes(every: Mapping[str, str], of: Winner) -> str:
    """The axes of a group, without its model if each model has a winner; the value alone of a single option's axis."""
    axes = {axis: text for axis, text in every.items() if not (of.model and axis in MODEL_AXES)}
    if len(axes) == 1 and "." not in "".join(axes):
        return "".join(axes.values())
    return ", ".join(f"{axis}={text}" for axis, text in axes.items())
