"""Folders: the files of runs and sweeps that lie in and below a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from perfexp.records.sweep_record import Sweep, SweepChild

#: Folder of the artifacts, beside the database; MLflow's own servers use the same name.
ARTIFACTS = "mlartifacts"
#: Levels of folders below the one that was named; perfexp makes three.
_DEEPEST = 40


def below(folder: Path, *names: str, refused: Callable[[OSError], None]) -> Iterator[Path]:
    """The files of these names in and below a folder.

    Links are not followed, and the copies that a tracking store keeps below it are no runs' folders.

    Args:
        folder: where to look; it may be a link itself, since somebody named it.
        names: of the files.
        refused: told of each folder that can't be read; the others are read.
    """
    waiting = [(folder, 0)]
    while waiting:
        parent, depth = waiting.pop()
        try:
            with os.scandir(parent) as entries:
                found = {each.name: each for each in entries if not each.is_symlink()}
        except OSError as error:
            refused(error)
            continue
        inner = sorted(name for name, each in found.items() if name != ARTIFACTS and each.is_dir())
        yield from (parent / name for name in names if name in found and not found[name].is_dir())
        if inner and depth >= _DEEPEST:
            refused(
                OSError(errno.ELOOP, f"more than {_DEEPEST} folders deep; what lies below is left out", str(parent))
            )
            continue
        waiting += [(parent / name, depth + 1) for name in reversed(inner)]


def run_folders(sweep: Sweep, folder: Path) -> Iterator[tuple[SweepChild, Path]]:
    """The runs of a sweep, each with its folder; those of a stage lie beside the sweep's folder, not in it.

    Args:
        sweep: its summary.
        folder: the sweep's.
    """
    for child in sweep.children:
        yield child, Path(os.path.normpath(folder / child.directory))
