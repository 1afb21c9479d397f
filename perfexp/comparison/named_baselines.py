"""Named baselines: plain record copies as FOLDER/MACHINE/NAME/NUMBER/record.json.

`perfexp baseline` stores a run's records under a name, so that later runs can be compared with it
after the run's folder is gone. A baseline's folder (here `place`) is MACHINE/NAME.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host.cache import home
from perfexp.host.files import safe_name, write_atomically
from perfexp.records.fact_lookup import fact_at
from perfexp.records.paths import refuse_link
from perfexp.records.record import Record

_RECORD = "record.json"


def default_folder() -> Path:
    """Return the baseline folder in the user's data (XDG Base Directory Specification)."""
    base = Path(os.environ.get("XDG_DATA_HOME") or home() / ".local" / "share")
    return base / "perfexp" / "baselines"


def machine_of(records: Sequence[Record]) -> str:
    """Return the records' machine and GPU as a folder name, in lower case.

    Raises:
        UserError: the records come from several machines.
    """
    machines = set()
    for record in records:
        names = fact_at(record.environment, "host"), fact_at(record.environment, "device.name")
        machines.add(safe_name(" ".join(map(str, names))).lower())
    if len(machines) > 1:
        raise UserError(
            f"A baseline is of one machine; these runs are of {', '.join(sorted(machines))}."
        )
    return machines.pop()


def find(folder: Path, name: str | None = None) -> list[Path]:
    """Return baseline folders, ordered by machine; links and folders without records are left out.

    Args:
        folder: folder of all baselines.
        name: only find baselines with this name.

    Raises:
        UserError: the name has characters that no baseline has.
    """
    pattern = f"*/{_checked(name)}" if name else "*/*"
    places = []
    for baseline in sorted(folder.glob(pattern)):
        is_link = baseline.is_symlink() or baseline.parent.is_symlink()
        if baseline.name[0] != "." and not is_link and any(baseline.glob(f"*/{_RECORD}")):
            places.append(baseline)
    return places


def read(baseline: Path) -> list[Record]:
    """Return a baseline's records, in the order in which they were added."""
    return list(map(Record.load, _files(baseline)))


def add(
    folder: Path, name: str, records: Sequence[Record], machine: str | None = None, *, force: bool
) -> Path:
    """Copy records into a new baseline and return its folder.

    The copy is complete or does not exist, even if the process is killed.

    Args:
        folder: folder of all baselines.
        machine: machine name, for example if the host name is different each time.
        force: whether to replace an existing baseline.

    Raises:
        UserError: the baseline exists, or cannot be written.
    """
    baseline = folder / (_checked(machine) if machine else machine_of(records)) / _checked(name)
    if baseline.exists() and not force:
        raise UserError(
            f"The baseline {baseline} exists. Choose another name, or replace it with --force."
        )
    try:
        baseline.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=baseline.parent, prefix=".new-") as scratch:
            for number, record in enumerate(records):
                (target := Path(scratch, name, str(number))).mkdir(parents=True)
                write_atomically(target / _RECORD, record.to_json())
            _replace(baseline, Path(scratch, name))
    except OSError as error:
        raise UserError(
            f"{baseline} can't be written: {error.strerror}. Choose another --folder."
        ) from error
    return baseline


def _replace(baseline: Path, new: Path) -> None:
    """Move a new baseline into place. The old baseline is kept until the move succeeds."""
    backup = baseline.with_name(f".{baseline.name}.old")
    if baseline.exists():
        _files(baseline)  # refuses links before anything is moved
        remove(backup)
        baseline.rename(backup)
    try:
        new.rename(baseline)
    except OSError:
        if backup.exists():
            backup.rename(baseline)
        raise
    remove(backup)


def remove(baseline: Path) -> None:
    """Delete a baseline's records and folders; do nothing if there is no such folder.

    Raises:
        OSError: the folders contain anything else.
        UserError: a folder is a link.
    """
    for file in _files(baseline):
        file.unlink()
        file.parent.rmdir()
    if baseline.exists():
        baseline.rmdir()


def _files(baseline: Path) -> list[Path]:
    """Return the paths of a baseline's records, by number.

    Raises:
        UserError: a folder is a link.
    """
    files = [file for file in baseline.glob(f"*/{_RECORD}") if file.parent.name.isdecimal()]
    refuse_link(baseline.parent)
    refuse_link(baseline)
    for file in files:
        refuse_link(file.parent)
    return sorted(files, key=lambda file: int(file.parent.name))


def _checked(name: str) -> str:
    """Return the name of a baseline or machine; raise `UserError` if it is not safe in a path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError(
            f"{name!r}: use letters, digits and ._- for the names of baselines and machines."
        )
    return name
