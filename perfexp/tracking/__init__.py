"""Tracking stores: finished records are sent to them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep


class Tracker(Protocol):
    """Type of a `tracking` node of the configuration.

    Attributes:
        settings: values of the node that identify the store from another folder, without credentials; empty for none.
    """

    @property
    def settings(self) -> dict[str, str]:
        """See the class."""

    def publish(self, record: Record, folder: Path) -> str | None:
        """Send a finished record of any status; sending it again changes nothing.

        Args:
            record: record to send.
            folder: folder of its artifacts.

        Returns:
            Lines for the console that lead to it; None for none.

        Raises:
            PerfexpError: it could not be sent. The record is on disk.
        """

    def publish_sweep(self, sweep: Sweep, folder: Path) -> str | None:
        """Send the summary of a sweep, finished or not; its runs are sent on their own.

        Args:
            sweep: summary to send.
            folder: folder of its table and plot.

        Returns:
            Lines for the console that lead to it; None for none.

        Raises:
            PerfexpError: it could not be sent.
        """


class NoTracking:
    """Records stay on disk only (tracking=none)."""

    settings: ClassVar[dict[str, str]] = {}

    def publish(self, record: Record, folder: Path) -> str | None:
        """Send nothing."""
        return None

    def publish_sweep(self, sweep: Sweep, folder: Path) -> str | None:
        """Send nothing."""
        return None
