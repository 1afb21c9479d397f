"""Tracking store: URI, lock, artifact folder, pages and text limits, without importing MLflow.

A store is a SQLite file (by default outputs/mlflow.db), another database, or a tracking server.
Records may contain credentials and stores may be prepared by others, so texts are masked, and
nothing is sent to a place that the user did not name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shlex
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from perfexp.errors import PerfexpError, UserError
from perfexp.host import locks
from perfexp.host.cache import home
from perfexp.host.credentials import hide, mask
from perfexp.host.foreign import is_regular
from perfexp.records.folders import ARTIFACTS

#: Default address for `perfexp ui`.
HOST, PORT = "127.0.0.1", 5000

#: Databases refuse longer names; MLflow truncates longer parameters and tags silently.
NAME_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 6_000, 8_000
_CUT = " … (cut)"
#: Characters that names in MLflow cannot have.
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-.: ]+")
#: Mark at the end of unedited descriptions; MLflow's pages hide it.
_MARK = "\n\n<!-- perfexp "
#: Object stores that a server may name; its own store is `mlflow-artifacts:` without a host.
_OBJECT_STORES = ("s3", "gs", "wasbs", "abfss", "r2")
#: Query that counts code in a database. MLflow 3.17 creates a trigger for the table `secrets`,
#: which perfexp never writes to.
_CODE = (
    "select count(*) from sqlite_master where type = 'view' or (type = 'trigger' and tbl_name <> "
    "'secrets')"
)
#: Last bytes of a journal that names another file.
#: Source: sqlite.org/fileformat.html, "The Rollback Journal"
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
_SQLITE, _VARIABLE = "sqlite:///", "MLFLOW_TRACKING_URI"
#: URI schemes; a database scheme may name its driver, e.g. `postgresql+psycopg`.
_KINDS = ("http", "https", "postgresql", "mysql", "mssql")


class TrackingFailed(PerfexpError):
    """A record could not be sent. It is on disk and can be sent again."""

    exit_code = 3


class LockTimeout(TrackingFailed):
    """Another process still held the database lock at the deadline."""


def mlflow_environment() -> dict[str, str]:
    """Return environment variables for MLflow: no telemetry, and a home, which its import needs."""
    return {"MLFLOW_DISABLE_TELEMETRY": "true", "HOME": os.environ.get("HOME") or str(home())}


def clean(text: str, length: int) -> str:
    """Return a text that every store accepts, cut to `length` characters.

    Credentials are masked, NUL is removed, and lone surrogates become `?`. All texts that are sent
    go through it.
    """
    text = mask(text.replace("\0", "").encode(errors="replace").decode())
    if len(text) <= length:
        return text
    return text[: length - len(_CUT)] + _CUT


def allowed(text: str) -> str:
    """Return a name with `_` for characters that MLflow names cannot contain, never empty."""
    return _FORBIDDEN.sub("_", text).strip(" .") or "unnamed"


def metric_part(text: str) -> str:
    """Return one part of a metric name. A slash would open another group, so it becomes a dot."""
    return allowed(text.replace("/", "."))


def signed(note: str) -> str:
    """Return a description with its hash appended, so that later edits can be detected."""
    return f"{note}{_MARK}{hashlib.sha256(note.encode()).hexdigest()[:16]} -->"


def is_unedited(note: str) -> bool:
    """Return whether a stored description is unchanged since perfexp wrote it.

    A description that a person has edited is not replaced.
    """
    body, mark, _ = note.rpartition(_MARK)
    return bool(mark) and note.rstrip() == signed(body)


def store_uri(uri: str | None) -> str:
    """Return a store's URI in a form that works from any working directory.

    Args:
        uri: None for `MLFLOW_TRACKING_URI`, or else `outputs/mlflow.db` in the working directory.

    Raises:
        UserError: MLflow has no such store.
    """
    source = ""
    if uri is None:
        uri, source = os.environ.get(_VARIABLE) or f"{_SQLITE}outputs/mlflow.db", f" ({_VARIABLE})"
    if fault := _fault(uri):
        raise UserError(
            f"tracking store {uri.partition(':')[0][:20]}:…{source}: {fault}. "
            "Use sqlite:///FILE, postgresql://…, mysql://…, mssql://…, http://… or https://…."
        )
    file, query = database(uri), uri[uri.find("?") :] if "?" in uri else ""
    if file:
        return f"{_SQLITE}{file.as_posix()}{query}"
    return uri.rstrip("/")


def _fault(uri: str) -> str | None:
    """Return why a URI cannot be a store, without connecting to it; None if it can.

    Such a URI is refused before anything is measured. Texts never repeat the URI, which may hold a
    password.
    """
    scheme, separator, address = uri.partition("://")
    kind = scheme.partition("+")[0]
    if not uri.isprintable():
        return "it has characters that do not print"
    if kind == "sqlite":
        file = database(uri)
        if file is None:
            return "a file's name is missing"
        if uri.endswith("/") or file.is_dir():
            return "this is a folder, not a file"
        return None
    # installed packages may add stores to MLflow
    plugins = {
        entry.name for entry in importlib.metadata.entry_points(group="mlflow.tracking_store")
    }
    if not separator or (scheme not in plugins and kind not in _KINDS):
        return "MLflow has no store of this kind"
    if not is_server(uri):
        if address:
            return None
        return "the database is missing"
    try:
        parts = urlsplit(uri)
        if not parts.hostname or parts.port == 0:
            return "the server's name or port is missing"
    except ValueError:  # its text quotes the port, which may be a part of a password
        return "this is not the address of a server; in a password, write / as %2F"
    return (
        "give the server's address only, without ? and #" if parts.query or parts.fragment else None
    )


def database(uri: str) -> Path | None:
    """Return the absolute path to a SQLite store; None for other kinds.

    Checks for links, locks and other users' files apply to such stores.
    """
    name = uri.removeprefix(_SQLITE).partition("?")[0]
    if not uri.startswith(_SQLITE) or name in ("", ":memory:"):
        return None
    return Path(name).absolute()


def is_server(uri: str) -> bool:
    """Return whether the URI names a tracking server."""
    return uri.startswith(("http://", "https://"))


def refuse_foreign_database(uri: str) -> None:
    """Refuse a SQLite store that could send records elsewhere: another user may have prepared it.

    Raises:
        UserError: the store or its artifact folder is a link, or the store runs code on writes.
    """
    file, folder = database(uri), artifact_folder(uri)
    if file is None or folder is None:
        return
    if folder.is_symlink() and is_default(uri):
        raise UserError(
            f"{folder} is a link: artifacts are stored in folders of this store only. Remove it."
        )
    if not os.path.lexists(file):
        return
    if not file.is_file() or (file.is_symlink() and is_default(uri)):
        raise UserError(
            f"{file} is not a regular file. Remove it, or name the store by tracking.uri."
        )
    for log in (Path(f"{file}-journal"), Path(f"{file}-wal")):
        if os.path.lexists(log) and (not is_regular(log) or _names_others(log)):
            raise UserError(
                f"{log} is not a log of this database alone: nothing is written to it. Remove the "
                "log."
            )
    # SQLite first rolls back interrupted transactions, so the query sees the final state.
    # Errors are ignored here: MLflow reports them.
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as connection,
    ):
        [(num_programs,)] = connection.execute(_CODE)
        if num_programs:
            raise UserError(
                f"{file} has triggers or views that MLflow does not make: nothing is written to it."
            )


def _names_others(log: Path) -> bool:
    """Return whether a journal names a super-journal, which SQLite would delete.

    MLflow never changes two databases at once, so it never writes such a journal.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - len(_SUPER_JOURNAL)))
        return file.read() == _SUPER_JOURNAL


def is_default(uri: str) -> bool:
    """Return whether the store is the default, not named by the user.

    It lies in the working directory, or in the directory of the sweep's first command. The user did
    not choose it, so links and artifacts elsewhere are refused for it.
    """
    file = database(uri)
    return file is not None and file.parts[-2:] == ("outputs", "mlflow.db")


def is_foreign_place(artifact_uri: str, uri: str) -> bool:
    """Return whether artifacts would leave the store.

    A server's artifacts must not go to another host, a default database's not to another folder.
    Databases that the user named may keep artifacts in any folder or object store.
    """
    scheme, _, after_scheme = artifact_uri.partition(":")
    if is_server(uri):
        hosts = ("", urlsplit(uri).netloc.rpartition("@")[2])
        is_elsewhere = after_scheme.startswith("//") and urlsplit(after_scheme).netloc not in hosts
        return scheme not in _OBJECT_STORES and (scheme != "mlflow-artifacts" or is_elsewhere)
    folder, is_path = artifact_folder(uri), scheme in ("file", artifact_uri) or "/" in scheme
    if folder is None or not is_default(uri):
        return not is_path and scheme not in _OBJECT_STORES
    path = Path(unquote(urlsplit(artifact_uri).path)) if scheme == "file" else Path(artifact_uri)
    return not is_path or not path.resolve().is_relative_to(folder.resolve())


def artifact_folder(uri: str) -> Path | None:
    """Return the artifact folder for new experiments; None if a tracking server decides.

    It lies beside a SQLite file, otherwise in `outputs`.
    """
    if is_server(uri):
        return None
    file = database(uri)
    return (file.parent if file else Path("outputs").absolute()) / ARTIFACTS


def lock_name(uri: str) -> str | None:
    """Return a database's lock name; None for a server, which has no lock.

    The name depends on the database alone, so that processes in different folders share the lock.
    """
    if is_server(uri):
        return None
    file = database(uri)
    identity = f"{_SQLITE}{file.resolve().as_posix()}" if file else uri
    return f"tracking-{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:16]}"


@contextmanager
def locked(uri: str, seconds: float) -> Iterator[None]:
    """Hold the database lock inside the `with` block; a server has none.

    Creating a schema, an experiment or a run needs it: two processes cannot create the schema in a
    new database at once.

    Args:
        seconds: limit for waiting.

    Raises:
        LockTimeout: the lock was not free within `seconds`.
        UserError: locks are impossible here, e.g. another user owns the lock folder.
    """
    name = lock_name(uri)
    if name is None:
        yield
        return
    locks.private_folder()  # a folder of another user is refused
    path = locks.lock_path(name)
    sign = partial(locks.sign, purpose="sends a record to the same tracking store")
    lock = FileLock(path, mode=0o600, fallback_to_soft=False, on_acquired=sign)
    try:
        lock.acquire(timeout=seconds, poll_interval=0.1)
    except Timeout as error:
        with locks.opened(name, os.O_RDONLY) as descriptor:
            owner = locks.owner_of(descriptor) or "another process has the lock"
        raise LockTimeout(f"{owner} (lock {path}); wait for that process, or end it") from error
    try:
        yield
    finally:
        lock.release()


def checked_id(identifier: object) -> str:
    """Return a store's id as text. The store may be a foreign server.

    Raises:
        TrackingFailed: the text is not an id.
    """
    text = str(identifier)
    if not re.fullmatch(r"[\w-]{1,64}", text, re.ASCII):
        raise TrackingFailed("its server answers with an id that is none")
    return text


def page(base: str, experiment_id: str, run_id: str | None = None) -> str:
    """Return the web address for an experiment or a run.

    `perfexp ui` and the answer to a delivery show it.

    Args:
        base: the server's address, e.g. `http://127.0.0.1:5000`.
    """
    run = f"/runs/{run_id}" if run_id else ""
    # without workflowType an experiment opens on an empty page for language models
    return f"{base}/#/experiments/{experiment_id}{run}?workflowType=machine_learning"


def view_page(base: str, experiment_id: str, key: str) -> str:
    """Return the web address for an experiment's saved view."""
    view = f"workflowType=machine_learning&viewStateShareKey={key}"
    return f"{base}/#/experiments/{experiment_id}/runs?{view}"


def uri_option(uri: str) -> str:
    """Return the `--uri` option that selects this store; empty if it is the default."""
    if uri == store_uri(None):
        return ""
    return f" --uri {shlex.quote(hide(uri))}"


def how_to_look(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the command that opens the store, and the run's page if its server runs."""
    if is_server(uri):
        return page(hide(uri), experiment_id, run_id)
    command = f"perfexp ui{uri_option(uri)}"
    with suppress(OSError), socket.create_connection((HOST, PORT), timeout=0.2):
        return f"{command}\n{page(f'http://{HOST}:{PORT}', experiment_id, run_id)}"
    return command
