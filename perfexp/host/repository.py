"""Git commit of the working folder, and whether files changed.

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
    """Return the commit, and whether tracked files changed; None outside of git.

    To read changed files, git runs the filters in its configuration, which are programs. If the
    repository itself configures filters (`.git/config`), `dirty` is therefore None.
    """
    commit = _run("rev-parse", "HEAD")
    if commit is None:
        return None
    settings = _run("config", "--show-scope", "--name-only", "--list")
    lines = [line.split(maxsplit=1) for line in (settings or "local filter.").splitlines()]
    is_filtered = any(
        scope in ("local", "worktree") and key.startswith("filter.") for scope, key in lines
    )
    status = None if is_filtered else _run(*_STATUS)
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _run(*arguments: str) -> str | None:
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
