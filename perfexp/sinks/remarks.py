"""Remarks: what every sink says beside the figures: doubts, how times grow, and points that did not end well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfexp.profilers import is_profile
from perfexp.record import Doubt, Point, Record, Status
from perfexp.sinks.subject import label, one_line, varying
from perfexp.sinks.wording import scaling_text
from perfexp.summary import Row, scalings


@dataclass(frozen=True, kw_only=True)
class Raised:
    """A doubt and where it was raised.

    Attributes:
        doubt: the first one of its code and its remedy.
        where: labels of the points, or nothing where it concerns the whole run.
    """

    doubt: Doubt
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.doubt.code}{self.place}: {one_line(self.doubt.detail)}"

    @property
    def place(self) -> str:
        """` (224 and 3 more points)`, or nothing."""
        if not self.where:
            return ""
        others = len(self.where) - 1
        if others == 0:
            return f" ({self.where[0]})"
        return f" ({self.where[0]} and {others} more point{'s' if others > 1 else ''})"


def raised_doubts(record: Record, rows: Sequence[Row]) -> list[Raised]:
    """All doubts of a run, each code once; but where points need different remedies, once for each of these.

    Args:
        record: of any run.
        rows: its rows, whose doubts include the statistical ones.
    """
    fields = varying(row.key for row in rows) or ("input_size", "batch_size")
    found: dict[tuple[str, str | None], tuple[Doubt, list[str]]] = {
        (doubt.code, doubt.remedy): (doubt, []) for doubt in record.doubts
    }
    raised = [(label(row.key, fields), row.doubts) for row in rows]
    untimed = (point for point in record.points if point.key.phase == "ttfp" or is_profile(point.key))
    raised += [(label(point.key), tuple(point.doubts)) for point in untimed]
    for name, doubts in raised:
        for doubt in doubts:
            where = found.setdefault((doubt.code, doubt.remedy), (doubt, []))[1]
            if name not in where:
                where.append(name)
    return [Raised(doubt=doubt, where=tuple(where)) for doubt, where in found.values()]


def scaling_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each group of sizes: which, and how its time depends on the size.

    Args:
        rows: of any run.
    """
    known = scalings(rows)
    fields = [field for field in varying(row.key for row in rows) if field != "input_size"]
    names = [label(scaling.key, fields) for scaling in known]
    return [": ".join(filter(None, (name, scaling_text(each)))) for name, each in zip(names, known, strict=True)]


def failures(record: Record) -> list[str]:
    """A line for each point that did not end well: which, how, and why."""
    return [_failure(point) for point in record.points if point.status is not Status.OK]


def _failure(point: Point) -> str:
    reason = f": {one_line(point.error)}" if point.error else ""
    return f"{label(point.key)}: {point.status.value}{reason}"
