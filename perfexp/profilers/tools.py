"""Find nsys and ncu, check their versions, and run them."""

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

from perfexp.diagnosis import environment
from perfexp.host import interrupts
from perfexp.host.foreign import printable, spreadsheet_text
from perfexp.profilers import ProfilerFailed

#: Default time limit of a tool.
_ANSWER_SECONDS = 60.0
#: Interval of checks for held interrupts.
_LOOK_SECONDS = 0.2
#: Time between SIGTERM and SIGKILL.
_GRACE_SECONDS = 5.0
#: The first versions that support the command lines of this package.
_LEAST = {"nsys": (2022, 4), "ncu": (2021, 1)}
_VERSION = re.compile(r"version:?\s+(\d{4})\.(\d+)((?:\.\d+)*)", re.IGNORECASE)
_LIBRARY = re.compile(r"(lib[\w+.-]+\.so[\d.]*): cannot open shared object")
#: Packages of Debian and Red Hat with libraries that importers are known to lack.
_PACKAGES = {
    "libdw": "libdw1 (Debian, Ubuntu) or elfutils-libs (Red Hat)",
    "libelf": "libelf1 or elfutils-libelf",
}


@dataclass(frozen=True)
class Tool:
    """An installed program."""

    name: str
    path: str
    version: str | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Output of a tool, and its exit code, which is unreliable; None after a timeout."""

    code: int | None
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both streams."""
        return f"{self.out}\n{self.err}"


def find(name: str, given: str | None = None) -> Tool:
    """The tool at the user's path, on the PATH, or the newest of an installer; `ProfilerFailed` if none can be used."""
    source, least = environment.NSIGHT[name], _LEAST[name]
    if given is not None and not os.access(given, os.X_OK):
        raise ProfilerFailed(f"profiler.tool={given} can't be run. Name the program {name} itself.")
    path = given or (environment.tool(name) or {}).get("path")
    if path is None:
        raise ProfilerFailed(
            f"{name} is not installed, neither on the PATH nor where its installer puts it: {source}"
        )
    path = str(Path(path).absolute())  # a relative path would fail in another working directory
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
        wanted = ".".join(map(str, least))
        raise ProfilerFailed(
            f"{path} is {name} {version}, which is too old: at least {wanted} is needed. {source}"
        )
    return Tool(name, path, version)


def ask(
    command: Sequence[str], seconds: float = _ANSWER_SECONDS, folder: Path | None = None
) -> Answer:
    """Run a tool and return its output; raises `ProfilerFailed` if it cannot be started.

    An interrupt, held or not, ends it with all its children.
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
            _end(process)
            out, err = (
                "",
                f"{Path(command[0]).name} took longer than {seconds:g} s and was terminated",
            )
            return Answer(code=None, out=out, err=err)
        except BaseException:
            _end(process)
            raise
    return Answer(code=process.returncode, out=out, err=err)


def _output_of(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Stdout and stderr of a process; raises `TimeoutExpired`, or `KeyboardInterrupt` for a held interrupt."""
    deadline = time.monotonic() + seconds
    while True:
        interrupts.check()
        left = deadline - time.monotonic()
        try:
            return process.communicate(timeout=max(min(left, _LOOK_SECONDS), 0.0))
        except subprocess.TimeoutExpired:
            if left <= 0:
                raise


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate the process and its children, which are in a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def missing_library(text: str) -> str | None:
    """A message for a library that a program reports as missing, with its package; None for other output."""
    match = _LIBRARY.search(text)
    if match is None:
        return None
    package = next((where for name, where in _PACKAGES.items() if match[1].startswith(name)), None)
    return f"the library {match[1]} is missing" + (f": install {package}" if package else "")


def has_content(path: Path) -> bool:
    """Whether a path is a file that is not empty."""
    return path.is_file() and path.stat().st_size > 0


def first_line_with(text: str, words: Sequence[str]) -> str | None:
    """The first line that contains one of some lower-case words, or None."""
    matching = (
        line.strip() for line in text.splitlines() if any(word in line.lower() for word in words)
    )
    return next(matching, None)


def reason(output: str, words: Sequence[str] = ()) -> str:
    """Why a tool failed, by its output: a missing library, the first line with one of the words, or the last lines."""
    filled = [line.strip() for line in output.splitlines() if line.strip()]
    return missing_library(output) or first_line_with(output, words) or " | ".join(filled[-2:])


def escaped(path: Path) -> str:
    """A path in the output syntax of nsys and ncu, where `%` begins a variable."""
    return str(path).replace("%", "%%")


def ranked(kernels: Iterable[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """Kernels or operators (name, count, seconds) with the totals of each name, by decreasing time."""
    counts: Counter[str] = Counter()
    totals: dict[str, float] = {}
    for name, count, seconds in kernels:
        counts[name] += count
        totals[name] = totals.get(name, 0.0) + seconds
    whole = sum(totals.values())
    return [
        {
            "name": name,
            "count": counts[name],
            "seconds": seconds,
            "share": seconds / whole if whole else 0.0,
        }
        for name, seconds in sorted(totals.items(), key=lambda item: -item[1])
    ]


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """CSV of some columns, in texts without control characters and formulas: the profiled program chooses names."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = (row[name] for name in columns)
        writer.writerow(
            [spreadsheet_text(printable(cell)) if isinstance(cell, str) else cell for cell in cells]
        )
    return content.getvalue().encode(errors="replace")
