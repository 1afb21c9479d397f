"""Entry point: `python -m perfexp` and the console script `perfexp`.

The first word decides: a command's name, such as `list`, goes to `perfexp.commands`; help and
completion are answered here; anything else is a measurement and goes to `perfexp.main`. Each path
imports only what it needs, since imports delay every command.

Before that, stdout and stderr are replaced by streams that survive being closed or full.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from pathlib import Path
from typing import Any, TextIO

from perfexp.errors import UserError, missing_package
from perfexp.version import __version__

try:
    from perfexp.cli import usage
    from perfexp.cli.completion import QUERY, candidates
    from perfexp.cli.usage import COMMANDS, OLD_COMMANDS
    from perfexp.host import crash_report, interrupts
    from perfexp.host.installation import conf_dir
    from perfexp.plan.flags import CONFIG_DIR, flag_values
except ModuleNotFoundError as error:
    print(f"error: {missing_package(error) or error}", file=sys.stderr)
    sys.exit(UserError.exit_code)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    install_streams()
    try:
        code = dispatch(sys.argv[1:])
    except Exception as error:  # such as a module that can't be imported
        failure = crash_report.failure(error)
        print(f"error: {failure}", file=sys.stderr)
        code = failure.exit_code
    interrupts.ignore()
    return code


def dispatch(arguments: list[str]) -> int:
    """Run a command line and return its exit code.

    Help and version need neither Hydra nor Typer.

    Args:
        arguments: words after the program's name.
    """
    try:
        if arguments[:1] == ["help"] and arguments[1:2] and arguments[1] in COMMANDS:
            arguments = [*arguments[1:], "--help"]
        if arguments and arguments[0] in (*COMMANDS, *OLD_COMMANDS):
            from perfexp.commands import run  # Typer and rich: not needed to measure

            return run(arguments)
        if arguments and arguments[0] == QUERY:
            for text in candidates(arguments[1:]):
                print(text)
            return 0
        if usage.is_asked_for(arguments):
            folders = [conf_dir(), *map(Path, flag_values(arguments, *CONFIG_DIR))]
            try:
                print(usage.text(folders, arguments))
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code
            return 0
        if "--version" in arguments or arguments == ["-V"]:
            print(f"perfexp {__version__}")
            return 0
        from perfexp.main import main as application

        return application(arguments)
    except KeyboardInterrupt:  # before there was anything to interrupt
        return 130


def install_streams() -> None:
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


if __name__ == "__main__":
    sys.exit(main())
