"""Selfcheck summary: how much the processes of a plan vary on this machine.

`perfexp selfcheck` measures a plan in many processes and shows, for each point and kind of time, by
how much process medians differ, and which differences between two runs can be detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.records.grid import Column, Grid
from perfexp.records.quantities import TIMES, time_title
from perfexp.records.record import Key
from perfexp.records.rows import Row
from perfexp.records.wording import percent
from perfexp.statistics import moderated
from perfexp.statistics.prior import Component

#: Process counts in the table of detectable differences; the sentence uses the second.
_PROCESSES = (3, 5, 10)


@dataclass(frozen=True, kw_only=True)
class ProcessSpread:
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
        """Return the entry for selfcheck's JSON output; `cv` is the relative standard deviation.

        `detectable` has the smallest detectable ratio between runs, by number of processes each.
        """
        interval = moderated.spread_interval(self.component)
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


def spreads(rows: Iterable[Row]) -> list[ProcessSpread]:
    """Return the spread for each point and kind of time that at least two processes measured.

    `perfexp selfcheck` summarizes them with `sentence` and shows them with `grid`.
    """
    process_spreads = []
    for row in rows:
        for name, medians in row.figures.items():
            # `own` is the variance that these processes show, without the prior
            if name in TIMES and medians.own:
                process_spreads.append(
                    ProcessSpread(
                        key=row.key,
                        time=name,
                        processes=len(medians.values),
                        component=medians.own,
                    )
                )
    return process_spreads


def sentence(process_spreads: Sequence[ProcessSpread]) -> str:
    """Return a sentence about each kind of time over all points, the last line of selfcheck.

    For example: `On this machine, latency varies by 0.9 % between processes; …`.
    """
    groups: dict[str, list[Component]] = {}
    for spread in process_spreads:
        groups.setdefault(spread.time, []).append(spread.component)
    count = _PROCESSES[1]
    varies, shows = [], []
    for time, components in groups.items():
        component = moderated.pooled(components)
        varies.append(f"{time} by {percent(component.spread)}")
        shows.append(percent(moderated.detectable_ratio(component, count)))
    return (
        f"On this machine, {_listed(varies).replace(' by ', ' varies by ', 1)} between processes; "
        f"{count} processes each show differences from {_listed(shows)}."
    )


def _listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def grid(process_spreads: Sequence[ProcessSpread]) -> Grid:
    """Return a table with a line for each point and kind of time.

    `CV` is the relative standard deviation between process medians. `N show` is the smallest
    relative difference between two runs that N processes each can show.
    """
    columns = [
        Column("point", prose=True, is_key=True),
        Column("time", prose=True, is_key=True),
        Column("CV"),
        Column("its 95 %", rank=2),
    ]
    columns += [Column(f"{count} show") for count in _PROCESSES]
    lines = []
    for spread in process_spreads:
        component = spread.component
        interval = moderated.spread_interval(component)
        line = [str(spread.key), time_title(spread.time), percent(component.spread)]
        line.append(f"{percent(interval.low or 0)} … {percent(interval.high or 0)}")
        line += [percent(moderated.detectable_ratio(component, count)) for count in _PROCESSES]
        lines.append(line)
    return Grid.of_cells(columns, lines)
