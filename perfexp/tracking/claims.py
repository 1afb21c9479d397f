"""Claims: the experiment and the run of a replay in a store, found or created, while others do the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from perfexp.tracking.delivery import Delivery, TrackingFailed
from perfexp.tracking.mlflow_metrics import to_ms
from perfexp.tracking.replay import Replay
from perfexp.tracking.run_tags import NAME_LENGTH, clean

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def experiment(client: MlflowClient, delivery: Delivery) -> str:
    """The experiment's id; one that is there keeps its place for artifacts.

    Args:
        client: MLflow's client for the store.
        delivery: the name and the place of a new one.

    Raises:
        TrackingFailed: it was deleted.
    """
    from mlflow.exceptions import MlflowException

    name = clean(delivery.experiment, NAME_LENGTH)
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return _checked(client.create_experiment(name, artifact_location=delivery.artifacts))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another process was faster
    if found is None or found.lifecycle_stage != "active":
        raise TrackingFailed(f"its experiment {name!r} was deleted there; restore it or name another one")
    return _checked(found.experiment_id)


def _checked(identifier: object) -> str:
    """An id that a server gave.

    Raises:
        TrackingFailed: it is not one.
    """
    text = str(identifier)
    if not re.fullmatch(r"[\w-]{1,64}", text, re.ASCII):
        raise TrackingFailed("its server answers with an id that is none")
    return text


class Claim:
    """The run of a replay: found by its identity tags, or created.

    A server has no lock: two processes that find nothing both create a run. Both then choose the earliest one, and a
    process deletes its own run where that lost. `settle` repeats the choice after the sending, when a run that was
    created at the same time has become visible.

    Args:
        client: MLflow's client for the store.
        experiment_id: id of the replay's experiment.
        content: the replay.
    """

    def __init__(self, client: MlflowClient, experiment_id: str, content: Replay) -> None:
        self._client, self._experiment_id = client, experiment_id
        self._query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in content.identity.items())
        found = self._earliest()
        self._created = None if found else self._create(content)
        self.run: Run = found or self._created
        self.settle()

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return _checked(self.run.info.run_id)

    def settle(self) -> bool:
        """Give up the run that this process created if an earlier one is there; returns whether it did."""
        earliest = self._earliest() if self._created else None
        if earliest is None or earliest.info.run_id == self.run_id:
            return False
        self._client.delete_run(self.run_id)
        self._created, self.run = None, earliest
        return True

    def _create(self, content: Replay) -> Run:
        run = self._client.create_run(
            self._experiment_id, start_time=to_ms(content.started), tags=content.identity, run_name=content.name
        )
        end(self._client, run, content)
        return run

    def _earliest(self) -> Run | None:
        found = self._client.search_runs([self._experiment_id], self._query)
        return min(found, key=lambda run: (run.info.start_time, run.info.run_id), default=None)


def end(client: MlflowClient, run: Run, content: Replay) -> None:
    """Status, end and name: at once and not after the rest, so that nothing that is interrupted stays RUNNING.

    Args:
        client: MLflow's client for the store.
        run: the replay's run.
        content: the replay.
    """
    run_id = run.info.run_id
    if content.status == "SCHEDULED":
        client.update_run(run_id, status=content.status)
    else:
        client.set_terminated(run_id, status=content.status, end_time=to_ms(content.ended))
    if run.info.run_name == content.placeholder:
        client.update_run(run_id, name=content.name)
