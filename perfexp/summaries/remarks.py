"""Remarks: what every sink says beside the figures: doubts, how times grow, and points that did not end well."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfexp.profilers import is_profile, profiled_key
from perfexp.records.record import Diagnostic, Key, Point, Record, Status
from perfexp.records.summary import Row, scalings
from perfexp.summaries.subject import label, one_line, varying
from perfexp.summaries.wording import scaling_text

#: A figure in a doubt's detail, with its sign and its percent sign.
_FIGURE = re.compile(r"(?<![\w.])[-+±]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?: ?%)?")
#: The figure of a detail by which doubts of one code are compared, where it is not the first; and how bad a value is,
#: where it is not worse the further it is from zero.
_PLACES = {"too_few_samples": 1}
_BADNESS: dict[str, Callable[[float], float]] = {
    "launch_bound": lambda share: -share,
    "too_few_samples": lambda effective: -effective,
    "phases_disagree": lambda ratio: abs(ratio - 1),
    "ranks_disagree": lambda ratio: abs(ratio - 1),
    "scaling_unexpected": lambda ratio: abs(ratio - 1),
    "choice_slower": lambda ratio: -ratio,
}


@dataclass(frozen=True, kw_only=True)
class Raised:
    """Doubts of one code and one remedy, with where they were raised.

    Attributes:
        doubts: one for each place, the worst first; of the whole run the only one.
        where: labels of the points, in the same order; nothing where it concerns the whole run.
    """

    doubts: tuple[Diagnostic, ...]
    where: tuple[str, ...]

    @property
    def doubt(self) -> Diagnostic:
        """The worst."""
        return self.doubts[0]

    def __str__(self) -> str:
        return f"{self.doubt.code}{self.place}: {one_line(self.doubt.detail)}{self._range}"

    @property
    def place(self) -> str:
        """` (224)`, ` (224 and 3 more points)` or ` (224, the worst of 4 points)`; nothing for the whole run."""
        if not self.where:
            return ""
        others = len(self.where) - 1
        if others and self._range:
            return f" ({self.where[0]}, the worst of {len(self.where)} points)"
        more = f" and {others} more point{'s' if others > 1 else ''}" if others else ""
        return f" ({self.where[0]}{more})"

    @property
    def _range(self) -> str:
        """How far the figure reaches by which the doubts are compared; nothing where it is the same in all of them."""
        figures = {_figure(each) for each in self.doubts}
        if len(figures) < 2 or not _comparable(self.doubts):
            return ""
        ordered = sorted(figures, key=_number)
        return f" ({ordered[0]} to {ordered[-1]} over the points)"


def _comparable(doubts: Sequence[Diagnostic]) -> bool:
    """Whether their details differ in figures only, and have any: not in a unit, a name or a reason."""
    return bool(_figure(doubts[0])) and len({_FIGURE.sub("", doubt.detail) for doubt in doubts}) == 1


def _figure(doubt: Diagnostic) -> str:
    """The figure by which doubts of that code are compared, as its detail has it; empty where there is none."""
    figures, place = _FIGURE.findall(doubt.detail), _PLACES.get(doubt.code, 0)
    return str(figures[place]) if place < len(figures) else ""


def _number(figure: str) -> float:
    return float(figure.strip("± %"))


def raised_doubts(record: Record, rows: Sequence[Row]) -> list[Raised]:
    """All doubts of a run, each code once; but where points need different remedies, once for each of these.

    Args:
        record: of any run.
        rows: its rows, whose doubts include the statistical ones.
    """
    fields = varying(row.key for row in rows) or ("input_size", "batch_size")
    found: dict[tuple[str, str, bool], list[tuple[str, Diagnostic]]] = {}
    raised = [("", tuple(record.doubts)), *((label(row.key, fields), row.doubts) for row in rows)]
    batches = {(row.key.phase, row.key.batch_size) for row in rows}
    untimed = (point for point in record.points if (own := _beside(point.key)) and (not rows or own in batches))
    raised += [(label(point.key), tuple(point.doubts)) for point in untimed]
    for name, doubts in raised:
        for doubt in doubts:
            places = found.setdefault((doubt.code, doubt.remedy, bool(name)), [])
            if name not in (where for where, _ in places):
                places.append((name, doubt))
    return [_worst_first(places) for places in found.values()]


def _beside(key: Key) -> tuple[str, int] | None:
    """Phase and batch size of the timed points that a profile or a first prediction belongs to; None for others."""
    if is_profile(key):
        return profiled_key(key).phase, key.batch_size
    return ("inference", key.batch_size) if key.phase == "ttfp" else None


def _worst_first(places: list[tuple[str, Diagnostic]]) -> Raised:
    if _comparable([doubt for _, doubt in places]):
        badness = _BADNESS.get(places[0][1].code, abs)
        places = sorted(places, key=lambda place: -badness(_number(_figure(place[1]))))
    return Raised(doubts=tuple(doubt for _, doubt in places), where=tuple(where for where, _ in places if where))


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
