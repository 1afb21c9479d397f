"""Move the files of an earlier profile aside until a new one replaces them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from perfexp.profilers import refuse_to_overwrite
from perfexp.records.paths import RunPaths, is_artifact

#: Prefix of the names of files that are moved aside, in the same folder.
_ASIDE = ".before-"


class Earlier:
    """Files of an earlier pass, which are restored if the new pass fails; deleted at once if not `worth` it."""

    def __init__(self, paths: RunPaths, *, worth: bool) -> None:
        self._paths, self._worth = paths, worth
        self._files: list[Path] = []
        self._aside: list[Path] = []

    def make_room(self, files: Sequence[Path]) -> None:
        """Move or delete existing files, and claim those that the new pass may write; `ProfilerFailed` for others'."""
        self._files = list(files)
        refuse_to_overwrite([*files, *map(_aside, files)], self._paths.root, "move it away and repeat the command")
        for path in files:
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        there = [path for path in files if path.is_symlink() or path.exists()]
        while there and not self._worth:
            there.pop().unlink()
        self._paths.claim(*files, *map(_aside, there))
        for path in there:
            path.replace(_aside(path))
            self._aside.append(path)

    def forget(self) -> None:
        """Delete the earlier files, after the new pass has succeeded."""
        for path in self._aside:
            _aside(path).unlink(missing_ok=True)
        self._aside = []

    def restore_results(self) -> None:
        """Restore the earlier files, after the new pass has failed."""
        if not self._aside:
            return
        for path in self._files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path in self._aside:
            with suppress(OSError):  # `recover` tries again
                _aside(path).replace(path)
        self._aside = []


def recover(paths: RunPaths) -> None:
    """Restore files that a killed pass had moved aside; no other process may profile into this folder."""
    for name in paths.claimed():
        aside, before = paths.root / name, name.removeprefix(_ASIDE)
        if name.startswith(_ASIDE) and is_artifact(before) and (aside.is_file() or aside.is_symlink()):
            aside.replace(paths.root / before)


def _aside(path: Path) -> Path:
    return path.with_name(f"{_ASIDE}{path.name}")
