"""Sweep summary: a sweep's runs as a table, the best run, diagnostics and failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import methodcaller
from typing import NamedTuple

from perfexp.records import quantities
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.growth import is_clearly_below
from perfexp.records.record import Status
from perfexp.records.summary import Row
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.summaries import wording
from perfexp.summaries.analysis import Analysis, SweepAnalysis
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.remarks import Raised, diagnostics_by_place, failures, grouped
from perfexp.summaries.subject import MODEL_AXES, common_device, constant, label, one_line

#: A smaller batch is named, too, if it reaches this share of the highest rate.
_NEARLY = 0.95


def headline(sweep: Sweep) -> str:
    """Return a sweep's axes and how many of its runs have each status."""
    statuses = [child.status for child in sweep.children]
    ended = f"{len(statuses) - statuses.count(Status.INTERRUPTED)}{f' of {sweep.jobs}' if sweep.jobs else ''}"
    counts = {status: statuses.count(status) for status in Status if status is not Status.OK}
    parts = [
        f"{ended} runs ended",
        *(f"{count} {status.value}" for status, count in counts.items() if count),
    ]
    return f"sweep over {one_line(sweep.name)}: {', '.join(parts)}"


def setting(analyses: Sequence[Analysis]) -> str:
    """Return facts common to all runs; empty if there are none.

    These are names, phase, size, batch, precision and devices.
    """
    keys = [row.key for one in analyses for row in one.rows]
    environments = [one.record.environment for one in analyses]
    model, algorithm, execution = (
        names.pop() if len(names := {getattr(one.about, name) for one in analyses}) == 1 else ""
        for name in ("model", "algorithm", "execution")
    )
    point = label(keys[0], same, environments) if keys and (same := constant(keys)) else ""
    device = common_device(environments)
    words = [
        " · ".join(filter(None, (model, algorithm, point, execution))),
        f"on {device}" if device else "",
    ]
    ranks = "; batch, times and memory are of one rank, samples/s and time per sample of all"
    return " ".join(filter(None, words)) + ranks * any("ranks" in one for one in environments)


def raised(whole: SweepAnalysis) -> list[Raised]:
    """Return the diagnostics from all runs, including those that only other runs reveal.

    Each code appears once for each help.
    """
    placed = [
        (f"run {child.job} · {place}" if place else "", diagnostics)
        for child, one in whole.runs
        for place, diagnostics in (diagnostics_by_place(one) if one else ())
    ]
    names = {child.job: one_line(child.name) for child, _ in whole.runs}
    return grouped(
        [*placed, *((f"run {job} {names[job]}", (one,)) for job, one in whole.slower.items())]
    )


def runs(whole: SweepAnalysis, title: str = "", ratios: Mapping[tuple[int, str], str] = {}) -> Grid:
    """Return a table with a line for each run and phase: axes, time and how it ended.

    Args:
        title: title of the ratio column.
        ratios: time ratio to the run's baseline, with its verdict, by run number and phase.
    """
    lines = [(child, table) for child, one in whole.runs for table in _by_phase(one)]
    children, tables = zip(*lines, strict=True)
    formats = {child.job: one.about.number_format for child, one in whole.runs if one}
    axes = dict.fromkeys(name for child in children for name in child.axes)
    every = [row for table in tables for row in table]
    phases, kinds = {row.key.phase for row in every}, wording.time_kinds(every)
    single = [table[0] if len(table) == 1 else None for table in map(_timed, tables)]
    names = {"memory": quantities.PEAK_MEMORY, "energy/per_call": quantities.ENERGY}
    columns = [
        Column("run", (str(child.job) for child in children), is_key=True),
        *(Column(name, [_axis(name, child, formats) for child in children]) for name in axes),
        Column(
            "phase", (table[0].key.phase if table and len(phases) > 1 else "" for table in tables)
        ),
        Column(f"{wording.median_title(kinds)} ± CI95", map(_times, tables)),
        Column("time", (_kinds(table) if len(kinds) > 1 else "" for table in tables)),
        Column("samples/s", (wording.row_rate_text(row) if row else "" for row in single), rank=3),
        Column(
            title,
            (
                ratios.get((child.job, table[0].key.phase), "") if table else ""
                for child, table in lines
            ),
        ),
        Column(quantities.named(quantities.COVERAGE).title, map(coverage, tables), rank=3),
    ]
    for heading, name in names.items():
        columns.append(
            Column(
                heading, [wording.figure_text(row, name) if row else "" for row in single], rank=4
            )
        )
    remarks = (_remarks(child.status, table, whole.slower.get(child.job)) for child, table in lines)
    columns.append(Column("remarks", remarks, prose=True))
    notes = [*wording.scope_notes(every), *wording.rate_notes(list(filter(None, single)))]
    return Grid(columns, notes).without_empty()


class Candidate(NamedTuple):
    """Point that is compared with others that do the same work.

    Attributes:
        batch: batch size, if that is the difference; otherwise None.
    """

    name: str
    batch: int | None
    row: Row


def best(candidates: Sequence[Candidate]) -> str:
    """Return the point with the highest rate, together with points not clearly below it.

    For example: `best: batch 64, 92 samples/s; batch 16 reaches 98 % of it`. Empty for fewer than
    two rates.
    """
    rated = [(one, rate) for one in candidates if (rate := one.row.samples_per_second)]
    if len(rated) < 2:
        return ""
    first, most = max(rated, key=lambda pair: pair[1].value)
    ties = [
        one.name for one, rate in rated if one is not first and not is_clearly_below(rate, most)
    ]
    if len(ties) == len(rated) - 1:
        return "best: undecided"
    text = f"best: {' or '.join([first.name, *ties])}, {wording.rate_text(most)} samples/s"
    shares = [(one.batch, one.name, rate.value / most.value) for one, rate in rated if one.batch]
    smaller = [
        one
        for one in shares
        if one[2] >= _NEARLY and one[0] < (first.batch or 0) and one[1] not in ties
    ]
    if not smaller:
        return text
    _, name, share = min(smaller)
    return f"{text}; {name} reaches {share:.0%} of it".replace("%", " %")


def best_run(whole: SweepAnalysis) -> str:
    """Return a sweep's best run, if each run measured a single point with the same phase and size.

    Empty for a sweep over models.
    """
    candidates = []
    for child, one in whole.runs:
        timed = _timed(one.rows) if one else []
        is_batch = list(child.axes) == ["batch_size"]
        for row in timed:
            name = (
                f"batch {row.key.batch_size}"
                if is_batch
                else ", ".join(map("=".join, child.axes.items()))
            )
            candidates.append(Candidate(name, row.key.batch_size if is_batch else None, row))
        if len(timed) > 1 or set(MODEL_AXES) & child.axes.keys():
            return ""
    same = {(one.row.key.phase, one.row.key.input_size) for one in candidates}
    return best(candidates) if len(same) == 1 else ""


def in_a_line(one: Analysis) -> str:
    """Return a run's times, rate and remarks by phase.

    For example: `latency 14.6 ms ± 3.9 %, 67 samples/s (drift)`.
    """
    by_phase = _by_phase(one)
    parts = []
    for table in by_phase:
        timed = _timed(table)
        rate = wording.rate_text(timed[0].samples_per_second) if len(timed) == 1 else ""
        words = [f"{_kinds(table)} {_times(table)}".strip(), f"{rate} samples/s" if rate else ""]
        remarks = _remarks(one.record.status, table, None)
        text = ", ".join(filter(None, words)) + (f" ({remarks})" if remarks else "")
        parts.append(f"{table[0].key.phase} {text}" if len(by_phase) > 1 else text.strip())
    return "; ".join(parts)


def child_failures(whole: SweepAnalysis) -> list[str]:
    """Return a line for each failed run, or for each failed point in a run.

    The line has name, status and reason.
    """
    lines = []
    for child, one in whole.runs:
        reasons = failures(one.record) if one else []
        if not reasons and child.status is not Status.OK:
            reasons = [child.status.value + (f": {one_line(child.error)}" if child.error else "")]
        lines += [f"run {child.job} {one_line(child.name)}: {reason}" for reason in reasons]
    return lines


def coverage(table: Iterable[Row]) -> str:
    """Return the algorithm coverage (share of convolution FLOPs), or its range over rows."""
    known = [row for row in table if row.value(quantities.COVERAGE) is not None]
    known.sort(key=methodcaller("value", quantities.COVERAGE))
    return " … ".join(dict.fromkeys(map(wording.coverage_text, known[:1] + known[-1:])))


def _axis(name: str, child: SweepChild, formats: Mapping[int, str]) -> str:
    value = one_line(child.axes.get(name, ""))
    return formats.get(child.job, value) if name == "precision" else value


def _kinds(table: Iterable[Row]) -> str:
    return ", ".join(map(quantities.time_title, wording.time_kinds(table)))


def _by_phase(one: Analysis | None) -> list[list[Row]]:
    phases: dict[str, list[Row]] = {}
    for row in one.rows if one else ():
        phases.setdefault(row.key.phase, []).append(row)
    return list(phases.values()) or [[]]


def _timed(table: Iterable[Row]) -> list[Row]:
    return [row for row in table if row.time]


def _times(table: Iterable[Row]) -> str:
    medians = sorted(
        (row.time.median for row in table if row.time), key=lambda median: median.value
    )
    if len(medians) < 2:
        return "".join(map(wording.interval_text, medians))
    return f"{wording.bare(medians[0])} … {wording.bare(medians[-1])}"


def _remarks(status: Status, table: Sequence[Row], slower: Diagnostic | None) -> str:
    points = [f"{len(_timed(table))} of {len(table)} points"] if len(table) > 1 else []
    ending = [] if status is Status.OK else [status.value]
    fits = dict.fromkeys(
        f"batch {size:g} fits" for row in table if (size := row.value(quantities.FITTING_BATCH))
    )
    found = [*(one for row in table for one in row.doubts), *filter(None, [slower])]
    return ", ".join([*points, *ending, *fits, *wording.codes(found)])
