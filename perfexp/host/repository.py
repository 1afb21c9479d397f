"""Commit of a git checkout and whether it was changed, without running any code of the repository."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfexp.host import untrusted

#: Disables programs that the user's own configuration may start: a file monitor, and hooks.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
#: Git locks and fetches nothing, and does not prompt.
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
_QUIET |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0"}
#: Settings of a repository that affect how its files compare with its objects; each is one of these words.
_COMPARING = ("core.autocrlf", "core.eol", "core.filemode", "core.symlinks", "core.ignorecase", "core.trustctime")
_WORDS = ("true", "false", "input", "lf", "crlf", "native")
_LIMIT_SECONDS = 10.0
#: A larger index is not copied: it could fill the temporary folder.
_LARGEST_INDEX = 1 << 30


def facts() -> dict[str, Any] | None:
    """Return the commit of the working folder's repository and whether tracked files changed; None outside of git.

    A plain `git status` would run filters, hooks, monitors and remotes that `.git/config` names. It therefore runs with
    perfexp's own configuration, on a copy of the index.
    """
    commit = _run("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "dirty": _is_changed(commit)}


def _is_changed(commit: str) -> bool | None:
    output = _run("rev-parse", "--show-toplevel", "--absolute-git-dir", "--git-path", "index", "--git-path", "objects")
    places = [Path(line).absolute() for line in (output or "").splitlines()]
    if len(places) != 4:  # a bare repository, or a line break in a name
        return None
    top, folder, index, objects = places
    try:
        with tempfile.TemporaryDirectory(prefix="perfexp-git-") as name:
            own = Path(name)
            _imitate(own, commit, folder, index)
            variables = {"GIT_DIR": name, "GIT_WORK_TREE": str(top), "GIT_INDEX_FILE": str(own / "index")}
            variables["GIT_OBJECT_DIRECTORY"] = str(objects)
            arguments = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
            status = _run(*arguments, folder=top, **variables)
    except OSError:
        return None
    return None if status is None else bool(status)


def _imitate(own: Path, commit: str, folder: Path, index: Path) -> None:
    """Make a repository of the same commit and index in the empty folder `own`.

    A split index has its other part in `folder`, the .git of the original.
    """
    (own / "refs").mkdir()
    (own / "HEAD").write_text(f"{commit}\n")
    lines = ["[core]", "repositoryformatversion = 1", "bare = false"]
    for key in _COMPARING:
        value = _run("config", "--get", key)
        if value in _WORDS:
            lines.append(f"{key.partition('.')[2]} = {value}")
    if len(commit) == 64:
        lines += ["[extensions]", "objectFormat = sha256"]
    (own / "config").write_text("\n".join(lines) + "\n")
    for file in (index, *folder.glob("sharedindex.*")):
        if untrusted.is_regular(file):
            if file.stat().st_size > _LARGEST_INDEX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
            shutil.copyfile(file, own / ("index" if file == index else file.name))


def _run(*arguments: str, folder: Path | None = None, **variables: str) -> str | None:
    inherited: Mapping[str, str] = os.environ
    if variables:  # another repository than that of the environment
        inherited = {key: value for key, value in os.environ.items() if key not in ("GIT_COMMON_DIR", "GIT_NAMESPACE")}
    try:
        done = subprocess.run(
            [*_GIT, *arguments],
            cwd=folder,
            env={**inherited, **_QUIET, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
