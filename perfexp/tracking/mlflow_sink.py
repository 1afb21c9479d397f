"""MLflow sink: the tracking store of a command, the process that sends to it, and the deadline. No MLflow here."""

from __future__ import annotations

import atexit
import json
import math
import os
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfexp.comparison.document import Comparison
from perfexp.errors import UserError
from perfexp.host.credentials import hide, reveal
from perfexp.host.installation import python_command
from perfexp.records.record import Point, Record
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.subject import one_line
from perfexp.tracking import Tracker, live, payload, store
from perfexp.tracking.descriptions import clean, reasons, tag_fault
from perfexp.tracking.payload import Payload
from perfexp.tracking.sender import Delivery, Fetch, Request, reason
from perfexp.tracking.store import TrackingFailed

#: The sender answers this long before it would be killed: its message names the process that it waited for.
_MARGIN_SECONDS = 0.5
#: Limit on the start of the sending process: the import of MLflow from a slow disk.
_START_SECONDS = 120.0
#: Limit on the end of a killed process.
_END_SECONDS = 5.0
#: Limit on an answer: a link, or an error.
_MAX_ANSWER_BYTES = 65_536
#: MLflow reads these settings from the environment only.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # a server may name an hour
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",  # records and credentials are for the server that was named
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
#: Stores that missed a deadline in this process: a sweep of 100 runs does not wait 100 times.
_late: set[str] = set()


class DeadlineMissed(TrackingFailed):
    """There was no answer before the deadline."""


class MlflowSink(Tracker):
    """A tracking store of MLflow; raises `UserError` if no such store can exist, or a limit is not positive.

    The run of a record, found by its uid, is completed and updated; nothing is stored twice. Parameters, which MLflow
    never changes, and a description or a name that a person changed stay.

    Args:
        uri: database (`sqlite:///FILE`, `postgresql://…`) or server (`http://…`). By default `MLFLOW_TRACKING_URI`, or
            else `outputs/mlflow.db` of the working directory.
        run_name: name of the run, or of a sweep whose runs keep theirs. By default what differs from other runs.
        description: text above the results, of each run and of a sweep.
        tags: further tags of each run and of a sweep.
        experiment: name of the experiment. By default `MLFLOW_EXPERIMENT_NAME`, the plan's stage, or `perfexp`.
        request_timeout_seconds: limit of one request to a server, which is tried twice.
        deadline_seconds: limit of sending one run or one sweep, waiting for other processes included.
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
        limits = {"request_timeout_seconds": request_timeout_seconds, "deadline_seconds": deadline_seconds}
        for name, seconds in limits.items():
            if not (0 < seconds < math.inf):
                raise UserError(f"tracking.{name}={seconds:g}: set a positive number of seconds.")
        # the payload takes name, description and tags from the record, so that `perfexp log` sends the same ones
        if tags is not None and not isinstance(tags, Mapping):
            raise UserError(f"tracking.tags={tags}: give names with values, tracking.tags={{team:vision}}.")
        if faults := {str(name): fault for name in tags or {} if (fault := tag_fault(str(name)))}:
            raise UserError(f"tracking.tags: {reasons(faults)}.")
        self.uri = store.store_uri(None if uri is None else reveal(uri))
        store.refuse_foreign_database(self.uri)
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
        self.request_timeout_seconds = request_timeout_seconds
        self.deadline_seconds = deadline_seconds

    @property
    def settings(self) -> dict[str, str]:
        return {"uri": str(hide(self.uri)), **({"experiment": self.experiment} if self.experiment else {})}

    @contextmanager
    def following(self, record: Callable[[], Record]) -> Iterator[Callable[[Point], None]]:
        start_sender()  # while the worker loads; a thread's child would end with the thread
        with live.Follower(record, lambda content: deliver(self._delivery(content)), end_sender) as follower:
            yield follower.add

    def publish(self, record: Record, folder: Path) -> str:
        return self._send(payload.of_run(record, folder), self._again(folder))

    def publish_sweep(self, sweep: Sweep, folder: Path) -> str:
        return self._send(payload.of_sweep(sweep, folder), self._again(folder))

    def publish_comparison(self, comparison: Comparison, records: Sequence[Sequence[Record]], folder: Path) -> str:
        """Send a comparison with the files in its folder; raises `TrackingFailed`."""
        return self._send(payload.of_comparison(comparison, records, folder), "The comparison itself is complete")

    def fetch(self, run_id: str, folder: Path) -> list[Path]:
        """Copy the record of a stored run, or the records of a stored sweep, into an empty folder; return the files."""
        file = store.database(self.uri)
        if file is not None and not file.is_file():
            raise UserError(f"There is no tracking store {file}; name one with --uri.")
        request = Fetch(
            uri=self.uri,
            request_timeout_seconds=self.request_timeout_seconds,
            deadline=time.monotonic() + self.deadline_seconds,
            run_id=run_id,
            folder=folder,
        )
        try:
            return [Path(line) for line in deliver(request).splitlines()]
        except Exception as error:
            is_late = isinstance(error, DeadlineMissed)
            why = "there was no answer in time" if is_late else clean(one_line(reason(error)), 400)
            raise UserError(
                f"the record of mlflow:{one_line(run_id)} could not be read from {hide(self.uri)}: {why}. "
                "Give a run's id, and name the store with --uri."
            ) from error

    def _again(self, folder: Path) -> str:
        return (
            f"Nothing is lost: its record is in {folder}; "
            f"send it again with: perfexp log {shlex.quote(str(folder))}{store.uri_option(self.uri)}"
        )

    def _send(self, content: Payload, remedy: str) -> str:
        """Send a payload; an error is one message with the failure and the remedy."""
        try:
            return self._deliver(content)
        except Exception as error:
            raise TrackingFailed(
                f"{one_line(content.name)} could not be sent to MLflow at {hide(self.uri)}: "
                f"{clean(one_line(reason(error)), 400)}. {remedy}"
            ) from error

    def _deliver(self, content: Payload) -> str:
        if self.uri in _late:
            raise TrackingFailed("it missed the deadline of an earlier send; this command does not try it again")
        try:
            return deliver(self._delivery(content))
        except DeadlineMissed as error:
            _late.add(self.uri)
            limit = f"tracking.deadline_seconds={self.deadline_seconds:g}"
            raise TrackingFailed(f"sending took longer than {limit}; see whether the store works") from error
        except store.LockTimeout:
            _late.add(self.uri)
            raise

    def _delivery(self, content: Payload) -> Delivery:
        folder = store.artifact_folder(self.uri)
        return Delivery(
            uri=self.uri,
            experiment=self.experiment or content.experiment,
            artifacts=folder.as_uri() if folder else None,
            request_timeout_seconds=self.request_timeout_seconds,
            deadline=time.monotonic() + self.deadline_seconds,
            payload=content,
        )


class SenderProcess:
    """A process that sends; it stays for the next delivery, since importing MLflow takes seconds.

    It has a session of its own: Ctrl-C reaches it through this process only.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self.process = subprocess.Popen(
            python_command("perfexp.tracking.sender", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env=os.environ | store.mlflow_environment() | _SETTINGS,
            start_new_session=True,
        )
        self._is_ready = False

    def wait_until_ready(self, deadline: float) -> None:
        """Wait for the first answer, after the imports; raises as `request` does."""
        if not self._is_ready:
            self.request(b"", deadline)
            self._is_ready = True

    def request(self, line: bytes, deadline: float) -> bytes:
        """Write a line and return the answer.

        Raises `DeadlineMissed` without an answer before the deadline (`time.monotonic`), `TrackingFailed` at its end.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        source, sink = self.process.stdout.fileno(), self.process.stdin.fileno()
        os.set_blocking(sink, False)  # a process that hangs does not read
        rest, answer = memoryview(line), b""
        while not answer.endswith(b"\n"):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise DeadlineMissed
            readable, writable, _ = select.select([source], [sink] if rest else [], [], min(seconds, 60.0))
            try:
                if writable:
                    rest = rest[os.write(sink, rest) :]
                if readable and not (data := os.read(source, 65536)):
                    raise BrokenPipeError
            except BrokenPipeError as error:
                raise TrackingFailed(f"the sending process has ended: {self._last_line()}") from error
            answer += data if readable else b""
            if len(answer) > _MAX_ANSWER_BYTES:
                raise TrackingFailed("the server's answer is too long")
        return answer

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


#: The sending process of this one, once something was sent.
_sender: SenderProcess | None = None


def deliver(delivery: Request) -> str:
    """Pass a request to the sending process, whose start is not part of the deadline; return the lines of its answer.

    Raises `DeadlineMissed` if it takes longer (the process has been killed), `LockTimeout` if another process creates
    runs in the same database, and `TrackingFailed` if it could not be sent.
    """
    begin = time.monotonic()
    if _sender is not None and _sender.process.poll() is not None:
        end_sender()
    try:
        sender = start_sender()
        sender.wait_until_ready(begin + _START_SECONDS)
        deadline = delivery.deadline + time.monotonic() - begin
        line = replace(delivery, deadline=deadline - _MARGIN_SECONDS).to_line()
        answer = json.loads(sender.request(line, deadline))
    except BaseException:  # Ctrl-C, too: a late answer must not be taken for the next one
        end_sender()
        raise
    if "link" in answer:
        return str(answer["link"])
    raise (store.LockTimeout if answer["is_late"] else TrackingFailed)(answer["error"])


def start_sender() -> SenderProcess:
    """Start the sending process, unless it runs; it is ready some seconds later."""
    global _sender
    _sender = _sender or SenderProcess()
    return _sender


@atexit.register
def end_sender() -> None:
    """End the sending process, if there is one."""
    global _sender
    if _sender is not None:
        sender, _sender = _sender, None
        sender.kill()
