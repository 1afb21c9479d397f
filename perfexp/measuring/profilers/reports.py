"""Reports from `nsys stats`, such as kernels by time, as CSV.

Its output shows success; its exit code does not. nsys exits with 0 for unknown, crashed and skipped
reports, and may leave files without rows. Reports were renamed in version 2023.1, for example
`gpukernsum` to `cuda_gpu_kern_sum`. Both names are accepted and mapped to the installed version.
Source: Nsight Systems User Guide, "Report scripts" and "nsys stats",
https://docs.nvidia.com/nsight-systems/UserGuide/index.html
"""

from __future__ import annotations

import csv
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfexp.errors import UserError, nearest
from perfexp.host.files import safe_name, write_atomically
from perfexp.measuring.profilers import ProfileLocation, ProfilerFailed
from perfexp.measuring.profilers.tools import Tool, ask, has_content, ranked, reason
from perfexp.roofline.numbers import factor, number

#: Default reports.
DEFAULT = ("cuda_api_gpu_sum", "cuda_gpu_kern_sum", "cuda_gpu_mem_time_sum", "nvtx_gpu_proj_sum")
#: Report names since 2023.1, and before.
_NAMES = """
    cuda_api_gpu_sum=apigpusum cuda_api_sum=cudaapisum cuda_api_trace=cudaapitrace
    cuda_gpu_kern_gb_sum=gpukerngbsum cuda_gpu_kern_sum=gpukernsum
    cuda_gpu_mem_size_sum=gpumemsizesum cuda_gpu_mem_time_sum=gpumemtimesum
    cuda_gpu_sum=gpusum cuda_gpu_trace=gputrace
    cuda_kern_exec_sum=kernexecsum cuda_kern_exec_trace=kernexectrace
    nvtx_gpu_proj_trace=nvtxgpuproj nvtx_gpu_proj_sum=nvtxgpuproj nvtx_kern_sum=nvtxkernsum
    nvtx_pushpop_sum=nvtxppsum nvtx_pushpop_trace=nvtxpptrace
    nvtx_startend_sum=nvtxsesum nvtx_sum=nvtxsum
    openacc_sum=openaccsum openmp_sum=openmpevtsum osrt_sum=osrtsum
    um_cpu_page_faults_sum=umcpupagefaults um_sum=unifiedmemory um_total_sum=unifiedmemorytotals
"""
_RENAMED = re.findall(r"(\w+)=(\w+)", _NAMES)
#: A name with the report's arguments; never the path of a script.
_REPORT = re.compile(r"[a-z][a-z0-9_]*(:[\w.,=-]+)*")
#: A report's name in the help of `nsys stats`.
_KNOWN = re.compile(r"^\s{0,4}([a-z][a-z0-9_]{3,})(?:\[[^\]]*\])*(?:\s+--|\s*$)", re.MULTILINE)
#: Words in nsys's messages for reports that it refuses to make.
_REFUSALS = ("skipped", "error", "not found", "could not", "invalid")
#: Message for copy and fill reports if there were none, or if they were not traced.
NO_COPIES = "does not contain GPU memory data"
#: First words of messages that every report causes.
_NO_NEWS = ("Processing", "Generating")
#: Title of total times with their unit; nanoseconds without a unit.
_TOTAL_TIME = re.compile(r"\s*total\s*time\s*(?:\(\s*([a-zµ]+)\s*\))?", re.IGNORECASE)
#: Time limit for a large profile's report or SQLite export.
_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A report with rows, as a table.

    Attributes:
        header: titles of the columns.
        rows: cells of each row, as text.
        text: the table as CSV.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: str

    def column(self, *titles: str) -> list[str] | None:
        """Return the first column with a title that begins with one of `titles`, or None.

        Case and blanks are ignored.
        """
        for title in titles:
            for index, name in enumerate(self.header):
                if _plain(name).startswith(_plain(title)):
                    return [row[index] for row in self.rows]
        return None


def check(reports: Iterable[str]) -> list[str]:
    """Return validated report names, each once.

    Args:
        reports: texts with one or several names, separated by commas.

    Raises:
        UserError: a name is invalid.
    """
    names = [name.strip() for name in ",".join(reports).split(",") if name.strip()]
    for name in names:
        if not _REPORT.fullmatch(name):
            raise UserError(
                f"'{name}' is not a report of nsys stats; name one such as cuda_gpu_kern_sum."
            )
    return list(dict.fromkeys(names))


def known(tool: Tool) -> frozenset[str]:
    """Ask the installed nsys for the names of its reports; empty if unknown."""
    answer = ask([tool.path, "stats", "--help-reports"])
    return frozenset(_KNOWN.findall(answer.text))


def names_of(report: str, known_reports: frozenset[str]) -> list[str]:
    """Return names to try for a report, best first; empty if nsys does not have it.

    These are the installed version's names, or all names if its reports are unknown.

    Args:
        report: name, with arguments after a colon.
        known_reports: reports of the installed version; empty if unknown.
    """
    base, _, arguments = report.partition(":")
    newer, older = [base], list[str]()
    for new, old in _RENAMED:
        if old == base:
            newer.append(new)
        if new == base:
            older.append(old)
    names = [name for name in newer + older if not known_reports or name in known_reports]
    return [f"{name}:{arguments}" for name in names] if arguments else names


def export(tool: Tool, source: Path, target: Path) -> str | None:
    """Export a profile to a database, as a source for reports; return the tool's error, or None.

    Raises:
        ProfilerFailed: the tool cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix=".perfexp-", dir=target.parent) as folder:
        temporary = Path(folder) / target.name  # next to the target, which survives a failure
        options = ("--type=sqlite", "--force-overwrite=true", f"--output={temporary}")
        # a relative path could be read as an option
        answer = ask([tool.path, "export", *options, str(source.absolute())], _SECONDS)
        if has_content(temporary):
            temporary.replace(target)
            return None
    return reason(answer.text) or "nsys export wrote nothing"


def make(tool: Tool, source: Path, report: str, known_reports: frozenset[str]) -> Sheet:
    """Make one report.

    Args:
        source: profile, or database exported from it.
        known_reports: see `names_of`.

    Raises:
        ProfilerFailed: there is no such report, or it has no rows; the message has the reason.
    """
    names = names_of(report, known_reports)
    if not names:
        near = nearest(report.partition(":")[0], known_reports)
        hint = f"; it has {' and '.join(near)}" if near else ""
        raise ProfilerFailed(
            f"nsys {tool.version or ''} has no such report{hint}: nsys stats --help-reports lists "
            "them"
        )
    why = ""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
            path = Path(folder)
            options = (f"--report={name}", "--format=csv", f"--output={path / 'report'}")
            command = [tool.path, "stats", *options, "--force-overwrite=true"]
            answer = ask([*command, str(source.absolute())], _SECONDS, path)
            texts = [file.read_text(errors="replace") for file in sorted(path.glob("report*"))]
        for text in (*texts, answer.out):
            if (sheet := read(text)) is not None:
                return sheet
        lines = answer.text.splitlines()
        output = "\n".join(line for line in lines if not line.startswith(_NO_NEWS))
        why = reason(output, _REFUSALS) or "it has no rows"
    raise ProfilerFailed(why)


def read(text: str) -> Sheet | None:
    """Return the CSV table in a report file or nsys output; None without rows.

    Messages before the table are skipped.
    """
    lines = text.splitlines()
    for index, line in enumerate(lines):
        no_table = (*_NO_NEWS, "SKIPPED", "NOTICE", "WARNING", "ERROR")
        if line.count(",") < 2 or line.startswith(no_table):
            continue
        table = filter(None, csv.reader(io.StringIO("\n".join(lines[index:]))))
        header = tuple(next(table))
        rows = tuple(tuple(row) for row in table if len(row) == len(header))
        if not rows or any(number(cell) is not None for cell in header):
            return None
        content = io.StringIO()
        csv.writer(content, lineterminator="\n").writerows([header, *rows])
        return Sheet(header=header, rows=rows, text=content.getvalue())
    return None


def write(
    tool: Tool,
    source: Path,
    wanted: Sequence[str],
    location: ProfileLocation,
    claim: Callable[[Path], None],
) -> tuple[dict[str, Sheet], dict[str, str]]:
    """Make reports and write those with rows as `STEM_REPORT.csv`.

    Args:
        source: profile, or database exported from it.
        wanted: names of the reports.
        claim: called with each file before it is written.

    Returns:
        The written reports, and the errors of the others, both by name.
    """
    known_reports = known(tool)
    sheets: dict[str, Sheet] = {}
    problems: dict[str, str] = {}
    for report in wanted:
        try:
            sheet = make(tool, source, report, known_reports)
        except ProfilerFailed as error:
            problems[report] = str(error)
            continue
        path = file_of(location, report)
        claim(path)
        write_atomically(path, sheet.text.encode())
        sheets[report] = sheet
    return sheets, problems


def file_of(location: ProfileLocation, report: str) -> Path:
    """Return the path of a report's CSV file."""
    return location.file(f"_{safe_name(report.replace(':', '_'))}.csv")


def kernels(sheets: Mapping[str, Sheet]) -> list[dict[str, Any]]:
    """Return a profile's kernels by decreasing total time, from the report of kernels.

    Each has `name`, `count`, total `seconds` and `share`. Without that report there are none.
    """
    for report, sheet in sheets.items():
        if report.partition(":")[0] in ("cuda_gpu_kern_sum", "gpukernsum"):
            names, counts = sheet.column("Name"), sheet.column("Instances", "Count")
            times = sheet.column("Total Time")
            matches = filter(None, map(_TOTAL_TIME.match, sheet.header))
            unit = next((match[1] for match in matches), None)
            unit_seconds = factor(unit or "ns")
            if names and counts and times and unit_seconds:
                rows = []
                for name, count, time in zip(names, counts, times, strict=True):
                    seconds = (number(time) or 0.0) * unit_seconds
                    rows.append((name, int(number(count) or 0), seconds))
                return ranked(rows)
    return []


def _plain(title: str) -> str:
    """Return a title in lower case without blanks, for comparisons."""
    return "".join(title.lower().split())
