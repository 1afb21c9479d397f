"""Summary of a sweep over several runs, stored as sweep.json."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.records.record import SCHEMA_VERSION, Count, CountFromOne, Record, Seconds, Status

#: Axis of a sweep over numbers of devices.
GPU_COUNT = "gpu.count"
#: Limit on the size of a sweep.json, which has a few lines per run.
_MOST_BYTES = 64 << 20
#: Limits in bytes on the folder of a run, relative to that of its sweep, and on the names in it.
_MOST_OF_PATH, _MOST_OF_NAME = 2000, 255
#: Characters of a folder that are shown.
_SHOWN = 80


class SweepChild(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One run in the summary of its sweep, numbered from 0; its folder is relative to that of the sweep."""

    job: Count
    name: str
    directory: str
    status: Status
    axes: dict[str, str] = {}
    error: str | None = None

    @property
    def devices(self) -> int | None:
        """Number of devices of a sweep over them; None without that axis, or where its value is another word."""
        text = self.axes.get(GPU_COUNT, "")
        return int(text) if text.isascii() and text.isdecimal() else None


class PlannedRun(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A run that a sweep is going to measure; it is written before the first run begins.

    Attributes:
        job: number of the run in the sweep, from 0.
        directory: folder of the run, relative to that of the sweep.
        overrides: overrides that vary, with this run's values.
        options: names of its model, algorithm, mode, precision and gpu.
        points: numbers of its points by kind: timed ones, first predictions, layers, profiles.
        seconds: estimated time of measuring all of them; None if the settings do not limit it.
    """

    job: Count
    directory: str
    overrides: list[str] = []
    options: dict[str, str] = {}
    points: dict[str, Count] = {}
    seconds: Seconds | None = None


class Sweep(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Summary of a sweep over several runs (`-m`); sweep.json in the sweep's folder.

    Attributes:
        started: start, ISO 8601 with time zone.
        ended: end, ISO 8601 with time zone; None while the sweep runs, or if it was killed.
        jobs: planned number of runs; None if unknown.
        axes: entry of sweeps of earlier versions that is not read.
        planned: the runs in their order, except those that were refused; empty where each run is chosen by the figures
            of earlier ones, and in sweeps of earlier versions.
        store: tracking store of the runs, without credentials. It is informative only: perfexp never connects to a
            store because a file names it.
    """

    schema_version: CountFromOne = SCHEMA_VERSION
    uid: str
    name: str
    started: str
    ended: str | None = None
    command: list[str] = []
    jobs: Count | None = None
    axes: dict[str, list[str]] | msgspec.UnsetType = msgspec.UNSET
    planned: list[PlannedRun] = []
    children: list[SweepChild] = []
    store: str | None = None

    def to_json(self) -> bytes:
        """The summary as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @property
    def in_turn(self) -> bool:
        """Whether the processes of the runs take turns (`perfexp ab`)."""
        return self.command[:1] == ["ab"]

    def continuation(self, folder: Path) -> str:
        """Return the command line that measures what the runs lack, for the folder of the sweep."""
        words = [*self.command, f"output_dir={folder}"] if self.in_turn else [f"resume={folder}"]
        return shlex.join(["perfexp", *words])

    def record_of(self, child: SweepChild, folder: Path) -> Record | None:
        """Read the record of a run, for the folder of the sweep; None without one. Raises `UserError` for a broken one.

        A run outside of that folder (stages) repeats the sweep's identity, or else it is somebody else's.
        """
        place = Path(os.path.normpath(folder / child.directory))
        if place.is_symlink() or not (place / "record.json").exists():
            return None
        record, own = Record.load(place), (self.uid, child.job)
        is_own = record.sweep is not None and (record.sweep.uid, record.sweep.job) == own
        return record if is_own or place.resolve().is_relative_to(folder.resolve()) else None

    def records(self, folder: Path) -> list[Record]:
        """The records of the runs, for the folder of the sweep; refused runs have none."""
        records = []
        for child in self.children:
            with suppress(UserError):
                records.append(self.record_of(child, folder))
        return [record for record in records if record is not None]

    def refresh(self, folder: Path) -> None:
        """Update the status of each run from its record, if there is one, for the folder of the sweep."""
        for child in self.children:
            with suppress(UserError):
                record = Record.load(folder / child.directory)
                if record.sweep is not None and (record.sweep.uid, record.sweep.job) == (
                    self.uid,
                    child.job,
                ):
                    child.status, child.error = record.status, None

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Read a sweep.json, or that of a folder; raises `UserError` if it is missing or invalid."""
        file = path / "sweep.json" if path.is_dir() else path
        try:
            sweep = foreign.from_json(foreign.read_bytes(file, _MOST_BYTES), cls)
            _check_folders(sweep.children)
            _check_folders(sweep.planned)
            return sweep
        except OSError as error:
            raise UserError(f"No sweep can be read at {file}: {error.strerror}.") from error
        except foreign.DECODING_ERRORS as error:
            raise UserError(f"{file} is not a perfexp sweep: {error}.") from error


def _check_folders(children: Sequence[SweepChild | PlannedRun]) -> None:
    """Raise `msgspec.ValidationError` for folders that cannot exist, and for one that several runs have."""
    folders = Counter(os.path.normpath(child.directory) for child in children)
    for folder, runs in folders.items():
        content = os.fsencode(folder)
        longest = max(map(len, content.split(b"/")))
        if runs > 1 or b"\0" in content or len(content) > _MOST_OF_PATH or longest > _MOST_OF_NAME:
            why = f"{runs} runs have the folder" if runs > 1 else "no folder can be"
            raise msgspec.ValidationError(f"{why} {foreign.printable(folder[:_SHOWN])}")
