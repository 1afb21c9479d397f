"""stdout and stderr that may be closed, or full, during a measurement."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO


def install() -> None:
    """Let the process's stdout and stderr drop output that cannot be written; stderr reports it once for stdout.

    The end of a pipe's reader, such as `head`, is not reported.

    A descriptor that was closed at the start is opened on /dev/null, so that no file of results gets its number.
    """
    closed = {number: _open_on_nothing(number) for number in (0, 1, 2)}
    sys.stderr = _tolerant(2, sys.stderr, is_closed=closed[2])
    sys.stdout = _tolerant(1, sys.stdout, is_closed=closed[1])


class _Tolerant(io.RawIOBase):
    """Bytes for a descriptor, up to the first write error; a warning names the stream, if it has a name."""

    def __init__(self, number: int, name: str | None, *, is_closed: bool) -> None:
        self._number, self._name = number, name
        self._is_closed, self._is_reported = is_closed, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return not self._is_closed and os.isatty(self._number)

    def write(self, data: Any) -> int:
        """Write some of the bytes, or drop all of them; return the number."""
        error = OSError(errno.EBADF, os.strerror(errno.EBADF))
        while not self._is_closed:
            try:
                return os.write(self._number, data)
            except BlockingIOError:  # somebody else made the pipe non-blocking
                select.select([], [self._number], [])
            except OSError as refused:
                self._is_closed, error = True, refused
                self._is_reported = refused.errno == errno.EPIPE  # the reader has enough, as `head` does
        if self._name and not self._is_reported:
            self._is_reported = True
            print(f"warning: {self._name} is closed ({error.strerror}); the rest of it is dropped", file=sys.stderr)
        return memoryview(data).nbytes


def _tolerant(number: int, stream: TextIO | None, *, is_closed: bool) -> TextIO:
    """A text stream as Python creates it, for the same descriptor."""
    raw = _Tolerant(number, "stdout" if number == 1 else None, is_closed=is_closed)
    if stream is not None:
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace" if number == 2 else stream.errors if stream else "replace",
        line_buffering=number == 2 or raw.isatty(),
    )


def _open_on_nothing(number: int) -> bool:
    """Open a closed descriptor on /dev/null; return whether it was closed."""
    try:
        os.fstat(number)
    except OSError:
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)
        return True
    return False
