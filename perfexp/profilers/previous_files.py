"""Earlier: the files of a profile that is made again, kept aside until there is a new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from perfexp.profilers import refuse_to_overwrite
from perfexp.records.paths import RunPaths

#: What the names of files that are kept aside begin with, in the same folder.
_ASIDE = ".before-"


class Earlier:
    """What an earlier pass left where a new one is going to write: not taken for the new one's, and not lost either.

    Args:
        paths: of the run.
        worth: whether it left a profile; otherwise what lies there is nothing that anybody misses.
    """

    def __init__(self, paths: RunPaths, *, worth: bool) -> None:
        self._paths, self._worth = paths, worth
        self._files: list[Path] = []
        self._aside: list[Path] = []

    def make_room(self, files: Sequence[Path]) -> None:
        """Move away what is there, or delete it where it is not worth keeping, and claim what is going to be.

        Args:
            files: that the new pass may write.

        Raises:
            ProfilerFailed: something lies there that perfexp did not write.
            OSError: a folder lies there, or one can't be written to.
        """
        self._files = list(files)
        refuse_to_overwrite([*files, *map(_aside, files)], self._paths.root, "move it away and repeat the command")
        for path in files:
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        there = [path for path in files if path.is_symlink() or path.exists()]
        if not self._worth:
            for path in there:
                path.unlink()
            there = []
        self._paths.claim(*files, *map(_aside, there))
        for path in there:
            path.replace(_aside(path))
            self._aside.append(path)

    def forget(self) -> None:
        """The new pass has left something: what was there before goes."""
        for path in self._aside:
            _aside(path).unlink(missing_ok=True)
        self._aside = []

    def put_back(self) -> None:
        """The new pass has left nothing that can be used: what was there before is there again."""
        if not self._aside:
            return
        for path in self._files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path in self._aside:
            with suppress(OSError):  # `recover` tries it again
                _aside(path).replace(path)
        self._aside = []


def recover(paths: RunPaths) -> None:
    """Put back what a pass that was killed had moved aside; nobody else may be profiling into this folder.

    Args:
        paths: of the run.

    Raises:
        OSError: the folder can't be written to.
    """
    for name in paths.claimed():
        aside = paths.root / name
        if name.startswith(_ASIDE) and Path(name).name == name and (aside.is_file() or aside.is_symlink()):
            aside.replace(paths.root / name.removeprefix(_ASIDE))


def _aside(path: Path) -> Path:
    return path.with_name(f"{_ASIDE}{path.name}")
