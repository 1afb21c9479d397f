"""Report an unexpected exception as one message, with its traceback in a file.

Every entry point (`perfexp`, its commands, the driver of a run) calls `failure` for exceptions that
are not a `PerfexpError`, which would be errors in perfexp itself or in a library.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from perfexp.errors import PerfexpError, UserError, missing_package
from perfexp.host import foreign
from perfexp.host.cache import cache_folder

#: Longest exception text in the message, in characters.
_MAX_TEXT = 300


def failure(error: Exception, log: Path | None = None) -> PerfexpError:
    """Write an exception's traceback to a file, and return the error to raise or print instead.

    The message names the file. A missing package becomes a `UserError` without a traceback.

    Args:
        log: run log, which gets the traceback if it exists. Otherwise a file of the day in the
            user's cache folder does.
    """
    if text := missing_package(error):
        return UserError(text)
    now = datetime.now(UTC)
    files = [cache_folder("tracebacks") / f"{now:%Y-%m-%d}.log"]
    if log is not None and log.is_file():
        files.insert(0, log)
    entry = f"{now:%H:%M:%S} {''.join(traceback.format_exception(error))}"
    text = " ".join(str(error).split())[:_MAX_TEXT]
    message = f"unexpected {type(error).__name__}: {text}; the traceback"
    for file in files:  # the next one if this one cannot be written
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with foreign.open_append(file) as opened:
                opened.write(entry.encode(errors="replace"))
            return PerfexpError(f"{message} is in {file}")
    return PerfexpError(f"{message} could not be written")
