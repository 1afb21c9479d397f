"""MLflow sink: a command's tracking store, and the process that sends to it. No MLflow here.

The plan's `tracking=mlflow` selects `MlflowSink`. It builds a payload and passes it to a
`SenderProcess` (`send`), which imports MLflow, so that a slow store cannot disturb a measurement.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from perfexp.comparison.document import Comparison
from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.host.credentials import hide, reveal, scrub
from perfexp.host.installation import python_command
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.record import Point, Record
from perfexp.records.subject import one_line
from perfexp.report.tracking import Tracker, payload, store
from perfexp.report.tracking.delivery import Delivery, Epochs, Fetch, Payload, Request
from perfexp.report.tracking.descriptions import reasons, tag_fault
from perfexp.report.tracking.store import TrackingFailed, clean

#: Limit for the last delivery after an interrupted training, and for a killed process to end.
_END_SECONDS = 5.0
#: MLflow reads these settings from the environment only.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # a server may name an hour
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",  # records and credentials go to the named server only
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
#: Stores that missed a deadline in this process: a sweep with 100 runs must not wait 100 times.
_late: set[str] = set()


class DeadlineMissed(TrackingFailed):
    """No answer arrived before the deadline."""


class MlflowSink(Tracker):
    """An MLflow tracking store.

    A record's run is found by its uid and updated, so nothing is stored twice. MLflow never changes
    parameters. A name or description that a person has edited stays.

    The keys are described in `plan/key_descriptions.yaml`.

    Raises:
        UserError: MLflow supports no such store, or a limit is not positive.
    """

    def __init__(
        self,
        *,
        uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        description: str | None = None,
        tags: Mapping[str, Any] | None = None,
        request_timeout_seconds: int = 10,
        deadline_seconds: float = 120.0,
    ) -> None:
        limits: dict[str, Any] = {
            "request_timeout_seconds": request_timeout_seconds,
            "deadline_seconds": deadline_seconds,
        }
        for name, seconds in limits.items():
            if not (0 < seconds < math.inf):
                raise UserError(f"tracking.{name}={seconds:g}: set a positive number of seconds.")
        # payloads read name, description and tags from the record: `perfexp sync` sends the same
        if tags is not None and not isinstance(tags, Mapping):
            raise UserError(
                f"tracking.tags={tags}: give names with values, tracking.tags={{team:vision}}."
            )
        if faults := {str(name): fault for name in tags or {} if (fault := tag_fault(str(name)))}:
            raise UserError(f"tracking.tags: {reasons(faults)}.")
        self.uri = store.store_uri(None if uri is None else reveal(uri))
        store.refuse_foreign_database(self.uri)
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
        self._limits = limits

    @property
    def settings(self) -> dict[str, str]:
        """Return the store's URI without credentials, and the experiment if the user named one."""
        return {
            "uri": str(hide(self.uri)),
            **({"experiment": self.experiment} if self.experiment else {}),
        }

    @contextmanager
    def following(self, record: Callable[[], Record]) -> Iterator[Callable[[Point], None]]:
        """Send a training's epochs as they arrive; see `Tracker.following`.

        If the training is interrupted, its run in the store is closed as killed.
        """
        start_sender()  # while the worker loads
        training: Payload | None = None
        seconds = 0.0

        def follow(point: Point) -> None:
            """Send the epochs of a point; failures are reported later, with the record."""
            nonlocal training, seconds
            with suppress(Exception):
                training = training or payload.of_training(record(), point)
                epochs = msgspec.structs.replace(
                    training, figures=payload.epochs_of(point, seconds)
                )
                seconds += sum(epoch.total_seconds for epoch in point.epochs)
                start_sender().put(self._delivery(epochs, Epochs))

        try:
            yield follow
        except BaseException:  # without a record the run would stay open
            if training is not None:
                last = msgspec.structs.replace(training, figures=[], status="KILLED")
                with suppress(TrackingFailed):
                    deliver(
                        msgspec.structs.replace(self._delivery(last), deadline_seconds=_END_SECONDS)
                    )
            raise

    def publish(self, analysis: Analysis, folder: Path) -> str:
        """Send a finished record; see `Tracker.publish`."""
        start_sender()  # imports MLflow while the payload is built
        return self._send(payload.of_run(analysis, folder), self._again(folder))

    def publish_sweep(self, sweep_analysis: SweepAnalysis, folder: Path) -> str:
        """Send a sweep summary; see `Tracker.publish_sweep`."""
        return self._send(payload.of_sweep(sweep_analysis, folder), self._again(folder))

    def publish_comparison(
        self, comparison: Comparison, records: Sequence[Sequence[Record]], folder: Path
    ) -> str:
        """Send a comparison with the files in its folder.

        Raises:
            TrackingFailed: the comparison could not be sent.
        """
        return self._send(
            payload.of_comparison(comparison, records, folder), "The comparison itself is complete"
        )

    def fetch(self, run_id: str, folder: Path) -> list[Path]:
        """Copy the record of a stored run, or all records of a stored sweep, into an empty folder.

        Returns:
            Paths to the copied files.

        Raises:
            UserError: the records could not be read.
        """
        file = store.database(self.uri)
        if file is not None and not file.is_file():
            raise UserError(f"There is no tracking store {file}; name one with --uri.")
        try:
            lines = deliver(Fetch(uri=self.uri, run_id=run_id, folder=str(folder), **self._limits))
        except Exception as error:
            why = (
                "there was no answer in time"
                if isinstance(error, DeadlineMissed)
                else _reason(error)
            )
            raise UserError(
                f"the record of mlflow:{one_line(run_id)} could not be read from "
                f"{hide(self.uri)}: {why}. Give a run's id, and name the store with --uri."
            ) from error
        return [Path(line) for line in lines.splitlines()]

    def _again(self, folder: Path) -> str:
        """Return the remedy in an error message: where the record is, and how to send it again."""
        text = f"Nothing is lost: its record is in {folder}; send it again"
        line = foreign.command_line(["sync", str(folder)])
        return f"{text} with: {line}{store.uri_option(self.uri)}" if line else text

    def _send(self, content: Payload, remedy: str) -> str:
        """Send a payload and return the answer: console lines that say where to find the run.

        Raises:
            TrackingFailed: sending failed; the message ends with the remedy.
        """
        try:
            if self.uri in _late:
                raise TrackingFailed(
                    "it missed the deadline of an earlier send; this command does not try it again"
                )
            return deliver(self._delivery(content))
        except Exception as error:
            why = _reason(error)
            if isinstance(error, DeadlineMissed):
                limit = f"tracking.deadline_seconds={self._limits['deadline_seconds']:g}"
                why = f"sending took longer than {limit}; see whether the store works"
            if isinstance(error, DeadlineMissed | store.LockTimeout):
                _late.add(self.uri)
            raise TrackingFailed(
                f"{one_line(content.name)} could not be sent to MLflow at {hide(self.uri)}: "
                f"{why}. {remedy}"
            ) from error

    def _delivery(self, content: Payload, kind: type[Delivery] = Delivery) -> Delivery:
        """Return a request that sends a payload to this store.

        Args:
            kind: `Epochs` for a training in progress.
        """
        folder, experiment = store.artifact_folder(self.uri), self.experiment or content.experiment
        artifacts = folder.as_uri() if folder else None
        return kind(
            uri=self.uri,
            experiment=experiment,
            artifacts=artifacts,
            payload=content,
            **self._limits,
        )


def _reason(error: Exception) -> str:
    """Return an error's text in one line, without credentials, for a message."""
    return clean(one_line(scrub(str(error))), 400)


class SenderProcess:
    """A process that sends.

    It stays alive between deliveries, since importing MLflow takes seconds. It runs in its own
    session, so Ctrl-C does not reach it directly: the parent ends it.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self.process = subprocess.Popen(
            python_command("perfexp.report.tracking.send", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | store.mlflow_environment() | _SETTINGS,
            start_new_session=True,
        )

    def put(self, request: Request) -> None:
        """Write a request, without waiting: the process reads continuously.

        `deliver` then waits for the answer; epochs have none.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(request.to_line())
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            DeadlineMissed: the process was terminated at its deadline.
            TrackingFailed: the process ended for another reason.
        """
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return dict(json.loads(line))
        if self.process.wait() == -signal.SIGALRM:
            raise DeadlineMissed
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").split("\n")]
        raise TrackingFailed(
            f"the sending process has ended: {next(filter(None, reversed(lines)), 'no message')}"
        )

    def kill(self) -> None:
        """Kill the process and all its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


#: This process's sending process, once started.
_sender: SenderProcess | None = None


def deliver(request: Request) -> str:
    """Pass a request to the sending process and return the lines of its answer.

    Starting that process does not count toward the deadline.

    Raises:
        DeadlineMissed: sending took longer than the deadline.
        LockTimeout: another process is creating runs in the same database.
        TrackingFailed: the request failed for another reason.
    """
    sender = start_sender()
    try:
        with suppress(BrokenPipeError):  # it has ended; the answer says why
            sender.put(request)
        answer = sender.answer()
    except BaseException:  # also after Ctrl-C: a late answer must not pass for the next answer
        end_sender()
        raise
    if "link" in answer:
        return str(answer["link"])
    raise (store.LockTimeout if answer["is_late"] else TrackingFailed)(answer["error"])


def start_sender() -> SenderProcess:
    """Start the sending process unless it already runs. It is ready some seconds later.

    Callers start it early, because importing MLflow takes seconds.
    """
    global _sender
    if _sender is not None and _sender.process.poll() is not None:
        end_sender()
    _sender = _sender or SenderProcess()
    return _sender


@atexit.register
def end_sender() -> None:
    """Terminate the sending process, if any."""
    global _sender
    if _sender is not None:
        sender, _sender = _sender, None
        sender.kill()
