"""MLflow: sends the replay of a record, or of a sweep, to a tracking store; MLflow is imported only for that."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfexp.errors import PerfexpError
from perfexp.record import Record
from perfexp.sinks import replay
from perfexp.sinks.figures import Figure, to_ms
from perfexp.sinks.labels import NAME_LENGTH, clean
from perfexp.sinks.notes import is_unedited
from perfexp.sinks.replay import Replay
from perfexp.sinks.store import artifact_folder, how_to_look, locked, store_uri, without_password
from perfexp.sinks.subject import one_line
from perfexp.sinks.uploads import Upload
from perfexp.sweep_record import Sweep

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

#: What one call of log_batch takes: so many of each, and 1,000 in all.
_METRICS, _PARAMS, _TAGS = 800, 100, 100
_NOTE, _PARENT = "mlflow.note.content", "mlflow.parentRunId"


class TrackingFailed(PerfexpError):
    """A record could not be sent; it is on disk and can be sent again."""


class MlflowSink:
    """A tracking store of MLflow.

    What is sent is on disk already and carries its own times and status. A record that is in the store, told by its
    uid, is completed and brought up to date; nothing is there twice. What MLflow never changes, the parameters, and
    what a person has changed, the description and the name, stay as they are.

    Args:
        uri: a database (`sqlite:///FILE`, `postgresql://…`) or a server (`http://…`); `outputs/mlflow.db` of the
            working directory if not given: MLflow's own environment variables are not asked.
        experiment: name of the experiment; the plan's stage, or `perfexp`, if not given.
        request_timeout_seconds: how long a server may take to answer; it is asked twice.
    """

    def __init__(
        self, *, uri: str | None = None, experiment: str | None = None, request_timeout_seconds: int = 10
    ) -> None:
        self.uri = store_uri(uri)
        self.experiment = experiment
        self.request_timeout_seconds = request_timeout_seconds

    def publish(self, record: Record, folder: Path) -> str:
        """See `Tracker`."""
        return self._send(replay.of_run(record, folder), folder)

    def publish_sweep(self, sweep: Sweep, folder: Path) -> str:
        """See `Tracker`."""
        return self._send(replay.of_sweep(sweep, folder), folder)

    def _send(self, content: Replay, folder: Path) -> str:
        """Send it, or say in one message what failed and what to do."""
        try:
            with _set_up(self.request_timeout_seconds):
                return self._replay(content)
        except Exception as error:
            remedy = " (pip install mlflow-skinny sqlalchemy alembic)" if isinstance(error, ImportError) else ""
            raise TrackingFailed(
                f"{one_line(content.name)} could not be sent to MLflow at {without_password(self.uri)}: "
                f"{clean(one_line(str(error)), 400)}{remedy}. Nothing is lost: its record is in {folder}; "
                f"send it again with: perfexp log {shlex.quote(str(folder))}{self._option}"
            ) from error

    @property
    def _option(self) -> str:
        """What `perfexp log` has to be told to use this store."""
        return "" if self.uri == store_uri(None) else f" --uri {shlex.quote(without_password(self.uri))}"

    def _replay(self, content: Replay) -> str:
        from mlflow import MlflowClient

        tags = dict(content.tags)
        with locked(self.uri):
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            experiment_id = self._experiment(client, self.experiment or content.experiment)
            if content.parent:
                tags[_PARENT] = _found_or_made(client, experiment_id, content.parent).info.run_id
            run = _found_or_made(client, experiment_id, content)
        _fill(client, run, content, tags)
        return how_to_look(self.uri, experiment_id, run.info.run_id)

    def _experiment(self, client: MlflowClient, name: str) -> str:
        """The experiment's id; one that is there keeps its place for artifacts."""
        name = clean(name, NAME_LENGTH)
        found = client.get_experiment_by_name(name)
        if found is None:
            folder = artifact_folder(self.uri)
            return str(client.create_experiment(name, artifact_location=folder.as_uri() if folder else None))
        if found.lifecycle_stage != "active":
            raise TrackingFailed(f"its experiment {name!r} was deleted there; restore it or name another one")
        return str(found.experiment_id)


@contextmanager
def _set_up(timeout_seconds: int) -> Iterator[None]:
    """MLflow as it has to be; it takes these settings from the environment only, which is put back afterwards."""
    settings = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_seconds),
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


def _found_or_made(client: MlflowClient, experiment_id: str, content: Replay) -> Run:
    """The run with these tags; to be called under the lock."""
    query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in content.identity.items())
    found = client.search_runs([experiment_id], query, max_results=1, order_by=["attributes.start_time ASC"])
    if found:
        return found[0]
    run = client.create_run(
        experiment_id, start_time=to_ms(content.started), tags=content.identity, run_name=content.name
    )
    _end(client, run, content)
    return run


def _end(client: MlflowClient, run: Run, content: Replay) -> None:
    """Status, end and name: at once and not after the rest, so that nothing that is interrupted stays RUNNING."""
    run_id = run.info.run_id
    if content.status == "SCHEDULED":
        client.update_run(run_id, status=content.status)
    else:
        client.set_terminated(run_id, status=content.status, end_time=to_ms(content.ended))
    if run.info.run_name == content.placeholder:
        client.update_run(run_id, name=content.name)


def _fill(client: MlflowClient, run: Run, content: Replay, tags: Mapping[str, str]) -> None:
    """Bring a run up to date; the files, which may take long, come last."""
    run_id, old = run.info.run_id, run.data
    params = {name: text for name, text in content.params.items() if name not in old.params}
    note = {_NOTE: content.note} if _NOTE not in old.tags or is_unedited(old.tags[_NOTE]) else {}
    _log(client, run_id, content.figures, params, {**tags, **note})
    for name in old.tags:
        if name.startswith("perfexp.") and name not in tags and name not in content.identity:
            client.delete_tag(run_id, name)
    _end(client, run, content)
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        for upload in content.files:
            client.log_artifact(run_id, str(_named(upload, Path(folder))), upload.folder or None)


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
