"""MLflow metrics: the quantities of a record under names, and with values, that MLflow accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from perfexp.records.record import Key, Record
from perfexp.records.summary import Row
from perfexp.tables.quantities import PointRun, quantities

#: Databases refuse longer names.
NAME_LENGTH = 250
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-.: ]+")


class Figure(NamedTuple):
    """One value of a metric `GROUP/NAME_UNIT`, at the step of its `Quantity` and the end of its point since 1970.

    The time comes from the record alone: a store keeps one of several values with the same name, step and time.
    """

    name: str
    value: float
    step: int
    time_ms: int


@dataclass
class Figures:
    """Metrics of one MLflow run: values that it can show, why others are dropped, and names of derived metrics."""

    sent: list[Figure] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    estimated: list[str] = field(default_factory=list)


def figures(record: Record, part: PointRun) -> Figures:
    """The metrics of one phase and batch size; their names do not depend on the rest of the record."""
    times = _end_times(record)
    result, taken = Figures(), set[tuple[str, int]]()
    for quantity in quantities(record, part):
        # one bad name rejects a whole batch
        name = f"{_part(quantity.group)}/{_part(quantity.name)}"[:NAME_LENGTH].rstrip(" .")
        if quantity.value is None or not math.isfinite(quantity.value):
            result.dropped.setdefault(name, quantity.reason or f"the value is {quantity.value}")
        elif (name, quantity.step) in taken:
            result.dropped.setdefault(name, "two metrics have this name in MLflow's letters; the first one is shown")
        else:
            taken.add((name, quantity.step))
            result.sent.append(Figure(name, float(quantity.value), quantity.step, times[quantity.key]))
            if quantity.estimated and name not in result.estimated:
                result.estimated.append(name)
    return result


def best_rates(record: Record, table: Sequence[Row]) -> Figures:
    """The highest rate of each phase over all sizes and batches: the metrics above several nested runs."""
    times = _end_times(record)
    best: dict[str, tuple[float, Row]] = {}
    for row in table:
        if row.samples_per_second and row.samples_per_second.value > best.get(row.key.phase, (0.0,))[0]:
            best[row.key.phase] = row.samples_per_second.value, row
    names = {phase: f"best/{_part(phase)}_samples_per_second" for phase in best}
    return Figures([Figure(names[phase], rate, 0, times[row.key]) for phase, (rate, row) in best.items()])


def _part(text: str) -> str:
    """A part of a metric's name; a slash in it would open another group."""
    return allowed(text.replace("/", "."))


def allowed(text: str) -> str:
    """Return a name in MLflow's letters."""
    return _FORBIDDEN.sub("_", text).strip(" .") or "unnamed"


def to_ms(date: str | None) -> int | None:
    """An ISO 8601 date as milliseconds since 1970; None if it is not a date."""
    try:
        return max(round(datetime.fromisoformat(date or "").timestamp() * 1e3), 0)
    except (ValueError, OverflowError):
        return None


def _end_times(record: Record) -> dict[Key, int]:
    """The ends of all points; that of the record for a point without a start."""
    ends = {}
    for point in record.points:
        start = to_ms(point.started)
        wall_ms = round(1e3 * (point.wall_seconds or 0.0))
        ends[point.key] = (to_ms(record.ended) or 0) if start is None else start + wall_ms
    return ends
