"""Find the files of runs and sweeps in and below a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from perfexp.records.paths import REPLACEMENT
from perfexp.records.sweep_record import PlannedRun, Sweep, SweepChild

#: Folder of the artifacts, beside the database; MLflow's own servers use the same name.
ARTIFACTS = "mlartifacts"
#: Folders that are skipped.
_SKIPPED = (ARTIFACTS, REPLACEMENT)
#: Limit on nested folders; perfexp creates three levels.
_DEEPEST = 40


def below(
    folder: Path, *names: str, refused: Callable[[OSError], None], deepest: int = _DEEPEST
) -> Iterator[Path]:
    """Yield the files with one of these names in and below a folder; links are skipped.

    So are the artifacts of tracking stores, and runs that are still being replaced (`--overwrite`).
    `refused` is called with the error of each folder that cannot be read.
    """
    waiting = [(folder, 0)]
    while waiting:
        parent, depth = waiting.pop()
        try:
            with os.scandir(parent) as entries:
                children = {entry.name: entry for entry in entries if not entry.is_symlink()}
        except OSError as error:
            refused(error)
            continue
        inner = sorted(
            name for name, entry in children.items() if name not in _SKIPPED and entry.is_dir()
        )
        yield from (
            parent / name for name in names if name in children and not children[name].is_dir()
        )
        if inner and depth >= deepest:
            refused(
                OSError(
                    errno.ELOOP,
                    f"more than {deepest} nested folders; deeper ones are skipped",
                    str(parent),
                )
            )
            continue
        waiting += [(parent / name, depth + 1) for name in reversed(inner)]


def run_folders(sweep: Sweep, folder: Path) -> Iterator[tuple[SweepChild, Path]]:
    """Yield the runs of a sweep with their folders, which may lie beside the sweep's folder (stages)."""
    for child in sweep.children:
        yield child, run_folder(child, folder)


def run_folder(child: SweepChild | PlannedRun, folder: Path) -> Path:
    """Return the folder of a run, for that of its sweep."""
    return Path(os.path.normpath(os.path.join(folder, child.directory)))  # noqa: PTH118 (called for thousands)
