"""Figures: the quantities of a record as MLflow's metrics: names that it takes, values that it can show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from perfexp.record import Point, Record
from perfexp.sinks.quantities import Quantity, quantities
from perfexp.summary import Row

_NAME_LENGTH = 250
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-.: ]+")
#: Groups that are the same for every batch size or phase, or say theirs already.
_WITHOUT_BATCH, _WITHOUT_PHASE = ("point",), ("point", "ttfp", "train", "inference")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One value of one metric.

    Attributes:
        name: `GROUP/NAME_UNIT`, with exactly one slash.
        value: finite.
        step: index of the point; of the sample in `samples/…`.
        time_ms: when its point ended, milliseconds since 1970. It comes from the record alone: of values that are sent
            twice with the same name, step and time a store keeps one.
    """

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(kw_only=True)
class Figures:
    """All figures of a record.

    Attributes:
        kept: those that can be shown.
        dropped: why others can't, by name; such a name may still have values at other points.
        estimated: names of those that are computed from something else that was measured.
    """

    kept: list[Figure] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    estimated: list[str] = field(default_factory=list)


def figures(record: Record, known: Sequence[Row]) -> Figures:
    """The figures of a record.

    Where a record has several phases their groups are told apart (`train_latency/p50_ms`), where it has several batch
    sizes the names are (`latency/batch_8_p50_ms`): a metric's values can then be compared from step to step.

    Args:
        record: of any run.
        known: its rows.
    """
    phases, batches = len({row.key.phase for row in known}) > 1, len({row.key.batch_size for row in known}) > 1
    times = {point.key: _end_ms(point, record) for point in record.points}
    found, taken = Figures(), set[tuple[str, int]]()
    for quantity in quantities(record, known):
        name = metric_name(quantity, several_phases=phases, several_batches=batches)
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


def metric_name(quantity: Quantity, *, several_phases: bool, several_batches: bool) -> str:
    """Group, slash and name of a quantity in MLflow's letters: one bad name rejects a whole batch.

    Args:
        quantity: of a record.
        several_phases: whether the record has some.
        several_batches: whether the record has several batch sizes.
    """
    group, name, key = _allowed(quantity.group), _allowed(quantity.name), quantity.key
    if several_phases and group not in _WITHOUT_PHASE and not group.startswith(f"{key.phase}_"):
        group = f"{key.phase}_{group}"
    if several_batches and group not in _WITHOUT_BATCH:
        name = f"batch_{key.batch_size}_{name}"
    return f"{group}/{name}"[:_NAME_LENGTH].rstrip(" .")


def to_ms(date: str | None) -> int | None:
    """A record's date as milliseconds since 1970; None where it is none.

    Args:
        date: ISO 8601.
    """
    try:
        return max(round(datetime.fromisoformat(date or "").timestamp() * 1e3), 0)
    except (ValueError, OverflowError):
        return None


def _allowed(text: str) -> str:
    """A part of a name; a slash in it would open a further group."""
    return _FORBIDDEN.sub("_", text.replace("/", ".")).strip(" .") or "unnamed"


def _end_ms(point: Point, record: Record) -> int:
    """When a point ended, or the record where the point does not tell."""
    start = to_ms(point.started)
    if start is None:
        return to_ms(record.ended) or 0
    return start + round(1e3 * (point.wall_seconds or 0.0))
