"""Sweep record: what a sweep over several runs came to, as JSON beside the folders of its runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.records.record import SCHEMA_VERSION, Record, Status

#: Limit on a sweep.json: it holds a few lines for each run.
_MOST_BYTES = 64 << 20


class SweepChild(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One run of a sweep, as the sweep's own summary knows it.

    Attributes:
        job: number in the sweep, from 0.
        name: name of the run.
        directory: the run's folder, relative to the sweep's.
        status: how it ended.
        axes: the overrides that vary, with this run's values.
        error: why it did not end well.
    """

    job: int
    name: str
    directory: str
    status: Status
    axes: dict[str, str] = {}
    error: str | None = None


class Sweep(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Summary of a sweep over several runs (`-m`); sweep.json in the sweep's folder.

    Attributes:
        schema_version: that of the records.
        uid: identifies the sweep for ever.
        name: what it is called in lists.
        started: date and time, ISO 8601 with time zone.
        ended: likewise; None while it runs, or if it was killed.
        command: the overrides as the user typed them.
        jobs: how many runs it was to have, or None where that is not known.
        children: those that have ended.
        store: tracking store that its runs are sent to, without credentials. It is there to be read by people: a file
            does not say where perfexp connects to.
    """

    schema_version: int = SCHEMA_VERSION
    uid: str
    name: str
    started: str
    ended: str | None = None
    command: list[str] = []
    jobs: int | None = None
    children: list[SweepChild] = []
    store: str | None = None

    def to_json(self) -> bytes:
        """The summary as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def records(self, folder: Path) -> list[Record]:
        """The records of its runs, as far as they are there: a run that was refused has none.

        Args:
            folder: the sweep's.
        """
        found = []
        for child in self.children:
            with suppress(UserError):
                found.append(Record.load(folder / child.directory))
        return found

    def refresh(self, folder: Path) -> None:
        """Take the status of each run from its record, where it has one.

        Args:
            folder: the sweep's.
        """
        for child in self.children:
            with suppress(UserError):
                record = Record.load(folder / child.directory)
                if record.sweep is not None and (record.sweep.uid, record.sweep.job) == (self.uid, child.job):
                    child.status, child.error = record.status, None

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Read sweep.json, given it or the folder that holds it.

        Raises:
            UserError: there is none, or it can't be read.
        """
        file = path / "sweep.json" if path.is_dir() else path
        try:
            return msgspec.json.decode(untrusted.read_bytes(file, _MOST_BYTES), type=cls)
        except OSError as error:
            raise UserError(f"No sweep can be read at {file}: {error.strerror}.") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{file} is not a perfexp sweep: {error}.") from error
