"""Selfcheck summary: how much the processes of a plan vary on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.records.quantities import TIMES, time_title
from perfexp.records.record import Key
from perfexp.records.summary import Row
from perfexp.statistics import moderated
from perfexp.statistics.moderated import Component, pooled
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.wording import percent

#: Process counts in the table of detectable differences; the sentence uses the second.
_PROCESSES = (3, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Variation of one kind of time between the processes that measured a point.

    Attributes:
        time: `device`, `latency` or `throughput`.
        processes: number of processes.
        component: variance between process medians.
    """

    key: Key
    time: str
    processes: int
    component: Component

    def to_builtins(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        interval = self.component.spread_interval
        return {
            "point": str(self.key),
            "phase": self.key.phase,
            "time": self.time,
            "processes": self.processes,
            "cv": interval.value,
            "cv_interval": [interval.low, interval.high],
            "variance": self.component.variance,
            "degrees": self.component.degrees,
            "detectable": {
                str(count): moderated.detectable_ratio(self.component, count)
                for count in _PROCESSES
            },
        }


def spreads(rows: Iterable[Row]) -> list[Spread]:
    """Return the spread for each point and kind of time that at least two processes measured."""
    return [
        Spread(key=row.key, time=name, processes=len(medians.values), component=medians.own)
        for row in rows
        for name, medians in row.figures.items()
        if name in TIMES and medians.own
    ]


def sentence(known: Sequence[Spread]) -> str:
    """Summarize each kind of time over all points."""
    groups: dict[str, list[Component]] = {}
    for one in known:
        groups.setdefault(one.time, []).append(one.component)
    pooled_of = {time: pooled(components) for time, components in groups.items()}
    count = _PROCESSES[1]
    varies = _listed(
        [f"{time} by {percent(component.spread)}" for time, component in pooled_of.items()]
    )
    shows = _listed(
        [percent(moderated.detectable_ratio(component, count)) for component in pooled_of.values()]
    )
    return (
        f"On this machine, {varies.replace(' by ', ' varies by ', 1)} between processes; "
        f"{count} processes each show differences from {shows}."
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def grid(known: Sequence[Spread]) -> Grid:
    """Return a table with a line for each point and kind of time."""
    components = [one.component for one in known]
    intervals = [component.spread_interval for component in components]
    columns = [
        Column("point", (str(one.key) for one in known), prose=True, is_key=True),
        Column("time", (time_title(one.time) for one in known), prose=True, is_key=True),
        Column("CV", (percent(component.spread) for component in components)),
        Column(
            "its 95 %",
            (f"{percent(one.low or 0)} … {percent(one.high or 0)}" for one in intervals),
            rank=2,
        ),
    ]
    for count in _PROCESSES:
        detectable = (moderated.detectable_ratio(component, count) for component in components)
        columns.append(Column(f"{count} show", map(percent, detectable)))
    return Grid(columns)
