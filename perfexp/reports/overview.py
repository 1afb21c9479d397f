"""Record tables for readers, narrowed to fields that vary and figures that exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from perfexp.records import quantities, units
from perfexp.records.point_times import GRAPH
from perfexp.records.record import Epoch, Key, Metric, Point, Record, Status, without_replicate
from perfexp.records.summary import Row
from perfexp.statistics import estimators
from perfexp.summaries import metric_notes, wording
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import distinguishing, field_text, label, varying
from perfexp.tables import convolutions

#: Prefix of multi-rank metrics.
_RANKS = "ranks/"
#: Shares of a step lost to multi-rank training, and the share that remains.
_LOSSES = (quantities.COMMUNICATION, quantities.STATISTICS, quantities.CONTENTION)
_SHARES = (quantities.EFFICIENCY, *_LOSSES)
#: Clock and power under load: title, factor and unit by fact.
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
#: Captions for a measurement's times.
CAPTIONS = {
    name: time.caption if name.startswith("device") else name
    for name, time in quantities.TIMES.items()
}
_TITLES = {"input_size": "size", "batch_size": "batch"}


def brief_points(rows: Sequence[Row]) -> Grid:
    """Return a row per point: time, throughput, memory, and how it ended."""
    kinds = wording.time_kinds(rows)
    columns = [
        *key_columns(rows),
        Column(CAPTIONS[kinds[0]] if len(kinds) == 1 else "time", map(wording.median_text, rows)),
        Column(
            "of", (quantities.time_title(row.time_kind) if len(kinds) > 1 else "" for row in rows)
        ),
        *_common_columns(rows),
        Column("remarks", map(remarks, rows), prose=True),
    ]
    return Grid(columns).without_empty()


def _common_columns(rows: Sequence[Row]) -> Iterator[Column]:
    yield Column("samples/s", map(wording.row_rate_text, rows), rank=1)
    yield Column(
        "memory", (wording.figure_text(row, quantities.PEAK_MEMORY) for row in rows), rank=20
    )


def points(analysis: Analysis) -> Grid:
    """Return the main table, with a row per point.

    Its columns are point, time, requested percentiles, throughput, memory, processes and remarks.
    """
    rows = analysis.rows
    kinds = wording.time_kinds(rows)
    services = _distinct(row.service_kind for row in rows)
    prefix = (
        "" if services == kinds or len(services) != 1 else f"{quantities.time_title(services[0])} "
    )
    asked = {f"{prefix}p{number:g}": number for number in analysis.percentiles if number != 50}
    spreads = ("" if row.spread is None else wording.percent(row.spread) for row in rows)
    columns = [
        *key_columns(rows),
        Column(f"{wording.median_title(kinds)} ± CI95", map(wording.median_text, rows)),
        Column(
            "time", (quantities.time_title(row.time_kind) if len(kinds) > 1 else "" for row in rows)
        ),
        Column(f"{GRAPH} p50", (_other_time(row, GRAPH) for row in rows), rank=40),
        Column("latency p50 ± CI95", (_other_time(row, "latency") for row in rows), rank=10),
    ]
    for rank, (title, number) in enumerate(asked.items(), 30):
        columns.append(
            Column(
                title,
                [wording.interval_or_about(row.percentile(number)) for row in rows],
                rank=rank,
            )
        )
    columns += [
        *_common_columns(rows),
        Column("spread", spreads, rank=50),
        Column(
            "processes", (str(row.processes) if row.processes > 1 else "" for row in rows), rank=51
        ),
        Column("remarks", map(remarks, rows), prose=True),
    ]
    notes = wording.scope_notes(rows)
    notes += [note for title, number in asked.items() for note in _shortages(rows, number, title)]
    if asked and any(row.processes > 1 for row in rows):
        names = ", ".join(f"p{number:g}" for number in asked.values())
        notes.append(
            f"{names} pool the calls of all processes; p50 is the geometric mean of their medians"
        )
        notes.append("spread is the standard deviation between the processes' medians")
    return Grid(columns, [*notes, *wording.rate_notes(rows)]).without_empty()


def _other_time(row: Row, name: str) -> str:
    """Return a time with its interval, unless it is the row's main time."""
    time = row.times.get(name)
    return wording.interval_or_about(time.median) if time and row.time_kind != name else ""


def _shortages(rows: Sequence[Row], number: float, title: str) -> Iterator[str]:
    """Yield why a percentile has no interval at some points."""
    intervals = [(row, interval) for row in rows if (interval := row.percentile(number))]
    missing = [
        row.times[row.service_kind or ""] for row, interval in intervals if interval.low is None
    ]
    if missing:
        where = (
            ""
            if len(missing) == len(intervals) == 1
            else f" at {len(missing)} of {len(intervals)} points"
        )
        yield f"≈ {title}{where} without an interval: {wording.shortage(missing, number)}"


def phases(rows: Sequence[Row]) -> Grid | None:
    """Return the time per phase of a call; None if no call was split into two or more phases."""
    split = [row for row in rows if len(row.phases) > 1]
    if not split:
        return None
    columns = key_columns(split)
    for rank, name in enumerate(_distinct(name for row in split for name in row.phases)):
        columns.append(Column(name, [_phase_text(row, name) for row in split], rank=rank))
    shares = (wording.figure_text(row, quantities.DATA_SHARE) for row in split)
    note = "medians of a pass of their own, one phase after the other"
    return Grid(
        [*columns, Column("data share of means", shares, rank=len(columns))], [note]
    ).without_empty()


def _phase_text(row: Row, name: str) -> str:
    seconds = row.phases.get(name)
    return (
        ""
        if seconds is None
        else wording.bare(estimators.Interval(value=seconds, low=None, high=None))
    )


def epochs(record: Record) -> Grid | None:
    """Return figures for each training epoch; None without epochs."""
    trained = [(point.key, epoch) for point in record.points for epoch in point.epochs]
    if not trained:
        return None
    keys, every = zip(*trained, strict=True)
    columns = [
        *_columns_of(keys, varying(keys)),
        Column("epoch", (str(one.number) for one in every), is_key=True),
    ]
    columns.append(Column("time", (units.format_seconds(one.seconds) for one in every)))
    custom = _distinct(metric.name for one in every for metric in one.metrics)
    for rank, (name, title) in enumerate(
        (_OF_EPOCH | dict(zip(custom, custom, strict=True))).items()
    ):
        columns.append(Column(title, [_epoch_text(one, name) for one in every], rank=rank))
    return Grid(columns).without_empty()


def _epoch_text(epoch: Epoch, name: str) -> str:
    value = epoch.figures.get(name)
    return "" if value is None else units.digits(value, 4)


def metrics(analysis: Analysis) -> Grid:
    """Return the other metrics, with notes. The grid has no columns if there are no metrics."""
    rows, kinds = analysis.rows, wording.time_kinds(analysis.rows)
    others = [
        metric for row in rows for metric in row.metrics if not quantities.of(metric).is_apart
    ]
    shown = [metric for metric in others if metric.value is not None]
    titles = {metric.name: wording.metric_title(metric, kinds) for metric in shown}
    having = [row for row in rows if any(row.value(name) is not None for name in titles)]
    columns = key_columns(having) if titles else []
    for rank, (name, title) in enumerate(titles.items()):
        columns.append(Column(title, [wording.figure_text(row, name) for row in having], rank=rank))
    notes = _reasons(rows, {metric.name for metric in others})
    if quantities.COVERAGE in titles:
        notes += convolutions.coverage(analysis.record)
    notes += metric_notes.peaks(analysis, shown)
    if {quantities.MFU, quantities.MFU_OF_CEILING} & titles.keys():
        notes += convolutions.saved_multiplications(analysis.record)
    notes += metric_notes.speedups(analysis, shown)
    notes += metric_notes.estimated(shown, kinds)
    notes += metric_notes.energies(rows, shown)
    return Grid(columns, notes)


def _reasons(rows: Sequence[Row], names: Collection[str]) -> list[str]:
    """Return why metrics are missing: each reason once, with the number of points it affects.

    Reasons that a warning already gives are left out.
    """
    warned = {
        reason
        for row in rows
        for one in row.doubts
        if not one.is_note
        for reason in (one.fields or {}).values()
    }
    asked = [metric for row in rows for metric in row.metrics if metric.name in names]
    points, lacking = Counter(metric.name for metric in asked), dict[str, list[Metric]]()
    for metric in asked:
        if metric.reason and metric.reason not in warned:
            lacking.setdefault(metric.reason, []).append(metric)
    found = []
    for reason, missing in lacking.items():
        [(name, count)] = Counter(metric.name for metric in missing).most_common(1)
        where = f" at {count} of {points[name]} points" if count < points[name] else ""
        found.append(
            f"no {', '.join(_distinct(map(wording.metric_title, missing)))}{where}: {reason}"
        )
    return found


def loads(record: Record) -> list[str]:
    """Return clock and power while the device works, as medians over all processes.

    Boards report average power, so power is left out if a process kept its device busy too briefly.
    """
    pooled: dict[tuple[Key, str], dict[str, list[float]]] = {}
    for point in record.points:
        for fact in _LOADS:
            for series, readings in point.facts.get(fact, {}).items():
                known = pooled.setdefault((without_replicate(point.key), series), {}).setdefault(
                    fact, []
                )
                if (
                    fact != "loaded_power_watts"
                    or _busy_seconds(point, series) >= _AVERAGED_SECONDS
                ):
                    known += readings
    fields = distinguishing(key for key, _ in pooled)
    return [
        f"{label(key, fields)} · {series}: "
        f"{', '.join(_load_text(fact, readings[fact]) for fact in readings)}"
        for (key, series), readings in pooled.items()
    ]


def _load_text(fact: str, readings: Sequence[float]) -> str:
    title, factor, unit = _LOADS[fact]
    if not readings:
        return (
            f"no {title}, since the device worked for less than {_AVERAGED_SECONDS:g} s, over "
            "which a board averages"
        )
    return (
        f"{title} {median(readings) * factor:.0f} {unit} "
        f"({units.counted(len(readings), 'reading')})"
    )


def _busy_seconds(point: Point, name: str) -> float:
    series = point.find_series(name)
    return sum(series.samples) * series.calls_per_sample if series else 0.0


def ranks(record: Record) -> list[str]:
    """Return the scope of multi-rank figures, and a sentence per point with rates and shares.

    Rates are for all ranks together and for each rank. Shares have intervals. Empty without ranks.
    """
    if "ranks" not in record.environment:
        return []
    points = [
        point
        for point in record.points
        if any(metric.name.startswith(_RANKS) for metric in point.metrics)
    ]
    fields = varying(point.key for point in points)
    words = {name: quantities.QUANTITIES[name].title for name in _SHARES}
    if norms := (record.environment["ranks"] or {}).get("sync_batch_norms"):
        layers = units.counted(norms, "layer")
        words[quantities.STATISTICS] = f"SyncBatchNorm ({layers}, in each of which the host waits)"
    of = "batch, times and memory are of one rank; samples/s, power and energy of all"
    sentences = (
        f"{label(point.key, fields)}: {', '.join(_rank_parts(point, words))}" for point in points
    )
    return [of, *(sentence.removeprefix(": ") for sentence in sentences)]


def _rank_parts(point: Point, words_of: Mapping[str, str]) -> Iterator[str]:
    metrics = {metric.name: metric for metric in point.metrics if metric.name.startswith(_RANKS)}
    together = metrics.pop(quantities.RANKS_RATE, None)
    own = [
        metric.value
        for name, metric in metrics.items()
        if name not in _SHARES and metric.value is not None
    ]
    if together is not None:
        rate = (
            f"{units.digits(together.value, 3)} samples/s"
            if together.value is not None
            else together.reason or ""
        )
        least, most = (
            units.digits(value, 3) for value in (min(own, default=0.0), max(own, default=0.0))
        )
        each = (
            f", each {least if least == most else f'{least} … {most}'} while all work"
            if own
            else ""
        )
        alone = point.find_series("ranks/alone")
        by_itself = ""
        if alone and alone.measured:
            rate_alone = point.key.batch_size * len(alone.measured) / sum(alone.measured)
            by_itself = f"; one rank alone {units.digits(rate_alone, 3)} samples/s"
        yield f"check by bursts: together {rate}{each}{by_itself}"
    intervals: Mapping[str, Any] = point.facts.get("ranks") or {}
    values = {
        name: value
        for name in words_of
        if name in metrics and (value := metrics[name].value) is not None
    }
    for name, value in sorted(
        values.items(), key=lambda item: (item[0] in _LOSSES, -item[1])
    ):  # largest loss first
        low, high = (
            (intervals.get(name.removeprefix(_RANKS)) or {}).get(end) for end in ("low", "high")
        )
        ends = (
            "no interval"
            if low is None or high is None
            else f"{wording.percent(low)} … {wording.percent(high)}"
        )
        yield f"{words_of[name]} {wording.percent(value)} ({ends})"


def key_columns(rows: Iterable[Row]) -> list[Column]:
    """Return columns for key fields that vary; size and batch size if none does."""
    keys = [row.key for row in rows]
    return _columns_of(keys, distinguishing(keys))


def remarks(row: Row) -> str:
    """Return the codes of a point's errors and warnings, behind its status if it failed."""
    ending = [] if row.status is Status.OK else [row.status.value]
    return ", ".join([*ending, *wording.codes(row.doubts)])


def _columns_of(keys: Sequence[Key], fields: Sequence[str]) -> list[Column]:
    return [
        Column(_TITLES.get(name, name), [field_text(key, name) for key in keys], is_key=True)
        for name in fields
    ]


def _distinct(words: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(word for word in words if word))
