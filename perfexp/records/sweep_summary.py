"""Sweep summary: a sweep's runs as a table, the best run, diagnostics and failures.

The console and MLflow show a sweep with these functions when it has ended, and `perfexp show`
later. An axis is an override that varies over the runs, such as `batch_size`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import NamedTuple

from perfexp.records import quantities, wording
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.grid import Column, Grid
from perfexp.records.growth import is_clearly_below
from perfexp.records.record import Status
from perfexp.records.remarks import Placed, Raised, diagnostics_by_place, failures, grouped
from perfexp.records.rows import Row
from perfexp.records.subject import MODEL_AXES, common_device, constant, label, one_line
from perfexp.records.sweep_record import Sweep, SweepChild

#: A smaller batch is named, too, if it reaches this share of the highest rate.
_NEARLY = 0.95


def headline(sweep: Sweep) -> str:
    """Return a sweep's first line: its name and how many runs ended, by status unless ok.

    Reports of the sweep begin with it.
    """
    counts = Counter(child.status for child in sweep.children)
    ended = str(counts.total() - counts[Status.INTERRUPTED])
    if sweep.jobs:
        ended += f" of {sweep.jobs}"
    parts = [f"{ended} runs ended"]
    for status in Status:
        if status is not Status.OK and counts[status]:
            parts.append(f"{counts[status]} {status.value}")
    return f"sweep over {one_line(sweep.name)}: {', '.join(parts)}"


def setting(analyses: Sequence[Analysis]) -> str:
    """Return facts common to all runs; empty if there are none.

    These are names, phase, size, batch, precision and devices. Reports show it below the headline,
    so that lines of the table need not repeat it.
    """
    keys = [row.key for analysis in analyses for row in analysis.rows]
    environments = [analysis.record.environment for analysis in analyses]
    parts = [_common_name(analyses, "model"), _common_name(analyses, "algorithm")]
    if keys and (same := constant(keys)):
        if any(analysis.about.mode == "decode" for analysis in analyses):  # its phase is inference
            parts.append(_common_name(analyses, "mode"))
            same = tuple(field for field in same if field != "phase")
        parts.append(label(keys[0], same, environments))
    parts.append(_common_name(analyses, "execution"))
    text = " · ".join(filter(None, parts))
    if device := common_device(environments):
        text = f"{text} on {device}".lstrip()
    if any("ranks" in environment for environment in environments):
        text += "; batch, times and memory are of one rank, samples/s and time per sample of all"
    return text


def _common_name(analyses: Sequence[Analysis], name: str) -> str:
    """Return a field of the runs' subjects, such as `model`, if all share it; otherwise empty."""
    names: set[str] = {getattr(analysis.about, name) for analysis in analyses}
    if len(names) == 1:
        return names.pop()
    return ""


def raised(sweep_analysis: SweepAnalysis) -> list[Raised]:
    """Return the diagnostics from all runs, including those that only other runs reveal.

    Each code appears once for each help.
    """
    placed: list[Placed] = []
    names = {}
    for child, analysis in sweep_analysis.runs:
        names[child.job] = one_line(child.name)
        for where_raised, diagnostics in diagnostics_by_place(analysis) if analysis else ():
            placed.append(
                (f"run {child.job} · {where_raised}" if where_raised else "", diagnostics)
            )
    for job, diagnostic in sweep_analysis.slower.items():
        placed.append((f"run {job} {names[job]}", (diagnostic,)))
    return grouped(placed)


def runs(
    sweep_analysis: SweepAnalysis, title: str = "", ratios: Mapping[tuple[int, str], str] = {}
) -> Grid:
    """Return a table with a line for each run and phase: axes, time and how it ended.

    A line for several points has the range of their times. Rate, memory and energy are shown for a
    single point.

    Args:
        sweep_analysis: the sweep with its runs' analyses.
        title: title of the ratio column.
        ratios: time ratio to the run's baseline, with its verdict, by run number and phase.
    """
    lines = [
        (child, table) for child, analysis in sweep_analysis.runs for table in _by_phase(analysis)
    ]
    formats = {
        child.job: analysis.about.number_format
        for child, analysis in sweep_analysis.runs
        if analysis
    }
    every, axes = list[Row](), dict[str, str]()
    for child, table in lines:
        every += table
        axes |= child.axes
    kinds = wording.time_kinds(every)
    has_phases = len({row.key.phase for row in every}) > 1
    columns = [
        Column("run", is_key=True),
        *map(Column, axes),
        Column("phase"),
        Column(f"{wording.median_title(kinds)} ± CI95"),
        Column("time"),
        Column("samples/s", rank=3),
        Column(title, rank=1),
        Column(quantities.named(quantities.COVERAGE).title, rank=3),
        Column("memory", rank=4),
        Column("energy/per_call", rank=4),
        Column("remarks", prose=True, rank=2),
    ]
    cells, single = [], []
    for child, table in lines:
        phase = table[0].key.phase if table else ""
        timed = _timed(table)
        rate = memory = energy = ""
        if len(timed) == 1:
            single += timed
            rate = wording.row_rate_text(timed[0])
            memory = wording.figure_text(timed[0], quantities.PEAK_MEMORY)
            energy = wording.figure_text(timed[0], quantities.ENERGY)
        line = [str(child.job)]
        line += [_axis(name, child, formats) for name in axes]
        line += [phase if has_phases else "", _times(table)]
        line.append(_kinds(table) if len(kinds) > 1 else "")
        line += [rate, ratios.get((child.job, phase), ""), coverage(table), memory, energy]
        line.append(_remarks(child.status, table, sweep_analysis.slower.get(child.job)))
        cells.append(line)
    notes = [*wording.scope_notes(every), *wording.rate_notes(single)]
    return Grid.of_cells(columns, cells, notes).without_empty()


class Candidate(NamedTuple):
    """Point that is compared with others that do the same work.

    Attributes:
        batch: batch size, if that is the difference; otherwise None.
    """

    name: str
    batch: int | None
    row: Row


def best(candidates: Sequence[Candidate]) -> str:
    """Return a sentence: the point with the highest rate, and points not clearly below it.

    For example: `best: batch 64, 92 samples/s; batch 16 reaches 98 % of it`. Empty for fewer than
    two rates. The line stands below a sweep's table, or below a run's table over batch sizes.
    """
    rated = [(run, rate) for run in candidates if (rate := run.row.samples_per_second)]
    if len(rated) < 2:
        return ""
    first, most = max(rated, key=lambda pair: pair[1].value)
    names, smaller = [first.name], []
    for run, rate in rated:
        share = rate.value / most.value
        if run is first:
            continue
        if not is_clearly_below(rate, most):
            names.append(run.name)
        elif run.batch and run.batch < (first.batch or 0) and share >= _NEARLY:
            smaller.append((run.batch, run.name, share))
    if len(names) == len(rated):
        return "best: undecided"
    text = f"best: {' or '.join(names)}, {wording.rate_text(most)} samples/s"
    if not smaller:
        return text
    _, name, share = min(smaller)
    return f"{text}; {name} reaches {share:.0%} of it".replace("%", " %")


def best_run(sweep_analysis: SweepAnalysis) -> str:
    """Return a sentence about a sweep's best run (see `best`).

    Empty unless each run measured a single point with the same phase and size. Also empty for a
    sweep over models, which do different work.
    """
    candidates, same = [], set()
    for child, analysis in sweep_analysis.runs:
        timed = _timed(analysis.rows if analysis else ())
        if len(timed) > 1 or set(MODEL_AXES) & child.axes.keys():
            return ""
        for row in timed:
            same.add((row.key.phase, row.key.input_size))
            if list(child.axes) == ["batch_size"]:
                size = row.key.batch_size
                candidates.append(Candidate(f"batch {size}", size, row))
            else:
                candidates.append(
                    Candidate(", ".join(map("=".join, child.axes.items())), None, row)
                )
    if len(same) != 1:
        return ""
    return best(candidates)


def in_a_line(analysis: Analysis) -> str:
    """Return a run's times, rate and remarks by phase.

    For example: `latency 14.6 ms ± 3.9 %, 67 samples/s (drift)`. While a sweep runs, the console
    prints this line for each finished run.
    """
    by_phase = _by_phase(analysis)
    parts = []
    for table in by_phase:
        timed = _timed(table)
        text = f"{_kinds(table)} {_times(table)}".strip()
        if len(timed) == 1 and (rate := wording.rate_text(timed[0].samples_per_second)):
            text = ", ".join(filter(None, (text, f"{rate} samples/s")))
        if remarks := _remarks(analysis.record.status, table, None):
            text += f" ({remarks})"
        parts.append(f"{table[0].key.phase} {text}" if len(by_phase) > 1 else text.strip())
    return "; ".join(parts)


def child_failures(sweep_analysis: SweepAnalysis) -> list[str]:
    """Return a line for each failed run, or for each failed point in a run.

    The line has name, status and reason.
    """
    lines = []
    for child, analysis in sweep_analysis.runs:
        reasons = failures(analysis.record) if analysis else []
        if not reasons and child.status is not Status.OK:
            reasons.append(child.status.value)
            if child.error:
                reasons[0] += f": {one_line(child.error)}"
        for reason in reasons:
            lines.append(f"run {child.job} {one_line(child.name)}: {reason}")
    return lines


def coverage(table: Iterable[Row]) -> str:
    """Return the algorithm coverage (share of convolution FLOPs), or its range over rows.

    The table of runs shows it.
    """
    covered = [row for row in table if row.value(quantities.COVERAGE) is not None]
    covered.sort(key=methodcaller("value", quantities.COVERAGE))
    return " … ".join(dict.fromkeys(map(wording.coverage_text, covered[:1] + covered[-1:])))


def _axis(name: str, child: SweepChild, formats: Mapping[int, str]) -> str:
    """Return a run's value on an axis as typed; a precision in words.

    Args:
        formats: precision in words, by run number, for runs with a record.
    """
    if name == "precision" and child.job in formats:
        return formats[child.job]
    return one_line(child.axes.get(name, ""))


def _kinds(table: Iterable[Row]) -> str:
    """Return the titles of the rows' representative times."""
    return ", ".join(map(quantities.time_title, wording.time_kinds(table)))


def _by_phase(analysis: Analysis | None) -> list[list[Row]]:
    """Return a run's rows by phase; an empty list of rows for a run without any."""
    phases: dict[str, list[Row]] = {}
    for row in analysis.rows if analysis else ():
        phases.setdefault(row.key.phase, []).append(row)
    return list(phases.values()) or [[]]


def _timed(table: Iterable[Row]) -> list[Row]:
    """Return the rows with a time: those that did not fail."""
    return list(filter(attrgetter("time"), table))


def _times(table: Iterable[Row]) -> str:
    """Return a row's median with its interval, or the range of several medians."""
    medians = [row.time.median for row in table if row.time]
    if len(medians) < 2:
        return "".join(map(wording.interval_text, medians))
    medians.sort(key=attrgetter("value"))
    return f"{wording.bare(medians[0])} … {wording.bare(medians[-1])}"


def _remarks(status: Status, table: Sequence[Row], slower: Diagnostic | None) -> str:
    """Return remarks on a run in a few words, such as `2 of 3 points, failed, batch 64 fits`.

    Args:
        slower: diagnostic that fewer GPUs do more samples/s than the run's; None if they do not.
    """
    words: dict[str, None] = {}  # in order, each once: several sizes may fit the same batch
    if len(table) > 1:
        words[f"{len(_timed(table))} of {len(table)} points"] = None
    if status is not Status.OK:
        words[status.value] = None
    doubts: list[Diagnostic] = []
    for row in table:
        doubts += row.doubts
        if size := row.value(quantities.FITTING_BATCH):
            words[f"batch {size:g} fits"] = None
    doubts += filter(None, [slower])
    return ", ".join([*words, *wording.codes(doubts)])
