"""The tables of a record for readers, narrowed to the fields that vary and the figures that exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from perfexp.diagnosis.environment import fact_at
from perfexp.records import diagnostics, estimates, quantities, units
from perfexp.records.point_times import DEVICE_TIMES, GRAPH
from perfexp.records.record import Key, Metric, Point, Record, Status
from perfexp.records.summary import Row
from perfexp.statistics import estimators
from perfexp.summaries import metric_notes, wording
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import distinguishing, field_text, label, varying
from perfexp.tables import convolutions

#: Figures of one rank and of all ranks, by the beginnings of their metrics; those without a metric are always there.
_OF_ONE_RANK = {
    "batch": "",
    "times": "",
    "memory": "memory/",
    "FLOPs": quantities.FLOPS,
    "FLOP/s": quantities.WORK_RATE,
    "MFU": quantities.MFU,
}
_OF_ALL_RANKS = {"samples/s": "", "power": quantities.POWER, "energy": quantities.ENERGY}
#: Prefix of metrics of several ranks.
_RANKS = "ranks/"
#: Shares of a step that several ranks lose, and what remains.
_LOSSES = (quantities.COMMUNICATION, quantities.STATISTICS, quantities.CONTENTION)
_SHARES = (quantities.EFFICIENCY, *_LOSSES)
#: Facts of clock and power under load: title, factor and unit.
_LOADS = {"loaded_sm_clock_hertz": ("SM clock", 1e-6, "MHz"), "loaded_power_watts": ("power", 1.0, "W")}
#: A board's power may be an average over up to this long.
_AVERAGED_SECONDS = 1.0
_LAGS = "– no power: the device worked on these calls for less than 1 s, over which a board may average its power"
_TITLES = {"input_size": "size", "batch_size": "batch"}


def points(rows: Sequence[Row], percentiles: Sequence[float]) -> Grid:
    """Return the main table: point, time, requested percentiles, throughput, memory, and how it ended."""
    kinds = wording.time_kinds(rows)
    services = _distinct(service[0] for row in rows if (service := wording.service_time(row)))
    prefix = "" if services == kinds or len(services) != 1 else f"{services[0]} "
    asked = [number for number in percentiles if number != 50]
    columns = [
        *key_columns(rows),
        Column(f"{wording.median_title(kinds)} ± CI95", map(wording.median_text, rows)),
        Column("time", (row.time_kind or "" if len(kinds) > 1 else "" for row in rows)),
        Column(f"{GRAPH} p50", map(_graph_text, rows), rank=40),
        Column("latency p50 ± CI95", (_latency_text(row) if 50 in percentiles else "" for row in rows), rank=10),
        *(_percentile_column(rows, number, prefix, rank) for rank, number in enumerate(asked, 30)),
        Column("samples/s", map(wording.row_rate_text, rows), rank=1),
        Column(
            "memory", (wording.metric_text(wording.find_metric(row, quantities.PEAK_MEMORY)) for row in rows), rank=20
        ),
        Column("remarks", map(remarks, rows), prose=True),
    ]
    shortages = (_shortage_note(rows, number, prefix) for number in asked)
    others = " and ".join(kind for kind in services if kind != "latency")
    names = " and ".join(f"p{number:g}" for number in asked)
    mixed = f"{names} are those of latency; where it was not measured, of {others}" if asked and services[1:] else ""
    notes = [
        wording.scope_note(rows),
        mixed,
        *shortages,
        _pooled_note(rows, asked),
        *wording.rate_notes(rows),
        *metric_notes.memories(rows),
    ]
    return Grid(columns, list(filter(None, notes))).without_empty()


def _latency_text(row: Row) -> str:
    """The median latency with its interval, of a row whose main time is another one."""
    time = row.times.get("latency")
    return wording.interval_text(time.median) if time and row.time_kind != "latency" else ""


def _graph_text(row: Row) -> str:
    time = row.times.get(GRAPH)
    return wording.bare_time(time.median) if time and row.time_kind != GRAPH else ""


def phases(record: Record, rows: Sequence[Row]) -> Grid | None:
    """Return the time of each phase of a call; None if no call was split into two phases or more."""
    split = [row for row in rows if len(row.phases) > 1]
    if not split:
        return None
    columns = key_columns(split)
    for rank, name in enumerate(_distinct(name for row in split for name in row.phases)):
        columns.append(Column(name, [_phase_text(row, name) for row in split], rank=rank))
    shares = (wording.find_metric(row, quantities.DATA_SHARE) for row in split)
    cells = ("" if share is None or share.value is None else wording.percent(share.value) for share in shares)
    return Grid([*columns, Column("data share of means", cells)], _phases_notes(record, split)).without_empty()


def _phases_notes(record: Record, split: Sequence[Row]) -> list[str]:
    """Whose times the phases are, and how much of the main table's median their own medians add up to."""
    # as they were compared when they were measured: a loader is a phase, and the device's time leaves it out
    loads = fact_at(record.plan, "data._target_") not in (None, "perfexp.data.synthetic.Synthetic")
    shares: dict[str, list[float]] = {}
    for row in split:
        kinds = (*(() if loads else DEVICE_TIMES), "throughput", "latency")
        kind = next((name for name in kinds if name in row.times), "")
        whole = row.times[kind].median.value if kind in row.times else 0.0
        if whole and wording.find_metric(row, quantities.PHASES):
            shares.setdefault(kind, []).append(sum(row.phases.values()) / whole)
    sums = [f"{wording.percent_range(found)} of {wording.median_title([kind])}" for kind, found in shares.items()]
    if not sums:
        return []
    if any(diagnostics.has(point.doubts, "phases_disagree") for point in record.points):  # which has their sum
        return ["medians of a pass of their own, one phase after the other"]
    return [f"medians of a pass of their own, one phase after the other; their sum is {' and '.join(sums)}"]


def epochs(record: Record) -> Grid | None:
    """Return the figures of each epoch of each training; None without epochs."""
    trained = [(point.key, epoch) for point in record.points for epoch in point.epochs]
    if not trained:
        return None
    keys = [key for key, _ in trained]
    names = _distinct(metric.name for _, epoch in trained for metric in epoch.metrics)
    custom = [Column(name, (_number(epoch.figures.get(name)) for _, epoch in trained)) for name in names]
    columns = [
        *_columns_of(keys, varying(keys)),
        Column("epoch", (str(epoch.number) for _, epoch in trained)),
        Column("time", (units.format_seconds(epoch.seconds) for _, epoch in trained)),
        Column("samples/s", (_number(epoch.samples_per_second) for _, epoch in trained)),
        Column("loss", (_number(epoch.loss) for _, epoch in trained)),
        Column("accuracy", (_number(epoch.accuracy) for _, epoch in trained)),
        Column("learning rate", (_number(epoch.learning_rate) for _, epoch in trained)),
        *custom,
    ]
    return Grid(columns).without_empty()


def _number(value: float | None) -> str:
    return "" if value is None else units.digits(value, 4)


def processes(rows: Sequence[Row]) -> Grid | None:
    """Return how far the processes that measured each of several points differ; None if there is at most one."""
    totals = [row for row in rows if row.spread is not None and row.time]
    if len(totals) < 2:
        return None
    kinds = _distinct(row.time_kind or "" for row in totals)
    medians = [row.time.median for row in totals if row.time]
    columns = [
        *_columns_of([row.key for row in totals], varying(row.key for row in totals) or ("input_size", "batch_size")),
        Column(wording.median_title(kinds), map(wording.bare_time, medians)),
        Column("CI95", map(wording.range_text, medians)),
        Column("time", (row.time_kind or "" if len(kinds) > 1 else "" for row in totals)),
        Column("spread", (wording.percent(row.spread or 0.0) for row in totals)),
        Column("processes", (str(row.processes) for row in totals)),
    ]
    return Grid(columns).without_empty()


def metrics(record: Record, rows: Sequence[Row], *, is_brief: bool = False, report: str = "") -> Grid | None:
    """Return the other metrics; None if there are none but those of the main table.

    Args:
        is_brief: whether to leave out details, which a note counts.
        report: where all metrics are: `report.md`, or `below` in its own lines; empty without that file.
    """
    every = [metric for row in rows for metric in row.metrics if not quantities.of(metric).is_apart]
    others = [metric for metric in every if not (is_brief and quantities.of(metric).is_detail)]
    left_out = len({metric.name for metric in every} - {metric.name for metric in others})
    kinds = wording.time_kinds(rows)
    titles = {metric.name: wording.metric_title(metric, kinds) for metric in others if metric.value is not None}
    having = [row for row in rows if any(wording.metric_text(wording.find_metric(row, name)) for name in titles)]
    columns = [
        Column(title, [_metric_text(row, name) for row in having], rank=rank)
        for rank, (name, title) in enumerate(titles.items())
    ]
    notes = _reasons(rows, {metric.name for metric in others})
    if not columns and not notes and not left_out:
        return None
    if quantities.COVERAGE in titles:
        notes += convolutions.coverage(record)
    notes += metric_notes.peaks(record, rows, others)
    if {metric.name for metric in others if metric.value} & {quantities.MFU, quantities.MFU_OF_CEILING}:
        notes += convolutions.saved_multiplications(record)
    notes += metric_notes.speedups(record, rows, others)
    notes += metric_notes.estimated(others, kinds)
    notes += metric_notes.energies(rows, others)
    if left_out:
        where = report if report == "below" else ", or ".join(filter(None, ("perfexp show DIR -v", report)))
        notes.append(f"{units.counted(left_out, 'more metric')}: {where}")
    elif not is_brief:
        notes.append("docs/reference/metrics.md defines each metric")
    return Grid([*key_columns(having), *columns] if columns else [], notes)


def _reasons(rows: Sequence[Row], names: Collection[str]) -> list[str]:
    """Why metrics are missing, each reason once, and at how many of the points; none that a warning contains."""
    warned = "\n".join(diagnostic.message for row in rows for diagnostic in row.doubts if not diagnostic.is_note)
    asked = [metric for row in rows for metric in row.metrics if metric.name in names]
    points, lacking = Counter(metric.name for metric in asked), dict[str, list[Metric]]()
    for metric in asked:
        if metric.reason and metric.reason not in warned:
            lacking.setdefault(metric.reason, []).append(metric)
    found = []
    for reason, missing in lacking.items():
        [(name, count)] = Counter(metric.name for metric in missing).most_common(1)
        where = f" at {count} of {points[name]} points" if count < points[name] else ""
        found.append(f"no {', '.join(_distinct(map(wording.metric_title, missing)))}{where}: {reason}")
    return found


def _metric_text(row: Row, name: str) -> str:
    metric = wording.find_metric(row, name)
    if name == quantities.COVERAGE:
        return wording.coverage_text(row)
    return wording.metric_text(metric, estimates.basis(row, metric) if metric else None)


def loads(record: Record) -> Grid | None:
    """Return clock and power during the device's own times, medians over all processes; None without readings.

    Powers of processes whose device worked for less time than a board averages over are left out.
    """
    pooled: dict[tuple[Key, str], dict[str, list[float]]] = {}
    for point in record.points:
        key = msgspec.structs.replace(point.key, replicate=0)
        for fact in _LOADS:
            for series, readings in point.facts.get(fact, {}).items():
                known = pooled.setdefault((key, series), {}).setdefault(fact, [])
                if fact != "loaded_power_watts" or _busy_seconds(point, series) >= _AVERAGED_SECONDS:
                    known += readings
    if not pooled:
        return None
    keys = [key for key, _ in pooled]
    columns = [*_columns_of(keys, distinguishing(keys)), Column("time", (series for _, series in pooled))]
    for fact, (title, factor, unit) in _LOADS.items():
        found = [readings.get(fact) for readings in pooled.values()]
        columns.append(Column(title, (_load_text(each, factor, unit) for each in found)))
    counts = (str(max(map(len, readings.values()))) for readings in pooled.values())
    lags = any(readings.get("loaded_power_watts") == [] for readings in pooled.values())
    return Grid([*columns, Column("readings", counts)], [_LAGS] if lags else []).without_empty()


def _load_text(readings: Sequence[float] | None, factor: float, unit: str) -> str:
    if readings is None:
        return ""
    return f"{median(readings) * factor:.0f} {unit}" if readings else "–"


def _busy_seconds(point: Point, name: str) -> float:
    series = point.find_series(name)
    return sum(series.samples) * series.calls_per_sample if series else 0.0


def scope_of_ranks(record: Record, rows: Sequence[Row]) -> str:
    """Return which figures are of one rank and which of all ranks; empty for a run of one process."""
    if "ranks" not in record.environment:
        return ""
    ranks = record.environment["ranks"] or {}
    names = {metric.name for row in rows for metric in row.metrics if metric.value is not None}
    of_one, of_all = (
        [title for title, start in titles.items() if not start or any(name.startswith(start) for name in names)]
        for titles in (_OF_ONE_RANK, _OF_ALL_RANKS)
    )
    count = len(ranks.get("devices") or ())
    return f"{_joined(of_one)} of one rank; {_joined(of_all)} of all{f' {count}' if count else ''}"


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def ranks(record: Record) -> list[str]:
    """Return a sentence for each point that several ranks measured: rates together and of each, shares, intervals."""
    points = [point for point in record.points if any(metric.name.startswith(_RANKS) for metric in point.metrics)]
    fields = varying(point.key for point in points)
    norms = (record.environment.get("ranks") or {}).get("sync_batch_norms")
    words = {name: quantities.QUANTITIES[name].title for name in _SHARES}
    if norms:
        layers = units.counted(norms, "layer")
        words[quantities.STATISTICS] = f"SyncBatchNorm ({layers}, in each of which the host waits)"
    return [
        f"{f'{label(point.key, fields)}: ' if fields else ''}{', '.join(_rank_parts(point, words))}" for point in points
    ]


def _rank_parts(point: Point, words_of: Mapping[str, str]) -> Iterator[str]:
    metrics = {metric.name: metric for metric in point.metrics if metric.name.startswith(_RANKS)}
    together = metrics.pop(quantities.RANKS_RATE, None)
    own = [metric.value for name, metric in metrics.items() if name not in _SHARES and metric.value is not None]
    if together is not None:
        rate = f"{units.digits(together.value, 3)} samples/s" if together.value is not None else together.reason or ""
        least, most = (units.digits(value, 3) for value in (min(own, default=0.0), max(own, default=0.0)))
        each = f", each {least if least == most else f'{least} … {most}'} while all work" if own else ""
        alone = point.find_series("ranks/alone")
        by_itself = ""
        if alone and alone.measured:
            rate_alone = point.key.batch_size * len(alone.measured) / sum(alone.measured)
            by_itself = f"; one rank alone {units.digits(rate_alone, 3)} samples/s"
        yield f"check by bursts: together {rate}{each}{by_itself}"
    intervals: Mapping[str, Any] = point.facts.get("ranks") or {}
    values = {name: value for name in words_of if name in metrics and (value := metrics[name].value) is not None}
    for name, value in sorted(values.items(), key=lambda item: (item[0] in _LOSSES, -item[1])):  # largest loss first
        low, high = ((intervals.get(name.removeprefix(_RANKS)) or {}).get(end) for end in ("low", "high"))
        ends = "no interval" if low is None or high is None else f"{wording.percent(low)} … {wording.percent(high)}"
        yield f"{words_of[name]} {wording.percent(value)} ({ends})"


def key_columns(rows: Sequence[Row]) -> list[Column]:
    """Return columns of the key's fields that vary; size and batch size if none does."""
    keys = [row.key for row in rows]
    return _columns_of(keys, distinguishing(keys))


def remarks(row: Row) -> str:
    """Return how a point ended unless it ended well, and the codes of its errors and warnings."""
    codes = _distinct(diagnostic.code for diagnostic in row.doubts if not diagnostic.is_note)
    return ", ".join(codes if row.status is Status.OK else [row.status.value, *codes])


def _columns_of(keys: Sequence[Key], fields: Sequence[str]) -> list[Column]:
    return [Column(_TITLES.get(name, name), [field_text(key, name) for key in keys], is_key=True) for name in fields]


def _percentile_column(rows: Sequence[Row], number: float, prefix: str, rank: int) -> Column:
    services = (wording.service_time(row) for row in rows)
    intervals = (wording.percentile(service[1], number) if service else None for service in services)
    cells = (wording.interval_or_about(interval) if interval else "" for interval in intervals)
    return Column(f"{prefix}p{number:g}", cells, rank=rank)


def _phase_text(row: Row, name: str) -> str:
    seconds = row.phases.get(name)
    return "" if seconds is None else wording.bare_time(estimators.Interval(value=seconds, low=None, high=None))


def _pooled_note(rows: Sequence[Row], asked: Sequence[float]) -> str:
    """Return how percentiles and p50 combine several processes; empty without rows of several."""
    if not asked or not any(row.processes > 1 for row in rows):
        return ""
    names = ", ".join(f"p{number:g}" for number in asked)
    return f"{names}: of the calls of all processes together; p50: geometric mean of the processes' medians"


def _shortage_note(rows: Sequence[Row], number: float, prefix: str) -> str:
    services = [service[1] for row in rows if (service := wording.service_time(row))]
    missing = [summary for summary in services if wording.percentile(summary, number).low is None]
    if not missing:
        return ""
    where = "" if len(missing) == len(services) == 1 else f" at {len(missing)} of {len(services)} points"
    return f"≈ {prefix}p{number:g}{where} without an interval: {wording.shortage(missing, number)}"


def _distinct(words: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(word for word in words if word))
