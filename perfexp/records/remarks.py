"""Remarks: lines that reports add to the figures: diagnostics, notes, scaling and failures.

Console, report.md and MLflow show the same lines: diagnostics of a run grouped by code, definitions
of the metrics in a table, how times grow with size, and points that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perfexp.records import quantities
from perfexp.records.analysis import Analysis
from perfexp.records.diagnostics import Diagnostic, has
from perfexp.records.messages import UNTRAINED
from perfexp.records.profile_keys import is_profile, profiled_key
from perfexp.records.quantities import FOLLOWING, Pooled
from perfexp.records.record import Key, Metric, Record, Status, without_replicate
from perfexp.records.rows import Row
from perfexp.records.subject import distinguishing, label, number_format, one_line, varying
from perfexp.records.summary import by_point, pooled_speedup
from perfexp.records.units import counted
from perfexp.records.wording import metric_title, percent, scaling_text

#: Diagnostics with the label of the place where they were raised.
Placed = tuple[str, Sequence[Diagnostic]]


@dataclass(frozen=True, kw_only=True)
class Raised:
    """Diagnostics with the same code and help, worst first, one for each place.

    Reports print a group as one message, so that forty points do not give forty lines.

    Attributes:
        diagnostics: the diagnostics.
        where: label of each one's place, for example `train · batch 4`; empty if they are about the
            whole run.
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
        prefix = f"{self._place}: " if self.where else ""
        message = f"{worst.severity}: {prefix}{one_line(worst.message)}{self._range} ({worst.code})"
        if not worst.help:
            return [message]
        return [message, f"  help: {one_line(worst.help)}"]

    @property
    def _place(self) -> str:
        """Return the worst diagnostic's place and how many others there are."""
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
        """Return the range of the ranking figures, for example ` (2.1% to 5.0% over all)`.

        Empty if they are equal or some are missing.
        """
        figures = sorted(
            diagnostic.figure for diagnostic in self.diagnostics if diagnostic.figure is not None
        )
        spec = self.worst.rule.by.partition(":")[2]
        ends = [f"{figure:{spec}}" for figure in figures]
        if len(ends) < len(self.diagnostics) or ends[0] == ends[-1]:
            return ""
        return f" ({ends[0]} to {ends[-1]} over all)"


def raised_diagnostics(analysis: Analysis) -> list[Raised]:
    """Return diagnostics for a run and its points, most severe first; reports print their `lines`.

    Each code appears once, or once for each help.
    """
    return grouped(diagnostics_by_place(analysis))


def diagnostics_by_place(analysis: Analysis) -> list[Placed]:
    """Return diagnostics for a run, each row, each profile and each cold start, with a label.

    The run's own label is empty. Layer points are left out. Runs and sweeps group the diagnostics
    with `grouped`.
    """
    rows = analysis.rows
    placed: list[Placed] = [("", analysis.record.doubts)]
    fields = distinguishing(row.key for row in rows)
    batches = set()
    for row in rows:
        placed.append((label(row.key, fields), row.doubts))
        batches.add((row.key.phase, row.key.batch_size))
    for point in analysis.record.points:
        timed = _timed_place(point.key)
        if timed and (not rows or timed in batches):
            placed.append((label(point.key), point.doubts))
    return placed


def grouped(placed: Iterable[Placed]) -> list[Raised]:
    """Return diagnostics from several places, most severe first.

    Each code appears once, or once for each help. A run's report groups its points, a sweep's
    report all its runs.
    """
    groups: dict[tuple[str, str, bool], dict[str, Diagnostic]] = {}
    for name, diagnostics in placed:
        for diagnostic in diagnostics:
            places = groups.setdefault((diagnostic.code, diagnostic.help, bool(name)), {})
            places.setdefault(name, diagnostic)
    return sorted(map(_worst_first, groups.values()), key=lambda raised: raised.worst.order)


def _timed_place(key: Key) -> tuple[str, int] | None:
    """Return phase and batch size of the timed points that a profile or cold start belongs to.

    None for other points.
    """
    if is_profile(key):
        return profiled_key(key).phase, key.batch_size
    if key.phase == "ttfp":
        return "inference", key.batch_size
    return None


def _worst_first(places: dict[str, Diagnostic]) -> Raised:
    """Return diagnostics with the same code as a group, ordered if all have a ranking figure.

    Args:
        places: diagnostics by the label of their place.
    """
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
    """Return a line for each group of sizes in a run: how its time depends on size.

    Empty for fewer than four sizes. Reports show them in a section of their own.
    """
    fields = set(varying(row.key for row in analysis.rows)) - {"input_size"}
    lines = []
    for scaling in analysis.scalings:
        words = (label(scaling.key, tuple(fields)), scaling_text(scaling))
        lines.append(": ".join(filter(None, words)))
    return lines


def failures(record: Record) -> list[str]:
    """Return a line for each failed point: label, status and error.

    Repetitions by further processes are left out, and so are points that were not tried because
    another listed point failed. Console and reports print them as the section `not measured`.
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


def peak_notes(analysis: Analysis, metrics: Sequence[Metric]) -> Iterator[str]:
    """Yield the peaks that MFUs (model FLOP utilizations) are relative to, with the precision.

    This and the following functions give notes below the table of metrics.

    Args:
        metrics: metrics in the table, of all rows.
    """
    names = {row.key.precision.removeprefix("amp_") for row in analysis.rows}
    formats = {number_format(name, [analysis.record.environment]) for name in names}
    precision = "in the precision of each point"
    if len(formats) == 1:
        precision = f"in {formats.pop()}"
    notes = dict.fromkeys(quantities.of(metric).note for metric in metrics)
    if text := "; ".join(filter(None, notes)):
        yield text.replace("{precision}", precision)


def estimate_notes(metrics: Sequence[Metric], kinds: Sequence[str]) -> Iterator[str]:
    """Yield why metrics are marked `≈`: they follow an estimated time or rate, or are estimates.

    Args:
        metrics: metrics in the table, of all rows.
        kinds: names of the points' representative times.
    """
    titles, others = [], []
    for metric in {metric.name: metric for metric in metrics if metric.estimated}.values():
        if quantities.of(metric).pooled in FOLLOWING:
            titles.append(metric_title(metric, kinds))
        else:
            others.append(metric.name)
    if titles:
        yield f"≈ {', '.join(titles)}: computed from a figure that has ≈ itself"
    if others:
        subject = "others are " if titles else ""
        yield f"≈ {subject}estimated from what was measured, not itself measured"


def energy_notes(rows: Sequence[Row], metrics: Sequence[Metric]) -> Iterator[str]:
    """Yield which loops the energies belong to, and how accurate the meter's scale is.

    The scale error of a meter is the same in all runs, so no interval includes it.
    """
    names = {metric.name for metric in metrics}
    if quantities.ENERGY in names:
        text = "energies are of a loop of calls back to back"
        if quantities.QUEUED_ENERGY in names:
            text += "; queued: of CUDA graphs that keep the device busy"
        yield text
    scales = [scale for row in rows if (scale := row.value(quantities.METER_ACCURACY)) is not None]
    if scales:
        accuracy = percent(max(scales))
        yield (
            "± of energies is repeatability; the scale of the board's meter is known to about "
            f"±{accuracy}"
        )


def speedup_notes(analysis: Analysis, metrics: Sequence[Metric]) -> Iterator[str]:
    """Yield which speedups come from a single process, and whether the loop idles the device.

    Other processes may choose other algorithms, so a speedup is only pooled over processes if each
    process measured it.
    """
    names = {metric.name for metric in metrics if quantities.of(metric).pooled is Pooled.SPEEDUP}
    processes = by_point(analysis.record)
    single, pooled, is_idle = set[str](), set[str](), False
    for row in analysis.rows:
        row_names = names.intersection(metric.name for metric in row.metrics)
        is_idle = is_idle or bool(row_names and has(row.doubts, "device_idle"))
        if row.processes < 2:
            continue
        for name in row_names:
            if pooled_speedup(processes[row.key], name) is None:
                single.add(name)
            else:
                pooled.add(name)
    pooled -= single
    if single:
        promised = {name for name in pooled | single if "promised" in name}
        but = ", but for the promised ones," if pooled and promised == pooled else ""
        yield (
            f"speedups{but} are of the first process, ± of its calls: another one may choose other "
            "algorithms"
        )
    if is_idle:
        yield (
            "speedups are of the time on the device: a loop that leaves it idle gains less, or "
            "nothing"
        )
