"""Parse ncu's CSV in any of its forms into kernel launches with their metrics in SI units.

The forms of `ncu --csv` are long (`--page details`, a line per metric, units in a column) and wide
(`--page raw`, a line per launch, units in the second line). Source: Nsight Compute CLI, "Console
Output", https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.roofline.numbers import factor, is_of_locale, number

#: Metrics that the "details" page shows under a label.
_LABELS = {
    "Duration": "gpu__time_duration.sum",
    "DRAM Throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "Compute (SM) Throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    **dict.fromkeys(("SOL SM", "SM"), "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    # until 2021
    **dict.fromkeys(("SOL DRAM", "SOL FB"), "dram__throughput.avg.pct_of_peak_sustained_elapsed"),
}
_SECOND = "[nuµμm]?s(?:ec(?:onds?)?)?"
#: Units by part of a metric name; the first part in a name counts. Other metrics are counts, which
#: need no unit.
_UNITS = {
    ".pct_of_peak": "%|percent",
    ".per_second": rf".+/{_SECOND}|[kmgt]?(?:hz|hertz)",
    "bytes": r"(?:[kmgtp]i?)?b(?:ytes?)?(?:/.+)?",
    "time_duration": _SECOND,
}
_KERNEL, _NAME, _UNIT, _VALUE = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
#: Metric with the name of the GPU.
_PRODUCT = "device__attribute_display_name"
_NAME_AND_UNIT = re.compile(r"(.+?)(?: \[(.*)\])?")
#: Columns that identify the tables of other tools.
_OTHER_TOOLS = {
    **dict.fromkeys(("Total Time (ns)", "Time (%)", "Total Time"), "nsys stats"),
    "Time(%)": "nvprof",
    **dict.fromkeys(("Kernel_Name", "KernelName", "DurationNs"), "rocprof"),
}
#: Number of a process-wide range, before its domain; a range of a thread has none.
_RANGE_NUMBER = re.compile(r"^\d+:(?=[^:]*:)")
#: Values below zero that a note names; further ones are counted.
_MAX_NAMED = 3
#: Limit on a file, since all of it is read into memory.
_MAX_BYTES = 1 << 29
#: Command that converts a report into a CSV.
EXPORT = "ncu --import FILE.ncu-rep --page raw --csv --print-units base > FILE.csv"
_AGAIN = f"Export it again, with its units: {EXPORT}"


@dataclass(kw_only=True)
class KernelLaunch:
    """One kernel launch.

    Attributes:
        kernel: full kernel name.
        stack: the launching thread's push/pop ranges, outermost first.
        spans: the process's open start/end ranges.
        capability: compute capability, for example `7.5`.
        metrics: SI values by ncu name, percentages as fractions.
    """

    kernel: str
    stack: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    capability: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Listing:
    """The contents of an ncu file.

    Attributes:
        source: file name for messages.
        product: GPU name; empty if the file has none.
        launches: kernel launches in their order.
        names: all metric names, including unwanted metrics.
        unavailable: metrics that ncu could not measure (`n/a`).
        notes: caveats about the file.
    """

    source: str
    product: str = ""
    launches: list[KernelLaunch] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    unavailable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def read(path: Path, wanted: Callable[[str], bool]) -> Listing:
    """Read a file's launches with the wanted metrics; the file may not be a link.

    Args:
        wanted: returns whether a metric is needed, by its name.

    Raises:
        UserError: the file is missing, empty, cut off, from another tool, or in an unknown encoding
            or unit.
    """
    try:
        content = foreign.read_bytes(path, _MAX_BYTES)
    except OSError as error:
        raise UserError(
            f"{path} can't be read: {error.strerror}. Name a CSV that ncu wrote, or a run's folder."
        ) from error
    return parse(_decode(content, str(path)), str(path), wanted)


def is_listing(path: Path) -> bool:
    """Return whether a file has ncu's columns; only its beginning is read.

    `perfexp roofline DIR` finds ncu's files in a run's folder by it.
    """
    try:
        with path.open("rb") as file:
            text = _decode(file.read(2**16), str(path), is_whole=False)
        return bool(_header(text.splitlines(keepends=True), str(path)))
    except (OSError, UserError):
        return False


def _decode(content: bytes, source: str, *, is_whole: bool = True) -> str:
    """Decode UTF-8 with or without a byte-order mark, or UTF-16, which PowerShell's `>` writes.

    Args:
        is_whole: whether the content may not end within a character.

    Raises:
        UserError: it is not text in one of these encodings.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif content[:200].count(0) > len(content[:200]) // 4:
        encoding = "utf-16-le" if content[1:2] == b"\0" else "utf-16-be"
    else:
        encoding = "utf-8-sig"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(content, final=is_whole)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source} is neither UTF-8 nor UTF-16 text (byte {error.start}). "
            f"If it is a report, export it: {EXPORT}. "
            f"Text in another encoding: iconv -f ENCODING -t UTF-8 {source}"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{source} is not text. If it is a report of ncu, name it .ncu-rep or export it: "
            f"{EXPORT}"
        )
    return text


def parse(text: str, source: str, wanted: Callable[[str], bool]) -> Listing:
    """Parse a CSV; `source` is its name for messages. See `read` for errors."""
    if not text.strip():
        raise UserError(
            f"{source} is empty. ncu leaves such a file after a failure; "
            "read its messages on the console."
        )
    lines = list(io.StringIO(text, newline=""))
    start, delimiter, header = _header(lines, source)
    listing = Listing(source=source)
    tables = 0
    negative: list[str] = []
    for rows in _tables(lines[start + 1 :], delimiter, header, source, first=start + 2):
        cells = list(_long(rows) if _VALUE in header else _wide(header, rows))
        names = {cell.name for cell in cells} - {""}
        negative += _add(listing, cells, set(filter(wanted, names)))
        listing.names |= names
        tables += bool(cells)
    if not listing.launches:
        raise UserError(
            f"{source} has a header and no kernel: the range or filter of ncu matched none."
        )
    if tables > 1:
        listing.notes.append(
            f"The file holds {tables} tables with the same header: "
            "the launches of all of them are counted."
        )
    if negative:
        values = ", ".join(negative[:_MAX_NAMED])
        if len(negative) > _MAX_NAMED:
            values += f" and {len(negative) - _MAX_NAMED} more"
        listing.notes.append(
            f"Values below zero are left out, since no counter has one: {values}. "
            "Is the file damaged?"
        )
    return listing


def _add(listing: Listing, cells: Sequence[_Cell], needed: Collection[str]) -> list[str]:
    """Add a table's launches to a listing, and return its values below zero with their places.

    Args:
        cells: the table's metrics, launch by launch.
        needed: names of the wanted metrics.

    Raises:
        UserError: a value has an unknown unit, or is a number in another locale.
    """
    for cell in cells:
        if "__" in cell.name and is_of_locale(cell.text):
            raise UserError(
                f"{_place(listing, cell)} is '{cell.text.strip()}': a decimal comma, "
                f"or groups of another locale. Export it again with LC_ALL=C: {EXPORT}"
            )
    launches: dict[tuple[str, ...], KernelLaunch] = {}
    negative: list[str] = []
    for cell in cells:
        if cell.launch not in launches:
            launches[cell.launch] = KernelLaunch(
                kernel=cell.columns[_KERNEL],
                stack=_ranges(cell.columns, "Push/Pop_Range"),
                spans=_ranges(cell.columns, "Start/Stop_Range"),
                capability=cell.columns.get("CC", ""),
            )
        if cell.name == _PRODUCT:
            listing.product = listing.product or cell.text.strip()
        if cell.name not in needed:
            continue
        value, scale = number(cell.text), factor(cell.unit)
        text = cell.text.strip()
        if value is None:
            if text[:1].isdigit():
                raise UserError(f"{_place(listing, cell)} is '{text}', not a number. {_AGAIN}")
            if text:
                listing.unavailable.add(cell.name)
        elif value < 0:
            negative.append(f"{cell.name} at line {cell.line} ({text})")
        elif scale is None or not _is_unit(cell):
            unit = f"is in '{cell.unit}', an unknown unit" if cell.unit.strip() else "has no unit"
            raise UserError(f"{_place(listing, cell)} {unit}. {_AGAIN}")
        else:  # the first of several equal names counts
            launches[cell.launch].metrics.setdefault(cell.name, value * scale)
    listing.launches += launches.values()
    return negative


def _place(listing: Listing, cell: _Cell) -> str:
    """Return file, metric and line of a cell, for messages."""
    return f"{listing.source}: {cell.name} at line {cell.line}"


def _is_unit(cell: _Cell) -> bool:
    """Return whether a cell has a unit that fits its metric."""
    pattern = next((pattern for part, pattern in _UNITS.items() if part in cell.name), ".*")
    return re.fullmatch(pattern, cell.unit.strip().lower()) is not None


def _header(lines: Sequence[str], source: str) -> tuple[int, str, list[str]]:
    """Return the header's index, its delimiter, and its columns.

    Raises:
        UserError: the file has no kernels, or is the table of another tool.
    """
    for index, line in enumerate(lines):
        if line.startswith("==") or not line.strip():
            continue
        for delimiter in (",", ";", "\t"):
            cells = list(map(str.strip, next(csv.reader([line], delimiter=delimiter), [])))
            if _is_header(cells):
                return index, delimiter, cells
            if {_NAME, "Average"} <= set(cells):
                raise UserError(
                    f"{source} is a summary of ncu (--print-summary), with means over launches "
                    f"instead of each launch. Leave --print-summary out: {EXPORT}"
                )
            if tool := next(filter(None, map(_OTHER_TOOLS.get, cells)), None):
                raise UserError(
                    f"{source} is a table of {tool}, which has times but neither FLOPs nor bytes. "
                    f"A roofline needs the counters of Nsight Compute: profile with ncu, "
                    f"then {EXPORT}"
                )
    texts = list(filter(None, map(str.strip, lines)))
    if all(line.startswith("==") for line in texts):
        reason = next((line for line in texts if "ERROR" in line or "WARNING" in line), texts[-1])
        raise UserError(f"{source} holds no kernel, only messages of ncu: {reason}")
    raise UserError(
        f"{source} is not a table of ncu: no line has the columns ID and {_KERNEL}. "
        f"Make one with: {EXPORT}"
    )


def _tables(
    lines: Sequence[str], delimiter: str, header: Sequence[str], source: str, *, first: int
) -> list[list[tuple[int, dict[str, str]]]]:
    """Return the rows below the header, each with its line number.

    A repeated header begins another table.

    Args:
        first: line number of the first row.

    Raises:
        UserError: a row is cut off, or a later table has other columns.
    """
    tables: list[list[tuple[int, dict[str, str]]]] = [[]]
    # columns behind the value in the long form belong to rules and may be missing
    least = header.index(_VALUE) + 1 if _VALUE in header else len(header)
    body = ("\n" if line.startswith("==") else line for line in lines)
    reader = csv.reader(body, delimiter=delimiter, strict=True)
    try:
        for cells in filter(any, reader):
            line = first + reader.line_num - 1
            if _is_header(names := list(map(str.strip, cells))):
                if names != list(header):
                    raise UserError(
                        f"{source}: another table begins at line {line}, with other columns than "
                        "the first. Write each table to its own file."
                    )
                tables.append([])
            elif len(cells) < least:
                raise _cut_off(source, line, f"{len(cells)} of {len(header)} columns")
            else:
                tables[-1].append((line, dict(zip(header, cells, strict=False))))
    except csv.Error as error:
        raise _cut_off(source, first + max(reader.line_num, 1) - 1, str(error)) from error
    return tables


def _cut_off(source: str, line: int, reason: str) -> UserError:
    """Return the error for a damaged line."""
    return UserError(
        f"{source} is cut off or damaged at line {line} ({reason}). "
        f"Check that the disk is not full, and export it again: {EXPORT}"
    )


def _is_header(cells: Sequence[str]) -> bool:
    return _KERNEL in cells and ("ID" in cells or _VALUE in cells)


class _Cell(NamedTuple):
    """One metric of one launch; nameless for a launch without metrics.

    Attributes:
        line: line in the file.
        launch: identity of the launch in its table.
        columns: the row's cells by column.
        unit: unit as written.
        text: value as written.
    """

    line: int
    launch: tuple[str, ...]
    columns: dict[str, str]
    name: str = ""
    unit: str = ""
    text: str = ""


def _long(rows: Iterable[tuple[int, dict[str, str]]]) -> Iterator[_Cell]:
    """Yield a cell for each row of the long form."""
    for line, row in rows:
        name, unit = _named(row.get(_NAME) or "")
        launch = row.get("Process ID", ""), row.get("ID", "")
        yield _Cell(line, launch, row, name, row.get(_UNIT) or unit, row[_VALUE])


def _named(label: str) -> tuple[str, str]:
    """Return a metric name, and its unit if that follows the name or label (`Duration [ns]`)."""
    match = _NAME_AND_UNIT.fullmatch(label.strip())
    if match is None:
        return "", ""
    return _LABELS.get(match[1], match[1]), match[2] or ""


def _wide(header: Sequence[str], rows: Sequence[tuple[int, dict[str, str]]]) -> Iterator[_Cell]:
    """Yield the cells of the wide form, one for each metric of each launch.

    A first row without a kernel holds the units.
    """
    units: dict[str, str] = {}
    if rows and not (rows[0][1].get("ID", "").strip() or rows[0][1][_KERNEL].strip()):
        (_, units), *rows = rows
    named_columns = [(column, *_named(column)) for column in header]
    for line, row in rows:
        launch = (str(line),)
        yield _Cell(line, launch, row)  # a launch without metrics is a launch too
        for column, name, unit in named_columns:
            if "__" in name:  # other columns are not metrics
                yield _Cell(line, launch, row, name, unit or units.get(column, ""), row[column])


def _ranges(columns: Mapping[str, str], kind: str) -> tuple[str, ...]:
    """Return the names of a launch's NVTX ranges, outermost first.

    A cell looks like `4713 "<default domain>:step:none:…" "<default domain>:forward:none:…"`.

    Args:
        kind: part of the column's name.
    """
    cell = next((cell for column, cell in columns.items() if kind in column), "").strip()
    entries = re.findall(r'"([^"]*)"', cell) or [cell]
    names = (_range_name(_RANGE_NUMBER.sub("", entry)) for entry in entries)
    return tuple(filter(None, names))


def _range_name(entry: str) -> str:
    """Return the range name in an entry, for example `step` in `<default domain>:step:none:…`.

    Six fields follow the name, among them payload, color and message.
    """
    fields = entry.partition(":")[2] or entry
    parts = fields.rsplit(":", 6)
    return (parts[0] if len(parts) == 7 else fields).strip()
