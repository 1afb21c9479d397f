"""Sweep groups: runs of a sweep that differ only in their points are one side of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfexp.comparison.pairing import KEY_FIELDS, POINT_AXES
from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import SweepChild

#: A run of a sweep with its record; None if it left none.
Run = tuple[SweepChild, Record | None]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of a sweep that differ only in the axes of points, or a single run.

    Attributes:
        runs: the runs by number.
    """

    runs: tuple[Run, ...]

    @property
    def records(self) -> list[Record]:
        """The records of the runs that left one."""
        return [record for _, record in self.runs if record]

    @property
    def timed(self) -> list[Record]:
        """The records of the runs with a timed point."""
        return [
            one for one in self.records if any(point.key.is_timed and point.status is Status.OK for point in one.points)
        ]

    @property
    def number(self) -> int:
        """The number of its first run."""
        return self.runs[0][0].job

    @property
    def axes(self) -> dict[str, str]:
        """The axes with their values, without those of points if it has several runs."""
        axes = self.runs[0][0].axes
        return axes if len(self.runs) == 1 else _without_points(axes)

    @property
    def name(self) -> str:
        """`run 3`, or the axes of several runs: `model=resnet50`."""
        if len(self.runs) == 1:
            return f"run {self.number}"
        return ", ".join(f"{axis}={value}" for axis, value in self.axes.items())

    @property
    def varying(self) -> list[str]:
        """The axes in which its runs differ."""
        first = self.runs[0][0].axes
        return [axis for axis in first if len({child.axes.get(axis) for child, _ in self.runs}) > 1]


def groups(runs: Iterable[Run]) -> list[Group]:
    """The groups of a sweep's runs, by the number of their first run.

    Runs that measured the same point are groups of their own, such as those of two modes that share a phase.
    """
    by_axes: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for child, record in sorted(runs, key=lambda run: run[0].job):
        by_axes.setdefault(tuple(sorted(_without_points(child.axes).items())), []).append((child, record))
    found = []
    for members in by_axes.values():
        found += [Group(runs=tuple(members))] if _differ(members) else [Group(runs=(run,)) for run in members]
    return sorted(found, key=lambda group: group.number)


def _without_points(axes: dict[str, str]) -> dict[str, str]:
    return {axis: value for axis, value in axes.items() if axis not in POINT_AXES}


def _differ(runs: Sequence[Run]) -> bool:
    """Whether no two runs have the same axes, or a point in common."""
    axes = [tuple(sorted(child.axes.items())) for child, _ in runs]
    points = [
        place
        for _, record in runs
        if record
        for place in {
            tuple(getattr(point.key, field) for field in KEY_FIELDS) for point in record.points if point.key.is_timed
        }
    ]
    return len(set(axes)) == len(axes) and len(set(points)) == len(points)
