"""CSV tables (RFC 4180) for spreadsheets and pandas, with every figure in full precision."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from itertools import chain

from perfexp.host.foreign import spreadsheet_text
from perfexp.records.subject import one_line
from perfexp.report.tables.flat import FIRST_COLUMNS, Cell


def to_csv(lines: Sequence[Mapping[str, Cell]]) -> bytes:
    """Return lines as UTF-8 CSV, with columns in order of first appearance.

    Without lines, only the header `FIRST_COLUMNS` is written. Result files of runs and sweeps,
    exports and comparisons are written this way.

    Args:
        lines: cells by column, one mapping per row; missing cells stay empty.
    """
    columns = list(dict.fromkeys(chain.from_iterable(lines))) or list(FIRST_COLUMNS)
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(map(cell_text, columns))
    for line in lines:
        writer.writerow(map(cell_text, map(line.get, columns)))
    return buffer.getvalue().encode("utf-8", errors="replace")


def cell_text(cell: Cell) -> str:
    """Return a cell as text: numbers in full precision, empty for None and infinite numbers.

    A text that a spreadsheet would run as a formula gets a leading apostrophe, for example `'=1+1`.
    """
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int | float):
        return repr(cell)
    return spreadsheet_text(one_line(cell))
