"""Profiles of a few calls from Nsight Systems (nsys): timeline, CSV reports, and work per range.

Source for the command lines: Nsight Systems User Guide, "CLI Profile Command Switch Options",
https://docs.nvidia.com/nsight-systems/UserGuide/index.html
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.profilers import WHOLE, About, Found, Place, Profiler, ProfilerFailed, tools
from perfexp.profilers import reports as stats
from perfexp.profilers.projection import Work, project
from perfexp.profilers.reports import DEFAULT, check
from perfexp.records.paths import RunPaths

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
_IMPORT_SECONDS = 3600.0
#: Ending of a database exported by nsys.
DATABASE = ".sqlite"
_RANGES = "_ranges.csv"


@dataclass(kw_only=True)
class Nsys(Profiler):
    """Nsight Systems on calls after a warm-up (profiler=nsys).

    See `Profiler` for the common arguments.
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
        super().__post_init__()
        self.trace = [one for text in self.trace for one in str(text).split(",")]
        if "cuda" not in self.trace:
            raise UserError(
                f"profiler.trace={self.trace}: add cuda, which the capture range needs."
            )
        self.reports = check(self.reports)

    def outputs(self, place: Place) -> list[Path]:
        recorded = map(place.file, (*ENDINGS, ".qdstrm"))
        return [*recorded, *evaluated(place, self.reports)]

    def command(self, place: Place, about: About) -> list[str]:
        """See `Profiler`.

        Without a capture range, torch's import alone creates gigabytes of profile.
        """
        super().command(place, about)
        tool = tools.find("nsys", self.tool)
        recording = recording_command(self.trace, self.sample, self.cpuctxsw)
        recording += ["--force-overwrite=true", f"--output={tools.escaped(place.file())}"]
        return [tool.path, *recording, *self.options]

    def collect(
        self, place: Place, about: About, said: str, observations: Mapping[str, Any]
    ) -> Found:
        tool = tools.find("nsys", self.tool)
        profile = next(filter(tools.has_content, map(place.file, ENDINGS)), None)
        if profile is None:
            raise _no_profile(place, said)
        claim = RunPaths(place.folder).claim
        results = evaluate(
            tool, profile, self.reports, place, claim, whole=WHOLE[about.phase], top=self.top
        )
        results.facts |= {"version": tool.version, "trace": self.trace}
        return results


def recording_command(
    trace: Sequence[str] = TRACE, sample: str = "none", cpuctxsw: str = "none"
) -> list[str]:
    """Return nsys arguments that record between cudaProfilerStart and Stop.

    By default, the program would end at Stop. Graph nodes are traced, because forced cuDNN passes
    are launched as graphs.
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


def evaluated(place: Place, wanted: Sequence[str]) -> list[Path]:
    """Return the files that `evaluate` may write."""
    files = [stats.file_of(place, report) for report in wanted]
    return [place.file(DATABASE), place.file(_RANGES), *files]


def evaluate(
    tool: tools.Tool,
    profile: Path,
    wanted: Sequence[str],
    place: Place,
    claim: Callable[[Path], None],
    *,
    whole: str | None = None,
    top: int = 20,
) -> Found:
    """Return a profile's reports, kernels and ranges.

    Args:
        profile: recorded file, or database exported from it.
        claim: called with each file before it is written.
        whole: name of the range around a call, if any.
    """
    results = Found(files=[profile.name])
    database = place.file(DATABASE)
    problem = None
    if profile.suffix != DATABASE:
        claim(database)
        problem = stats.export(tool, profile, database)
    sheets, problems = stats.write(tool, profile if problem else database, wanted, place, claim)
    written = {}
    for report, sheet in sheets.items():
        name = stats.file_of(place, report).name
        results.files.append(name)
        written[report] = {"file": name, "rows": len(sheet.rows)}
    ranges: list[dict[str, Any]] = []
    work: list[Work] = []
    if not problem:
        # other versions have other tables; the reports are unaffected
        with suppress(sqlite3.Error):
            ranges, work = project(database)
    if ranges:
        path = place.file(_RANGES)
        claim(path)
        write_atomically(path, tools.to_csv(ranges, list(ranges[0])))
        results.files.append(path.name)
    launches = list[tuple[str, int, float]]()
    for one in work:
        if one.kernel is not None:
            launches.append((one.kernel, 1, (one.end_ns - one.start_ns) * 1e-9))
    results.add_kernels(stats.kernels(sheets) or tools.ranked(launches), top)
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


def imported(tool: tools.Tool, stream: Path) -> Path:
    """Import a .qdstrm recording that nsys could not import.

    Raises `ProfilerFailed` if that fails too.
    """
    own = Path(tool.path).resolve().parent
    importers = sorted([*own.glob("QdstrmImporter"), *own.parent.glob("*/QdstrmImporter")])
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


def _no_profile(place: Place, said: str) -> ProfilerFailed:
    stream = place.file(".qdstrm")
    if tools.has_content(stream):
        why = tools.missing_library(said) or _libdw()
        why = why or tools.first_line_with(said, ("importer", "import failed"))
        why = why or "without a message"
        return ProfilerFailed(
            f"nsys recorded {stream.name}, but its importer failed: {why}. Then import it without "
            f"measuring again: perfexp nsys-stats {place.folder.parent}",
            files=[stream.name],
        )
    if re.search("capture range|no data was collected|not collected", said, re.IGNORECASE):
        return ProfilerFailed(
            "nsys saw no cudaProfilerStart: nothing was recorded; see details/run.log."
        )
    why = tools.reason(said, _COMPLAINTS) or "without a message"
    return ProfilerFailed(f"nsys left no profile: {why}; see details/run.log.")


def _libdw() -> str | None:
    """Return the message for a missing libdw; None if it is installed.

    Importers lack this library most often.
    """
    import ctypes

    try:
        ctypes.CDLL("libdw.so.1")
    except OSError:
        return tools.missing_library("libdw.so.1: cannot open shared object")
    return None
