"""Crash reports: an unexpected exception as one message, with its traceback in a file."""

from __future__ import annotations

import traceback
from datetime import UTC, datetime
from pathlib import Path

from perfexp.errors import PerfexpError, UserError, missing_package
from perfexp.host import untrusted
from perfexp.host.cache import cache_folder

#: Characters of an exception's own text that are shown.
_SHOWN = 300


def failure(error: Exception, folder: Path | None = None) -> PerfexpError:
    """Return an exception as an error of perfexp, after writing its traceback to a file: the run's log, if any."""
    if text := missing_package(error):
        return UserError(text)
    log = None if folder is None else folder / "run.log"
    now = datetime.now(UTC)
    elsewhere = cache_folder("tracebacks") / f"{now:%Y-%m-%d}.log"
    story = "".join(traceback.format_exception(error))
    text = " ".join(str(error).split())[:_SHOWN]
    for file in (log, elsewhere):
        if file is not None and (file == elsewhere or file.is_file()) and _appended(file, f"{now:%H:%M:%S} {story}"):
            return PerfexpError(f"unexpected {type(error).__name__}: {text}; the traceback is in {file}")
    return PerfexpError(f"unexpected {type(error).__name__}: {text}; the traceback could not be written")


def _appended(file: Path, text: str) -> bool:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with untrusted.open_append(file) as log:
            log.write(text.encode(errors="replace"))
    except OSError:
        return False
    return True
