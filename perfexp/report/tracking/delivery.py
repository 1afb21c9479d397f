"""Deliveries: requests to the sending process, one JSON line each, and the files to send.

The command that measures writes them (`mlflow_sink`), and the sending process reads them (`send`).
No heavy imports, so that the process starts quickly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from perfexp.host.files import safe_name
from perfexp.records.paths import DETAILS
from perfexp.records.record import Artifact

#: Experiment for plans without a stage.
DEFAULT_EXPERIMENT = "perfexp"
#: A run's artifact folders; files of any other kind lie next to them.
FOLDERS = ("config", "data", "plots", "tables", "profiles", "logs")
#: Larger files stay on disk: a copied sparse file could fill the store.
_MAX_FILE_BYTES = 2 << 30


class Figure(NamedTuple):
    """One value of a metric `GROUP/NAME_UNIT`.

    The time comes from the record alone, so sending again changes nothing: if name, step and time
    are equal, a store keeps one value.

    Attributes:
        step: position on MLflow's horizontal axis, for example the epoch or the batch size.
        time_ms: end of the epoch or point, in milliseconds since 1970.
    """

    name: str
    value: float
    step: int
    time_ms: int


class Dataset(msgspec.Struct, kw_only=True, frozen=True):
    """A model's input data, e.g. `synthetic 224 b8`.

    Attributes:
        digest: eight hexadecimal digits that identify the data.
        source: settings that define the data, as JSON.
        context: `training` or `inference`.
    """

    name: str
    digest: str
    source: str
    context: str


class Upload(msgspec.Struct, kw_only=True, frozen=True):
    """A file to send.

    Attributes:
        source: absolute path to the file; None if the file is made from `content`.
        folder: artifact folder; "" for the top level.
        name: artifact name, from letters, digits and `._-`.
    """

    source: str | None
    folder: str
    name: str
    content: str = ""


class Payload(msgspec.Struct, kw_only=True):
    """One MLflow run.

    Attributes:
        identity: tags that identify the run.
        first_tags: tags that a person may extend; set once.
        tags: all other tags.
        status: `FINISHED`, `FAILED` or `KILLED`. While the outcome is open, `SCHEDULED`, or
            `RUNNING` during training.
        started: date and time, ISO 8601, like `ended`.
        figures: metrics.
        params: parameters, which MLflow never changes once they are set.
        datasets: input data, one per phase.
        note: description in Markdown.
        files: artifacts.
        parent: the sweep's own run, as created if missing.
        children: nested runs, for example one for each phase and batch size.
        experiment: MLflow experiment, unless the user's settings name another.
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
        request_timeout_seconds: limit per server request. A failed request is tried once more.
        deadline_seconds: limit for the whole delivery, including waits for other processes.
    """

    uri: str
    request_timeout_seconds: int
    deadline_seconds: float

    def to_line(self) -> bytes:
        """Return the request as one JSON line. Escapes keep any file name valid."""
        return json.dumps(msgspec.to_builtins(self)).encode() + b"\n"


class Delivery(Request):
    """A payload and its destination.

    Attributes:
        artifacts: artifact URI for a new experiment; None if the server decides.
    """

    experiment: str
    artifacts: str | None
    payload: Payload


class Epochs(Delivery):
    """Epochs from a training in progress, sent from time to time without an answer."""


class Fetch(Request):
    """A request for the records of a stored run or sweep, to copy into an existing folder.

    `perfexp compare mlflow:RUN_ID` and similar commands send it.
    """

    run_id: str
    folder: str


def from_line(line: bytes) -> Delivery | Epochs | Fetch:
    """Decode a request from one line.

    The sending process reads each line of its stdin this way.
    """
    return msgspec.convert(json.loads(line), Delivery | Epochs | Fetch)


def to_ms(date: str | None) -> int | None:
    """Convert an ISO 8601 date to milliseconds since 1970; return None if it is not a date.

    MLflow's times are in this unit.
    """
    try:
        return max(round(datetime.fromisoformat(date or "").timestamp() * 1e3), 0)
    except (ValueError, OverflowError):
        return None


def sendable(artifacts: Iterable[Artifact], folder: Path) -> tuple[list[Upload], dict[str, str]]:
    """Return the files to send, and reasons for skipped files, keyed by path in the record.

    The record is data and can name anything. For example, `plots/a b.png` with kind `plots` becomes
    `plots/a-b.png`; deeper folders become part of the name.
    """
    uploads: dict[str, Upload] = {}
    sources = set[str]()
    skipped: dict[str, str] = {}
    for artifact in artifacts:
        kind = artifact.kind if artifact.kind in FOLDERS else ""
        parts = PurePosixPath(artifact.path).parts
        name = safe_name("-".join(part for part in parts if part not in (kind, DETAILS)))
        source = str(folder.absolute() / artifact.path)
        target = f"{kind}/{name}".lstrip("/")
        if reason := _refusal(artifact.path, folder):
            skipped[artifact.path] = reason
        elif target in uploads:
            skipped[artifact.path] = f"{target} is there already"
        elif source in sources:
            skipped[artifact.path] = "it is named twice"
        else:
            uploads[target] = Upload(source=source, folder=kind, name=name)
            sources.add(source)
    return list(uploads.values()), skipped


def _refusal(path: str, folder: Path) -> str | None:
    """Return why a file is not sent, or None.

    Links, and files outside the run's folder, are never sent.
    """
    root = folder.resolve()
    source = root / path
    try:
        if not source.is_relative_to(root) or source.resolve() != source:
            return "a link, or outside of the run's folder"
        if not source.is_file():
            if source.exists():
                return "not a file"
            return "missing"
        if source.stat().st_size > _MAX_FILE_BYTES:
            return f"larger than {_MAX_FILE_BYTES >> 30} GiB"
        return None
    except (OSError, ValueError) as error:
        return str(error)
