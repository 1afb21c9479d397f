"""Errors that perfexp raises: what was given, what is possible, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: What allocators, the system and its loader of libraries say when the host's memory is not enough.
_HOST_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|Cannot allocate memory|std::bad_alloc|failed to map segment", re.I
)


class PerfexpError(Exception):
    """A failure that perfexp understands: one clear message, no traceback on the console.

    Attributes:
        exit_code: the exit code of the command that it ends: 2 for what the user can mend in the command or the
            configuration, 1 for a measurement that failed.
    """

    exit_code = 1


class UserError(PerfexpError):
    """The command, the configuration or a file that the user named is wrong."""

    exit_code = 2


class DeviceMismatch(UserError):
    """The device that the configuration asks for is not the one that the job runs on."""


class Unsupported(PerfexpError):
    """This point can't be measured by design (a size that the model can't take, …); the other points go on."""


class Waits(Unsupported):
    """The call waits for the device before it returns, which no graph can do."""

    def __init__(self) -> None:
        super().__init__("the call waits for the device inside (it reads a value back), which no graph can do")


class OutOfMemory(PerfexpError):
    """The device, or the host, has not enough memory for this point; the other points go on."""


class RankLost(PerfexpError):
    """Another rank of the same run has ended: this one can't go on, and the launcher knows why."""


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether an exception, or what it came from, says that the host's memory was not enough.

    Args:
        error: raised by whatever.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or _HOST_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def nearest(name: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """The valid names most like a wrong one, best first; a dotted name is also compared by its last part.

    Args:
        name: what was given.
        valid: what is possible.
        count: at most so many are returned.
    """
    choices = sorted(set(valid))
    close = difflib.get_close_matches(name, choices, n=count, cutoff=0.6)
    if not close:
        tails = {choice.rsplit(".", 1)[-1]: choice for choice in reversed(choices)}
        close = [tails[tail] for tail in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(tails), n=count)]
    return close


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence that names the nearest valid names, or all of them where none is near and they are few."""
    choices = sorted(set(valid))
    close = nearest(name, choices)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    if choices and len(choices) <= 40:
        return f"Possible: {', '.join(choices)}."
    return ""
