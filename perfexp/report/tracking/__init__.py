"""Tracking stores, which receive finished records: MLflow, or none.

The parent process calls a `Tracker` when a training advances and when a record is complete.
`mlflow_sink` passes payloads to a sending process, which alone imports MLflow. What is sent comes
from the record only, so `perfexp sync` can send it again later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.record import Point, Record


class Tracker:
    """Base class for the `tracking` node of the configuration; sends nothing."""

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that identify the store from another folder, without credentials.

        Empty if there is no store.
        """
        return {}

    def following(
        self, record: Callable[[], Record]
    ) -> AbstractContextManager[Callable[[Point], None]]:
        """Return a context that covers one training.

        It gives a function to call after each epoch, with a point that holds only that epoch.

        Args:
            record: returns the run's record in its current state; called from another thread.
        """
        return nullcontext(lambda _: None)

    def publish(self, analysis: Analysis, folder: Path) -> str | None:
        """Send a finished record of any status, with the artifacts in its folder.

        Sending the same record again changes nothing.

        Returns:
            Console lines that say where to find the run in the store.

        Raises:
            PerfexpError: the record could not be sent.
        """
        return None

    def publish_sweep(self, sweep_analysis: SweepAnalysis, folder: Path) -> str | None:
        """Send a sweep summary, finished or not, as `publish` does.

        Its runs are sent separately.
        """
        return None


class NoTracking(Tracker):
    """Tracker for `tracking=none`: records stay on disk only."""
