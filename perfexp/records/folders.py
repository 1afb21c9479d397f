"""Folders: find run and sweep files in and below a folder.

Commands such as `list`, `clean` and `export` find runs by their record.json or manifest this way.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from perfexp.records.paths import REPLACEMENT
from perfexp.records.sweep_record import PlannedRun, Sweep, SweepChild

#: Artifact folder next to the tracking database; MLflow's own servers use the same name.
ARTIFACTS = "mlartifacts"
#: Folders that are skipped.
_SKIPPED = (ARTIFACTS, REPLACEMENT)
#: Limit on nested folders; perfexp creates three levels.
_DEEPEST = 40


def below(
    folder: Path, *names: str, refused: Callable[[OSError], None], deepest: int = _DEEPEST
) -> Iterator[Path]:
    """Yield files with one of these names in and below a folder, parents before children.

    Links are skipped, and so are artifact folders and runs that are still being replaced
    (`--overwrite`).

    Args:
        names: file names to find.
        refused: called with the error for each folder that cannot be read.
        deepest: limit on nested folders.
    """
    pending = [(folder, 0)]
    while pending:
        parent, depth = pending.pop()
        try:
            with os.scandir(parent) as entries:
                children = {entry.name: entry for entry in entries if not entry.is_symlink()}
        except OSError as error:
            refused(error)
            continue
        inner = []
        for name in sorted(children, reverse=True):
            if name not in _SKIPPED and children[name].is_dir():
                inner.append((parent / name, depth + 1))
        for name in names:
            if name in children and not children[name].is_dir():
                yield parent / name
        if inner and depth >= deepest:
            message = f"more than {deepest} nested folders; deeper ones are skipped"
            refused(OSError(errno.ELOOP, message, str(parent)))
            continue
        pending += inner


def run_folders(sweep: Sweep, folder: Path) -> Iterator[tuple[SweepChild, Path]]:
    """Yield a sweep's runs and their folders.

    On a cluster, runs in a sweep of several stages may lie outside the sweep's own folder.
    """
    for child in sweep.children:
        yield child, run_folder(child, folder)


def run_folder(child: SweepChild | PlannedRun, folder: Path) -> Path:
    """Return a run's folder, given its sweep's folder.

    Sweeps store their runs' folders relative to their own folder.
    """
    # os.path is several times as fast as Path.resolve, and sweeps may have thousands of runs
    return Path(os.path.normpath(os.path.join(folder, child.directory)))  # noqa: PTH118
