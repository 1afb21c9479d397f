"""Folders: the files of runs and sweeps that lie in and below a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from perfexp.sinks.store import ARTIFACTS
from perfexp.sweep_record import Sweep, SweepChild


def below(folder: Path, *names: str, refused: Callable[[OSError], None]) -> Iterator[Path]:
    """The files of these names in and below a folder.

    Links are not followed, and the copies that a tracking store keeps below it are no runs' folders.

    Args:
        folder: where to look; it may be a link itself, since somebody named it.
        names: of the files.
        refused: told of each folder that can't be read; the others are read.
    """
    for parent, folders, files in os.walk(folder, onerror=refused):
        folders[:] = sorted(name for name in folders if name != ARTIFACTS)
        paths = (Path(parent, name) for name in names if name in files)
        yield from (path for path in paths if not path.is_symlink())


def run_folders(sweep: Sweep, folder: Path) -> Iterator[tuple[SweepChild, Path]]:
    """The runs of a sweep, each with its folder; those of a stage lie beside the sweep's folder, not in it.

    Args:
        sweep: its summary.
        folder: the sweep's.
    """
    for child in sweep.children:
        yield child, Path(os.path.normpath(folder / child.directory))
