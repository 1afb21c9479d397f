"""Projection of a profile's ranges onto the device work that they launched, from any thread.

nsys's `nvtx_gpu_proj_sum` only covers launches from the range's own thread, but autograd launches
the backward pass from another thread. Here a process range covers every launch with a call that
began within it. Tables and columns follow `nsys export --type=sqlite`:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html, "SQLite Schema Reference".
"""

from __future__ import annotations

import sqlite3
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

#: Limit on reading a database; a few calls take a second.
_MOST_SECONDS = 300.0
#: Event type of process ranges (thread ranges have 59).
_START_END = 60
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
#: Tables of device work, and the column with its name.
_WORK = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("demangledName", "shortName"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (),
    "CUPTI_ACTIVITY_KIND_MEMSET": (),
}


class Work(NamedTuple):
    """A device activity, and the start of the call that launched it.

    Attributes:
        kernel: kernel name; None for copies and fills.
    """

    issued_ns: int
    start_ns: int
    end_ns: int
    kernel: str | None


def project(database: Path) -> tuple[list[dict[str, Any]], list[Work]]:
    """Return a profile's ranges with the work that they launched, and all device work.

    Each range name has `name`, `count`, and medians per range: `launches`, `kernels`,
    `busy_seconds` (with any activity) and `span_seconds` (from the first start to the last end).

    Raises:
        sqlite3.Error: the file is not such a database, or takes too long.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    with closing(
        sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    ) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
        [(views,)] = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE type = 'view'")
        if views:
            raise sqlite3.DatabaseError("nsys exports no views")
        try:
            work = sorted(_work(connection), key=lambda activity: activity.issued_ns)
            ranges = list(_ranges(connection))
            return list(_summarized(ranges, work)), work
        except TypeError as error:  # a time stored as text
            raise sqlite3.DataError(str(error)) from error


def _summarized(ranges: list[tuple[str, int, int]], work: list[Work]) -> Iterator[dict[str, Any]]:
    """Yield the summaries for `project`; the work is sorted by issue time."""
    issued = [activity.issued_ns for activity in work]
    by_name: dict[str, list[list[Work]]] = {}
    for name, start, end in sorted(ranges, key=lambda each: (each[1], -each[2])):
        inside = work[bisect_left(issued, start) : bisect_right(issued, end)]
        by_name.setdefault(name, []).append(inside)
    for name, instances in by_name.items():
        yield {
            "name": name,
            "count": len(instances),
            "launches": median(map(len, instances)),
            "kernels": median(map(_num_kernels, instances)),
            "busy_seconds": median(map(_busy_seconds, instances)),
            "span_seconds": median(map(_span_seconds, instances)),
        }


def _num_kernels(work: list[Work]) -> int:
    return sum(one.kernel is not None for one in work)


def _span_seconds(work: list[Work]) -> float:
    if not work:
        return 0.0
    first = min(one.start_ns for one in work)
    return (max(one.end_ns for one in work) - first) * 1e-9


def _busy_seconds(work: list[Work]) -> float:
    busy, until = 0, 0
    for start, end in sorted((item.start_ns, item.end_ns) for item in work):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy * 1e-9


def _work(connection: sqlite3.Connection) -> Iterator[Work]:
    for table, names in _WORK.items():
        columns = _columns(connection, table)
        if "correlationId" not in columns:
            continue
        column = next((name for name in names if name in columns), None)
        name = f"(SELECT value FROM StringIds WHERE id = w.{column})" if column else "NULL"
        query = (
            f"SELECT MIN(r.start), w.start, w.end, {name} FROM {table} w "
            f"JOIN {_RUNTIME} r ON r.correlationId = w.correlationId GROUP BY w.rowid"
        )
        for issued, start, end, text in connection.execute(query):
            yield Work(issued, start, end, (text or "unknown") if names else None)


def _ranges(connection: sqlite3.Connection) -> Iterator[tuple[str, int, int]]:
    columns = _columns(connection, "NVTX_EVENTS")
    if not columns:
        return
    texts = []
    if "text" in columns:
        texts.append("text")
    if "textId" in columns:
        texts.append("(SELECT value FROM StringIds WHERE id = textId)")
    name = f"COALESCE({', '.join(texts)}, '')"
    query = f"SELECT {name}, start, end FROM NVTX_EVENTS WHERE eventType = ? AND end IS NOT NULL"
    for row in connection.execute(query, (_START_END,)):
        if row[0]:
            yield row


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
