"""Speed files for a run's trainings, in the run's folder and in `speed_dir`.

A speed file has a training's images/s as JSON (`report.speed`). A run writes one for each training
when it ends. The plan's `speed_dir` collects the files of many runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from perfexp.errors import UserError
from perfexp.plan.speed_folder import refuse_no_folder
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.report.speed import Speed, of_record, placing

_REPEAT = "Move it away and repeat the command: the measurements are kept."
_OTHER = (
    "choose another speed_dir=DIR. The measurements are kept, and the run's own folder has the "
    "file."
)


def write(record: Record, paths: RunPaths, on_error: Callable[[str], None]) -> list[Path]:
    """Write a speed file for each training in a finished run.

    Args:
        on_error: called with a message for each file that cannot be written.

    Returns:
        the files in the run's folder.
    """
    speeds = of_record(record, paths.root)
    written = _put(speeds, paths.root, _REPEAT, on_error)
    folder = _speed_dir(record, paths.root)
    if speeds and folder is not None:
        _place(speeds, folder, _logs_of_sweep(record, paths.root), on_error)
    return written


def where(record: Record, folder: Path) -> list[tuple[Speed, Path | None]]:
    """Return a run's trainings, each with the path of its speed file; None without a file.

    A file in `speed_dir` takes precedence over the file in the run's folder.
    """
    places = list(filter(None, (_speed_dir(record, folder.absolute()), folder)))
    trainings = []
    for speed in of_record(record, folder):
        files = (_own(speed, path) for path in places)
        trainings.append((speed, next(filter(None, files), None)))
    return trainings


def _speed_dir(record: Record, root: Path) -> Path | None:
    """Return the plan's `speed_dir`; None without one, or if it is the run's own folder."""
    named = record.plan.get("speed_dir")
    if not isinstance(named, str) or not named:
        return None
    folder = Path(named).expanduser()
    if folder.resolve() == root.resolve():
        return None
    return folder


def _place(
    speeds: Sequence[Speed], folder: Path, logs: Collection[str], on_error: Callable[[str], None]
) -> None:
    """Write a run's speed files to `speed_dir`, without overwriting files from the same sweep.

    Args:
        logs: log files of all runs in the sweep, which speed files name.
    """
    try:
        refuse_no_folder(folder, _OTHER)
    except UserError as error:
        return on_error(str(error))
    free = (_free(speed, folder, logs) for speed in speeds)
    _put(free, folder, f"Move it away, or {_OTHER}", on_error)


def _free(speed: Speed, folder: Path, logs: Collection[str]) -> Speed:
    """Return the training with the first number not used by another log in the sweep."""
    others = {"", *logs} - {speed.log_file}
    named = placing.numbered(speed)
    return next(name for name in named if placing.whose(folder / name.file_name) not in others)


def _put(
    speeds: Iterable[Speed], folder: Path, remedy: str, on_error: Callable[[str], None]
) -> list[Path]:
    """Write speed files to a folder and return the paths of those that could be written.

    Args:
        remedy: end of the error messages.
        on_error: called with the message for each other file.
    """
    written = []
    for speed in speeds:
        try:
            written.append(placing.put(speed, folder, remedy=remedy))
        except UserError as error:
            on_error(str(error))
    return written


def _own(speed: Speed, folder: Path) -> Path | None:
    """Return the speed file in a folder that describes this training's log; None without one."""
    for named in placing.numbered(speed):
        path = folder / named.file_name
        log_file = placing.whose(path)
        if log_file is None:
            return None
        if log_file == speed.log_file:
            return path
    return None


def _logs_of_sweep(record: Record, root: Path) -> list[str]:
    """Return the log files of all runs in a run's sweep; empty outside a sweep.

    Args:
        root: the run's folder.
    """
    if record.sweep is None:
        return []
    folder = root / record.sweep.directory
    try:
        children = Sweep.load(folder).children
    except UserError:
        return []
    return [str(RunPaths((folder / child.directory).resolve()).log) for child in children]
