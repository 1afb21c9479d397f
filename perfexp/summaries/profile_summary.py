"""Profiles of a few calls as sentences, tables and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from perfexp.profilers import WHOLE, is_profile, profiled_key
from perfexp.records.point_times import DEVICE_TIMES, first_median
from perfexp.records.record import Point, Record, Status
from perfexp.records.units import digits, format_seconds
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import label, one_line, varying

#: Rows of a table on the console and on the page; the record has more, and the CSVs all.
_ROWS = 10
#: Limit on the names of kernels, which may have thousands of characters.
_LONGEST = 72
#: Meaning of operator times, by the column of torch's profiler that they are sorted by.
_OWN_TIME = {
    "self_cpu_seconds": "self: on the CPU, without the operators that it calls; the CSV includes them",
    "self_device_seconds": "self: on the device, of the kernels that it launches itself and not through others; the "
    "CSV has its time on the CPU too",
}


def points(record: Record) -> list[Point]:
    """Return the points of profiles with results."""
    return [point for point in record.points if is_profile(point.key) and _is_profile_of_perfexp(_facts(point))]


def files(record: Record) -> list[str]:
    """Return the names of the profilers' files in the run's folder."""
    return list(dict.fromkeys(str(name) for point in points(record) for name in _facts(point).get("files") or ()))


def sentences(record: Record) -> list[str]:
    """Return lines for each profile: tool, calls, duration, and its findings."""
    timed = {point.key: point for point in record.points}
    return [
        f"{name}: {text}" if name else text
        for name, point in _named_profiles(record)
        for text in _findings(point, timed.get(profiled_key(point.key)))
    ]


def tables(record: Record) -> list[tuple[str, Grid]]:
    """Return tables with their titles: kernels, operators, and the launches of each part of a call."""
    titled: list[tuple[str, Grid]] = []
    for name, point in _named_profiles(record):
        facts = _facts(point)
        by = f"by {facts['profiler']}{f' ({name})' if name else ''}"
        for what in ("kernel", "operator"):
            if rows := facts.get(f"{what}s"):
                title = f"top {min(len(rows), _ROWS)} of {facts.get(f'{what}_names', len(rows))} {what}s {by}"
                own = _OWN_TIME.get(facts.get("sorted_by")) if what == "operator" else None
                steps = max(1, int(facts.get("steps") or 1))
                titled.append((title, ranked(rows, steps, what, "self per call" if own else "per call", own)))
        if rows := facts.get("ranges"):
            titled.append((f"launches of each part, {by}", _ranges(rows[:_ROWS])))
    return titled


def commands(record: Record) -> list[str]:
    """Return command lines that profile a marked call."""
    return [one_line(str(text)) for point in points(record) for text in (_facts(point).get("commands") or {}).values()]


class _Row(msgspec.Struct):
    name: str
    share: float
    seconds: float
    count: float


class _Range(msgspec.Struct):
    name: str
    kernels: float
    busy_seconds: float
    span_seconds: float


class _Facts(msgspec.Struct):
    """The facts of a profile that are computed with; a record is data, and may hold anything there."""

    profiler: str
    files: list[str] | None = None
    settings: dict[str, Any] | None = None
    steps: int | None = None
    warmup: int | None = None
    kernels: list[_Row] | None = None
    operators: list[_Row] | None = None
    ranges: list[_Range] | None = None
    commands: dict[str, Any] | None = None
    marked: list[Any] | None = None
    kernels_in: dict[str, Any] | None = None
    empty: dict[str, Any] | None = None


def _is_profile_of_perfexp(facts: Any) -> bool:
    try:
        msgspec.convert(facts, _Facts)
    except msgspec.ValidationError:
        return False
    return True


def _facts(point: Point) -> Any:
    return point.facts.get("profile")


def _named_profiles(record: Record) -> list[tuple[str, Point]]:
    profiled = [point for point in points(record) if point.status is Status.OK]
    keys = [profiled_key(point.key) for point in profiled]
    fields = varying(keys)
    return [(label(key, fields), point) for key, point in zip(keys, profiled, strict=True)]


def _findings(point: Point, timed: Point | None) -> Iterator[str]:
    facts = _facts(point)
    steps, warmup = int(facts.get("steps") or 0), facts.get("warmup")
    tool = " ".join(filter(None, (str(facts["profiler"]), str(facts.get("version") or ""))))
    if facts.get("commands"):
        text = f"call {int(warmup or 0) + 1} was marked ({', '.join(map(str, facts.get('marked') or ()))})"
    else:
        text = f"{tool} profiled {steps} call{'' if steps == 1 else 's'} after {warmup} warm-up calls"
    cost = f" in {format_seconds(point.wall_seconds, 2)}" if point.wall_seconds else ""
    yield one_line(f"{text}{cost}, in a process of its own; its times are not in the record")
    whole = WHOLE[profiled_key(point.key).phase]
    span = next((part["span_seconds"] for part in facts.get("ranges") or () if part["name"] == whole), None)
    device = first_median(timed, *DEVICE_TIMES, "latency") if timed else None
    if span:
        against = f"; without profiling: {format_seconds(device)} ({span / device - 1:+.1%})" if device else ""
        yield f"the work of a call spans {format_seconds(span)} on the device under the profiler{against}"
    within = facts.get("kernels_in") or {}
    if any(within.values()):
        yield "kernels: " + ", ".join(f"{count} in {one_line(str(name))}" for name, count in within.items())
    for report, why in (facts.get("empty") or {}).items():
        yield one_line(f"{report} has no rows: {why} in these calls")


def ranked(rows: list[Mapping[str, Any]], steps: int, what: str, time: str, note: str | None = None) -> Grid:
    """Return the first kernels or operators of a profile (`name`, `count`, `seconds` and `share`) as a table."""
    rows = rows[:_ROWS]
    columns = [
        Column("share", (f"{row['share'] * 1e2:.1f} %" for row in rows)),
        Column(time, (format_seconds(row["seconds"] / steps) for row in rows)),
        Column("times", (digits(row["count"] / steps) for row in rows), rank=1),
        Column(what, (_short(str(row["name"])) for row in rows), prose=True, is_key=True),
    ]
    return Grid(columns, [note] if note else [])


def _ranges(rows: list[Mapping[str, Any]]) -> Grid:
    columns = [
        Column("part", (one_line(str(row["name"])) for row in rows), prose=True, is_key=True),
        Column("kernels", (digits(row["kernels"]) for row in rows)),
        Column("device busy", (format_seconds(row["busy_seconds"]) for row in rows)),
        Column("span", (format_seconds(row["span_seconds"]) for row in rows), rank=1),
    ]
    return Grid(columns)


def _short(name: str) -> str:
    text = one_line(name).removeprefix("void ")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
