"""The runs of a sweep with their records, and the table of them for readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from perfexp.records import diagnostics, quantities
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.growth import is_clearly_below
from perfexp.records.record import Record, Status
from perfexp.records.summary import Row, rows
from perfexp.records.sweep_record import GPU_COUNT, Sweep, SweepChild
from perfexp.statistics import estimators
from perfexp.summaries import wording
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.remarks import Raised, diagnostics_by_place, failures, grouped
from perfexp.summaries.subject import MODEL_AXES, common_device, constant, label, one_line, subject

#: Share of the highest rate from which a smaller batch is named beside it.
_NEARLY = 0.95


def paired(sweep: Sweep, records: Sequence[Record]) -> list[tuple[SweepChild, Record | None]]:
    """Return each run of a sweep with its record, by number; None if it left no record."""
    by_job = {record.sweep.job: record for record in records if record.sweep and record.sweep.uid == sweep.uid}
    return [(child, by_job.get(child.job)) for child in sorted(sweep.children, key=lambda child: child.job)]


def headline(sweep: Sweep) -> str:
    """Return the axes of a sweep and how many runs ended in which way."""
    statuses = [child.status for child in sweep.children]
    ended = f"{len(statuses) - statuses.count(Status.INTERRUPTED)}{f' of {sweep.jobs}' if sweep.jobs else ''}"
    counts = {status: statuses.count(status) for status in Status if status is not Status.OK}
    parts = [f"{ended} runs ended", *(f"{count} {status.value}" for status, count in counts.items() if count)]
    return f"sweep over {one_line(sweep.name)}: {', '.join(parts)}"


def setting(records: Sequence[Record]) -> str:
    """Return the constants of all runs: names, phase, size, batch, precision and devices; empty if there are none."""
    keys = [row.key for record in records for row in rows(record)]
    subjects = [subject(record.plan) for record in records]
    model, algorithm, execution = (
        names.pop() if len(names := {getattr(one, name) for one in subjects}) == 1 else ""
        for name in ("model", "algorithm", "execution")
    )
    environments = [record.environment for record in records]
    point = label(keys[0], same, environments) if keys and (same := constant(keys)) else ""
    device = common_device(environments)
    words = [" · ".join(filter(None, (model, algorithm, point, execution))), f"on {device}" if device else ""]
    ranks = "; batch, times and memory are of one rank, samples/s and time per sample of all"
    return " ".join(filter(None, words)) + ranks * any("ranks" in one for one in environments)


def diagnostics_of(sweep: Sweep, records: Sequence[Record]) -> dict[int, Diagnostic]:
    """By its number each run with a warning that only the other runs show: several GPUs that are slower than fewer."""
    counts: dict[tuple[object, ...], list[tuple[int, int, Row, estimators.Interval]]] = {}
    for child, record in paired(sweep, records):
        rest = tuple(sorted((name, value) for name, value in child.axes.items() if name != GPU_COUNT))
        for row in rows(record) if record and child.devices is not None else []:
            if rate := row.samples_per_second:
                counts.setdefault((rest, row.key), []).append((child.devices or 0, child.job, row, rate))
    worst: dict[int, tuple[float, int, int, str]] = {}
    for group in counts.values():
        for count, job, row, rate in group:
            fewer = [other for other in group if other[0] < count and is_clearly_below(rate, other[3])]
            if fewer:
                best, _, of_fewer, most = max(fewer, key=lambda other: other[3].value)
                slower = (rate.value / most.value, count, best, _scope(row, of_fewer))
                worst[job] = min(worst.get(job, slower), slower)
    return {
        job: diagnostics.make("multi_gpu_slower", ratio=ratio, count=count, fewer=fewer, scope=scope)
        for job, (ratio, count, fewer, scope) in worst.items()
    }


def _scope(*sides: Row) -> str:
    """The runs that a ratio of two rates holds for; empty if it holds for others on this machine too."""
    is_decided = all((rate := row.samples_per_second) and rate.low is not None for row in sides)
    return "" if is_decided else " in these runs (undecided)"


def raised(sweep: Sweep, records: Sequence[Record]) -> list[Raised]:
    """The diagnostics of all runs, and those that only the other runs show: each code once, with its help."""
    placed = [
        (f"run {child.job} · {place}" if place else "", diagnostics)
        for child, record in paired(sweep, records)
        for place, diagnostics in (diagnostics_by_place(record, rows(record)) if record else ())
    ]
    names = {child.job: one_line(child.name) for child in sweep.children}
    placed += [(f"run {job} {names[job]}", (one,)) for job, one in diagnostics_of(sweep, records).items()]
    return grouped(placed)


def runs(sweep: Sweep, records: Sequence[Record], title: str = "", ratios: Mapping[tuple[int, str], str] = {}) -> Grid:
    """Return a line for each run, or for each of its phases: the axes, the time, and how it ended.

    Args:
        title: title of the ratios.
        ratios: ratio of the times to those that the others are compared with, and verdict, by run's number and phase.
    """
    known = paired(sweep, records)
    lines = [(child, rows_of_phase) for child, record in known for rows_of_phase in _by_phase(record)]
    children, tables = [child for child, _ in lines], [table for _, table in lines]
    axes = dict.fromkeys(name for child in children for name in child.axes)
    formats = {child.job: subject(one.plan, one.environment).number_format for child, one in known if one}
    phases = {row.key.phase for table in tables for row in table}
    kinds = wording.time_kinds(row for table in tables for row in table)
    slower = diagnostics_of(sweep, records)
    columns = [
        Column("run", (str(child.job) for child in children), is_key=True),
        *(Column(name, [_axis(name, child, formats) for child in children]) for name in axes),
        Column("phase", (table[0].key.phase if table and len(phases) > 1 else "" for table in tables)),
        Column(f"{wording.median_title(kinds)} ± CI95", map(_times, tables)),
        Column("time", (_kinds(table) if len(kinds) > 1 else "" for table in tables)),
        Column("samples/s", (_single(table, wording.row_rate_text) for table in tables), rank=3),
        Column(title, (ratios.get((child.job, table[0].key.phase), "") if table else "" for child, table in lines)),
        Column(quantities.named(quantities.COVERAGE).title, map(coverage, tables), rank=3),
        Column("memory", (_single(table, _metric_of(quantities.PEAK_MEMORY)) for table in tables), rank=4),
        Column("energy/per_call", (_single(table, _metric_of(quantities.ENERGY)) for table in tables), rank=4),
        Column("remarks", (_remarks(child.status, table, slower.get(child.job)) for child, table in lines), prose=True),
    ]
    singles = [table[0] for table in map(_timed, tables) if len(table) == 1]
    notes = [wording.scope_note([row for table in tables for row in table]), *wording.rate_notes(singles)]
    return Grid(columns, list(filter(None, notes))).without_empty()


class Candidate(NamedTuple):
    """A point among others with which it shares the work: its name, its batch if that is what differs, its figures."""

    name: str
    batch: int | None
    row: Row


def best(candidates: Sequence[Candidate]) -> str:
    """Return which of several points has the highest rate: `best: batch 64, 92 samples/s; batch 16 reaches 98 % of it`.

    Points whose rates are not clearly below it are named with it. Empty for less than two rates.
    """
    rated = [(one, rate) for one in candidates if (rate := one.row.samples_per_second)]
    if len(rated) < 2:
        return ""
    first, most = max(rated, key=lambda pair: pair[1].value)
    ties = [one.name for one, rate in rated if one is not first and not is_clearly_below(rate, most)]
    if len(ties) == len(rated) - 1:
        return "best: undecided"
    text = f"best: {' or '.join([first.name, *ties])}, {wording.rate_text(first.row.samples_per_second)} samples/s"
    enough = [(one, rate.value / most.value) for one, rate in rated if one.batch and one.name not in ties]
    smaller = [pair for pair in enough if pair[1] >= _NEARLY and (pair[0].batch or 0) < (first.batch or 0)]
    if not smaller:
        return text
    small, share = min(smaller, key=lambda pair: pair[0].batch or 0)
    return f"{text}; {small.name} reaches {share:.0%} of it".replace("%", " %")


def best_run(sweep: Sweep, records: Sequence[Record]) -> str:
    """Return the best of a sweep's runs, if each measured one point, of one phase, size and model."""
    candidates = []
    for child, record in paired(sweep, records):
        timed = _timed(rows(record)) if record else []
        is_batch = list(child.axes) == ["batch_size"]
        for row in timed:
            name = f"batch {row.key.batch_size}" if is_batch else ", ".join(map("=".join, child.axes.items()))
            candidates.append(Candidate(name, row.key.batch_size if is_batch else None, row))
        if len(timed) > 1 or set(MODEL_AXES) & child.axes.keys():
            return ""
    same = {(one.row.key.phase, one.row.key.input_size) for one in candidates}
    return best(candidates) if len(same) == 1 else ""


def _kinds(table: Sequence[Row]) -> str:
    return ", ".join(map(quantities.time_title, wording.time_kinds(table)))


def _axis(name: str, child: SweepChild, formats: Mapping[int, str]) -> str:
    value = one_line(child.axes.get(name, ""))
    return formats.get(child.job, value) if name == "precision" else value


def in_a_line(record: Record) -> str:
    """Return times, rate and remarks of a run by phase: `latency 14.6 ms ± 3.9 %, 67 samples/s (drift)`."""
    by_phase = _by_phase(record)
    parts = []
    for table in by_phase:
        rate = _single(table, lambda row: wording.rate_text(row.samples_per_second))
        words = [f"{_kinds(table)} {_times(table)}".strip(), f"{rate} samples/s" if rate else ""]
        remarks = _remarks(record.status, table, None)
        text = ", ".join(filter(None, words)) + (f" ({remarks})" if remarks else "")
        parts.append(f"{table[0].key.phase} {text}" if len(by_phase) > 1 else text.strip())
    return "; ".join(parts)


def _by_phase(record: Record | None) -> list[list[Row]]:
    phases: dict[str, list[Row]] = {}
    for row in rows(record) if record else []:
        phases.setdefault(row.key.phase, []).append(row)
    return list(phases.values()) or [[]]


def child_failures(sweep: Sweep, records: Sequence[Record]) -> list[str]:
    """Return a line for each run, or each point of a run, that did not end well: name, status and reason."""
    lines = []
    for child, record in paired(sweep, records):
        reasons = failures(record) if record else []
        if not reasons and child.status is not Status.OK:
            reasons = [child.status.value + (f": {one_line(child.error)}" if child.error else "")]
        lines += [f"run {child.job} {one_line(child.name)}: {reason}" for reason in reasons]
    return lines


def _timed(table: Sequence[Row]) -> list[Row]:
    return [row for row in table if row.time]


def _times(table: Sequence[Row]) -> str:
    medians = sorted((row.time.median for row in table if row.time), key=lambda median: median.value)
    if len(medians) < 2:
        return wording.interval_text(medians[0]) if medians else ""
    return f"{wording.bare(medians[0])} … {wording.bare(medians[-1])}"


def coverage(table: Sequence[Row]) -> str:
    """The share of the convolutions' FLOPs that the selected algorithm computed, or the range of several."""
    metrics = ((wording.find_metric(row, quantities.COVERAGE), row) for row in table)
    shares = [(metric.value, row) for metric, row in metrics if metric and metric.value is not None]
    shares.sort(key=itemgetter(0))
    return " … ".join(dict.fromkeys(wording.coverage_text(row) for _, row in shares[:1] + shares[-1:]))


def _single(table: Sequence[Row], text: Callable[[Row], str]) -> str:
    """Return the text of a run with one timed point; empty with several."""
    timed = _timed(table)
    return text(timed[0]) if len(timed) == 1 else ""


def _metric_of(name: str) -> Callable[[Row], str]:
    return lambda row: wording.metric_text(wording.find_metric(row, name))


def _remarks(status: Status, table: Sequence[Row], slower: Diagnostic | None) -> str:
    points = [f"{len(_timed(table))} of {len(table)} points"] if len(table) > 1 else []
    ending = [] if status is Status.OK else [status.value]
    fitting = (wording.find_metric(row, quantities.FITTING_BATCH) for row in table)
    fits = dict.fromkeys(f"batch {metric.value:g} fits" for metric in fitting if metric and metric.value)
    found = [*(one for row in table for one in row.doubts if not one.is_note), *filter(None, [slower])]
    return ", ".join([*points, *ending, *fits, *dict.fromkeys(one.code for one in found)])
