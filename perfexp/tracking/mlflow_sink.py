"""MLflow: where a record's replay is sent, by which process, and for how long at most; MLflow is not imported here."""

from __future__ import annotations

import math
import os
import shlex
import time
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host.credentials import hide, reveal
from perfexp.host.locks import LockTimeout
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.subject import one_line
from perfexp.tracking import replay, sender_process, sending
from perfexp.tracking.delivery import Delivery
from perfexp.tracking.delivery import TrackingFailed as TrackingFailed
from perfexp.tracking.replay import Replay
from perfexp.tracking.run_tags import clean
from perfexp.tracking.sender_process import DeadlineMissed
from perfexp.tracking.store import artifact_folder, database, refuse_foreign_database, store_uri

#: Stores that have missed a deadline in this process: a sweep of 100 runs does not wait 100 times.
_late: set[str] = set()


class MlflowSink:
    """A tracking store of MLflow.

    What is sent is on disk already and carries its own times and status. A record that is in the store, told by its
    uid, is completed and brought up to date; nothing is there twice. What MLflow never changes, the parameters, and
    what a person has changed, the description and the name, stay as they are.

    A sqlite file is written by this process. Everything else is sent by a process of its own, which is killed at the
    deadline: no timeout of an HTTP client limits a server that answers a byte at a time.

    Args:
        uri: a database (`sqlite:///FILE`, `postgresql://…`) or a server (`http://…`). By default
            `MLFLOW_TRACKING_URI`, or else `outputs/mlflow.db` of the working directory.
        experiment: name of the experiment. By default `MLFLOW_EXPERIMENT_NAME`, the plan's stage, or `perfexp`.
        request_timeout_seconds: limit of one request to a server, which is tried twice.
        deadline_seconds: limit of sending one run or one sweep, waiting for other processes included.

    Raises:
        UserError: no such store can exist, or a limit is not positive.
    """

    def __init__(
        self,
        *,
        uri: str | None = None,
        experiment: str | None = None,
        request_timeout_seconds: int = 10,
        deadline_seconds: float = 120.0,
    ) -> None:
        limits = {"request_timeout_seconds": request_timeout_seconds, "deadline_seconds": deadline_seconds}
        for name, seconds in limits.items():
            if not (0 < seconds < math.inf):
                raise UserError(f"tracking.{name}={seconds:g}: set a positive number of seconds.")
        self.uri = store_uri(None if uri is None else reveal(uri))
        refuse_foreign_database(self.uri)
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
        self.request_timeout_seconds = request_timeout_seconds
        self.deadline_seconds = deadline_seconds

    @property
    def settings(self) -> dict[str, str]:
        """See `Tracker`."""
        return {"uri": str(hide(self.uri)), **({"experiment": self.experiment} if self.experiment else {})}

    def publish(self, record: Record, folder: Path) -> str:
        """See `Tracker`."""
        return self._send(replay.of_run(record, folder), folder)

    def publish_sweep(self, sweep: Sweep, folder: Path) -> str:
        """See `Tracker`."""
        return self._send(replay.of_sweep(sweep, folder), folder)

    def _send(self, content: Replay, folder: Path) -> str:
        """Send it, or say in one message what failed and what to do."""
        try:
            return self._deliver(content)
        except Exception as error:
            raise TrackingFailed(
                f"{one_line(content.name)} could not be sent to MLflow at {hide(self.uri)}: "
                f"{clean(one_line(sending.reason(error)), 400)}. Nothing is lost: its record is in {folder}; "
                f"send it again with: perfexp log {shlex.quote(str(folder))}{self._option}"
            ) from error

    @property
    def _option(self) -> str:
        """What `perfexp log` has to be told to use this store."""
        return "" if self.uri == store_uri(None) else f" --uri {shlex.quote(hide(self.uri))}"

    def _deliver(self, content: Replay) -> str:
        if self.uri in _late:
            raise TrackingFailed("it missed the deadline of an earlier send; this command does not try it again")
        folder = artifact_folder(self.uri)
        delivery = Delivery(
            uri=self.uri,
            experiment=self.experiment or content.experiment,
            artifacts=folder.as_uri() if folder else None,
            request_timeout_seconds=self.request_timeout_seconds,
            deadline=time.monotonic() + self.deadline_seconds,
            content=content,
        )
        try:
            return sending.send(delivery) if database(self.uri) else sender_process.send(delivery)
        except DeadlineMissed as error:
            _late.add(self.uri)
            limit = f"tracking.deadline_seconds={self.deadline_seconds:g}"
            raise TrackingFailed(f"sending took longer than {limit}; see whether the server works") from error
        except LockTimeout:
            _late.add(self.uri)
            raise
