"""Figures: the quantities of a record as MLflow's metrics: names that it takes, values that it can show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from perfexp.records.record import Key, Point, Record
from perfexp.records.summary import Row
from perfexp.tables.point_runs import PointRun
from perfexp.tables.quantities import Quantity, quantities

_NAME_LENGTH = 250
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-.: ]+")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One value of one metric.

    Attributes:
        name: `GROUP/NAME_UNIT`, with exactly one slash.
        value: finite.
        step: see `Quantity`.
        time_ms: when its point ended, milliseconds since 1970. It comes from the record alone: of values that are sent
            twice with the same name, step and time a store keeps one.
    """

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(kw_only=True)
class Figures:
    """All figures of one tracking run.

    Attributes:
        kept: those that can be shown.
        dropped: why others can't, by name; such a name may still have values at other points.
        estimated: names of those that are computed from something else that was measured.
    """

    kept: list[Figure] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    estimated: list[str] = field(default_factory=list)


def figures(record: Record, run: PointRun) -> Figures:
    """The figures of one phase and batch size; their names do not depend on what else the record has.

    Args:
        record: record of any run.
        run: one of its phases and batch sizes.
    """
    times = _end_times(record)
    found, taken = Figures(), set[tuple[str, int]]()
    for quantity in quantities(record, run):
        name = _metric_name(quantity)
        if quantity.value is None or not math.isfinite(quantity.value):
            found.dropped.setdefault(name, quantity.reason or f"the value is {quantity.value}")
        elif (name, quantity.step) in taken:
            found.dropped.setdefault(name, "two metrics have this name in MLflow's letters; the first one is shown")
        else:
            taken.add((name, quantity.step))
            value, time_ms = float(quantity.value), times[quantity.key]
            found.kept.append(Figure(name=name, value=value, step=quantity.step, time_ms=time_ms))
            if quantity.estimated and name not in found.estimated:
                found.estimated.append(name)
    return found


def best_rates(record: Record, known: Sequence[Row]) -> Figures:
    """The highest rate of each phase, whatever its size and batch: the figures above those of several point runs.

    Args:
        record: record of any run.
        known: its rows.
    """
    times = _end_times(record)
    best: dict[str, tuple[float, Row]] = {}
    for row in known:
        if row.samples_per_second and row.samples_per_second.value > best.get(row.key.phase, (0.0,))[0]:
            best[row.key.phase] = row.samples_per_second.value, row
    return Figures(
        kept=[
            Figure(name=f"best/{_allowed(phase)}_samples_per_second", value=rate, step=0, time_ms=times[row.key])
            for phase, (rate, row) in best.items()
        ]
    )


def to_ms(date: str | None) -> int | None:
    """A record's date as milliseconds since 1970; None where it is none.

    Args:
        date: ISO 8601.
    """
    try:
        return max(round(datetime.fromisoformat(date or "").timestamp() * 1e3), 0)
    except (ValueError, OverflowError):
        return None


def _metric_name(quantity: Quantity) -> str:
    """Group, slash and name of a quantity in MLflow's letters: one bad name rejects a whole batch."""
    return f"{_allowed(quantity.group)}/{_allowed(quantity.name)}"[:_NAME_LENGTH].rstrip(" .")


def _allowed(text: str) -> str:
    """A part of a name; a slash in it would open a further group."""
    return _FORBIDDEN.sub("_", text.replace("/", ".")).strip(" .") or "unnamed"


def _end_times(record: Record) -> dict[Key, int]:
    return {point.key: _end_ms(point, record) for point in record.points}


def _end_ms(point: Point, record: Record) -> int:
    """When a point ended, or the record where the point does not tell."""
    start = to_ms(point.started)
    if start is None:
        return to_ms(record.ended) or 0
    return start + round(1e3 * (point.wall_seconds or 0.0))
