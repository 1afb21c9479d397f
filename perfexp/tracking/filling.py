"""Filling: write the content of a payload into a run of MLflow."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfexp.tracking.datasets import Dataset
from perfexp.tracking.descriptions import is_unedited
from perfexp.tracking.payload import Payload, to_ms
from perfexp.tracking.store import TrackingFailed, is_foreign_place
from perfexp.tracking.uploads import Upload

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

#: Limits of one call of log_batch.
_METRICS, _PARAMS, _TAGS = 800, 100, 100
_NOTE = "mlflow.note.content"
#: Tag of the name that perfexp gave a run; any other name was set by a person and stays.
NAME_TAG = "perfexp.name"


def end_run(client: MlflowClient, run: Run, payload: Payload) -> None:
    """Set status, end and name; done at creation too, so that an interrupted run does not stay RUNNING."""
    run_id = run.info.run_id
    if payload.status in ("SCHEDULED", "RUNNING"):
        client.update_run(run_id, status=payload.status)
    else:
        client.set_terminated(run_id, status=payload.status, end_time=to_ms(payload.ended))
    if run.info.run_name == run.data.tags.get(NAME_TAG) != payload.name:
        client.update_run(run_id, name=payload.name)


def fill(client: MlflowClient, run: Run, payload: Payload, tags: Mapping[str, str]) -> None:
    """Update a run: metrics, parameters and tags, in batches as large as MLflow accepts."""
    from mlflow.entities import Metric, Param, RunTag

    run_id, old, tags = run.info.run_id, run.data, {**tags, NAME_TAG: payload.name}
    own = {name: text for name, text in payload.first_tags.items() if name not in old.tags}
    note = {_NOTE: payload.note} if _NOTE not in old.tags or is_unedited(old.tags[_NOTE]) else {}
    metrics = [Metric(figure.name, figure.value, figure.time_ms, figure.step) for figure in payload.figures]
    params = [Param(name, text) for name, text in payload.params.items() if name not in old.params]
    new_tags = [RunTag(name, text) for name, text in {**tags, **own, **note}.items()]
    batches = zip_longest(_chunks(metrics, _METRICS), _chunks(params, _PARAMS), _chunks(new_tags, _TAGS), fillvalue=())
    for batch in batches:
        client.log_batch(run_id, *batch, synchronous=True)
    for name in old.tags:
        if name.startswith("perfexp.") and name not in tags and name not in payload.identity:
            client.delete_tag(run_id, name)
    _add_inputs(client, run, payload.datasets)
    end_run(client, run, payload)


def _add_inputs(client: MlflowClient, run: Run, datasets: Sequence[Dataset]) -> None:
    """Add the datasets that a run lacks."""
    from mlflow import entities
    from mlflow.exceptions import MlflowException

    there = {(one.dataset.name, one.dataset.digest) for one in (run.inputs.dataset_inputs if run.inputs else ())}
    inputs = [
        entities.DatasetInput(
            entities.Dataset(name=one.name, digest=one.digest, source_type="perfexp", source=one.source),
            [entities.InputTag("mlflow.data.context", one.context)],
        )
        for one in datasets
        if (one.name, one.digest) not in there
    ]
    try:
        if inputs:
            client.log_inputs(run.info.run_id, inputs)
    except MlflowException as error:
        if error.error_code != "ENDPOINT_NOT_FOUND":  # servers before MLflow 2.4; a run is complete without them
            raise


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def upload(client: MlflowClient, run_id: str, files: Sequence[Upload], uri: str) -> None:
    """Send the files of a run; a store may not choose a folder of this machine or another host for them."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    place = str(client.get_run(run_id).info.artifact_uri)
    if is_foreign_place(place, uri):
        raise TrackingFailed(
            f"it wants files at {place.partition(':')[0][:20]}:…, outside of the store, where none are sent "
            "(a server: start it with --serve-artifacts)"
        )
    repository = get_artifact_repository(place, tracking_uri=uri)
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        for file in files:
            source = file.source or Path(folder, file.name)
            if file.source is None:
                source.write_text(file.content)
            elif source.name != file.name:  # MLflow names an artifact like its file
                source = Path(folder, file.name)
                shutil.copyfile(file.source, source, follow_symlinks=False)
            repository.log_artifact(str(source), file.folder or None)
