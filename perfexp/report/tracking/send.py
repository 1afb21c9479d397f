"""The process that sends payloads to MLflow and fetches records: JSON lines from stdin to stdout.

`mlflow_sink.SenderProcess` starts it and writes requests (`delivery`). Each request but `Epochs`
gets an answer: `link` with console lines, or `error`.

Only this process imports MLflow. At the deadline the kernel terminates it (SIGALRM), because an
HTTP timeout does not limit a server that answers one byte at a time.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from perfexp.host.credentials import scrub
from perfexp.host.foreign import MAX_BYTES
from perfexp.host.lifeline import die_with
from perfexp.report.tracking.delivery import (
    Dataset,
    Delivery,
    Epochs,
    Fetch,
    Payload,
    Upload,
    from_line,
    to_ms,
)
from perfexp.report.tracking.store import (
    NAME_LENGTH,
    LockTimeout,
    TrackingFailed,
    checked_id,
    clean,
    how_to_look,
    is_foreign_place,
    is_unedited,
    locked,
)
from perfexp.report.tracking.views import VIEWS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

#: Limit for the imports: MLflow may come from a slow disk.
_START_SECONDS = 120.0
#: Time left before termination to answer which process holds the database lock.
_MARGIN_SECONDS = 0.5
#: Memory for sending, beyond the imports: a larger server answer is an error.
_MEMORY_BYTES = 2**30
#: Longest reported error text, in characters.
_LONGEST_REASON = 2_000
#: Server errors when two processes write the same run at once.
_RACES = ("BAD_REQUEST", "INTERNAL_ERROR", "RESOURCE_DOES_NOT_EXIST")
#: Limits for one `log_batch` call.
_METRICS, _PARAMS, _TAGS = 800, 100, 100
_PARENT, _NOTE = "mlflow.parentRunId", "mlflow.note.content"
#: Tag with the name that perfexp set; any other run name was set by a person and stays.
_NAME = "perfexp.name"
#: Artifact path of a run's record.
_RECORD = "data/record.json"
#: Largest share of training time spent on sending epochs, not counting the run's creation.
_SHARE = 0.005

Requests = queue.SimpleQueue[Delivery | Epochs | Fetch | None]


def main(parent: int) -> None:
    """Send until stdin ends or the process `parent`, which reads the answers, ends.

    A thread reads requests at once, because the process that writes them is measuring.
    """
    die_with(parent)
    requests: Requests = queue.SimpleQueue()
    threading.Thread(target=_read, args=[requests], daemon=True).start()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers, _limited_time(_START_SECONDS):
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # MLflow prints
        with suppress(ImportError):  # `send` raises it again
            import mlflow  # noqa: F401 - before memory is limited

            logging.getLogger("mlflow").setLevel(logging.WARNING)
        _limit_memory()
        while (request := next_request(requests, _answer)) is not None:
            print(json.dumps(_answer(request)), file=answers, flush=True)


def _read(requests: Requests) -> None:
    """Read all requests at once: the writing process is measuring and must not wait."""
    for line in sys.stdin.buffer:
        requests.put(from_line(line))
    requests.put(None)


def _answer(request: Delivery | Fetch) -> dict[str, Any]:
    """Carry out a request and return its answer: `link`, or `error` with the reason."""
    try:
        with _limited_time(request.deadline_seconds + _MARGIN_SECONDS):
            return {"link": fetch(request) if isinstance(request, Fetch) else send(request)}
    except Exception as error:
        return {"error": _reason(error), "is_late": isinstance(error, LockTimeout)}


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """Let the kernel terminate this process if the `with` block takes longer than `seconds`."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, 1e8))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _limit_memory() -> None:
    """Limit this process's memory beyond the imports, if the system allows it."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def next_request(
    requests: Requests, deliver: Callable[[Epochs], dict[str, Any]]
) -> Delivery | Fetch | None:
    """Send a training's epochs as they arrive; return the next other request, or None at the end.

    Sending takes CPU time from the training, so each delivery is followed by a pause 199 times as
    long. The first delivery also creates the run. After a failure no more epochs are sent, since
    the record follows anyway.

    Args:
        deliver: sends epochs and returns an answer.
    """
    held_request: Epochs | None = None
    due, pause, has_failed = 0.0, 0.0, False
    while True:
        try:
            request = requests.get(
                timeout=max(due - time.monotonic(), 0.0) if held_request else None
            )
        except queue.Empty:
            assert held_request is not None
            begin = time.monotonic()
            has_failed = "error" in deliver(held_request)
            end, held_request = time.monotonic(), None
            due, pause = end + pause * (end - begin), (1 - _SHARE) / _SHARE
            continue
        if not isinstance(request, Epochs):
            return request
        if held_request:
            request.payload.figures[:0] = held_request.payload.figures
        held_request = None if has_failed else request


def send(delivery: Delivery) -> str:
    """Send a payload, updating the run if the store already has it.

    Returns:
        Console lines that say where to find the run.
    """
    from mlflow.exceptions import MlflowException

    try:
        return _send(delivery)
    except MlflowException as error:
        # Another process is sending the same run. Either it deleted our run because an older copy
        # exists, or both inserted the same row. A second attempt finds the other process's run.
        if error.error_code not in _RACES and "Current state is deleted" not in str(error):
            raise
        return _send(delivery)


def _send(delivery: Delivery) -> str:
    """Send a payload once: find or create its runs under the lock, fill them, upload the files.

    Runs that another process created at the same moment are settled at the end, when they are
    visible; nested runs are then moved below the run that stays.
    """
    from mlflow import MlflowClient

    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(delivery.request_timeout_seconds)
    payload, parent = delivery.payload, None
    with locked(delivery.uri, delivery.deadline_seconds):
        client = MlflowClient(tracking_uri=delivery.uri, registry_uri=delivery.uri)
        experiment_id = _experiment(client, delivery)
        with suppress(Exception):  # views are internal to MLflow; a run is complete without them
            _add_views(client, experiment_id, payload)
        if payload.parent:
            parent = Claim(client, experiment_id, payload.parent)
        claim = Claim(client, experiment_id, payload)
        children = [(Claim(client, experiment_id, child), child) for child in payload.children]
    fill(client, claim.run, payload, {_PARENT: parent.run_id} if parent else {})
    for nested, child in children:
        fill(client, nested.run, child, {_PARENT: claim.run_id})
    upload(client, claim.run_id, payload.files, delivery.uri)
    for nested, _ in children:
        nested.settle()
    if claim.settle():
        for nested, _ in children:
            client.set_tag(nested.run_id, _PARENT, claim.run_id, synchronous=True)
    if parent and parent.settle():
        client.set_tag(claim.run_id, _PARENT, parent.run_id, synchronous=True)
    return how_to_look(delivery.uri, experiment_id, claim.run_id)


def _experiment(client: MlflowClient, delivery: Delivery) -> str:
    """Return the experiment's id, creating the experiment if needed.

    An existing experiment keeps its artifact location.

    Raises:
        TrackingFailed: the experiment was deleted.
    """
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
        raise TrackingFailed(
            f"its experiment {name!r} was deleted there; restore it or name another one"
        )
    return checked_id(experiment.experiment_id)


def _add_views(client: MlflowClient, experiment_id: str, payload: Payload) -> None:
    """Add missing views for this kind of run. Views that a person changed stay."""
    tags = client.get_experiment(experiment_id).tags
    for view in VIEWS:
        if view.tag not in tags and (not view.made_with or view.made_with in payload.tags):
            client.set_experiment_tag(experiment_id, view.tag, view.value())


class Claim:
    """A payload's run: the stored run with its identity tags, or a new run.

    A server has no lock, so two processes may both create the run. Both then choose the earliest
    run, and the process with the later run deletes its own. `settle` repeats this choice after
    sending, when runs created at the same moment are visible.
    """

    def __init__(self, client: MlflowClient, experiment_id: str, payload: Payload) -> None:
        self._client, self._experiment_id = client, experiment_id
        terms = [f"tags.`{name}` = '{value}'" for name, value in payload.identity.items()]
        self._query = " and ".join(terms)
        earliest = self._earliest()
        self._is_new = earliest is None
        self.run: Run = earliest or self._create(payload)
        self.settle()

    @property
    def run_id(self) -> str:
        """Return the run's id; `TrackingFailed` if the server's answer is not an id."""
        return checked_id(self.run.info.run_id)

    def settle(self) -> bool:
        """Delete the run that this process created if an earlier run exists; return whether so."""
        earliest = self._earliest() if self._is_new else None
        if earliest is None or earliest.info.run_id == self.run_id:
            return False
        self._client.delete_run(self.run_id)
        self._is_new, self.run = False, earliest
        return True

    def _create(self, payload: Payload) -> Run:
        """Create the payload's run in its final status, without figures."""
        start, tags = to_ms(payload.started), {**payload.identity, _NAME: payload.name}
        run = self._client.create_run(self._experiment_id, start, tags=tags, run_name=payload.name)
        _end_run(self._client, run, payload)
        return run

    def _earliest(self) -> Run | None:
        """Return the earliest stored run with the payload's identity tags; None without any."""
        runs = self._client.search_runs([self._experiment_id], self._query)
        return min(runs, key=lambda run: (run.info.start_time, run.info.run_id), default=None)


def _end_run(client: MlflowClient, run: Run, payload: Payload) -> None:
    """Set a run's status, end and name, unless a person has changed the name.

    Also called at creation, so that an interrupted run does not stay RUNNING.
    """
    run_id = run.info.run_id
    if payload.status in ("SCHEDULED", "RUNNING"):
        client.update_run(run_id, status=payload.status)
    else:
        client.set_terminated(run_id, status=payload.status, end_time=to_ms(payload.ended))
    if run.info.run_name == run.data.tags.get(_NAME) != payload.name:
        client.update_run(run_id, name=payload.name)


def fill(client: MlflowClient, run: Run, payload: Payload, above: Mapping[str, str]) -> None:
    """Update a run's metrics, parameters, tags and datasets, in batches that MLflow accepts.

    Stored parameters, `first_tags` and an edited description stay. perfexp's tags that the payload
    lacks are removed.

    Args:
        above: tags that name the parent run.
    """
    from mlflow.entities import Metric, Param, RunTag

    run_id, old, tags = run.info.run_id, run.data, {**payload.tags, **above, _NAME: payload.name}
    extended_tags = dict(payload.first_tags)
    for name in old.tags:
        extended_tags.pop(name, None)
    if _NOTE not in old.tags or is_unedited(old.tags[_NOTE]):
        extended_tags[_NOTE] = payload.note
    metrics = []
    for figure in payload.figures:
        metrics.append(Metric(figure.name, figure.value, figure.time_ms, figure.step))
    params = [Param(name, text) for name, text in payload.params.items() if name not in old.params]
    new_tags = list(itertools.starmap(RunTag, {**tags, **extended_tags}.items()))
    batches = zip_longest(
        _chunks(metrics, _METRICS), _chunks(params, _PARAMS), _chunks(new_tags, _TAGS), fillvalue=()
    )
    for batch in batches:
        client.log_batch(run_id, *batch, synchronous=True)
    for name in old.tags:
        if name.startswith("perfexp.") and name not in tags and name not in payload.identity:
            client.delete_tag(run_id, name)
    _add_inputs(client, run, payload.datasets)
    _end_run(client, run, payload)


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return items in parts of at most `size`."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _add_inputs(client: MlflowClient, run: Run, datasets: Sequence[Dataset]) -> None:
    """Add missing datasets to a run.

    A run that is sent again has them already.
    """
    from mlflow import entities

    there = set[tuple[str, str]]()
    for stored in run.inputs.dataset_inputs if run.inputs else ():
        there.add((stored.dataset.name, stored.dataset.digest))
    inputs = []
    for dataset_to_add in datasets:
        if (dataset_to_add.name, dataset_to_add.digest) not in there:
            dataset = entities.Dataset(
                name=dataset_to_add.name,
                digest=dataset_to_add.digest,
                source_type="perfexp",
                source=dataset_to_add.source,
            )
            context = entities.InputTag("mlflow.data.context", dataset_to_add.context)
            inputs.append(entities.DatasetInput(dataset, [context]))
    if inputs:
        client.log_inputs(run.info.run_id, inputs)


def upload(client: MlflowClient, run_id: str, files: Sequence[Upload], uri: str) -> None:
    """Send files to a run's artifact location.

    Args:
        uri: the store, which limits where files may go.

    Raises:
        TrackingFailed: the store names a folder on this machine, or another host.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    artifact_uri = str(client.get_run(run_id).info.artifact_uri)
    if is_foreign_place(artifact_uri, uri):
        raise TrackingFailed(
            f"it wants files at {artifact_uri.partition(':')[0][:20]}:…, outside of the store, "
            "where none are sent (a server: start it with --serve-artifacts)"
        )
    repository = get_artifact_repository(artifact_uri, tracking_uri=uri)
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        for file in files:
            source = Path(file.source or f"{folder}/{file.name}")
            if file.source is None:
                source.write_text(file.content)
            elif source.name != file.name:  # MLflow names an artifact like its file
                source = Path(
                    shutil.copyfile(source, f"{folder}/{file.name}", follow_symlinks=False)
                )
            repository.log_artifact(str(source), file.folder or None)


def fetch(request: Fetch) -> str:
    """Copy the record of a run, or the records of a sweep.

    For a nested run, such as a single size, the whole run's record is copied.

    Returns:
        Paths to the copied files, one per line.
    """
    from mlflow import MlflowClient
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(request.request_timeout_seconds)
    client = MlflowClient(tracking_uri=request.uri, registry_uri=request.uri)
    run = client.get_run(request.run_id)
    if run.data.tags.get("perfexp.kind") in ("point", "size"):
        run = client.get_run(checked_id(run.data.tags[_PARENT]))
    runs = [run]
    if run.data.tags.get("perfexp.kind") == "sweep":
        runs = list(
            client.search_runs(
                [run.info.experiment_id], f"tags.`{_PARENT}` = '{checked_id(run.info.run_id)}'"
            )
        )
    files: list[str] = []
    for number, stored_run in enumerate(runs):
        artifact_uri = str(stored_run.info.artifact_uri)
        if is_foreign_place(artifact_uri, request.uri):
            raise TrackingFailed(
                f"its files are at {artifact_uri.partition(':')[0][:20]}:…, outside of the store"
            )
        (folder := Path(request.folder, str(number))).mkdir()
        repository = get_artifact_repository(artifact_uri, tracking_uri=request.uri)
        repository.list_artifacts = lambda *_: []  # a record is a file, whatever it says
        with _limited_files(MAX_BYTES - sum(Path(file).stat().st_size for file in files)):
            files.append(repository.download_artifacts(_RECORD, str(folder)))
    return "\n".join(files)


@contextmanager
def _limited_files(most_bytes: int) -> Iterator[None]:
    """Limit every file written inside the `with` block; a larger file raises `OSError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(most_bytes, 0), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _reason(error: Exception) -> str:
    """Return why sending failed, with a remedy if there is one.

    The text has no credentials and a limited length.
    """
    if "MemoryError" in "".join(traceback.format_exception(error)):  # also as a hidden cause
        return (
            "the server's answer needs more memory than sending may use; see whether it is a "
            "tracking server"
        )
    text = scrub(str(error))[:_LONGEST_REASON] or type(error).__name__
    if not isinstance(error, ImportError):
        return text
    is_own = (error.name or "").partition(".")[0] in ("mlflow", "sqlalchemy", "alembic")
    remedy = (
        "pip install mlflow-skinny sqlalchemy alembic"
        if is_own
        else "install the driver of that database"
    )
    return f"{text} ({remedy})"


if __name__ == "__main__":
    main(int(sys.argv[1]))
