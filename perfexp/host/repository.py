"""Git commit of the working folder, and whether files changed, for a run's environment facts.

No code in the repository is run.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

#: Turn off programs that a repository can configure: a file monitor, and hooks.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
#: Keep git from locking, fetching and prompting.
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
_QUIET |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0"}
_STATUS = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
_LIMIT_SECONDS = 10.0


def facts() -> dict[str, Any] | None:
    """Return `commit` and `dirty` (whether tracked files changed); None outside of git.

    To read changed files, git runs the filters in its configuration, which are programs. If the
    repository itself configures filters (`.git/config`), `dirty` is therefore None.
    """
    commit = _run("rev-parse", "HEAD")
    if commit is None:
        return None
    # if git cannot list its settings, filters are assumed
    settings = _run("config", "--show-scope", "--name-only", "--list") or "local filter."
    lines = [line.split(maxsplit=1) for line in settings.splitlines()]
    has_filters = any(
        scope in ("local", "worktree") and key.startswith("filter.") for scope, key in lines
    )
    status = None if has_filters else _run(*_STATUS)
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _run(*arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or takes longer than 10 s."""
    try:
        done = subprocess.run(
            [*_GIT, *arguments],
            env={**os.environ, **_QUIET},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
