"""Sender: a process that sends payloads to MLflow, and fetches records. It answers lines of JSON on stdin on stdout.

It is the only process that imports MLflow, and is killed at the deadline: no timeout of an HTTP client limits a server
that answers a byte at a time.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from perfexp.host.credentials import scrub
from perfexp.host.lifeline import die_with
from perfexp.host.untrusted import MAX_BYTES
from perfexp.tracking.descriptions import NAME_LENGTH, clean
from perfexp.tracking.filling import NAME_TAG, end_run, fill, upload
from perfexp.tracking.payload import Payload, to_ms
from perfexp.tracking.store import LockTimeout, TrackingFailed, checked_id, how_to_look, is_foreign_place, locked
from perfexp.tracking.views import VIEWS, has_views

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

#: Memory for sending, beyond the imports: a longer answer of a server ends in an error.
_MEMORY_BYTES = 2**30
#: Characters of an error that are reported.
_LONGEST_REASON = 2_000
#: Errors that a server reports when two processes write the same run at once.
_RACES = ("BAD_REQUEST", "INTERNAL_ERROR", "RESOURCE_DOES_NOT_EXIST")
_PARENT = "mlflow.parentRunId"
#: Path of the record among the artifacts of a run.
RECORD = "data/record.json"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a store, as it passes to the sender.

    Attributes:
        request_timeout_seconds: limit of one request to a server, which is tried twice.
        deadline: end of the wait for other processes, on the clock `time.monotonic`.
    """

    uri: str
    request_timeout_seconds: int
    deadline: float

    def to_line(self) -> bytes:
        """Return one line of JSON, for another process of this machine."""
        return json.dumps(asdict(self), default=lambda path: str(path.absolute())).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Delivery(Request):
    """A payload and its destination; `artifacts` is a URI for a new experiment, None if the server decides."""

    experiment: str
    artifacts: str | None
    payload: Payload


@dataclass(frozen=True, kw_only=True)
class Fetch(Request):
    """The record of a stored run, or those of a stored sweep, to copy into an existing folder."""

    run_id: str
    folder: Path


def main(parent: int) -> None:
    """Send until stdin ends, or the process `parent`, which reads the answers."""
    die_with(parent)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # MLflow prints
        with suppress(ImportError):  # `send` raises it again
            import mlflow  # noqa: F401 - before memory is limited

            logging.getLogger("mlflow").setLevel(logging.WARNING)
        _limit_memory()
        answers.write("{}\n")  # ready
        answers.flush()
        for line in sys.stdin.buffer:
            answers.write(f"{json.dumps(_answer(line))}\n")
            answers.flush()


def _answer(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
        read = partial(msgspec.convert, content, dec_hook=lambda kind, value: kind(value))
        return {"link": send(read(Delivery)) if "payload" in content else fetch(read(Fetch))}
    except Exception as error:
        return {"error": reason(error), "is_late": isinstance(error, LockTimeout)}


def _limit_memory() -> None:
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def send(delivery: Delivery) -> str:
    """Send a payload, or update the run that the store already has; return lines for the console that lead to it."""
    from mlflow.exceptions import MlflowException

    try:
        return _send(delivery)
    except MlflowException as error:
        # Another process sends the same run at this moment: it deleted the run that we wrote to, because an older copy
        # exists, or both inserted the same row. The second attempt finds what the other has written.
        if error.error_code not in _RACES and "Current state is deleted" not in str(error):
            raise
        return _send(delivery)


def _send(delivery: Delivery) -> str:
    from mlflow import MlflowClient

    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(delivery.request_timeout_seconds)
    payload, tags = delivery.payload, dict(delivery.payload.tags)
    parent = None
    with locked(delivery.uri, delivery.deadline):
        client = MlflowClient(tracking_uri=delivery.uri, registry_uri=delivery.uri)
        experiment_id = _experiment(client, delivery)
        with suppress(Exception):  # they are internal to MLflow, and a run is complete without them
            _add_views(client, experiment_id, payload)
        if payload.parent:
            parent = Claim(client, experiment_id, payload.parent)
            tags[_PARENT] = parent.run_id
        claim = Claim(client, experiment_id, payload)
        children = [Claim(client, experiment_id, child) for child in payload.children]
    fill(client, claim.run, payload, tags)
    for child, nested in zip(payload.children, children, strict=True):
        fill(client, nested.run, child, {**child.tags, _PARENT: claim.run_id})
    upload(client, claim.run_id, payload.files, delivery.uri)
    for nested in children:
        nested.settle()
    if claim.settle():
        for nested in children:
            client.set_tag(nested.run_id, _PARENT, claim.run_id, synchronous=True)
    if parent and parent.settle():
        client.set_tag(claim.run_id, _PARENT, parent.run_id, synchronous=True)
    return how_to_look(delivery.uri, experiment_id, claim.run_id)


def fetch(request: Fetch) -> str:
    """Copy the records of a run, of a part of one, or of a sweep; return their files, a line each."""
    from mlflow import MlflowClient
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(request.request_timeout_seconds)
    client = MlflowClient(tracking_uri=request.uri, registry_uri=request.uri)
    run = client.get_run(request.run_id)
    if run.data.tags.get("perfexp.kind") in ("point", "size"):
        run = client.get_run(checked_id(run.data.tags[_PARENT]))
    runs = [run]
    if run.data.tags.get("perfexp.kind") == "sweep":
        runs = list(client.search_runs([run.info.experiment_id], f"tags.`{_PARENT}` = '{checked_id(run.info.run_id)}'"))
    files: list[str] = []
    for number, found in enumerate(runs):
        place = str(found.info.artifact_uri)
        if is_foreign_place(place, request.uri):
            raise TrackingFailed(f"its files are at {place.partition(':')[0][:20]}:…, outside of the store")
        (folder := request.folder / str(number)).mkdir()
        repository = get_artifact_repository(place, tracking_uri=request.uri)
        repository.list_artifacts = lambda *_: []  # a record is a file, whatever it says
        with _limited_files(MAX_BYTES - sum(Path(file).stat().st_size for file in files)):
            files.append(repository.download_artifacts(RECORD, str(folder)))
    return "\n".join(files)


@contextmanager
def _limited_files(most_bytes: int) -> Iterator[None]:
    """While entered, no file that this process writes gets larger; one that would is an `OSError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(most_bytes, 0), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _experiment(client: MlflowClient, delivery: Delivery) -> str:
    """The experiment's id; raises `TrackingFailed` if it was deleted. An old one keeps its place for artifacts."""
    from mlflow.exceptions import MlflowException

    name = clean(delivery.experiment, NAME_LENGTH)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return checked_id(client.create_experiment(name, artifact_location=delivery.artifacts))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another process was faster
    if experiment is None or experiment.lifecycle_stage != "active":
        raise TrackingFailed(f"its experiment {name!r} was deleted there; restore it or name another one")
    return checked_id(experiment.experiment_id)


def _add_views(client: MlflowClient, experiment_id: str, payload: Payload) -> None:
    """Add the views that an experiment lacks, of a run's kind; those that a person changed stay."""
    from mlflow import __version__

    if has_views(__version__):
        tags = client.get_experiment(experiment_id).tags
        for view in VIEWS:
            if view.tag not in tags and (not view.made_with or view.made_with in payload.tags):
                client.set_experiment_tag(experiment_id, view.tag, view.value())


class Claim:
    """The run of a payload: the one with its identity tags, or a new one.

    A server has no lock: two processes may both create a run. Both then choose the earliest one, and a process deletes
    its own run if that lost. `settle` repeats the choice after sending, when a run of the same moment is visible.
    """

    def __init__(self, client: MlflowClient, experiment_id: str, payload: Payload) -> None:
        self._client, self._experiment_id = client, experiment_id
        self._query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in payload.identity.items())
        self._is_new, earliest = False, self._earliest()
        self.run: Run = earliest or self._create(payload)
        self.settle()

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return checked_id(self.run.info.run_id)

    def settle(self) -> bool:
        """Delete the run that this process created if there is an earlier one; return whether it did."""
        earliest = self._earliest() if self._is_new else None
        if earliest is None or earliest.info.run_id == self.run_id:
            return False
        self._client.delete_run(self.run_id)
        self._is_new, self.run = False, earliest
        return True

    def _create(self, payload: Payload) -> Run:
        start, name = to_ms(payload.started), payload.name
        tags = {**payload.identity, NAME_TAG: name}
        run = self._client.create_run(self._experiment_id, start, tags=tags, run_name=name)
        self._is_new = True
        end_run(self._client, run, payload)
        return run

    def _earliest(self) -> Run | None:
        runs = self._client.search_runs([self._experiment_id], self._query)
        return min(runs, key=lambda run: (run.info.start_time, run.info.run_id), default=None)


def reason(error: BaseException) -> str:
    """Return why sending failed, and the remedy if there is one."""
    if _is_out_of_memory(error):  # or hides such an error
        return "the server's answer needs more memory than sending may use; see whether it is a tracking server"
    text = scrub(str(error))[:_LONGEST_REASON] or type(error).__name__
    if not isinstance(error, ImportError):
        return text
    is_own = (error.name or "").partition(".")[0] in ("mlflow", "sqlalchemy", "alembic")
    remedy = "pip install mlflow-skinny sqlalchemy alembic" if is_own else "install the driver of that database"
    return f"{text} ({remedy})"


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    main(int(sys.argv[1]))
