"""Selfcheck: how much the processes of one plan differ on this machine, from the record of many of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.records.point_times import blocks_of
from perfexp.records.quantities import time_title
from perfexp.records.record import Key, Record, Series
from perfexp.records.summary import series_of_processes
from perfexp.statistics import blockwise, moderated
from perfexp.statistics.moderated import Component, Repeats, pooled
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.wording import percent

#: Numbers of processes for which the table has the detectable difference; the sentence has that of the second.
_PROCESSES = (3, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What the processes that measured a point show about one kind of time.

    Attributes:
        time: `device`, `latency` or `throughput`.
        processes: number of processes.
        component: variance between the processes' medians.
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
            "detectable": {str(count): moderated.detectable_ratio(self.component, count) for count in _PROCESSES},
        }


def spreads(record: Record) -> list[Spread]:
    """Return the spread of each point and kind of time that at least two processes measured."""
    return [
        _spread(key, name, series)
        for key, name, series in series_of_processes(record)
        if len(series) > 1 and all(min(one.measured) > 0 for one in series)
    ]


def _spread(key: Key, time: str, series: Sequence[Series]) -> Spread:
    component = Repeats.of([blockwise.block_median(blocks_of(one)) for one in series]).own
    assert component is not None  # two processes or more
    return Spread(key=key, time=time, processes=len(series), component=component)


def sentence(known: Sequence[Spread]) -> str:
    """Sum up the kinds of time, each over all points."""
    groups: dict[str, list[Component]] = {}
    for one in known:
        groups.setdefault(one.time, []).append(one.component)
    pooled_of = {time: pooled(components) for time, components in groups.items()}
    count = _PROCESSES[1]
    varies = _listed([f"{time} by {percent(component.spread)}" for time, component in pooled_of.items()])
    shows = _listed([percent(moderated.detectable_ratio(component, count)) for component in pooled_of.values()])
    return (
        f"On this machine, {varies.replace(' by ', ' varies by ', 1)} between processes; "
        f"{count} processes each show differences from {shows}."
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def grid(known: Sequence[Spread]) -> Grid:
    """Return a table with a line for each point and kind of time."""
    keys = [one.key for one in known]
    intervals = [one.component.spread_interval for one in known]
    return Grid(
        [
            Column("point", map(str, keys), prose=True, is_key=True),
            Column("time", (time_title(one.time) for one in known), prose=True, is_key=True),
            Column("CV", _percents(one.component.spread for one in known)),
            Column("its 95 %", (f"{percent(one.low or 0)} … {percent(one.high or 0)}" for one in intervals), rank=2),
            *(
                Column(f"{count} show", _percents(moderated.detectable_ratio(one.component, count) for one in known))
                for count in _PROCESSES
            ),
        ]
    )


def _percents(fractions: Iterable[float]) -> list[str]:
    return [percent(fraction) for fraction in fractions]
