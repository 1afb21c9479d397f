"""Profiles of a few calls from Nsight Systems (nsys): timeline, CSV reports, and work per range.

`Nsys` makes profiles during a run; `evaluate` and `imported` also serve `perfexp nsys-stats`. The
work per range is read from nsys's SQLite export (`project`). nsys's own `nvtx_gpu_proj_sum` only
covers launches from the range's own thread, but autograd launches the backward pass from another
thread. Here a process range covers every launch with a call that began within it. Tables and
columns: "SQLite Schema Reference" in the user guide.

Source for the command lines: Nsight Systems User Guide, "CLI Profile Command Switch Options",
https://docs.nvidia.com/nsight-systems/UserGuide/index.html
"""

from __future__ import annotations

import re
import sqlite3
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.measuring.profilers import (
    About,
    ProfileLocation,
    Profiler,
    ProfileResult,
    ProfilerFailed,
    tools,
)
from perfexp.measuring.profilers import reports as stats
from perfexp.measuring.profilers.reports import DEFAULT, check
from perfexp.records.paths import RunPaths
from perfexp.records.profile_keys import WHOLE

#: Interfaces traced by default.
TRACE = ("cuda", "cudnn", "nvtx", "osrt")
#: Endings of profiles since 2021.4, and before.
ENDINGS = (".nsys-rep", ".qdrep")
#: Words in nsys's error messages.
_COMPLAINTS = (
    "illegal",
    "unrecognised",
    "unrecognized",
    "error",
    "not supported",
    "failed",
    "unable",
)
#: Time limit for importing a recording.
_IMPORT_SECONDS = 3600.0
#: Ending of a database exported by nsys.
DATABASE = ".sqlite"
#: Ending of the table of ranges.
_RANGES = "_ranges.csv"
#: Time limit for reading a database; a few calls take a second.
_MOST_SECONDS = 300.0
#: Event type of process ranges (thread ranges have 59).
_START_END = 60
#: Table of the host's calls to the CUDA runtime.
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
#: Tables of device work, and the column with its name.
_WORK = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("demangledName", "shortName"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (),
    "CUPTI_ACTIVITY_KIND_MEMSET": (),
}


@dataclass(kw_only=True)
class Nsys(Profiler):
    """Nsight Systems on calls after a warm-up (profiler=nsys).

    The keys are described in `plan/key_descriptions.yaml`.
    """

    name: str = "nsys"
    steps: int = 3
    trace: Sequence[str] = TRACE
    sample: str = "none"
    cpuctxsw: str = "none"
    reports: Sequence[str] = DEFAULT
    top: int = 20
    options: Sequence[str] = ()
    tool: str | None = None

    needs_nvidia = True

    def __post_init__(self) -> None:
        """Check the settings, and split lists that were given as one text."""
        super().__post_init__()
        self.trace = [name for text in self.trace for name in str(text).split(",")]
        if "cuda" not in self.trace:
            raise UserError(
                f"profiler.trace={self.trace}: add cuda, which the capture range needs."
            )
        self.reports = check(self.reports)

    def outputs(self, location: ProfileLocation) -> list[Path]:
        recorded = map(location.file, (*ENDINGS, ".qdstrm"))
        return [*recorded, *evaluated(location, self.reports)]

    def command(self, location: ProfileLocation, about: About) -> list[str]:
        """See `Profiler`.

        nsys records only between cudaProfilerStart and Stop: torch's import alone would create
        gigabytes of profile.
        """
        super().command(location, about)
        tool = tools.find("nsys", self.tool)
        recording = recording_command(self.trace, self.sample, self.cpuctxsw)
        recording += ["--force-overwrite=true", f"--output={tools.escaped(location.file())}"]
        return [tool.path, *recording, *self.options]

    def collect(
        self, location: ProfileLocation, about: About, said: str, observations: Mapping[str, Any]
    ) -> ProfileResult:
        """See `Profiler`; writes the reports and the table of ranges."""
        tool = tools.find("nsys", self.tool)
        profile = next(filter(tools.has_content, map(location.file, ENDINGS)), None)
        if profile is None:
            raise _no_profile(location, said)
        claim = RunPaths(location.folder).claim
        results = evaluate(
            tool, profile, self.reports, location, claim, whole=WHOLE[about.phase], top=self.top
        )
        results.facts |= {"version": tool.version, "trace": self.trace}
        return results


def recording_command(
    trace: Sequence[str] = TRACE, sample: str = "none", cpuctxsw: str = "none"
) -> list[str]:
    """Return nsys arguments that record between cudaProfilerStart and Stop.

    By default, the program would end at Stop. Graph nodes are traced, because forced cuDNN passes
    are launched as graphs. Arguments as in `Nsys`.
    """
    capture = (
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--kill=none",
        "--cuda-graph-trace=node",
    )
    return [
        "profile",
        f"--trace={','.join(trace)}",
        f"--sample={sample}",
        f"--cpuctxsw={cpuctxsw}",
        *capture,
    ]


def evaluated(location: ProfileLocation, wanted: Sequence[str]) -> list[Path]:
    """Return the files that `evaluate` may write for these reports."""
    files = [stats.file_of(location, report) for report in wanted]
    return [location.file(DATABASE), location.file(_RANGES), *files]


def evaluate(
    tool: tools.Tool,
    profile: Path,
    wanted: Sequence[str],
    location: ProfileLocation,
    claim: Callable[[Path], None],
    *,
    whole: str | None = None,
    top: int = 20,
) -> ProfileResult:
    """Write a profile's reports and ranges as CSV; return the files, kernels and ranges.

    A report that nsys cannot make is listed with the reason, and a diagnostic is added.

    Args:
        profile: recorded file, or database exported from it.
        wanted: names of the reports.
        claim: called with each file before it is written, to add it to the run's manifest.
        whole: name of the range around a call, if any.
        top: number of kernels and ranges to list.
    """
    results = ProfileResult(files=[profile.name])
    database = location.file(DATABASE)
    problem = None
    if profile.suffix != DATABASE:
        claim(database)
        problem = stats.export(tool, profile, database)
    sheets, problems = stats.write(tool, profile if problem else database, wanted, location, claim)
    written = {}
    for report, sheet in sheets.items():
        name = stats.file_of(location, report).name
        results.files.append(name)
        written[report] = {"file": name, "rows": len(sheet.rows)}
    ranges: list[dict[str, Any]] = []
    work: list[DeviceActivity] = []
    if not problem:
        ranges, work = _write_ranges(database, location, claim)
    if ranges:
        results.files.append(location.file(_RANGES).name)
    launches = list[tuple[str, int, float]]()
    for activity in work:
        if activity.kernel is not None:
            launches.append((activity.kernel, 1, (activity.end_ns - activity.start_ns) * 1e-9))
    results.add_kernels(stats.kernels(sheets) or tools.ranked(launches), top)
    # an empty report of copies is not a problem if the database shows that there were none
    empty: dict[str, str] = {}
    for report, why in list(problems.items()):
        if work and len(launches) == len(work) and stats.NO_COPIES in why:
            empty[report] = "nothing was copied or filled"
            del problems[report]
    if problem:
        problems["sqlite"] = problem
    results.facts |= {
        "ranges": ranges[:top],
        "reports": written,
        "empty": empty,
        "problems": problems,
    }
    if problems:
        failed = "; ".join(f"{report}: {why}" for report, why in problems.items())
        advice = (
            "choose others with profiler.reports, or create them later with perfexp nsys-stats "
            "DIR -r REPORT"
        )
        results.doubt(f"nsys created no {failed}", advice)
    in_range = {entry["name"]: entry["kernels"] for entry in ranges}
    if whole == WHOLE["train"] and "backward" in in_range:
        results.compare_passes("nsys", in_range.get("forward", 0), in_range["backward"])
    return results


def _write_ranges(
    database: Path, location: ProfileLocation, claim: Callable[[Path], None]
) -> tuple[list[dict[str, Any]], list[DeviceActivity]]:
    """Write the table of ranges, if there are any; return ranges and device work as `project` does.

    Both are empty if the database cannot be read.
    """
    ranges: list[dict[str, Any]] = []
    work: list[DeviceActivity] = []
    # other versions have other tables; the reports are unaffected
    with suppress(sqlite3.Error):
        ranges, work = project(database)
    if ranges:
        path = location.file(_RANGES)
        claim(path)
        write_atomically(path, tools.to_csv(ranges, list(ranges[0])))
    return ranges, work


def imported(tool: tools.Tool, stream: Path) -> Path:
    """Import a .qdstrm recording that nsys could not import, and return the profile's path.

    Raises:
        ProfilerFailed: that fails too.
    """
    nsys_folder = Path(tool.path).resolve().parent
    importers = sorted(
        [*nsys_folder.glob("QdstrmImporter"), *nsys_folder.parent.glob("*/QdstrmImporter")]
    )
    if not importers:
        raise ProfilerFailed(
            f"{stream.name} was recorded but not imported, and there is no QdstrmImporter beside "
            f"{tool.path}: open it with the user interface of Nsight Systems, which imports it."
        )
    target = stream.with_suffix(ENDINGS[0])
    if target.is_symlink():  # the importer would follow it
        target.unlink()
    command = [str(importers[0]), f"--input-file={stream}", f"--output-file={target}"]
    answer = tools.ask(command, _IMPORT_SECONDS)
    if not tools.has_content(target):
        why = tools.missing_library(answer.text) or _libdw() or tools.reason(answer.text)
        raise ProfilerFailed(f"{stream.name} can't be imported: {why}")
    return target


def _no_profile(location: ProfileLocation, said: str) -> ProfilerFailed:
    """Return the error for a run of nsys that left no profile, with the reason from its output."""
    stream = location.file(".qdstrm")
    if tools.has_content(stream):
        why = tools.missing_library(said) or _libdw()
        why = why or tools.first_line_with(said, ("importer", "import failed"))
        why = why or "without a message"
        return ProfilerFailed(
            f"nsys recorded {stream.name}, but its importer failed: {why}. Then import it without "
            f"measuring again: perfexp nsys-stats {location.folder.parent}",
            files=[stream.name],
        )
    if re.search("capture range|no data was collected|not collected", said, re.IGNORECASE):
        return ProfilerFailed(
            "nsys saw no cudaProfilerStart: nothing was recorded; see details/run.log."
        )
    why = tools.reason(said, _COMPLAINTS) or "without a message"
    return ProfilerFailed(f"nsys left no profile: {why}; see details/run.log.")


def _libdw() -> str | None:
    """Return the message for a missing library libdw; None if it is installed.

    It is what nsys's importer lacks most often.
    """
    import ctypes

    try:
        ctypes.CDLL("libdw.so.1")
    except OSError:
        return tools.missing_library("libdw.so.1: cannot open shared object")
    return None


class DeviceActivity(NamedTuple):
    """A kernel, copy or fill on the device, in nanoseconds.

    Attributes:
        issued_ns: start of the host's call that launched it.
        kernel: kernel name; None for copies and fills.
    """

    issued_ns: int
    start_ns: int
    end_ns: int
    kernel: str | None


def project(database: Path) -> tuple[list[dict[str, Any]], list[DeviceActivity]]:
    """Return a profile's ranges with the work that they launched, and all device work.

    Each range name has `name`, `count`, and medians per range: `launches`, `kernels`,
    `busy_seconds` (with any activity) and `span_seconds` (from the first start to the last end).

    Args:
        database: SQLite export of a profile.

    Raises:
        sqlite3.Error: the file is not such a database, or takes too long.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    address = f"{database.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
        # the file may be anyone's, and a view could run any query
        [(views,)] = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE type = 'view'")
        if views:
            raise sqlite3.DatabaseError("nsys exports no views")
        try:
            work = sorted(_read_work(connection), key=lambda activity: activity.issued_ns)
            ranges = list(_read_ranges(connection))
            return list(_summarize(ranges, work)), work
        except TypeError as error:  # a time stored as text
            raise sqlite3.DataError(str(error)) from error


def _summarize(
    ranges: list[tuple[str, int, int]], work: list[DeviceActivity]
) -> Iterator[dict[str, Any]]:
    """Yield the summary of each range name for `project`, by first start.

    Args:
        ranges: name, start and end of each range.
        work: device work, sorted by issue time.
    """
    issued = [activity.issued_ns for activity in work]
    by_name: dict[str, list[list[DeviceActivity]]] = {}
    for name, start, end in sorted(ranges, key=lambda span: (span[1], -span[2])):
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


def _num_kernels(work: list[DeviceActivity]) -> int:
    return sum(activity.kernel is not None for activity in work)


def _span_seconds(work: list[DeviceActivity]) -> float:
    """Return the seconds from the first start to the last end; 0 without work."""
    if not work:
        return 0.0
    first_ns = min(activity.start_ns for activity in work)
    return (max(activity.end_ns for activity in work) - first_ns) * 1e-9


def _busy_seconds(work: list[DeviceActivity]) -> float:
    """Return the seconds with any activity; overlapping activities count once."""
    busy_ns, until_ns = 0, 0
    for start, end in sorted((activity.start_ns, activity.end_ns) for activity in work):
        busy_ns += max(0, end - max(start, until_ns))
        until_ns = max(until_ns, end)
    return busy_ns * 1e-9


def _read_work(connection: sqlite3.Connection) -> Iterator[DeviceActivity]:
    """Yield all kernels, copies and fills in a database, each with its launching call."""
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
            yield DeviceActivity(issued, start, end, (text or "unknown") if names else None)


def _read_ranges(connection: sqlite3.Connection) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each process range, in nanoseconds; nothing without a table."""
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
    """Return the names of a table's columns; empty if there is no such table."""
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
