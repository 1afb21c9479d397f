"""Overview: the tables of a record that people read, narrowed to what varies and to what is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfexp.records.record import Key, Status
from perfexp.records.summary import Row, across
from perfexp.reports import multi_device
from perfexp.statistics import estimators
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import field_text, varying
from perfexp.summaries.wording import (
    DATA_SHARE,
    PEAK_MEMORY,
    bare_time,
    find_metric,
    known_or_about,
    median_text,
    metric_text,
    metric_title,
    percent,
    percentile,
    range_text,
    rate_text,
    service_time,
    shortage,
)

#: Metrics that the tables show in places of their own, and those that a reader looks up in the CSV.
_SHOWN_ELSEWHERE = (
    PEAK_MEMORY,
    DATA_SHARE,
    "memory/warmup_peak_bytes",
    "phases_over_whole",
    "loop/host_seconds",
)

_TITLES = {"input_size": "size", "batch_size": "batch"}

_TWO_PROCESSES = "two processes say little of a third: their interval is ± 12.7 standard errors; of five it is ± 2.8"


def points(rows: Sequence[Row], percentiles: Sequence[float]) -> Grid:
    """The main table: which point, its time, percentiles, throughput, memory, and how it ended.

    Args:
        rows: at least one.
        percentiles: those that were asked for.
    """
    kinds = _distinct(row.time_kind for row in rows)
    name = f"{kinds[0]} p50" if len(kinds) == 1 else "p50"
    columns = [*key_columns(rows), Column(title=f"{name} ± CI95", cells=tuple(map(median_text, rows)))]
    if len(kinds) > 1:
        columns.append(Column(title="time", cells=tuple(row.time_kind or "" for row in rows)))
    services = _distinct(service[0] for row in rows if (service := service_time(row)))
    prefix = "" if services == kinds or len(services) != 1 else f"{services[0]} "
    asked = [number for number in percentiles if number != 50 or services != kinds]
    notes = [note for number in asked if (note := _shortage_note(rows, number, prefix))]
    columns += [_percentile_column(rows, number, prefix, rank) for rank, number in enumerate(asked, 10)]
    columns += [
        Column(title="samples/s", cells=tuple(rate_text(row.samples_per_second) for row in rows), rank=1),
        Column(title="memory", cells=tuple(metric_text(find_metric(row, PEAK_MEMORY)) for row in rows), rank=20),
        Column(title="remarks", cells=tuple(map(remarks, rows)), prose=True),
    ]
    return Grid(columns=tuple(column for column in columns if not set(column.cells) <= {"", "—"}), notes=tuple(notes))


def phases(rows: Sequence[Row]) -> Grid | None:
    """Where the time of a call goes; None where no call was taken apart into two phases or more.

    Args:
        rows: of any run.
    """
    apart = [row for row in rows if len(row.phases) > 1]
    if not apart:
        return None
    names = _distinct(name for row in apart for name in row.phases)
    columns = [
        *key_columns(apart),
        *(
            Column(title=name, cells=tuple(_phase_text(row, name) for row in apart), rank=rank)
            for rank, name in enumerate(names)
        ),
        Column(title="data share", cells=tuple(_share_text(row) for row in apart)),
    ]
    return Grid(columns=tuple(column for column in columns if any(column.cells)))


def processes(rows: Sequence[Row]) -> Grid | None:
    """What several processes say together of each point; None where none was measured by two or more.

    Args:
        rows: of any run.
    """
    known = across(rows)
    if not known:
        return None
    fields = [name for name in varying(each.key for each in known) if name != "replicate"]
    kinds = _distinct(each.time_kind for each in known)
    columns = [
        *_columns_of([each.key for each in known], fields or ("input_size", "batch_size")),
        Column(
            title=f"{kinds[0]} p50" if len(kinds) == 1 else "p50", cells=tuple(bare_time(each.time) for each in known)
        ),
        Column(title="CI95 across", cells=tuple(range_text(each.time) for each in known)),
        Column(title="time", cells=tuple(each.time_kind if len(kinds) > 1 else "" for each in known)),
        Column(title="spread", cells=tuple(percent(each.spread) for each in known)),
        Column(title="processes", cells=tuple(str(len(each.keys)) for each in known)),
    ]
    notes = (_TWO_PROCESSES,) if any(len(each.keys) == 2 for each in known) else ()
    return Grid(columns=tuple(column for column in columns if any(column.cells)), notes=notes)


def metrics(rows: Sequence[Row]) -> Grid | None:
    """The figures beside the times; None where there are none but those of the main table.

    Args:
        rows: of any run.
    """
    known = [
        metric
        for row in rows
        for metric in row.metrics
        if metric.name not in _SHOWN_ELSEWHERE and not metric.name.startswith(multi_device.PREFIX)
    ]
    titles = {metric.name: metric_title(metric) for metric in known if metric.value is not None}
    having = [row for row in rows if any(metric_text(find_metric(row, name)) for name in titles)]
    columns = [
        Column(title=title, cells=tuple(metric_text(find_metric(row, name)) for row in having), rank=rank)
        for rank, (name, title) in enumerate(titles.items())
    ]
    lacking: dict[str, list[str]] = {}
    for metric in known:
        if metric.reason:
            lacking.setdefault(metric.reason, []).append(metric_title(metric))
    notes = [f"{', '.join(_distinct(names))}: {reason}" for reason, names in lacking.items()]
    if any(metric.estimated for metric in known):
        notes.append("≈ estimated from what was measured, not itself measured")
    if not columns and not notes:
        return None
    return Grid(columns=(*key_columns(having), *columns) if columns else (), notes=tuple(notes))


def key_columns(rows: Sequence[Row]) -> list[Column]:
    """The fields of the key that vary; size and batch size where none does."""
    return _columns_of([row.key for row in rows], varying(row.key for row in rows) or ("input_size", "batch_size"))


def remarks(row: Row) -> str:
    """Status of a point that did not end well, and the codes of its errors and warnings."""
    codes = _distinct(doubt.code for doubt in row.doubts if not doubt.is_note)
    return ", ".join(codes if row.status is Status.OK else [row.status.value, *codes])


def _columns_of(keys: Sequence[Key], fields: Sequence[str]) -> list[Column]:
    return [
        Column(title=_TITLES.get(name, name), cells=tuple(field_text(key, name) for key in keys), is_key=True)
        for name in fields
    ]


def _percentile_column(rows: Sequence[Row], number: float, prefix: str, rank: int) -> Column:
    found = [percentile(service[1], number) if (service := service_time(row)) else None for row in rows]
    cells = tuple(known_or_about(each, bare_time(each)) if each else "" for each in found)
    return Column(title=f"{prefix}p{number:g}", cells=cells, rank=rank)


def _shortage_note(rows: Sequence[Row], number: float, prefix: str) -> str:
    """Which percentile has no interval, and why; empty where it has one everywhere."""
    services = [service[1] for row in rows if (service := service_time(row))]
    missing = [summary for summary in services if percentile(summary, number).low is None]
    if not missing:
        return ""
    fewest = min(missing, key=lambda summary: summary.n / summary.tau)
    where = "" if len(missing) == len(services) == 1 else f" at {len(missing)} of {len(services)} points"
    return f"≈ {prefix}p{number:g}{where} without an interval: {shortage(fewest, number)}"


def _phase_text(row: Row, name: str) -> str:
    seconds = row.phases.get(name)
    return "" if seconds is None else bare_time(estimators.Interval(value=seconds, low=None, high=None))


def _share_text(row: Row) -> str:
    share = find_metric(row, DATA_SHARE)
    return "" if share is None or share.value is None else percent(share.value)


def _distinct(words: Iterable[str | None]) -> list[str]:
    """The words that there are, each once, in the order of their first appearance."""
    return list(dict.fromkeys(word for word in words if word))
