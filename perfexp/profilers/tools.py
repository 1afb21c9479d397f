"""Tools: where nsys and ncu are, which version they have, and what they answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perfexp.diagnosis import machine
from perfexp.host import interrupts
from perfexp.profilers import ProfilerFailed

#: So long a question to a tool may take.
_ANSWER_SECONDS = 60.0
#: So often a tool that is waited for is left for a look at interrupts that are held.
_LOOK_SECONDS = 0.2
#: So long a tool may take to end after it was asked to, before it is killed.
_GRACE_SECONDS = 5.0
#: Where they can be got, and the first version that takes the command lines of this package.
_SOURCES = {
    "nsys": ("Nsight Systems: https://developer.nvidia.com/nsight-systems, or the package nsight-systems", (2022, 4)),
    "ncu": ("Nsight Compute: https://developer.nvidia.com/nsight-compute, or the package nsight-compute", (2021, 1)),
}
_VERSION = re.compile(r"version:?\s+(\d{4})\.(\d+)((?:\.\d+)*)", re.IGNORECASE)
_LIBRARY = re.compile(r"(lib[\w+.-]+\.so[\d.]*): cannot open shared object")
#: Packages of Debian and of Red Hat that have a library which importers were seen to lack.
_PACKAGES = {"libdw": "libdw1 (Debian, Ubuntu) or elfutils-libs (Red Hat)", "libelf": "libelf1 or elfutils-libelf"}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A program that is installed.

    Attributes:
        name: `nsys` or `ncu`.
        path: of the program.
        version: `2025.1.3`, or None where it does not say.
    """

    name: str
    path: str
    version: str | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a tool said.

    Attributes:
        code: its exit code, which says little; None where it took too long.
        out: on stdout.
        err: on stderr.
    """

    code: int | None
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last lines that say something."""
        return last_words(f"{self.out}\n{self.err}")


def find(name: str, given: str | None = None) -> Tool:
    """The tool: the one that is named, the one on the PATH, or the newest where installers put it.

    Args:
        name: `nsys` or `ncu`.
        given: path of the program, where the user names it.

    Raises:
        ProfilerFailed: it is not there, can't be run, or is too old.
    """
    source, least = _SOURCES[name]
    if given is not None:
        if not os.access(given, os.X_OK):
            raise ProfilerFailed(f"profiler.tool={given} can't be run. Name the program {name} itself.")
        path = given
    else:
        found = machine.tool(name)
        if found is None:
            raise ProfilerFailed(
                f"{name} is not installed, neither on the PATH nor where its installer puts it: {source}"
            )
        path = str(found["path"])
    path = str(Path(path).absolute())  # where it runs, a relative one leads elsewhere
    answer = ask([path, "--version"])
    match = _VERSION.search(f"{answer.out}\n{answer.err}")
    if match is None:
        if answer.code != 0:
            why = answer.last_words or f"ended with code {answer.code}"
            raise ProfilerFailed(f"{path} can't be run: {missing_library(why) or why}")
        return Tool(name=name, path=path, version=None)
    version = match[0].split()[-1]
    if (int(match[1]), int(match[2])) < least:
        wanted = ".".join(map(str, least))
        raise ProfilerFailed(f"{path} is {name} {version}, which is too old: at least {wanted} is needed. {source}")
    return Tool(name=name, path=path, version=version)


def ask(command: Sequence[str], seconds: float = _ANSWER_SECONDS, folder: Path | None = None) -> Answer:
    """Run a tool that answers. It is ended with all that it started when an interrupt comes, held or not.

    Args:
        command: its command line.
        seconds: that it may take.
        folder: where it runs.

    Raises:
        ProfilerFailed: it can't be started.
        KeyboardInterrupt: it was interrupted.
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
        raise ProfilerFailed(f"{command[0]} can't be started: {error.strerror or error}.") from error
    with process:
        try:
            out, err = _heard(process, seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            out, err = "", f"{Path(command[0]).name} took longer than {seconds:g} s and was ended"
            return Answer(code=None, out=out, err=err)
        except BaseException:
            _end(process)
            raise
    return Answer(code=process.returncode, out=out, err=err)


def _heard(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """What it says on stdout and stderr until it has ended.

    Raises:
        subprocess.TimeoutExpired: it takes longer.
        KeyboardInterrupt: an interrupt that is held came.
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


def _end(process: subprocess.Popen[str]) -> None:
    """End it and what it started, which are a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def missing_library(text: str) -> str | None:
    """Which library a program lacks by what it said, and where that is; None where it says nothing of that.

    Args:
        text: that it wrote.
    """
    match = _LIBRARY.search(text)
    if match is None:
        return None
    package = next((where for name, where in _PACKAGES.items() if match[1].startswith(name)), None)
    return f"the library {match[1]} is missing" + (f": install {package}" if package else "")


def last_words(text: str, lines: int = 2) -> str:
    """The last lines of a text that are not empty.

    Args:
        text: of a log.
        lines: how many.
    """
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(said[-lines:])


def first_line_with(text: str, words: Iterable[str]) -> str | None:
    """The first line in which one of some words is, or None.

    Args:
        text: of a log.
        words: in lower case.
    """
    wanted = list(words)
    found = (line.strip() for line in text.splitlines() if any(word in line.lower() for word in wanted))
    return next(found, None)


def escaped(path: Path) -> str:
    """A path as nsys and ncu take it for their output, where `%` begins a variable.

    Args:
        path: any.
    """
    return str(path).replace("%", "%%")
