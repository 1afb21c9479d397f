"""Store: where the tracking database is, who may write to it now, and how to look at it; without MLflow."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Where `perfexp ui` listens unless told otherwise.
HOST, PORT = "127.0.0.1", 5000
#: Folder of the artifacts, beside the database; MLflow's own servers call theirs so too.
ARTIFACTS = "mlartifacts"

_SQLITE = "sqlite:///"


def store_uri(uri: str | None) -> str:
    """The URI of a store that means the same wherever it is used from.

    Args:
        uri: None for `outputs/mlflow.db` of the working directory; a sqlite file is made absolute.
    """
    if uri is None:
        return f"{_SQLITE}{Path('outputs/mlflow.db').absolute().as_posix()}"
    file = database(uri)
    return f"{_SQLITE}{file.as_posix()}" if file else uri.rstrip("/")


def database(uri: str) -> Path | None:
    """The file of a sqlite store, absolute; None for any other kind of store."""
    name = uri.removeprefix(_SQLITE)
    if not uri.startswith(_SQLITE) or name in ("", ":memory:"):
        return None
    return Path(name).absolute()


def is_server(uri: str) -> bool:
    """Whether the URI is that of a tracking server."""
    return uri.startswith(("http://", "https://"))


def artifact_folder(uri: str) -> Path | None:
    """Where the artifacts of new experiments go; None where a tracking server decides.

    Args:
        uri: from `store_uri`.
    """
    if is_server(uri):
        return None
    file = database(uri)
    return (file.parent if file else Path("outputs").absolute()) / ARTIFACTS


@contextmanager
def locked(uri: str) -> Iterator[None]:
    """While entered, this process is the only one of this machine that makes a schema, an experiment or a run.

    Two processes that make the schema of one fresh database at once kill each other, and two that look for a run
    before either has made it make it twice. The lock goes with the process that holds it, however that ends.

    Args:
        uri: from `store_uri`.
    """
    descriptor = os.open(_lock_file(uri), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock_file(uri: str) -> Path:
    file = database(uri)
    if file is None:
        digest = hashlib.sha256(uri.encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"perfexp-{os.getuid()}-{digest}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f"{file.name}.lock")


def without_password(text: str) -> str:
    """A text in which no URL carries a name and a password any more."""
    return re.sub(r"(?<=://)\S*@", "***@", text)  # as far as the last @: a password may hold what it should not


def page(base: str, experiment_id: str, run_id: str | None = None) -> str:
    """The address of an experiment or a run in MLflow's pages.

    Args:
        base: the server, `http://127.0.0.1:5000`.
        experiment_id: of the experiment.
        run_id: of one of its runs.
    """
    run = f"/runs/{run_id}" if run_id else ""
    # without it an experiment opens on an empty page for language models
    return f"{base}/#/experiments/{experiment_id}{run}?workflowType=machine_learning"


def how_to_look(uri: str, experiment_id: str, run_id: str) -> str:
    """Two lines for the console: the command that opens the store, if one is needed, and the address of a run.

    Args:
        uri: from `store_uri`.
        experiment_id: of the run's experiment.
        run_id: of the run.
    """
    if is_server(uri):
        return page(without_password(uri), experiment_id, run_id)
    option = "" if uri == store_uri(None) else f" --uri {shlex.quote(without_password(uri))}"
    return f"perfexp ui{option}\n{page(f'http://{HOST}:{PORT}', experiment_id, run_id)}"
