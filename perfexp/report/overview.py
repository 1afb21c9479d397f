"""Overview: a record's tables for readers, narrowed to fields that vary and figures that exist.

`sections` puts them in order. A row is a point, with its processes combined (`records.rows`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from perfexp.records import quantities, units, wording
from perfexp.records.analysis import Analysis
from perfexp.records.grid import Column, Grid
from perfexp.records.point_times import GRAPH
from perfexp.records.record import Epoch, Key, Metric, Point, Record, Status, without_replicate
from perfexp.records.remarks import energy_notes, estimate_notes, peak_notes, speedup_notes
from perfexp.records.rows import Row
from perfexp.records.subject import distinguishing, field_text, label, varying
from perfexp.report.tables import convolutions
from perfexp.statistics import estimators

#: Prefix of multi-rank metrics.
_RANKS = "ranks/"
#: Shares of a step lost to multi-rank training, and the share that remains.
_LOSSES = (quantities.COMMUNICATION, quantities.STATISTICS, quantities.CONTENTION)
_SHARES = (quantities.EFFICIENCY, *_LOSSES)
#: Clock and power under load: title, factor from SI units and unit, by fact.
_LOADS = {
    "loaded_sm_clock_hertz": ("SM clock", 1e-6, "MHz"),
    "loaded_power_watts": ("power", 1.0, "W"),
}
#: Longest period over which a board averages its power.
_AVERAGED_SECONDS = 1.0
#: Epoch figures other than duration and custom metrics, with their titles.
_OF_EPOCH = {
    "samples_per_second": "samples/s",
    "loss": "loss",
    "accuracy": "accuracy",
    "learning_rate": "learning rate",
}
#: Captions for a measurement's times in the short answer, by series name.
CAPTIONS = {
    name: time.caption if name.startswith("device") else name
    for name, time in quantities.TIMES.items()
}
_TITLES = {"input_size": "size", "batch_size": "batch"}


def brief_points(rows: Sequence[Row]) -> Grid:
    """Return the short table: a row per point with time, throughput, memory, and how it ended."""
    columns = key_columns(rows)
    kinds = wording.time_kinds(rows)
    if len(kinds) == 1:
        columns.append(Column(CAPTIONS[kinds[0]], map(wording.median_text, rows)))
    else:
        columns.append(Column("time", map(wording.median_text, rows)))
        columns.append(Column("of", [quantities.time_title(row.time_kind) for row in rows]))
    columns += _common_columns(rows)
    columns.append(Column("remarks", map(remarks, rows), prose=True))
    return Grid(columns).without_empty()


def _common_columns(rows: Sequence[Row]) -> Iterator[Column]:
    """Yield the columns of the short and the main table: samples/s, tokens/s and memory."""
    yield Column("samples/s", map(wording.row_rate_text, rows), rank=1)
    tokens = [wording.figure_text(row, quantities.TOKENS_RATE).partition(" tok")[0] for row in rows]
    yield Column("tokens/s", tokens, rank=10)
    memory = [wording.figure_text(row, quantities.PEAK_MEMORY) for row in rows]
    yield Column("memory", memory, rank=20)


def points(analysis: Analysis) -> Grid:
    """Return the main table, with a row per point.

    Its columns are point, time, requested percentiles, throughput, memory, processes and remarks.
    """
    rows = analysis.rows
    kinds = wording.time_kinds(rows)
    services = _distinct(row.service_kind for row in rows)
    prefix = ""
    if services != kinds and len(services) == 1:
        prefix = f"{quantities.time_title(services[0])} "
    columns = key_columns(rows)
    columns.append(Column(f"{wording.median_title(kinds)} ± CI95", map(wording.median_text, rows)))
    if len(kinds) > 1:
        columns.append(Column("time", [quantities.time_title(row.time_kind) for row in rows]))
    columns += [
        Column(f"{GRAPH} p50", map(partial(_other_time, GRAPH), rows), rank=40),
        Column("latency p50 ± CI95", map(partial(_other_time, "latency"), rows), rank=10),
    ]
    notes, names = wording.scope_notes(rows), list[str]()
    for number in dict.fromkeys(analysis.percentiles):
        if number != 50:
            texts = [wording.interval_or_about(row.percentile(number)) for row in rows]
            title = f"{prefix}p{number:g}"
            columns.append(Column(title, texts, rank=30 + len(names)))
            notes += _shortages(rows, number, title)
            names.append(f"p{number:g}")
    columns += _common_columns(rows)
    spreads, processes = list[str](), list[str]()
    for row in rows:
        spreads.append("" if row.spread is None else wording.percent(row.spread))
        processes.append(str(row.processes) if row.processes > 1 else "")
    columns += [
        Column("spread", spreads, rank=50),
        Column("processes", processes, rank=51),
        Column("remarks", map(remarks, rows), prose=True),
    ]
    if names and any(processes):
        pooled = f"{', '.join(names)} pool the calls of all processes"
        notes.append(f"{pooled}; p50 is the geometric mean of their medians")
        notes.append("spread is the standard deviation between the processes' medians")
    return Grid(columns, [*notes, *wording.rate_notes(rows)]).without_empty()


def _other_time(name: str, row: Row) -> str:
    """Return a time with its interval; empty if it is the row's main time or was not measured."""
    time = row.times.get(name)
    if time and row.time_kind != name:
        return wording.interval_or_about(time.median)
    return ""


def _shortages(rows: Sequence[Row], number: float, title: str) -> Iterator[str]:
    """Yield a note why a percentile has no interval at some points; nothing if all have one.

    Args:
        number: the percentile, in percent.
        title: title of its column.
    """
    measured, missing = 0, []
    for row in rows:
        interval = row.percentile(number)
        if interval is None or row.service_kind is None:
            continue
        measured += 1
        if interval.low is None:
            missing.append(row.times[row.service_kind])
    if missing:
        share_of_points = ""
        if measured > 1:
            share_of_points = f" at {len(missing)} of {measured} points"
        yield f"≈ {title}{share_of_points} without an interval: {wording.shortage(missing, number)}"


def phases(rows: Sequence[Row]) -> Grid | None:
    """Return the median time of each phase of a call, such as forward and backward.

    None if no call was split into two or more phases.
    """
    split, names, shares = list[Row](), dict[str, float](), list[str]()
    for row in rows:
        if len(row.phases) > 1:
            split.append(row)
            names |= row.phases
            shares.append(wording.figure_text(row, quantities.DATA_SHARE))
    if not split:
        return None
    columns = key_columns(split)
    for rank, name in enumerate(names):
        columns.append(Column(name, map(partial(_phase_text, name), split), rank=rank))
    columns.append(Column("data share of means", shares, rank=len(columns)))
    note = "medians of a pass of their own, one phase after the other"
    return Grid(columns, [note]).without_empty()


def _phase_text(name: str, row: Row) -> str:
    """Return the median time of a phase; empty if the row's calls do not have it."""
    if name not in row.phases:
        return ""
    return wording.bare(estimators.Interval(value=row.phases[name], low=None, high=None))


def epochs(record: Record) -> Grid | None:
    """Return figures for each training epoch; None without epochs.

    Reports show the table if the run trained whole epochs.
    """
    keys, every, titles = list[Key](), list[Epoch](), dict(_OF_EPOCH)
    numbers, times = list[str](), list[str]()
    for point in record.points:
        for epoch in point.epochs:
            keys.append(point.key)
            every.append(epoch)
            numbers.append(str(epoch.number))
            times.append(units.format_seconds(epoch.seconds))
            for metric in epoch.metrics:
                titles[metric.name] = metric.name
    if not every:
        return None
    columns = _columns_of(keys, varying(keys))
    columns += [Column("epoch", numbers, is_key=True), Column("time", times)]
    for rank, (name, title) in enumerate(titles.items()):
        columns.append(Column(title, map(partial(_epoch_text, name), every), rank=rank))
    return Grid(columns).without_empty()


def _epoch_text(name: str, epoch: Epoch) -> str:
    """Return a figure of an epoch with four digits; empty without a value."""
    value = epoch.figures.get(name)
    if value is None:
        return ""
    return units.digits(value, 4)


def metrics(analysis: Analysis) -> Grid:
    """Return the metrics that no other table has, a column each, with notes that define them.

    The grid has no columns if there are no metrics.
    """
    rows, kinds = analysis.rows, wording.time_kinds(analysis.rows)
    names, titles = set[str](), dict[str, str]()
    shown_metrics, having = list[Metric](), list[Row]()
    for row in rows:
        before = len(shown_metrics)
        for metric in row.metrics:
            if quantities.of(metric).is_apart:
                continue
            names.add(metric.name)
            if metric.value is not None:
                shown_metrics.append(metric)
                titles[metric.name] = wording.metric_title(metric, kinds)
        if len(shown_metrics) > before:
            having.append(row)
    columns = key_columns(having) if titles else []
    for rank, (name, title) in enumerate(titles.items()):
        columns.append(Column(title, [wording.figure_text(row, name) for row in having], rank=rank))
    notes = _reasons(rows, names)
    if quantities.COVERAGE in titles:
        notes += convolutions.coverage(analysis.record)
    notes += peak_notes(analysis, shown_metrics)
    if {quantities.MFU, quantities.MFU_OF_CEILING} & titles.keys():
        notes += convolutions.saved_multiplications(analysis.record)
    notes += speedup_notes(analysis, shown_metrics)
    notes += estimate_notes(shown_metrics, kinds)
    notes += energy_notes(rows, shown_metrics)
    return Grid(columns, notes)


def _reasons(rows: Sequence[Row], names: Collection[str]) -> list[str]:
    """Return why metrics are missing: each reason once, with the number of points it affects.

    Reasons that a warning already gives are left out.

    Args:
        names: names of the metrics to look for.
    """
    warned = list[str | int | float]()
    points, metrics_by_reason = Counter[str](), dict[str, list[Metric]]()
    for row in rows:
        for doubt in row.doubts:
            if not doubt.is_note:
                warned += (doubt.fields or {}).values()
        for metric in row.metrics:
            if metric.name in names:
                points[metric.name] += 1
                if metric.reason:
                    metrics_by_reason.setdefault(metric.reason, []).append(metric)
    reasons = []
    for reason, missing in metrics_by_reason.items():
        if reason not in warned:
            text = f"no {', '.join(_distinct(map(wording.metric_title, missing)))}"
            name, count = Counter(metric.name for metric in missing).most_common(1)[0]
            if count < points[name]:
                text += f" at {count} of {points[name]} points"
            reasons.append(f"{text}: {reason}")
    return reasons


def loads(record: Record) -> list[str]:
    """Return clock and power while the device works, as medians over all processes.

    Boards report average power, so power is left out if a process kept its device busy too briefly.
    Reports show them in a section of their own.
    """
    pooled: dict[tuple[Key, str], dict[str, list[float]]] = {}
    for point in record.points:
        for fact in _LOADS:
            for series, readings in point.facts.get(fact, {}).items():
                facts = pooled.setdefault((without_replicate(point.key), series), {})
                pooled_readings = facts.setdefault(fact, [])
                if fact != "loaded_power_watts" or _is_long(point, series):
                    pooled_readings += readings
    fields = distinguishing(key for key, _ in pooled)
    lines = []
    for (key, series), facts in pooled.items():
        texts = itertools.starmap(_load_text, facts.items())
        lines.append(f"{label(key, fields)} · {series}: {', '.join(texts)}")
    return lines


def _load_text(fact: str, readings: Sequence[float]) -> str:
    """Return the median of clock or power readings, or why there are none."""
    title, factor, unit = _LOADS[fact]
    if not readings:
        short = f"the device worked for less than {_AVERAGED_SECONDS:g} s"
        return f"no {title}, since {short}, over which a board averages"
    number = units.counted(len(readings), "reading")
    return f"{title} {median(readings) * factor:.0f} {unit} ({number})"


def _is_long(point: Point, name: str) -> bool:
    """Return whether a series kept the device busy for as long as a board averages its power."""
    series = point.find_series(name)
    if series is None:
        return False
    return sum(series.samples) * series.calls_per_sample >= _AVERAGED_SECONDS


def ranks(record: Record) -> list[str]:
    """Return the scope of multi-rank figures, and a sentence per point with rates and shares.

    Rates are for all ranks together and for each rank. Shares have intervals. Empty without ranks.
    """
    if "ranks" not in record.environment:
        return []
    points = list(filter(_rank_metrics, record.points))
    fields = varying(point.key for point in points)
    words = {name: quantities.QUANTITIES[name].title for name in _SHARES}
    if norms := (record.environment["ranks"] or {}).get("sync_batch_norms"):
        layers = units.counted(norms, "layer")
        words[quantities.STATISTICS] = f"SyncBatchNorm ({layers}, in each of which the host waits)"
    sentences = ["batch, times and memory are of one rank; samples/s, power and energy of all"]
    for point in points:
        sentence = f"{label(point.key, fields)}: {', '.join(_rank_parts(point, words))}"
        sentences.append(sentence.removeprefix(": "))
    return sentences


def _rank_metrics(point: Point) -> dict[str, Metric]:
    """Return a point's multi-rank metrics by name; empty if it ran on one rank."""
    return {metric.name: metric for metric in point.metrics if metric.name.startswith(_RANKS)}


def _rank_parts(point: Point, words_of: Mapping[str, str]) -> Iterator[str]:
    """Yield the rates of all ranks, then the scaling efficiency and the losses with intervals.

    Bursts are short loops that all ranks run together, to check the rate.

    Args:
        words_of: words for a share, by metric name.
    """
    metrics = _rank_metrics(point)
    together = metrics.pop(quantities.RANKS_RATE, None)
    rates, shares = list[float](), dict[str, float]()
    for name, metric in metrics.items():
        if metric.value is not None:
            if name in _SHARES:
                shares[name] = metric.value
            else:
                rates.append(metric.value)
    if together is not None:
        rate = together.reason or ""
        if together.value is not None:
            rate = f"{units.digits(together.value, 3)} samples/s"
        if rates:
            ends = dict.fromkeys((units.digits(min(rates), 3), units.digits(max(rates), 3)))
            rate += f", each {' … '.join(ends)} while all work"
        alone = point.find_series("ranks/alone")
        if alone and alone.measured:
            rate_alone = point.key.batch_size * len(alone.measured) / sum(alone.measured)
            rate += f"; one rank alone {units.digits(rate_alone, 3)} samples/s"
        yield f"check by bursts: together {rate}"
    intervals: Mapping[str, Any] = point.facts.get("ranks") or {}
    shown = [name for name in _SHARES if name in shares]
    # efficiency, then the largest loss first
    for name in sorted(shown, key=lambda name: (name in _LOSSES, -shares[name])):
        interval = intervals.get(name.removeprefix(_RANKS)) or {}
        low, high = interval.get("low"), interval.get("high")
        text = "no interval"
        if low is not None and high is not None:
            text = f"{wording.percent(low)} … {wording.percent(high)}"
        yield f"{words_of[name]} {wording.percent(shares[name])} ({text})"


def key_columns(rows: Iterable[Row]) -> list[Column]:
    """Return columns for key fields that vary; size and batch size if none does.

    They come first in each table, so that a row says which point it is.
    """
    keys = [row.key for row in rows]
    return _columns_of(keys, distinguishing(keys))


def remarks(row: Row) -> str:
    """Return the codes of a point's errors and warnings, behind its status if it failed.

    The last column of the tables of points shows them.
    """
    words = wording.codes(row.doubts)
    return ", ".join(words if row.status is Status.OK else [row.status.value, *words])


def _columns_of(keys: Sequence[Key], fields: Sequence[str]) -> list[Column]:
    """Return a key column for each field, with a cell per key."""
    columns = []
    for name in fields:
        texts = [field_text(key, name) for key in keys]
        columns.append(Column(_TITLES.get(name, name), texts, is_key=True))
    return columns


def _distinct(words: Iterable[str | None]) -> list[str]:
    """Return the words that are not empty, each once, in order."""
    return list(dict.fromkeys(word for word in words if word))
