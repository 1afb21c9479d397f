"""Exceptions with messages for users, and suggestions for misspelled names.

A `PerfexpError` is anticipated: the command prints its message and exits with its code. A worker
records an error of a point (`Unsupported`, `OutOfMemory`) and goes on with the next one.
"""

from __future__ import annotations

import difflib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

#: Messages when host memory is exhausted: from allocators, the system and its dynamic loader.
_HOST_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|Cannot allocate memory|std::bad_alloc"
    r"|failed to map segment",
    re.I,
)
#: Names of folders with installed packages, which their versions identify.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
#: pip names of packages that have another import name.
_DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "pynvml": "nvidia-ml-py",
}


class PerfexpError(Exception):
    """An anticipated failure, printed as a message without a traceback.

    Attributes:
        exit_code: command exit code: 2 for a wrong command or configuration, 1 for a failed
            measurement.
    """

    exit_code = 1


class UserError(PerfexpError):
    """Wrong command, configuration or input file."""

    exit_code = 2


class DeviceMismatch(UserError):
    """The plan asks for another device than this machine has, so the run is refused."""


class Unsupported(PerfexpError):
    """A point that cannot be measured by design, such as a size that the model rejects.

    Other points continue.
    """


class Waits(Unsupported):
    """The call synchronizes with the device before it returns.

    A CUDA graph cannot do that.
    """

    def __init__(self) -> None:
        super().__init__(
            "the call waits for the device inside (it reads a value back), which no graph can do"
        )


class OutOfMemory(PerfexpError):
    """Device or host memory is too small for this point; other points continue."""


class RankLost(PerfexpError):
    """Another rank in the same run has ended; the process that started it reports why."""


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return whether an exception or one of its causes means exhausted host memory.

    The point or the run then fails with a message about memory, without a traceback.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or _HOST_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def is_own(file: Path) -> bool:
    """Return whether a file is the user's: not of Python, an installed package, or perfexp."""
    installed: list[Path | str] = [Path(__file__).parent, Path(sys.prefix) / "lib"]
    installed += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return _INSTALLED.isdisjoint(file.parts) and not any(map(file.is_relative_to, installed))


def line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback, as ` (model.py:12)`.

    It is empty if the user's code is not involved. Messages about failed calls contain it.
    """
    own = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.suffix == ".py" and is_own(file) and "torchinductor" not in str(file):
            own = f" ({file.name}:{number})"
    return own


def missing_package(error: BaseException) -> str:
    """Return the message for a package that is not installed; empty for another error.

    The message replaces a traceback of the failed import.
    """
    name = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")[0]
    if not name or name in ("perfexp", "hydra_plugins"):
        return ""
    return f"the package {name} is not installed: pip install {_DISTRIBUTIONS.get(name, name)}"


def nearest(name: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` valid names that resemble a misspelled name, best match first.

    If no whole name is close, compare last dotted parts: `seconds` finds `stopping.max_seconds`.
    Suggestions for misspelled keys, options and commands come from it.
    """
    choices = sorted(set(valid))
    close = difflib.get_close_matches(name, choices, n=count, cutoff=0.6)
    if not close:
        by_tail = {choice.rsplit(".", 1)[-1]: choice for choice in reversed(choices)}
        tails = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(by_tail), n=count)
        close = [by_tail[tail] for tail in tails]
    return close


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest valid names.

    Without a near match, it lists the valid names if there are at most 40; otherwise it is empty.
    """
    choices = sorted(set(valid))
    if close := nearest(name, choices):
        return f"Did you mean {' or '.join(close)}?"
    if choices and len(choices) <= 40:
        return f"Possible: {', '.join(choices)}."
    return ""
