"""Crash reports: an unexpected exception as one message, with its traceback in a file."""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from perfexp.errors import PerfexpError, UserError, missing_package
from perfexp.host import foreign
from perfexp.host.cache import cache_folder

#: Longest exception text to show, in characters.
_SHOWN = 300


def failure(error: Exception, log: Path | None = None) -> PerfexpError:
    """Write an exception's traceback to a file and return the error to report.

    A missing package is a UserError without a traceback.

    Args:
        log: run log that gets the traceback if it exists; otherwise the user's cache folder does.
    """
    if text := missing_package(error):
        return UserError(text)
    now = datetime.now(UTC)
    files = [cache_folder("tracebacks") / f"{now:%Y-%m-%d}.log"]
    if log is not None and log.is_file():
        files.insert(0, log)
    story = f"{now:%H:%M:%S} {''.join(traceback.format_exception(error))}"
    message = (
        f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}; the traceback"
    )
    for file in files:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with foreign.open_append(file) as opened:
                opened.write(story.encode(errors="replace"))
            return PerfexpError(f"{message} is in {file}")
    return PerfexpError(f"{message} could not be written")
