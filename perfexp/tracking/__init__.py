"""Sink: what reads a finished record and shows, writes or sends it; it measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep


class Tracker(Protocol):
    """What a `tracking` node of the configuration builds: where finished records are sent.

    Attributes:
        settings: values of the node by which the same store is found from another folder, without credentials; empty
            where nothing is sent.
    """

    @property
    def settings(self) -> dict[str, str]:
        """See the class."""

    def publish(self, record: Record, folder: Path) -> str | None:
        """Send a record; sending it again changes nothing.

        Args:
            record: finished, whatever its status.
            folder: where its artifacts lie.

        Returns:
            How to look at it, for the console; None where there is nothing to look at.

        Raises:
            PerfexpError: it could not be sent. The record is on disk.
        """

    def publish_sweep(self, sweep: Sweep, folder: Path) -> str | None:
        """Send the summary of a sweep; its runs have been sent, or are sent later.

        Args:
            sweep: finished or not.
            folder: where its table and picture lie.

        Returns:
            How to look at it.

        Raises:
            PerfexpError: it could not be sent.
        """


class NoTracking:
    """Records stay on disk only (tracking=none)."""

    settings: ClassVar[dict[str, str]] = {}

    def publish(self, record: Record, folder: Path) -> str | None:
        """Nothing is sent."""
        return None

    def publish_sweep(self, sweep: Sweep, folder: Path) -> str | None:
        """Nothing is sent."""
        return None
