"""Profile a few calls by Nsight Systems (nsys): a timeline, reports as CSV, and the work that each range launched.

Source of the command lines: Nsight Systems User Guide, "CLI Profile Command Switch Options",
https://docs.nvidia.com/nsight-systems/UserGuide/index.html
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.profilers import WHOLE, About, Found, Place, Profiler, ProfilerFailed, refuse_other_devices
from perfexp.profilers import reports as stats
from perfexp.profilers.projection import Work, project
from perfexp.profilers.reports import DEFAULT, check
from perfexp.profilers.tools import Tool, ask, escaped, find, first_line_with, missing_library, ranked, reason, to_csv
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths

#: Interfaces that are traced by default.
TRACE = ("cuda", "cudnn", "nvtx", "osrt")
#: Endings of profiles: since 2021.4, and before.
ENDINGS = (".nsys-rep", ".qdrep")
#: Words of nsys's error messages.
_COMPLAINTS = ("illegal", "unrecognised", "unrecognized", "error", "not supported", "failed", "unable")
_IMPORT_SECONDS = 3600.0
#: Ending of a database that nsys exports from a profile.
DATABASE = ".sqlite"
_RANGES = "_ranges.csv"


class Nsys(Profiler):
    """Nsight Systems on calls after a warm-up (profiler=nsys); common arguments as in `Profiler`.

    Args:
        trace: traced interfaces (`nsys profile --trace`).
        sample: sampling of instruction pointers (`none`, `process-tree`, …).
        cpuctxsw: recording of thread switches (`none`, `process-tree`, …).
        reports: reports of `nsys stats` to write as CSV.
        tool: path of nsys; None searches for it.
    """

    def __init__(
        self,
        *,
        name: str = "nsys",
        warmup: int = 20,
        steps: int = 3,
        modules: bool = False,
        all_points: bool = False,
        trace: Sequence[str] = TRACE,
        sample: str = "none",
        cpuctxsw: str = "none",
        reports: Sequence[str] = DEFAULT,
        top: int = 20,
        options: Sequence[str] = (),
        tool: str | None = None,
    ) -> None:
        super().__init__(name=name, warmup=warmup, steps=steps, modules=modules, all_points=all_points, top=top)
        self._trace = [one for text in trace for one in str(text).split(",")]
        if "cuda" not in self._trace:
            raise UserError(f"profiler.trace={self._trace}: add cuda, which the capture range needs.")
        self._sample, self._cpuctxsw, self._options, self._tool = sample, cpuctxsw, list(options), tool
        self._reports = check(reports)

    def outputs(self, place: Place) -> list[Path]:
        return [*(place.file(ending) for ending in (*ENDINGS, ".qdstrm")), *evaluated(place, self._reports)]

    def command(self, place: Place, about: About) -> list[str]:
        """See `Profiler`. Without a capture range, torch's import alone makes a profile of gigabytes."""
        refuse_other_devices(about.device)
        tool = find("nsys", self._tool)
        recording = recording_command(self._trace, self._sample, self._cpuctxsw)
        return [tool.path, *recording, "--force-overwrite=true", f"--output={escaped(place.file())}", *self._options]

    def collect(self, place: Place, about: About, said: str, observations: Mapping[str, Any]) -> Found:
        tool = find("nsys", self._tool)
        profile = next((place.file(ending) for ending in ENDINGS if _has_content(place.file(ending))), None)
        if profile is None:
            raise _no_profile(place, said)
        claim = RunPaths(place.folder).claim
        results = evaluate(tool, profile, self._reports, place, claim, whole=WHOLE[about.phase], top=self.top)
        results.facts |= {"version": tool.version, "trace": self._trace}
        return results


def recording_command(trace: Sequence[str] = TRACE, sample: str = "none", cpuctxsw: str = "none") -> list[str]:
    """The arguments of nsys that record between cudaProfilerStart and Stop.

    By default, the program would end at Stop. Nodes of graphs are traced: forced cuDNN passes are launched as graphs.
    """
    traced = ["profile", f"--trace={','.join(trace)}", f"--sample={sample}", f"--cpuctxsw={cpuctxsw}"]
    return [
        *traced,
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--kill=none", "--cuda-graph-trace=node"),
    ]


def evaluated(place: Place, wanted: Sequence[str]) -> list[Path]:
    """The files that `evaluate` may write."""
    return [place.file(DATABASE), place.file(_RANGES), *(stats.file_of(place, report) for report in wanted)]


def evaluate(
    tool: Tool,
    profile: Path,
    wanted: Sequence[str],
    place: Place,
    claim: Callable[[Path], None],
    *,
    whole: str | None = None,
    top: int = 20,
) -> Found:
    """Reports, kernels and ranges of a profile.

    Args:
        profile: recorded file, or database exported from one.
        claim: called with each file before it is written.
        whole: name of the range around a call, if there is one.
    """
    results = Found(files=[profile.name])
    database = place.file(DATABASE)
    problem = None
    if profile.suffix != DATABASE:
        claim(database)
        problem = stats.export(tool, profile, database)
    sheets, problems = stats.write(tool, profile if problem else database, wanted, place, claim)
    results.files += [stats.file_of(place, report).name for report in sheets]
    ranges, work = ([], []) if problem else _projected(database)
    if ranges:
        path = place.file(_RANGES)
        claim(path)
        write_atomically(path, to_csv(ranges, list(ranges[0])))
        results.files.append(path.name)
    kernels = stats.kernels(sheets) or ranked(
        (one.kernel, 1, (one.end_ns - one.start_ns) * 1e-9) for one in work if one.kernel is not None
    )
    empty = {report: "nothing was copied or filled" for report, why in problems.items() if _no_copies(why, work)}
    problems = {report: why for report, why in problems.items() if report not in empty}
    results.facts = {
        "kernels": kernels[:top],
        "kernel_names": len(kernels),
        "kernel_seconds": sum(kernel["seconds"] for kernel in kernels),
        "ranges": ranges[:top],
        "reports": {
            report: {"file": stats.file_of(place, report).name, "rows": len(s.rows)} for report, s in sheets.items()
        },
        "empty": empty,
        "problems": problems | ({"sqlite": problem} if problem else {}),
    }
    results.doubts = [*_without_reports(results.facts["problems"]), *_without_backward(ranges, whole)]
    return results


def imported(tool: Tool, stream: Path) -> Path:
    """Import a .qdstrm recording that nsys itself could not import; raises `ProfilerFailed` if that fails too."""
    own = Path(tool.path).resolve().parent
    importers = sorted([*own.glob("QdstrmImporter"), *own.parent.glob("*/QdstrmImporter")])
    if not importers:
        raise ProfilerFailed(
            f"{stream.name} was recorded but not imported, and there is no QdstrmImporter beside {tool.path}: "
            "open it with the user interface of Nsight Systems, which imports it."
        )
    target = stream.with_suffix(ENDINGS[0])
    if target.is_symlink():  # the importer would follow it
        target.unlink()
    command = [str(importers[0]), f"--input-file={stream}", f"--output-file={target}"]
    answer = ask(command, _IMPORT_SECONDS)
    if not _has_content(target):
        why = missing_library(answer.text) or _libdw() or reason(answer.text)
        raise ProfilerFailed(f"{stream.name} can't be imported: {why}")
    return target


def _no_profile(place: Place, said: str) -> ProfilerFailed:
    stream = place.file(".qdstrm")
    if _has_content(stream):
        why = missing_library(said) or _libdw() or first_line_with(said, ("importer", "import failed"))
        why = why or "without a message"
        return ProfilerFailed(
            f"nsys recorded {stream.name}, but its importer failed: {why}. Then import it without measuring again: "
            f"perfexp stats {place.folder}",
            files=[stream.name],
        )
    if "capture range" in said.lower() or "no data was collected" in said.lower() or "not collected" in said.lower():
        return ProfilerFailed("nsys saw no cudaProfilerStart: nothing was recorded; see run.log.")
    why = reason(said, _COMPLAINTS) or "without a message"
    return ProfilerFailed(f"nsys left no profile: {why}; see run.log.")


def _libdw() -> str | None:
    """The message for a missing libdw, the library that importers most often lack; None if it is installed."""
    import ctypes

    try:
        ctypes.CDLL("libdw.so.1")
    except OSError:
        return missing_library("libdw.so.1: cannot open shared object")
    return None


def _without_reports(problems: Mapping[str, str]) -> list[Diagnostic]:
    if not problems:
        return []
    reports = "; ".join(f"{report}: {why}" for report, why in problems.items())
    return [diagnostics.make("reports_missing", reports=reports)]


def _without_backward(ranges: Iterable[Mapping[str, Any]], whole: str | None) -> list[Diagnostic]:
    """Diagnostic of a training step with an incomplete backward pass."""
    kernels = {entry["name"]: entry["kernels"] for entry in ranges}
    if whole != WHOLE["train"] or "backward" not in kernels or kernels["backward"] >= kernels.get("forward", 0):
        return []
    forward, backward = kernels["forward"], kernels["backward"]
    return [diagnostics.make("backward_incomplete", profiler="nsys", forward=forward, backward=backward)]


def _projected(database: Path) -> tuple[list[dict[str, Any]], list[Work]]:
    try:
        return project(database)
    except sqlite3.Error:  # another version has other tables; the reports are unaffected
        return [], []


def _no_copies(why: str, work: Sequence[Work]) -> bool:
    """Whether nsys skipped a report for lack of copies and fills, and the recorded work confirms it."""
    return stats.NO_COPIES in why and bool(work) and all(activity.kernel is not None for activity in work)


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
