"""Profile summary: profiled calls as sentences, tables and files.

Profilers (torch.profiler, nsys, ncu, NVTX markers) store what they found in a point's
`facts["profile"]`. Reports show it with these functions. Times are in seconds; a step is a profiled
call.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from perfexp.host import foreign
from perfexp.records.grid import Column, Grid
from perfexp.records.point_times import DEVICE_TIMES, first_median
from perfexp.records.profile_keys import WHOLE, is_profile, profiled_key
from perfexp.records.record import Point, Record, Status
from perfexp.records.subject import label, one_line, varying
from perfexp.records.units import counted, digits, format_seconds

#: Table rows on the console and on the page; the record has more, and the CSVs have all.
_ROWS = 10
#: Character limit for kernel names, which may have thousands.
_LONGEST = 72
#: Tools of a marked call, and their words up to the program that they profile.
_TOOLS, _OPTION = ("nsys", "ncu"), re.compile("profile|-.*")
#: Meaning of operator times, by torch.profiler's sort column.
_OWN_TIME = {
    "self_cpu_seconds": (
        "self: on the CPU, without the operators that it calls; the CSV includes them"
    ),
    "self_device_seconds": (
        "self: on the device, of the kernels that it launches itself and not through others; the "
        "CSV has its time on the CPU too"
    ),
}


class _Row(msgspec.Struct):
    """Kernel or operator, with totals over all profiled calls; `share` is from 0 to 1."""

    name: str
    share: float
    seconds: float
    count: float


class _Range(msgspec.Struct):
    """Part of a call, such as `forward`: launched kernels, device busy time and span, in seconds.

    The span is the time from the start of the first kernel to the end of the last.
    """

    name: str
    kernels: float
    busy_seconds: float
    span_seconds: float


class Profile(msgspec.Struct):
    """Facts shown about a profile; those that a profiler does not provide are None.

    Attributes:
        profiler: name of the tool.
        files: names of its files in the run's folder.
        steps: number of profiled calls.
        warmup: number of calls before them.
        kernels: kernels, the longest first; `kernel_names` is the number of all.
        operators: operators, the longest first; `operator_names` is the number of all.
        sorted_by: torch.profiler's sort column for the operators.
        ranges: parts of a call.
        commands: command lines that profile a marked call, by tool.
        marked: names of the marked ranges.
        kernels_in: number of kernels by part of a call.
        empty: reasons why a report of nsys has no rows, by report.
    """

    profiler: str
    version: Any = None
    files: list[str] | None = None
    steps: int | None = None
    warmup: int | None = None
    kernels: list[_Row] | None = None
    kernel_names: int | None = None
    operators: list[_Row] | None = None
    operator_names: int | None = None
    sorted_by: str | None = None
    ranges: list[_Range] | None = None
    commands: dict[str, Any] | None = None
    marked: list[Any] | None = None
    kernels_in: dict[str, Any] | None = None
    empty: dict[str, Any] | None = None


def profiles(record: Record) -> list[tuple[Point, Profile]]:
    """Return a record's profile points with their facts; points with malformed facts are left out.

    A record is data from anywhere, so the facts may hold anything.
    """
    profile_points = []
    for point in record.points:
        if is_profile(point.key):
            with suppress(msgspec.ValidationError):
                profile_points.append((point, msgspec.convert(point.facts.get("profile"), Profile)))
    return profile_points


def files(record: Record) -> list[str]:
    """Return the names of profiler files in the run's folder.

    The run lists them among its artifacts.
    """
    names: dict[str, None] = {}
    for _, profile in profiles(record):
        names |= dict.fromkeys(profile.files or ())
    return list(names)


def sentences(record: Record) -> list[str]:
    """Return sentences for each profile: tool, calls, duration and findings.

    Reports show them in the section `profile`.
    """
    timed = {point.key: point for point in record.points}
    lines = []
    for name, point, profile in _named(record):
        prefix = f"{name}: " if name else ""
        for text in _findings(point, profile, timed.get(profiled_key(point.key))):
            lines.append(prefix + text)
    return lines


def tables(record: Record) -> list[tuple[str, Grid]]:
    """Return titled tables: kernels, operators, and launches for each part of a call.

    Reports show each as a section of its own.
    """
    titled: list[tuple[str, Grid]] = []
    for name, _, profile in _named(record):
        by = f"by {profile.profiler}"
        if name:
            by += f" ({name})"
        meaning = _OWN_TIME.get(profile.sorted_by or "")
        steps = max(1, profile.steps or 1)
        if rows := profile.kernels:
            title = _top(rows, profile.kernel_names, f"kernels {by}")
            titled.append((title, ranked(rows, steps, "kernel", "per call")))
        if rows := profile.operators:
            title = _top(rows, profile.operator_names, f"operators {by}")
            time = "self per call" if meaning else "per call"
            titled.append((title, ranked(rows, steps, "operator", time, meaning)))
        if profile.ranges:
            titled.append((f"launches of each part, {by}", _ranges(profile.ranges[:_ROWS])))
    return titled


def _top(rows: Sequence[_Row], names: int | None, noun: str) -> str:
    """Return a table's title, for example `top 10 of 85 kernels by nsys`."""
    return f"top {min(len(rows), _ROWS)} of {names or len(rows)} {noun}"


def commands(record: Record) -> list[str]:
    """Return command lines that profile a marked call, for users to copy.

    A record may come from anybody, so lines that do anything else are left out.
    """
    lines: list[str] = []
    for _, profile in profiles(record):
        for tool, line in (profile.commands or {}).items():
            if tool in _TOOLS and _is_harmless(str(line), tool):
                lines.append(line)
    return lines


def _is_harmless(line: str, tool: str) -> bool:
    """Return whether a line is `TOOL [profile] --OPTION… python -m perfexp KEY=VALUE…`, no more.

    A user may copy such a line without reading it.
    """
    try:
        words = shlex.split(line)
        start = words.index("python")
    except ValueError:
        return False
    return (
        words[start:][:3] == ["python", "-m", "perfexp"]
        and all(map(_OPTION.fullmatch, words[1:start]))
        and all("=" in word or word[:1] in "~-" for word in words[start + 3 :])
        and foreign.command_line(words[1:], (tool,)) == line
    )


def _named(record: Record) -> list[tuple[str, Point, Profile]]:
    """Return successful profiles with the label of the timed point; empty for a single profile."""
    profiled = []
    for point, profile in profiles(record):
        if point.status is Status.OK:
            profiled.append((profiled_key(point.key), point, profile))
    fields = varying(key for key, _, _ in profiled)
    return [(label(key, fields), point, profile) for key, point, profile in profiled]


def _findings(point: Point, profile: Profile, timed: Point | None) -> Iterator[str]:
    """Yield sentences about one profile: how it was made, its duration, kernels, empty reports.

    Args:
        point: profile point.
        timed: point with the times without profiling; None if it was not measured.
    """
    steps, warmup = profile.steps or 0, profile.warmup
    tool = " ".join(filter(None, (profile.profiler, str(profile.version or ""))))
    text = f"{tool} profiled {counted(steps, 'call')} after {warmup} warm-up calls"
    if profile.commands:
        text = f"call {(warmup or 0) + 1} was marked ({', '.join(map(str, profile.marked or ()))})"
    if point.wall_seconds:
        text += f" in {format_seconds(point.wall_seconds, 2)}"
    yield one_line(f"{text}, in a process of its own; its times are not in the record")
    spans = {part.name: part.span_seconds for part in reversed(profile.ranges or ())}
    if span := spans.get(WHOLE[profiled_key(point.key).phase]):
        text = f"the work of a call spans {format_seconds(span)} on the device under the profiler"
        if timed and (device := first_median(timed, *DEVICE_TIMES, "latency")):
            text += f"; without profiling: {format_seconds(device)} ({span / device - 1:+.1%})"
        yield text
    within = profile.kernels_in or {}
    if any(within.values()):
        counts = (f"{count} in {one_line(str(name))}" for name, count in within.items())
        yield f"kernels: {', '.join(counts)}"
    for report, why in (profile.empty or {}).items():
        yield one_line(f"{report} has no rows: {why} in these calls")


def ranked(rows: Sequence[Any], steps: int, noun: str, time: str, note: str | None = None) -> Grid:
    """Return a profile's first kernels or operators as a table, with times per call.

    Args:
        rows: objects with `name`, `count`, `seconds` and `share`, totals over all profiled calls.
        steps: number of profiled calls.
        noun: title of the name column, for example `kernel`.
        time: title of the time column, for example `per call`.
        note: line below the table, if any.
    """
    columns = [
        Column("share"),
        Column(time),
        Column("times", rank=1),
        Column(noun, prose=True, is_key=True),
    ]
    lines = []
    for row in msgspec.convert(rows[:_ROWS], list[_Row], from_attributes=True):
        share, seconds = f"{row.share * 1e2:.1f} %", format_seconds(row.seconds / steps)
        lines.append((share, seconds, digits(row.count / steps), _short(row.name)))
    return Grid.of_cells(columns, lines, [note] if note else [])


def _ranges(rows: Sequence[_Range]) -> Grid:
    """Return a table of a call's parts: kernels, device busy time, and span.

    Times are per call.
    """
    columns = [
        Column("part", prose=True, is_key=True),
        Column("kernels"),
        Column("device busy"),
        Column("span", rank=1),
    ]
    lines = []
    for row in rows:
        busy, span = format_seconds(row.busy_seconds), format_seconds(row.span_seconds)
        lines.append((one_line(row.name), digits(row.kernels), busy, span))
    return Grid.of_cells(columns, lines)


def _short(name: str) -> str:
    """Return a kernel or operator name in one line, without its return type and a long end."""
    text = one_line(name).removeprefix("void ")
    if len(text) > _LONGEST:
        return f"{text[: _LONGEST - 1]}…"
    return text
