"""Sending: one replay to a tracking store by MLflow's client, which is imported only when something is sent."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfexp.host import locks
from perfexp.host.credentials import scrub
from perfexp.tracking.claims import Claim, end, experiment
from perfexp.tracking.delivery import Delivery, TrackingFailed
from perfexp.tracking.descriptions import is_unedited
from perfexp.tracking.mlflow_metrics import Figure
from perfexp.tracking.replay import Replay
from perfexp.tracking.store import how_to_look, is_foreign_place, lock_name, mlflow_environment
from perfexp.tracking.uploads import Upload

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

#: What one call of log_batch takes: so many of each, and 1,000 in all.
_METRICS, _PARAMS, _TAGS = 800, 100, 100
#: Characters of an error that are reported.
_LONGEST_REASON = 2_000
_NOTE, _PARENT = "mlflow.note.content", "mlflow.parentRunId"


def send(delivery: Delivery) -> str:
    """Send a replay, or bring up to date what is there already.

    Args:
        delivery: the replay and where it goes.

    Returns:
        How to look at it, for the console.

    Raises:
        LockTimeout: another process makes runs in the same database.
        Exception: whatever MLflow raises.
    """
    with _set_up(delivery.request_timeout_seconds):
        from mlflow import MlflowClient

        content, tags = delivery.content, dict(delivery.content.tags)
        parent = None
        with _alone(delivery):
            client = MlflowClient(tracking_uri=delivery.uri, registry_uri=delivery.uri)
            experiment_id = experiment(client, delivery)
            if content.parent:
                parent = Claim(client, experiment_id, content.parent)
                tags[_PARENT] = parent.run_id
            claim = Claim(client, experiment_id, content)
            children = [Claim(client, experiment_id, child) for child in content.children]
        _fill(client, claim.run, content, tags)
        for child, below in zip(content.children, children, strict=True):
            _fill(client, below.run, child, {**child.tags, _PARENT: claim.run_id})
        _upload(client, claim.run_id, content.files, delivery.uri)
        for below in children:
            below.settle()
        if claim.settle():
            for below in children:
                client.set_tag(below.run_id, _PARENT, claim.run_id, synchronous=True)
        if parent and parent.settle():
            client.set_tag(claim.run_id, _PARENT, parent.run_id, synchronous=True)
        return how_to_look(delivery.uri, experiment_id, claim.run_id)


def _alone(delivery: Delivery) -> Any:
    """While entered, this process is the only one of this user that makes a schema or a run in the database."""
    name = lock_name(delivery.uri)
    if name is None:
        return nullcontext()
    return locks.held_until(name, delivery.deadline, purpose="sends a record to the same tracking store")


@contextmanager
def _set_up(timeout_seconds: int) -> Iterator[None]:
    """MLflow as it has to be; it takes these settings from the environment only, which is put back afterwards."""
    settings = {
        **mlflow_environment(),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_seconds),
        "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # a server may name an hour
        "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",  # records and credentials are for the server that was named
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    logger = logging.getLogger("mlflow")
    try:
        import mlflow  # noqa: F401 - sets the level of its logger, once

        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.setLevel(level)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _fill(client: MlflowClient, run: Run, content: Replay, tags: Mapping[str, str]) -> None:
    """Bring a run up to date; the files, which may take long, come last."""
    run_id, old = run.info.run_id, run.data
    params = {name: text for name, text in content.params.items() if name not in old.params}
    note = {_NOTE: content.note} if _NOTE not in old.tags or is_unedited(old.tags[_NOTE]) else {}
    _log(client, run_id, content.figures, params, {**tags, **note})
    for name in old.tags:
        if name.startswith("perfexp.") and name not in tags and name not in content.identity:
            client.delete_tag(run_id, name)
    end(client, run, content)


def _upload(client: MlflowClient, run_id: str, files: Sequence[Upload], uri: str) -> None:
    """Send the files of a run; a store does not choose a folder of this machine or another host for them."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    place = str(client.get_run(run_id).info.artifact_uri)
    if is_foreign_place(place, uri):
        raise TrackingFailed(
            f"it wants files at {place.partition(':')[0][:20]}:…, outside of the store, where none are sent "
            "(a server: start it with --serve-artifacts)"
        )
    repository = get_artifact_repository(place, tracking_uri=uri)
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        for upload in files:
            repository.log_artifact(str(_named(upload, Path(folder))), upload.folder or None)


def _log(
    client: MlflowClient,
    run_id: str,
    figures: Sequence[Figure],
    params: Mapping[str, str],
    tags: Mapping[str, str],
) -> None:
    """Figures, parameters and tags in batches as large as MLflow takes them."""
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(figure.name, figure.value, figure.time_ms, figure.step) for figure in figures]
    batches = zip_longest(
        _chunks(metrics, _METRICS),
        _chunks([Param(name, text) for name, text in params.items()], _PARAMS),
        _chunks([RunTag(name, text) for name, text in tags.items()], _TAGS),
        fillvalue=(),
    )
    for some_metrics, some_params, some_tags in batches:
        client.log_batch(run_id, metrics=some_metrics, params=some_params, tags=some_tags, synchronous=True)


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _named(upload: Upload, folder: Path) -> Path:
    """The file under the name that it is to have; a copy where that is not its own."""
    if upload.source.name == upload.name:
        return upload.source
    copy = folder / upload.name
    shutil.copyfile(upload.source, copy, follow_symlinks=False)
    return copy


def reason(error: BaseException) -> str:
    """Why sending failed, and the remedy where there is one.

    Args:
        error: raised by `send`.
    """
    if _is_out_of_memory(error):
        return "the server's answer needs more memory than sending may use; see whether it is a tracking server"
    return f"{scrub(str(error))[:_LONGEST_REASON] or type(error).__name__}{_remedy(error)}"


def _remedy(error: BaseException) -> str:
    """What to install."""
    if not isinstance(error, ImportError):
        return ""
    is_own = (error.name or "").partition(".")[0] in ("mlflow", "sqlalchemy", "alembic")
    return " (pip install mlflow-skinny sqlalchemy alembic)" if is_own else " (install the driver of that database)"


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it hides, is that of the memory."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
