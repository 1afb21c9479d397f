"""The runs of a sweep with their records, and the table of them for readers."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric, Record, Status
from perfexp.records.summary import Row, is_clearly_below, rows
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.statistics import estimators
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.remarks import Raised, failures
from perfexp.summaries.subject import constant, label, one_line, subject
from perfexp.summaries.wording import bare_time, find_metric, median_text, rate_text

#: The axis of a sweep over numbers of devices.
_GPU_COUNT = "gpu.count"


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
    """Return the constants of all runs: phase, size, batch, precision and device; empty if there are none."""
    keys = [row.key for record in records for row in rows(record)]
    devices = {subject(record.plan, record.environment).device for record in records}
    device = devices.pop() if len(devices) == 1 else None
    words = [label(keys[0], same) if keys and (same := constant(keys)) else "", f"on {device}" if device else ""]
    return " ".join(filter(None, words))


def diagnostics_of(sweep: Sweep, records: Sequence[Record]) -> dict[int, Diagnostic]:
    """By its number each run with a warning that only the other runs show: several GPUs that are slower than fewer.

    Args:
        sweep: the summary.
        records: those of its runs, as far as there are any.
    """
    counts: dict[tuple[object, ...], list[tuple[int, int, estimators.Interval]]] = {}
    for child, record in paired(sweep, records):
        rest = tuple(sorted((name, value) for name, value in child.axes.items() if name != _GPU_COUNT))
        for row in rows(record) if record and child.axes.get(_GPU_COUNT, "").isdecimal() else []:
            if row.samples_per_second:
                group = counts.setdefault((rest, row.key), [])
                group.append((int(child.axes[_GPU_COUNT]), child.job, row.samples_per_second))
    ratios: dict[int, list[tuple[float, int, int]]] = {}
    for group in counts.values():
        for count, job, rate in group:
            fewer = [each for each in group if each[0] < count and is_clearly_below(rate, each[2])]
            if fewer:
                best, _, most = max(fewer, key=lambda each: each[2].value)
                ratios.setdefault(job, []).append((rate.value / most.value, count, best))
    worst = {job: min(each) for job, each in ratios.items()}
    return {
        job: diagnostics.make("multi_gpu_slower", ratio=ratio, count=count, fewer=fewer)
        for job, (ratio, count, fewer) in worst.items()
    }


def diagnostic_lines(sweep: Sweep, records: Sequence[Record]) -> list[str]:
    """A line for each warning that only the other runs show, and its help below it.

    Args:
        sweep: the summary.
        records: those of its runs, as far as there are any.
    """
    names = {child.job: one_line(child.name) for child in sweep.children}
    lines = []
    for job, doubt in diagnostics_of(sweep, records).items():
        lines += Raised(diagnostics=(doubt,), where=(f"run {job} {names[job]}",)).lines
    return lines


def runs(sweep: Sweep, records: Sequence[Record]) -> Grid:
    """Return a line for each run, or for each of its phases: the axes, the time, and how it ended."""
    pairs = paired(sweep, records)
    axes = dict.fromkeys(name for child, _ in pairs for name in child.axes)
    lines = [(child, rows_of_line) for child, record in pairs for rows_of_line in _by_phase(record)]
    phases = dict.fromkeys(row.key.phase for _, rows_of_line in lines for row in rows_of_line)
    kinds = dict.fromkeys(kind for _, rows_of_line in lines for row in rows_of_line if (kind := row.time_kind))
    raised = diagnostics_of(sweep, records)
    title = f"{next(iter(kinds))} p50 ± CI95" if len(kinds) == 1 else "p50 ± CI95"
    columns = [
        Column(title="run", cells=tuple(str(child.job) for child, _ in lines), is_key=True),
        *(Column(title=name, cells=tuple(one_line(child.axes.get(name, "")) for child, _ in lines)) for name in axes),
        Column(
            title="phase",
            cells=tuple(
                rows_of_line[0].key.phase if rows_of_line and len(phases) > 1 else "" for _, rows_of_line in lines
            ),
        ),
        Column(title=title, cells=tuple(_times(rows_of_line) for _, rows_of_line in lines)),
        Column(title="time", cells=tuple(_kinds(rows_of_line) if len(kinds) > 1 else "" for _, rows_of_line in lines)),
        Column(title="samples/s", cells=tuple(_rates(rows_of_line) for _, rows_of_line in lines), rank=1),
        Column(title="algorithm coverage", cells=tuple(_shares(rows_of_line) for _, rows_of_line in lines), rank=1),
        Column(
            title="remarks",
            cells=tuple(_remarks(child, rows_of_line, raised.get(child.job)) for child, rows_of_line in lines),
            prose=True,
        ),
    ]
    return Grid(columns=tuple(column for column in columns if any(column.cells)))


def _by_phase(record: Record | None) -> list[list[Row]]:
    """The rows of each phase; one empty list without rows."""
    phases: dict[str, list[Row]] = {}
    for row in rows(record) if record else []:
        phases.setdefault(row.key.phase, []).append(row)
    return list(phases.values()) or [[]]


def child_failures(sweep: Sweep, records: Sequence[Record]) -> list[str]:
    """Return a line for each run, or each point of a run, that did not end well: name, status and reason."""
    lines = []
    for child, record in paired(sweep, records):
        which = f"run {child.job} {one_line(child.name)}"
        reasons = failures(record) if record else []
        if not reasons and child.status is not Status.OK:
            reasons = [child.status.value + (f": {one_line(child.error)}" if child.error else "")]
        lines += [f"{which}: {reason}" for reason in reasons]
    return lines


def _timed(table: Sequence[Row]) -> list[Row]:
    return [row for row in table if row.time]


def _times(table: Sequence[Row]) -> str:
    """The time of the only point, or the range of several points."""
    timed = _timed(table)
    if len(timed) < 2:
        return median_text(timed[0]) if timed else ""
    medians = sorted((row.time.median for row in timed if row.time), key=lambda median: median.value)
    return f"{bare_time(medians[0])} … {bare_time(medians[-1])}"


def _kinds(table: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row.time_kind for row in table if row.time_kind))


def _rates(table: Sequence[Row]) -> str:
    timed = _timed(table)
    return rate_text(timed[0].samples_per_second) if len(timed) == 1 else ""


def _shares(table: Sequence[Row]) -> str:
    """The share of the convolutions' FLOPs that the selected algorithm computed, or the range of several."""
    metrics = (find_metric(row, "algorithm/flops_share") for row in table)
    shares = sorted(metric.value for metric in metrics if metric and metric.value is not None)
    texts = dict.fromkeys(f"{100 * share:.0f} %" for share in shares[:1] + shares[-1:])
    return " … ".join(texts)


def _remarks(child: SweepChild, known: Sequence[Row], raised: Diagnostic | None) -> str:
    """Number of points, the status of a run that did not end well, and the codes of its errors and warnings."""
    codes = dict.fromkeys(doubt.code for row in known for doubt in row.doubts if not doubt.is_note)
    codes |= {raised.code: None} if raised else {}
    points = [f"{len(_timed(known))} of {len(known)} points"] if len(known) > 1 else []
    fits = dict.fromkeys(f"batch {metric.value:g} fits" for metric in map(_fitting, known) if metric and metric.value)
    status = [] if child.status is Status.OK else [child.status.value]
    return ", ".join([*points, *status, *fits, *codes])


def _fitting(row: Row) -> Metric | None:
    """The batch size that would have fitted, if a point ran out of memory."""
    return find_metric(row, "batch_that_fits")
