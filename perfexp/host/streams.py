"""Make stdout and stderr survive being closed or full during a measurement.

`__main__` calls `install` before anything else is imported.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO


def install() -> None:
    """Replace stdout and stderr by streams that drop output that cannot be written.

    stderr reports a loss on stdout once, unless the reader of the pipe has ended, such as `head`. A
    descriptor that is closed at the start is opened on /dev/null, so that no results file gets its
    number.
    """
    errors = list(map(_open_on_nothing, (0, 1, 2)))
    sys.stderr = _tolerant(2, sys.stderr, errors[2])
    sys.stdout = _tolerant(1, sys.stdout, errors[1])


class _Tolerant(io.RawIOBase):
    """Raw bytes for a descriptor, dropped after the first write error.

    Args:
        number: descriptor, 1 for stdout or 2 for stderr.
        error: error that the descriptor already has; None while it can be written.
    """

    def __init__(self, number: int, error: OSError | None) -> None:
        self._number, self._error, self._warns = number, error, number == 1

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return self._error is None and os.isatty(self._number)

    def write(self, data: Any) -> int:
        """Write some of the bytes, or drop all of them; return the number written or dropped."""
        while self._error is None:
            try:
                return os.write(self._number, data)
            except BlockingIOError:  # another process made the pipe non-blocking
                select.select([], [self._number], [])
            except OSError as error:
                self._error = error
        # at EPIPE the reader has enough, like `head`
        if self._warns and self._error.errno != errno.EPIPE:
            print(
                f"warning: stdout is closed ({self._error.strerror}); the rest of it is dropped",
                file=sys.stderr,
            )
        self._warns = False
        return memoryview(data).nbytes


def _tolerant(number: int, stream: TextIO | None, error: OSError | None) -> TextIO:
    """Return a text stream like Python's own for this descriptor, with the same encoding.

    Args:
        stream: Python's stream; None if the descriptor was closed at the start.
        error: see `_Tolerant`.
    """
    raw = _Tolerant(number, error)
    encoding: str | None = "utf-8"
    errors: str | None = "backslashreplace"
    if stream is not None:
        stream.flush()
        encoding, errors = stream.encoding, stream.errors
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors=errors,
        line_buffering=number == 2 or raw.isatty(),
    )


def _open_on_nothing(number: int) -> OSError | None:
    """Open a standard descriptor on /dev/null if it is closed.

    Returns:
        The error that shows that it was closed; None if it was open.
    """
    try:
        os.fstat(number)
    except OSError as error:
        # the new descriptor gets the lowest free number, which is this one: lower ones are open
        os.open(os.devnull, os.O_RDWR)
        return error
    return None
