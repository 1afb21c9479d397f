"""Remarks: lines that every report adds to the figures: diagnostics, growth with the size, and failures."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from perfexp.profilers import is_profile, profiled_key
from perfexp.records.diagnostics import Diagnostic, Severity
from perfexp.records.growth import scalings
from perfexp.records.messages import UNTRAINED
from perfexp.records.record import Key, Record, Status, without_replicate
from perfexp.records.summary import Row
from perfexp.records.units import counted
from perfexp.summaries.subject import distinguishing, label, one_line, varying
from perfexp.summaries.wording import scaling_text

#: A figure in a message, with its sign and its percent sign.
_FIGURE = re.compile(r"(?<![\w.])[-+±]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?: ?%)?")
#: Unit of a figure in a message, directly behind it: `1.6 times`, `3.1 of 64 CPU cores`.
_UNIT = re.compile(r"(?: of \d+)? (s|ms|µs|W|times|CPU cores)\b")
#: Index of the figure in a message that says how bad a diagnostic is, by code; those of other codes are not compared.
_PLACES = {
    **dict.fromkeys(
        (
            "drift",
            "processes_drift",
            "process_apart",
            "scaling_unexpected",
            "rate_falls",
            "phases_disagree",
            "busy_host",
        ),
        0,
    ),
    **dict.fromkeys(("launch_bound", "device_idle", "queue_starved", "clock_moved", "throttled", "ranks_disagree"), 0),
    **dict.fromkeys(("algorithm_fallback", "above_the_ceiling", "layers_unattributed", "choice_slower"), 0),
    "multi_gpu_slower": 1,
    "layers_disagree": 2,
    "too_few_samples": 2,
}
#: Least ratio whose logarithm is taken: a printed ratio may be 0.00.
_LEAST_RATIO = 1e-9
#: How bad a value is by code, where it is not worse the further it is from zero.
_BADNESS: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(
        ("launch_bound", "device_idle", "rate_falls", "multi_gpu_slower", "algorithm_fallback"), operator.neg
    ),
    **dict.fromkeys(
        ("phases_disagree", "process_apart", "ranks_disagree", "scaling_unexpected"),
        lambda ratio: abs(math.log(max(ratio, _LEAST_RATIO))),
    ),
}
_SEVERITIES = list(Severity)


@dataclass(frozen=True, kw_only=True)
class Raised:
    """Diagnostics of one code and one help, one for each place, the worst first; without a place, of the whole run."""

    diagnostics: tuple[Diagnostic, ...]
    where: tuple[str, ...] = ()

    @property
    def worst(self) -> Diagnostic:
        """The diagnostic whose message is shown."""
        return self.diagnostics[0]

    @property
    def lines(self) -> list[str]:
        """As compilers print them: `warning: PLACE: MESSAGE (CODE)`, and the help below it."""
        worst = self.worst
        place = f"{self._place}: " if self.where else ""
        message = f"{worst.severity}: {place}{one_line(worst.message)}{self._range} ({worst.code})"
        return [message, *([f"  help: {one_line(worst.help)}"] if worst.help else [])]

    @property
    def _place(self) -> str:
        others = len(self.where) - 1
        if not others:
            return self.where[0]
        if self._range:
            return f"{self.where[0]}, the worst of {len(self.where)} measurements"
        if len({diagnostic.message for diagnostic in self.diagnostics}) > 1:
            return f"{self.where[0]}, and {counted(others, 'more measurement')} with other details"
        return f"{self.where[0]} and {counted(others, 'more measurement')}"

    @property
    def _range(self) -> str:
        """The range of the figure by which the diagnostics are compared; empty where it is the same in all of them."""
        figures = {_figure(diagnostic) for diagnostic in self.diagnostics}
        if len(figures) < 2 or not _comparable(self.diagnostics):
            return ""
        ordered = sorted(figures, key=_number)
        return f" ({ordered[0]} to {ordered[-1]}{_unit(self.worst)} over all)"


def _comparable(diagnostics: Sequence[Diagnostic]) -> bool:
    """Whether each message has the figure of its code, in the same unit."""
    return all(map(_figure, diagnostics)) and len(set(map(_unit, diagnostics))) == 1


def _figure(diagnostic: Diagnostic) -> str:
    """The figure of the message that says how bad a diagnostic is; empty where there is none."""
    match = _match(diagnostic)
    return match[0] if match else ""


def _unit(diagnostic: Diagnostic) -> str:
    """The unit of that figure after a space; empty for a percentage, which has its sign, and without a unit."""
    match = _match(diagnostic)
    unit = _UNIT.match(diagnostic.message, match.end()) if match else None
    return f" {unit[1]}" if unit else ""


def _match(diagnostic: Diagnostic) -> re.Match[str] | None:
    place = _PLACES.get(diagnostic.code)
    match = None if place is None else next(islice(_FIGURE.finditer(diagnostic.message), place, None), None)
    is_share = (
        match is None or diagnostic.code != "algorithm_fallback" or match.start() == 0
    )  # it may begin with "none"
    return match if is_share else None


def _number(figure: str) -> float:
    return float(figure.strip("± %"))


def raised_diagnostics(record: Record, rows: Sequence[Row]) -> list[Raised]:
    """Diagnostics of a run, also those of its rows, the most severe first; each code once, or once for each help."""
    return grouped(diagnostics_by_place(record, rows))


def diagnostics_by_place(record: Record, rows: Sequence[Row]) -> list[tuple[str, tuple[Diagnostic, ...]]]:
    """Diagnostics of a run, and of each of its points with the point's label; the label of the run is empty."""
    fields = distinguishing(row.key for row in rows)
    placed = [("", tuple(record.doubts)), *((label(row.key, fields), row.doubts) for row in rows)]
    batches = {(row.key.phase, row.key.batch_size) for row in rows}
    untimed = (point for point in record.points if (own := _beside(point.key)) and (not rows or own in batches))
    return [*placed, *((label(point.key), tuple(point.doubts)) for point in untimed)]


def grouped(placed: Iterable[tuple[str, Sequence[Diagnostic]]]) -> list[Raised]:
    """Diagnostics of several places, the most severe first; each code once, or once for each help."""
    groups: dict[tuple[str, str, bool], list[tuple[str, Diagnostic]]] = {}
    for name, diagnostics in placed:
        for diagnostic in diagnostics:
            places = groups.setdefault((diagnostic.code, diagnostic.help, bool(name)), [])
            if name not in (where for where, _ in places):
                places.append((name, diagnostic))
    return sorted(map(_worst_first, groups.values()), key=lambda raised: _SEVERITIES.index(raised.worst.severity))


def _beside(key: Key) -> tuple[str, int] | None:
    """Phase and batch size of the timed points that a profile or a first prediction belongs to; None for others."""
    if is_profile(key):
        return profiled_key(key).phase, key.batch_size
    return ("inference", key.batch_size) if key.phase == "ttfp" else None


def _worst_first(places: list[tuple[str, Diagnostic]]) -> Raised:
    if _comparable([diagnostic for _, diagnostic in places]):
        badness = _BADNESS.get(places[0][1].code, abs)
        places = sorted(places, key=lambda place: badness(_number(_figure(place[1]))), reverse=True)
    return Raised(
        diagnostics=tuple(diagnostic for _, diagnostic in places), where=tuple(where for where, _ in places if where)
    )


def scaling_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each group of sizes of one run: which, and how its time depends on the size."""
    fields = [field for field in varying(row.key for row in rows) if field != "input_size"]
    parts = ((label(scaling.key, fields), scaling_text(scaling)) for scaling in scalings(rows))
    return [": ".join(filter(None, pair)) for pair in parts]


def failures(record: Record) -> list[str]:
    """A line for each point that did not end well: which, how, and why; without repetitions by further processes."""
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
            lines.append(f"{label(first)}: interrupted after {finished[first]} of {processes[first]} processes")
        elif first not in failed or not key.replicate:
            lines.append(f"{label(key)}: {point.status.value}{f': {one_line(point.error)}' if point.error else ''}")
    return list(dict.fromkeys(lines))
