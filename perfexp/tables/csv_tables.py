"""CSV tables (RFC 4180) for spreadsheets and pandas, with every figure in full precision."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence

from perfexp.host.foreign import spreadsheet_text
from perfexp.summaries.subject import one_line
from perfexp.tables.flat import FIRST_COLUMNS, Cell


def to_csv(lines: Sequence[Mapping[str, Cell]]) -> bytes:
    """Return lines as UTF-8 CSV, with columns in order of first appearance.

    Without lines, only the header `FIRST_COLUMNS` is written.
    """
    columns = list(dict.fromkeys(name for line in lines for name in line)) or list(FIRST_COLUMNS)
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow([cell_text(column) for column in columns])
    writer.writerows([cell_text(line.get(column)) for column in columns] for line in lines)
    return buffer.getvalue().encode("utf-8", errors="replace")


def cell_text(cell: Cell) -> str:
    """Return a cell as text.

    A text that a spreadsheet would run as a formula gets a leading apostrophe, for example `'=1+1`.
    """
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    return repr(cell) if isinstance(cell, int | float) else spreadsheet_text(one_line(cell))
