"""Listing: an ncu CSV in any of its forms, as kernel launches with their metrics in SI.

The forms are those of `ncu --csv`: long (`--page details`, a line for each metric, its unit in a column) and wide
(`--page raw`, a line for each launch, units in the second line). Source: Nsight Compute CLI, "Console Output",
https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.roofline.numbers import decimal_mark, factor, number

#: What the "details" page calls metrics that have a name of their own.
_LABELS = {
    "Duration": "gpu__time_duration.sum",
    "DRAM Throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "Compute (SM) Throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "SOL SM": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}
_KERNEL, _NAME, _UNIT, _VALUE = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
#: Metric that says what the GPU is called.
_PRODUCT = "device__attribute_display_name"
_IN_HEADER = re.compile(r"(.+) \[(.*)\]")
#: Columns by which the tables of other tools are known.
_OTHERS = {
    "Total Time (ns)": "nsys stats",
    "Time (%)": "nsys stats",
    "Total Time": "nsys stats",
    "Time(%)": "nvprof",
    "Kernel_Name": "rocprof",
    "KernelName": "rocprof",
    "DurationNs": "rocprof",
}
#: So many values are named in a note.
_TOLD = 3
#: Limit on a listing, all of which is read into memory.
_MOST_BYTES = 1 << 29
#: How a report becomes a file that can be read.
EXPORT = "ncu --import FILE.ncu-rep --page raw --csv --print-units base > FILE.csv"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        number: ncu's own.
        kernel: name with template arguments.
        stack: push/pop ranges of the launching thread, the outermost first.
        spans: start/end ranges of the process that were open.
        device: index.
        capability: compute capability, `7.5`.
        product: name of the GPU, where the file has it.
        metrics: values in SI by ncu's names, percentages as fractions.
    """

    number: str
    kernel: str
    stack: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    device: str = ""
    capability: str = ""
    product: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a file says.

    Attributes:
        source: what to call it.
        launches: in the order of the file.
        names: of all metrics in it, those among them that nobody asked for.
        unavailable: metrics that ncu was asked for and could not give (`n/a`).
        notes: what has to be known of the file.
    """

    source: str
    launches: tuple[Launch, ...]
    names: frozenset[str]
    unavailable: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


class _Row(NamedTuple):
    """A line below a header."""

    line: int
    cells: dict[str, str]


@dataclass(kw_only=True)
class _Seen:
    """What is seen of a file besides its launches.

    Attributes:
        names: of all metrics.
        unavailable: those without a value.
        negative: values that can't be, with their lines.
    """

    names: set[str] = field(default_factory=set)
    unavailable: set[str] = field(default_factory=set)
    negative: list[str] = field(default_factory=list)


#: The number of a range of the process, before its domain; a range of a thread has none.
_NUMBERED = re.compile(r"^\d+:(?=[^:]*:)")


def read(path: Path, wanted: Callable[[str], bool]) -> Listing:
    """Read a file.

    Args:
        path: of the CSV.
        wanted: whether a metric is kept.

    Raises:
        UserError: it is not there, empty, cut off, of another tool, or not in a known encoding or unit.
    """
    try:
        content = untrusted.read_bytes(path.resolve(), _MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"{path} can't be read: {error.strerror}. Name a CSV that ncu wrote, or a run's folder."
        ) from error
    return parse(decode(content, str(path)), str(path), wanted)


def is_listing(path: Path) -> bool:
    """Whether a file has the columns of ncu.

    Args:
        path: of any file.
    """
    try:
        with path.open("rb") as file:
            text = decode(file.read(2**16), str(path), whole=False)
        _header(text.splitlines(keepends=True), str(path))
    except (OSError, UserError):
        return False
    return True


def decode(content: bytes, source: str, *, whole: bool = True) -> str:
    """Bytes as text: UTF-8 with or without its mark, or UTF-16, which PowerShell's `>` writes.

    Args:
        content: of the file.
        source: what to call it.
        whole: whether nothing follows behind these bytes.

    Raises:
        UserError: it is none of these.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif content[:200].count(0) > len(content[:200]) // 4:
        encoding = "utf-16-le" if content[1:2] == b"\0" else "utf-16-be"
    else:
        encoding = "utf-8-sig"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source} is neither UTF-8 nor UTF-16 text (byte {error.start}). If it is a report, export it: {EXPORT}. "
            f"Text in another encoding: iconv -f ENCODING -t UTF-8 {source}"
        ) from error
    if "\0" in text:
        raise UserError(f"{source} is no text. If it is a report of ncu, name it .ncu-rep or export it: {EXPORT}")
    return text


def parse(text: str, source: str, wanted: Callable[[str], bool]) -> Listing:
    """What a CSV says; see `read`."""
    if not text.strip():
        raise UserError(f"{source} is empty. ncu leaves such a file where it failed; it says why on the console.")
    lines = list(io.StringIO(text, newline=""))
    start, delimiter, header = _header(lines, source)
    found = [rows for rows in _tables(lines[start + 1 :], delimiter, header, source, first=start + 2) if rows]
    otherwise, seen = "," if delimiter == ";" else ".", _Seen()
    read_one = _long if _VALUE in header else _wide
    tables = [read_one(header, rows, source, wanted, otherwise, seen) for rows in found]
    launches = tuple(launch for table in tables for launch in table)
    if not launches:
        raise UserError(f"{source} has a header and no kernel: the range or filter that ncu was given caught none.")
    return Listing(
        source=source,
        launches=launches,
        names=frozenset(seen.names),
        unavailable=frozenset(seen.unavailable),
        notes=tuple(_notes(sum(map(bool, tables)), seen)),
    )


def _notes(tables: int, seen: _Seen) -> Iterator[str]:
    """What has to be known of a file."""
    if tables > 1:
        yield f"The file holds {tables} tables with the same header: the launches of all of them are counted."
    if seen.negative:
        more = len(seen.negative) - _TOLD
        told = ", ".join(seen.negative[:_TOLD]) + (f" and {more} more" if more > 0 else "")
        yield f"Values below zero are left out, since no counter has one: {told}. Is the file damaged?"


def _is_header(cells: Sequence[str]) -> bool:
    return _KERNEL in cells and ("ID" in cells or _VALUE in cells)


def _header(lines: Sequence[str], source: str) -> tuple[int, str, list[str]]:
    """Where the header is, what separates its columns, and the columns."""
    for number_, line in enumerate(lines):
        if line.startswith("==") or not line.strip():
            continue
        for delimiter in (",", ";", "\t"):
            cells = [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
            if _is_header(cells):
                return number_, delimiter, cells
            _refuse_others(cells, source)
    _refuse_messages(lines, source)
    first = next(line.strip()[:100] for line in lines if line.strip())
    raise UserError(
        f"{source} is no table of ncu: no line has the columns ID and {_KERNEL}. It begins with '{first}'. "
        f"Make one with: {EXPORT}"
    )


def _refuse_others(cells: Sequence[str], source: str) -> None:
    tool = next((_OTHERS[cell] for cell in cells if cell in _OTHERS), None)
    if tool:
        raise UserError(
            f"{source} is a table of {tool}, which has times but neither FLOPs nor bytes. A roofline needs the "
            f"counters of Nsight Compute: profile with ncu, then {EXPORT}"
        )


def _refuse_messages(lines: Sequence[str], source: str) -> None:
    """Where ncu wrote nothing but messages, its own words are told."""
    told = [line.strip() for line in lines if line.strip()]
    if all(line.startswith("==") for line in told):
        reason = next((line for line in told if "ERROR" in line or "WARNING" in line), told[-1])
        raise UserError(f"{source} holds no kernel, only messages of ncu: {reason}")


def _tables(
    lines: Sequence[str], delimiter: str, header: Sequence[str], source: str, *, first: int
) -> list[list[_Row]]:
    """The lines below the header as cells by column; where the header comes again, another table begins.

    Raises:
        UserError: a line is cut off, or is another header.
    """
    tables: list[list[_Row]] = [[]]
    body = [(number_, line) for number_, line in enumerate(lines, first) if not line.startswith("==")]
    reader = csv.reader((line for _, line in body), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            line = body[reader.line_num - 1][0]
            if not any(cells):
                continue
            if _is_header(names := [cell.strip() for cell in cells]):
                if names != list(header):
                    raise UserError(
                        f"{source}: another table begins at line {line}, with other columns than the first. "
                        "Give each a file of its own."
                    )
                tables.append([])
                continue
            if len(cells) < _least(header) or (len(cells) < len(header) and _VALUE not in header):
                raise _cut_off(source, line, f"{len(cells)} of {len(header)} columns")
            tables[-1].append(_Row(line, dict(zip(header, cells, strict=False))))
    except csv.Error as error:
        raise _cut_off(source, body[max(reader.line_num, 1) - 1][0], str(error)) from error
    return tables


def _least(header: Sequence[str]) -> int:
    """Columns that a line has at least: in the long form those behind the value are for rules, and may lack."""
    return header.index(_VALUE) + 1 if _VALUE in header else 1


def _cut_off(source: str, line: int, seen: str) -> UserError:
    return UserError(
        f"{source} is cut off or damaged at line {line} ({seen}). Export it again, and see that the disk is not full: "
        f"{EXPORT}"
    )


def _long(
    header: Sequence[str], rows: Sequence[_Row], source: str, wanted: Callable[[str], bool], otherwise: str, seen: _Seen
) -> list[Launch]:
    mark = _agreed((row[_VALUE] for _, row in rows if wanted(_metric(row))), source, otherwise)
    metrics: dict[tuple[str, str], dict[str, float]] = {}
    about: dict[tuple[str, str], dict[str, str]] = {}
    for line, row in rows:
        key = (row.get("Process ID", ""), row.get("ID", ""))
        known = about.setdefault(key, dict(row))
        name = _metric(row)
        seen.names |= {name} if name else set()
        if name == _PRODUCT:
            known[_PRODUCT] = row[_VALUE]
        into = metrics.setdefault(key, {})
        if wanted(name):
            _keep(into, seen, name, row[_VALUE], row.get(_UNIT, ""), mark, source, line)
    return [_launch(about[key], found) for key, found in metrics.items()]


def _metric(row: Mapping[str, str]) -> str:
    """The metric that a row of the long form is of."""
    label = (row.get(_NAME) or "").strip()
    return _LABELS.get(label, label)


def _wide(
    header: Sequence[str], rows: Sequence[_Row], source: str, wanted: Callable[[str], bool], otherwise: str, seen: _Seen
) -> list[Launch]:
    columns = {column: _in_header(column) for column in header}
    _, first = rows[0]
    units = first if not (first.get("ID", "").strip() or first[_KERNEL].strip()) else {}
    body = rows[1:] if units else rows
    metrics = {column: name for column, (name, _) in columns.items() if "__" in name}
    kept = {column: name for column, name in metrics.items() if wanted(name)}
    mark = _agreed((row[column] for _, row in body for column in kept), source, otherwise)
    seen.names |= set(metrics.values())
    launches = []
    for line, row in body:
        found: dict[str, float] = {}
        for column, name in kept.items():
            unit = columns[column][1] or units.get(column, "")
            _keep(found, seen, name, row[column], unit, mark, source, line)
        launches.append(_launch(row, found))
    return launches


def _in_header(column: str) -> tuple[str, str]:
    """A metric's name and its unit, of `name [unit]`."""
    found = _IN_HEADER.fullmatch(column)
    return (found[1], found[2]) if found else (column, "")


def _agreed(cells: Iterable[str], source: str, otherwise: str) -> str:
    mark = decimal_mark(cells, otherwise=otherwise)
    if mark is None:
        raise UserError(
            f"{source} writes some numbers with a decimal comma and others with a decimal point, so that none can be "
            "trusted. Export it again with LC_ALL=C, and do not mend it in a spreadsheet."
        )
    return mark


def _keep(
    into: dict[str, float], seen: _Seen, name: str, cell: str, unit: str, mark: str, source: str, line: int
) -> None:
    """Keep a metric, if it has a value that can be; the first of several equal names counts."""
    if name in into:
        return
    value = number(cell, mark)
    if value is None:
        seen.unavailable |= {name} if cell.strip() else set()
        return
    scale = factor(unit)
    if scale is None:
        raise UserError(f"{source}: {name} is in '{unit}', which is no known unit. Export it with --print-units base.")
    if value < 0:
        seen.negative.append(f"{name} at line {line} ({cell.strip()})")
        return
    into[name] = value * scale


def _launch(row: Mapping[str, str], metrics: Mapping[str, float]) -> Launch:
    return Launch(
        number=row.get("ID", ""),
        kernel=row[_KERNEL],
        stack=_ranges(row, "Push/Pop_Range"),
        spans=_ranges(row, "Start/Stop_Range"),
        device=row.get("Device", ""),
        capability=row.get("CC", ""),
        product=row.get(_PRODUCT, "").strip(),
        metrics=metrics,
    )


def _ranges(row: Mapping[str, str], kind: str) -> tuple[str, ...]:
    """The names of a launch's NVTX ranges: `4713 "<default domain>:step:none:…" "<default domain>:forward:none:…"`.

    Those of the process have a number of their own before the domain.
    """
    cell = next((cell for column, cell in row.items() if kind in column), "").strip()
    entries = re.findall(r'"([^"]*)"', cell) or ([cell] if cell else [])
    return tuple(filter(None, (_range_name(_NUMBERED.sub("", entry)) for entry in entries)))


def _range_name(entry: str) -> str:
    """The name, between the domain and six fields of payload, colour and message."""
    rest = entry.partition(":")[2] or entry
    parts = rest.rsplit(":", 6)
    return (parts[0] if len(parts) == 7 else rest).strip()
