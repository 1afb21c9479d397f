"""nsys and ncu: find them, check their versions, run them, and read their messages.

The last functions here (`ranked`, `to_csv`) make tables for all profilers.
"""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfexp.doctor import environment
from perfexp.host import interrupts
from perfexp.host.foreign import printable, spreadsheet_text
from perfexp.measuring.profilers import ProfilerFailed

#: Default time limit for a tool.
_ANSWER_SECONDS = 60.0
#: Interval between checks for held interrupts.
_LOOK_SECONDS = 0.2
#: Time between SIGTERM and SIGKILL.
_GRACE_SECONDS = 5.0
#: First versions that support this package's command lines.
_LEAST = {"nsys": (2022, 4), "ncu": (2021, 1)}
_VERSION = re.compile(r"version:?\s+(\d{4})\.(\d+)((?:\.\d+)*)", re.IGNORECASE)
_LIBRARY = re.compile(r"(lib[\w+.-]+\.so[\d.]*): cannot open shared object")
#: Debian and Red Hat packages with libraries that importers are known to lack.
_PACKAGES = {
    "libdw": "libdw1 (Debian, Ubuntu) or elfutils-libs (Red Hat)",
    "libelf": "libelf1 or elfutils-libelf",
}


@dataclass(frozen=True)
class Tool:
    """An installed program; its version is None if it does not report one."""

    name: str
    path: str
    version: str | None


@dataclass(frozen=True, kw_only=True)
class ToolOutput:
    """A tool's output and exit code. The exit code is unreliable, and None after a timeout."""

    code: int | None
    out: str
    err: str

    @property
    def text(self) -> str:
        """Return both streams."""
        return f"{self.out}\n{self.err}"


def find(name: str, tool_path: str | None = None) -> Tool:
    """Return the tool at the user's path, on the PATH, or the newest from an installer.

    Args:
        name: `nsys` or `ncu`.
        tool_path: the user's path (profiler.tool); None to search.

    Raises:
        ProfilerFailed: there is no usable tool.
    """
    source, least = environment.NSIGHT[name], _LEAST[name]
    if tool_path is not None and not os.access(tool_path, os.X_OK):
        raise ProfilerFailed(
            f"profiler.tool={tool_path} can't be run. Name the program {name} itself."
        )
    path = tool_path or (environment.tool(name) or {}).get("path")
    if path is None:
        raise ProfilerFailed(
            f"{name} is not installed, neither on the PATH nor where its installer puts it: "
            f"{source}"
        )
    # a relative path would fail in another working directory
    path = str(Path(path).absolute())
    answer = ask([path, "--version"])
    match = _VERSION.search(answer.text)
    if match is None:
        if answer.code != 0:
            raise ProfilerFailed(
                f"{path} can't be run: {reason(answer.text) or f'exit code {answer.code}'}"
            )
        return Tool(name, path, None)
    version = match[0].split()[-1]
    if (int(match[1]), int(match[2])) < least:
        least_text = ".".join(map(str, least))
        raise ProfilerFailed(
            f"{path} is {name} {version}, which is too old: at least {least_text} is needed. "
            f"{source}"
        )
    return Tool(name, path, version)


def ask(
    command: Sequence[str], seconds: float = _ANSWER_SECONDS, folder: Path | None = None
) -> ToolOutput:
    """Run a tool and return its output.

    An interrupt (Ctrl-C), held or not, ends the tool with all its children.

    Args:
        seconds: time limit. After it the tool is terminated, and the output says so.
        folder: working directory.

    Raises:
        ProfilerFailed: the tool cannot be started.
        KeyboardInterrupt: the user interrupted.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ProfilerFailed(
            f"{command[0]} can't be started: {error.strerror or error}."
        ) from error
    with process:
        try:
            out, err = _output_of(process, seconds)
        except subprocess.TimeoutExpired:
            _terminate(process)
            name = Path(command[0]).name
            message = f"{name} took longer than {seconds:g} s and was terminated"
            return ToolOutput(code=None, out="", err=message)
        # with an interrupt, too, no child may go on
        except BaseException:
            _terminate(process)
            raise
    return ToolOutput(code=process.returncode, out=out, err=err)


def _output_of(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Wait for a process and return its stdout and stderr.

    Raises:
        TimeoutExpired: it takes longer than `seconds`.
        KeyboardInterrupt: the user interrupted, and the interrupt was held.
    """
    deadline = time.monotonic() + seconds
    while True:
        interrupts.check()
        left = deadline - time.monotonic()
        try:
            return process.communicate(timeout=max(min(left, _LOOK_SECONDS), 0.0))
        except subprocess.TimeoutExpired:
            if left <= 0:
                raise


def _terminate(process: subprocess.Popen[str]) -> None:
    """Terminate the process and its children, which have their own session; then kill them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def missing_library(text: str) -> str | None:
    """Return a message for a missing library and its package, from a program's output.

    None if the output reports no missing library.
    """
    match = _LIBRARY.search(text)
    if match is None:
        return None
    missing = f"the library {match[1]} is missing"
    for name, package in _PACKAGES.items():
        if match[1].startswith(name):
            return f"{missing}: install {package}"
    return missing


def has_content(path: Path) -> bool:
    """Return whether a path is a file that is not empty."""
    return path.is_file() and path.stat().st_size > 0


def first_line_with(text: str, words: Sequence[str]) -> str | None:
    """Return the first line that contains any of the lower-case words, or None."""
    pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
    matching = (line.strip() for line in text.splitlines() if pattern.search(line))
    return next(matching, None)


def reason(output: str, words: Sequence[str] = ()) -> str:
    """Return why a tool failed, from its output.

    It is a missing library, the first line with any of the words, or the last lines.
    """
    filled = [line.strip() for line in output.splitlines() if line.strip()]
    return missing_library(output) or first_line_with(output, words) or " | ".join(filled[-2:])


def escaped(path: Path) -> str:
    """Return a path in nsys and ncu output syntax, where `%` begins a variable."""
    return str(path).replace("%", "%%")


def ranked(kernels: Iterable[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """Return kernels or operators with totals by name, in order of decreasing time.

    Args:
        kernels: names, counts and seconds; a name may occur several times.

    Returns:
        `name`, `count`, `seconds` and `share` (of the time of all) for each name.
    """
    counts: Counter[str] = Counter()
    totals: dict[str, float] = {}
    for name, count, seconds in kernels:
        counts[name] += count
        totals[name] = totals.get(name, 0.0) + seconds
    total_seconds = sum(totals.values())
    ordered = list[dict[str, Any]]()
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        share = seconds / total_seconds if total_seconds else 0.0
        ordered.append({"name": name, "count": counts[name], "seconds": seconds, "share": share})
    return ordered


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """Return selected columns as CSV, without control characters or formulas.

    The profiled program chooses kernel and range names, so they are not trusted.
    """
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = (row[name] for name in columns)
        writer.writerow(
            [spreadsheet_text(printable(cell)) if isinstance(cell, str) else cell for cell in cells]
        )
    return content.getvalue().encode(errors="replace")
