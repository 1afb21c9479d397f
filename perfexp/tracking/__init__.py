"""Tracking stores: finished records are sent to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from perfexp.records.record import Point, Record
from perfexp.summaries.analysis import Analysis, SweepAnalysis


class Tracker:
    """Base of the objects that a `tracking` node of the configuration builds; sends nothing."""

    @property
    def settings(self) -> dict[str, str]:
        """Values of the node that identify the store from another folder, without credentials; empty for none."""
        return {}

    def following(
        self, record: Callable[[], Record]
    ) -> AbstractContextManager[Callable[[Point], None]]:
        """A context for one training; gives a function that takes the point after each epoch, with that epoch alone.

        Args:
            record: function that returns the record of the run as it is now; another thread calls it.
        """
        return nullcontext(lambda _: None)

    def publish(self, analysis: Analysis, folder: Path) -> str | None:
        """Send a finished record of any status, with the artifacts in its folder; sending it again changes nothing.

        Returns lines for the console that lead to it; raises `PerfexpError` if it could not be sent.
        """
        return None

    def publish_sweep(self, whole: SweepAnalysis, folder: Path) -> str | None:
        """Send the summary of a sweep, finished or not, as `publish` does; its runs are sent on their own."""
        return None


class NoTracking(Tracker):
    """Records stay on disk only (tracking=none)."""
