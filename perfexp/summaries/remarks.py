"""Remarks: lines that every report adds to the figures: diagnostics, scaling and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfexp.profilers import is_profile, profiled_key
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.messages import UNTRAINED
from perfexp.records.record import Key, Record, Status, without_replicate
from perfexp.records.units import counted
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.subject import distinguishing, label, one_line, varying
from perfexp.summaries.wording import scaling_text

#: Diagnostics with the label of the place where they were raised.
Placed = tuple[str, Sequence[Diagnostic]]


@dataclass(frozen=True, kw_only=True)
class Raised:
    """Diagnostics with the same code and help, worst first, one for each place.

    Diagnostics about the whole run have no place.
    """

    diagnostics: tuple[Diagnostic, ...]
    where: tuple[str, ...] = ()

    @property
    def worst(self) -> Diagnostic:
        """Return the diagnostic that provides the message."""
        return self.diagnostics[0]

    @property
    def lines(self) -> list[str]:
        """Return compiler-style lines: `warning: PLACE: MESSAGE (CODE)`, then the help."""
        worst = self.worst
        place = f"{self._place}: " if self.where else ""
        message = f"{worst.severity}: {place}{one_line(worst.message)}{self._range} ({worst.code})"
        if not worst.help:
            return [message]
        return [message, f"  help: {one_line(worst.help)}"]

    @property
    def _place(self) -> str:
        others = len(self.where) - 1
        if not others:
            return self.where[0]
        if self._range:
            return f"{self.where[0]}, the worst of {len(self.where)} measurements"
        more = counted(others, "more measurement")
        if any(diagnostic.message != self.worst.message for diagnostic in self.diagnostics):
            return f"{self.where[0]}, and {more} with other details"
        return f"{self.where[0]} and {more}"

    @property
    def _range(self) -> str:
        """Return the range of the ranking figures; empty if they are equal or incomplete."""
        figures = sorted(one.figure for one in self.diagnostics if one.figure is not None)
        spec = self.worst.rule.by.partition(":")[2]
        ends = [f"{figure:{spec}}" for figure in figures]
        if len(ends) < len(self.diagnostics) or ends[0] == ends[-1]:
            return ""
        return f" ({ends[0]} to {ends[-1]} over all)"


def raised_diagnostics(analysis: Analysis) -> list[Raised]:
    """Return diagnostics for a run and its rows, most severe first.

    Each code appears once, or once for each help.
    """
    return grouped(diagnostics_by_place(analysis))


def diagnostics_by_place(analysis: Analysis) -> list[Placed]:
    """Return diagnostics for a run and for each row, with the point's label.

    The run's own label is empty.
    """
    rows = analysis.rows
    placed: list[Placed] = [("", analysis.record.doubts)]
    fields = distinguishing(row.key for row in rows)
    batches = set()
    for row in rows:
        placed.append((label(row.key, fields), row.doubts))
        batches.add((row.key.phase, row.key.batch_size))
    for point in analysis.record.points:
        own = _beside(point.key)
        if own and (not rows or own in batches):
            placed.append((label(point.key), point.doubts))
    return placed


def grouped(placed: Iterable[Placed]) -> list[Raised]:
    """Return diagnostics from several places, most severe first.

    Each code appears once, or once for each help.
    """
    groups: dict[tuple[str, str, bool], dict[str, Diagnostic]] = {}
    for name, diagnostics in placed:
        for diagnostic in diagnostics:
            places = groups.setdefault((diagnostic.code, diagnostic.help, bool(name)), {})
            places.setdefault(name, diagnostic)
    return sorted(map(_worst_first, groups.values()), key=lambda raised: raised.worst.order)


def _beside(key: Key) -> tuple[str, int] | None:
    """Return phase and batch size of the timed points that a profile or cold start belongs to.

    None for other points.
    """
    if is_profile(key):
        return profiled_key(key).phase, key.batch_size
    if key.phase == "ttfp":
        return "inference", key.batch_size
    return None


def _worst_first(places: dict[str, Diagnostic]) -> Raised:
    badness = {}
    for name, diagnostic in places.items():
        if diagnostic.figure is not None:
            badness[name] = diagnostic.rule.badness(diagnostic.figure)
    names = list(places)
    if len(badness) == len(places):
        names.sort(key=badness.__getitem__, reverse=True)
    return Raised(
        diagnostics=tuple(map(places.__getitem__, names)), where=tuple(filter(None, names))
    )


def scaling_lines(analysis: Analysis) -> list[str]:
    """Return a line for each group of sizes in a run: how its time depends on size."""
    fields = set(varying(row.key for row in analysis.rows)) - {"input_size"}
    lines = []
    for scaling in analysis.scalings:
        words = (label(scaling.key, tuple(fields)), scaling_text(scaling))
        lines.append(": ".join(filter(None, words)))
    return lines


def failures(record: Record) -> list[str]:
    """Return a line for each failed point: name, status and error.

    Repetitions by further processes are left out.
    """
    failed = {point.key: point for point in record.points if point.status is not Status.OK}
    processes = Counter(without_replicate(point.key) for point in record.points)
    finished = processes - Counter(map(without_replicate, failed))
    errors = {UNTRAINED, *(point.error for point in failed.values())}
    lines = []
    for key, point in failed.items():
        first = without_replicate(key)
        if (point.error or "").partition("not tried: ")[2] in errors:
            continue
        if point.status is Status.INTERRUPTED and finished[first]:
            done = f"interrupted after {finished[first]} of {processes[first]} processes"
            lines.append(f"{label(first)}: {done}")
        elif first not in failed or not key.replicate:
            reason = f": {one_line(point.error)}" if point.error else ""
            lines.append(f"{label(key)}: {point.status.value}{reason}")
    return list(dict.fromkeys(lines))
