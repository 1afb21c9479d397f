"""Deliveries: requests to the process that sends. It waits for its imports, so that nothing heavy is imported here."""

from __future__ import annotations

import json
from datetime import datetime
from typing import NamedTuple

import msgspec

#: Experiment of a plan without a stage.
DEFAULT_EXPERIMENT = "perfexp"


class Figure(NamedTuple):
    """One value of a metric `GROUP/NAME_UNIT`, at the step of its `Quantity` and the end of its point or epoch.

    The time comes from the record alone: a store keeps one of several values with the same name, step and time.
    """

    name: str
    value: float
    step: int
    time_ms: int


class Dataset(msgspec.Struct, kw_only=True, frozen=True):
    """The data that a model got, `synthetic 224 b8`; `context` is `training` or `inference`, `source` is JSON."""

    name: str
    digest: str
    source: str
    context: str


class Upload(msgspec.Struct, kw_only=True, frozen=True):
    """A file to send, to an artifact folder or to none (""), under a name of letters, digits and `._-`.

    Attributes:
        source: absolute path of the file; None for a file that is made of `content`.
    """

    source: str | None
    folder: str
    name: str
    content: str = ""


class Payload(msgspec.Struct, kw_only=True):
    """One MLflow run.

    Attributes:
        identity: tags that identify the run; `tags` has others, `first_tags` those that a person may extend.
        status: `FINISHED`, `FAILED`, `KILLED`; `SCHEDULED` or, of a training, `RUNNING` while the outcome is open.
        started: date and time, ISO 8601, as of `ended`.
        parent: the sweep's own run, as it is created if it is missing.
        children: nested runs, for example one for each phase and batch size.
    """

    name: str
    identity: dict[str, str]
    status: str
    started: str
    ended: str | None = None
    figures: list[Figure] = []
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    first_tags: dict[str, str] = {}
    datasets: list[Dataset] = []
    note: str = ""
    files: list[Upload] = []
    parent: Payload | None = None
    children: list[Payload] = []
    experiment: str = DEFAULT_EXPERIMENT


class Request(msgspec.Struct, kw_only=True, tag=True):
    """A request to a store.

    Attributes:
        request_timeout_seconds: limit of one request to a server, which is tried twice.
        deadline_seconds: limit of the whole, waiting for other processes included.
    """

    uri: str
    request_timeout_seconds: int
    deadline_seconds: float

    def to_line(self) -> bytes:
        """Return one line of JSON, in which any file name is possible."""
        return json.dumps(msgspec.to_builtins(self)).encode() + b"\n"


class Delivery(Request):
    """A payload and its destination; `artifacts` is a URI for a new experiment, None if the server decides."""

    experiment: str
    artifacts: str | None
    payload: Payload


class Epochs(Delivery):
    """Epochs of a training under way, which are sent now and then, without an answer."""


class Fetch(Request):
    """The record of a stored run, or the records of a stored sweep, to copy into an existing folder."""

    run_id: str
    folder: str


def from_line(line: bytes) -> Delivery | Epochs | Fetch:
    """Return the request of a line."""
    return msgspec.convert(json.loads(line), Delivery | Epochs | Fetch)


def to_ms(date: str | None) -> int | None:
    """Return an ISO 8601 date as milliseconds since 1970; None if it is not a date."""
    try:
        return max(round(datetime.fromisoformat(date or "").timestamp() * 1e3), 0)
    except (ValueError, OverflowError):
        return None
