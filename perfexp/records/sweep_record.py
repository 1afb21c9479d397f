"""Sweep record: a summary of several runs, stored as sweep.json.

`perfexp -m` starts a run for each combination of swept overrides, and `perfexp ab` a run for each
side. Each run has its own folder and record.json; sweep.json lists them with their status.
"""

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

#: Sweep axis for the number of devices.
GPU_COUNT = "gpu.count"
#: Size limit for a sweep.json, which has a few lines per run.
_MOST_BYTES = 64 << 20
#: Byte limits for a run's folder relative to its sweep's folder, and for each name in it.
_MOST_OF_PATH, _MOST_OF_NAME = 2000, 255
#: Characters of a folder shown in messages.
_SHOWN = 80


class SweepChild(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Run in its sweep's summary, once it has begun.

    Attributes:
        job: number of the run in the sweep, from 0.
        directory: run folder, relative to the sweep's folder.
        axes: values of the varying overrides as typed (`{"batch_size": "1"}`).
        error: reason why the run has no record; None if it has one.
    """

    job: Count
    name: str
    directory: str
    status: Status
    axes: dict[str, str] = {}
    error: str | None = None

    @property
    def devices(self) -> int | None:
        """Return the number of devices in a sweep over device counts.

        Plots and warnings about scaling over GPUs use it.

        Returns:
            None without that axis, or if its value is not a number.
        """
        text = self.axes.get(GPU_COUNT, "")
        if text.isascii() and text.isdecimal():
            return int(text)
        return None


class PlannedRun(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Run that a sweep is going to measure, written before the first run begins.

    Attributes:
        job: number of the run in the sweep, from 0.
        directory: run folder, relative to the sweep's folder.
        overrides: varying overrides, with this run's values.
        options: names of its model, algorithm, mode, precision and gpu.
        points: number of points by kind: timed points, first predictions, layers, profiles.
        seconds: estimated time to measure all points; None if the settings do not limit it.
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
        started: start time, ISO 8601 with time zone.
        ended: end time, ISO 8601 with time zone; None while the sweep runs, or if it was killed.
        jobs: planned number of runs; None if unknown.
        axes: entry in sweeps of earlier versions, accepted and ignored.
        planned: runs in order, except refused runs. Empty if earlier figures decide each next run,
            and in sweeps of earlier versions.
        store: tracking store of the runs, without credentials. For information only: perfexp never
            connects to a store because a file names it.
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
        """Return the summary as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @property
    def in_turn(self) -> bool:
        """Return whether the runs' processes alternate (`perfexp ab`)."""
        return self.command[:1] == ["ab"]

    def continuation(self, folder: Path) -> str:
        """Return the command that completes an interrupted sweep, given its folder.

        For example, `perfexp resume=DIR`. Runs that alternate (`perfexp ab`) continue by their own
        command.
        """
        if self.in_turn and (line := self.command_line(folder)):
            return line
        return shlex.join(["perfexp", f"resume={folder}"])

    def command_line(self, folder: Path) -> str | None:
        """Return the sweep's command with its folder, to copy into a shell.

        None if a shell would not read it as it is shown.
        """
        return foreign.command_line([*self.command, f"output_dir={folder}"])

    def record_of(self, child: SweepChild, folder: Path) -> Record | None:
        """Read a run's record; None without a record.

        A run outside the sweep's folder, as in a cluster campaign of several stages, must repeat
        the sweep's identity. Otherwise it is somebody else's run.

        Args:
            folder: sweep folder.

        Raises:
            UserError: the record is broken.
        """
        run_folder = Path(os.path.normpath(folder / child.directory))
        if run_folder.is_symlink() or not (run_folder / "record.json").exists():
            return None
        record = Record.load(run_folder)
        if self._lists(child, record) or run_folder.resolve().is_relative_to(folder.resolve()):
            return record
        return None

    def _lists(self, child: SweepChild, record: Record) -> bool:
        """Return whether a record belongs to this run of the sweep."""
        member = record.sweep
        return member is not None and (member.uid, member.job) == (self.uid, child.job)

    def records(self, folder: Path) -> list[Record]:
        """Return the runs' records in order, given the sweep's folder; broken ones are left out.

        Commands on finished sweeps start from them.
        """
        records = []
        for child in self.children:
            with suppress(UserError):
                records.append(self.record_of(child, folder))
        return [record for record in records if record is not None]

    def refresh(self, folder: Path) -> None:
        """Update each run's status from its record, if there is one, given the sweep's folder.

        Runs may have been resumed alone after the sweep ended.
        """
        for child in self.children:
            with suppress(UserError):
                record = Record.load(folder / child.directory)
                if self._lists(child, record):
                    child.status, child.error = record.status, None

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Read a sweep.json, given the file or its folder.

        Raises:
            UserError: the file is missing or invalid.
        """
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
    """Raise `msgspec.ValidationError` for impossible folders and folders with several runs."""
    folders = Counter(os.path.normpath(child.directory) for child in children)
    for folder, runs in folders.items():
        content = os.fsencode(folder)
        longest = max(map(len, content.split(b"/")))
        if runs > 1 or b"\0" in content or len(content) > _MOST_OF_PATH or longest > _MOST_OF_NAME:
            why = f"{runs} runs have the folder" if runs > 1 else "no folder can be"
            raise msgspec.ValidationError(f"{why} {foreign.printable(folder[:_SHOWN])}")
