"""Store: the URI of the tracking store, its lock, its artifacts and its pages; without MLflow."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from perfexp.errors import UserError
from perfexp.host.cache import home
from perfexp.host.credentials import hide
from perfexp.host.untrusted import is_regular
from perfexp.records.folders import ARTIFACTS

#: Where `perfexp ui` listens unless told otherwise.
HOST, PORT = "127.0.0.1", 5000

#: Stores of objects that a server may name; its own is `mlflow-artifacts:` without a host.
_OBJECT_STORES = ("s3", "gs", "wasbs", "abfss", "r2")
#: What runs by itself in a database; MLflow 3.17 makes a trigger of its own for a table that perfexp never writes to.
_CODE = "select count(*) from sqlite_master where type = 'view' or (type = 'trigger' and tbl_name <> 'secrets')"
#: The last bytes of a journal that ends in the name of another file (sqlite.org/fileformat.html, the rollback journal).
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
_SQLITE, _VARIABLE = "sqlite:///", "MLFLOW_TRACKING_URI"
#: Schemes of servers and of databases; a database's may name its driver, `postgresql+psycopg`.
_KINDS = ("http", "https", "postgresql", "mysql", "mssql")


def mlflow_environment() -> dict[str, str]:
    """What MLflow finds in its environment wherever it runs: no telemetry, and a home, which its import needs."""
    return {"MLFLOW_DISABLE_TELEMETRY": "true", "HOME": os.environ.get("HOME") or str(home())}


def store_uri(uri: str | None) -> str:
    """The URI of a store that means the same wherever it is used from.

    Args:
        uri: None for MLflow's own `MLFLOW_TRACKING_URI`, or else `outputs/mlflow.db` of the working directory. A sqlite
            file is made absolute.

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
    return f"{_SQLITE}{file.as_posix()}{query}" if file else uri.rstrip("/")


def _fault(uri: str) -> str | None:
    """Why no store can have this URI, as far as that shows without asking the store; None where one can."""
    scheme, separator, rest = uri.partition("://")
    kind = scheme.partition("+")[0]
    if not uri.isprintable():
        return "it has characters that do not print"
    if kind == "sqlite":
        file = database(uri)
        if file is None:
            return "a file's name is missing"
        return "this is a folder, not a file" if uri.endswith("/") or file.is_dir() else None
    if not separator or not (kind in _KINDS or scheme in _plugins()):
        return "MLflow has no store of this kind"
    return _server_fault(uri) if is_server(uri) else None if rest else "the database is missing"


def _server_fault(uri: str) -> str | None:
    """Why no server can have this address."""
    try:
        parts = urlsplit(uri)
        if not parts.hostname or parts.port == 0:
            return "the server's name or port is missing"
    except ValueError:  # its text holds what stands in the place of the port, which may be a password
        return "this is not the address of a server; in a password, write / as %2F"
    return "give the server's address only, without ? and #" if parts.query or parts.fragment else None


def _plugins() -> set[str]:
    """Schemes of the stores that installed packages add to MLflow."""
    return {entry.name for entry in importlib.metadata.entry_points(group="mlflow.tracking_store")}


def database(uri: str) -> Path | None:
    """The file of a sqlite store, absolute; None for any other kind of store."""
    name = uri.removeprefix(_SQLITE).partition("?")[0]
    if not uri.startswith(_SQLITE) or name in ("", ":memory:"):
        return None
    return Path(name).absolute()


def is_server(uri: str) -> bool:
    """Whether the URI is that of a tracking server."""
    return uri.startswith(("http://", "https://"))


def refuse_foreign_database(uri: str) -> None:
    """See that a sqlite store, if it is there, cannot lead what is sent elsewhere. Somebody else may have made it.

    Args:
        uri: from `store_uri`.

    Raises:
        UserError: the database or its folder of artifacts is a link, or something in it runs when it is written to.
    """
    file, folder = database(uri), artifact_folder(uri)
    if file is None or folder is None:
        return
    if folder.is_symlink() and is_default(uri):
        raise UserError(f"{folder} is a link: artifacts are stored in folders of this store only. Remove it.")
    if not file.exists() and not file.is_symlink():
        return
    if not file.is_file() or (file.is_symlink() and is_default(uri)):
        raise UserError(f"{file} is not a regular file. Remove it, or name the store by tracking.uri.")
    logs = [log for ending in ("-journal", "-wal") if os.path.lexists(log := Path(f"{file}{ending}"))]
    for log in logs:
        if not is_regular(log) or _names_others(log):
            raise UserError(f"{log} is not a log of this database alone: nothing is written to it. Remove the log.")
    try:
        # an interrupted transaction is undone or completed first: what it leaves is looked at
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=rw", uri=True, timeout=10.0)) as connection:
            [(found,)] = connection.execute(_CODE)
    except sqlite3.Error as error:
        if logs and error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise UserError(f"{file} can't be read with {logs[0].name} beside it: {error}.") from error
        return  # MLflow reports what is wrong with it
    if found:
        raise UserError(f"{file} has triggers or views that MLflow does not make: nothing is written to it.")


def _names_others(log: Path) -> bool:
    """Whether a journal names a super-journal, which SQLite deletes; MLflow never changes two databases at once."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - len(_SUPER_JOURNAL)))
        return file.read() == _SUPER_JOURNAL


def is_default(uri: str) -> bool:
    """Whether nobody named the store: it is that of the folder where the user stands, or stood when a sweep was begun.

    Args:
        uri: from `store_uri`.
    """
    file = database(uri)
    return file is not None and file.parts[-2:] == ("outputs", "mlflow.db")


def is_foreign_place(place: str, uri: str) -> bool:
    """Whether artifacts would leave the store: another host than the server's, or another folder than the database's.

    A database that the user named may keep its artifacts wherever its experiments say.

    Args:
        place: URI of a run's artifacts, as the store has it.
        uri: the store's URI, from `store_uri`.
    """
    scheme, _, rest = place.partition(":")
    if is_server(uri):
        return scheme not in _OBJECT_STORES and (scheme != "mlflow-artifacts" or is_elsewhere(rest, uri))
    folder = artifact_folder(uri)
    if folder is None or not is_default(uri):
        return False
    path = Path(unquote(urlsplit(place).path)) if scheme == "file" else Path(place)
    return scheme not in ("file", place) or not path.resolve().is_relative_to(folder.resolve())


def is_elsewhere(place: str, uri: str) -> bool:
    """Whether a place for artifacts is on another host than the server's.

    Args:
        place: what follows the scheme, `/path` or `//host/path`.
        uri: the server's URI.
    """
    return place.startswith("//") and urlsplit(place).netloc not in ("", urlsplit(uri).netloc.rpartition("@")[2])


def artifact_folder(uri: str) -> Path | None:
    """Where the artifacts of new experiments go; None where a tracking server decides.

    Args:
        uri: from `store_uri`.
    """
    if is_server(uri):
        return None
    file = database(uri)
    return (file.parent if file else Path("outputs").absolute()) / ARTIFACTS


def lock_name(uri: str) -> str | None:
    """Name of the lock under which a schema, an experiment or a run is made; None for a server, which needs none.

    Two processes that make the schema of one fresh database at once kill each other. The name follows from the
    database alone: processes in different folders have to meet.

    Args:
        uri: from `store_uri`.
    """
    if is_server(uri):
        return None
    file = database(uri)
    identity = f"{_SQLITE}{file.resolve().as_posix()}" if file else uri
    return f"tracking-{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:16]}"


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
        return page(hide(uri), experiment_id, run_id)
    option = "" if uri == store_uri(None) else f" --uri {shlex.quote(hide(uri))}"
    return f"perfexp ui{option}\n{page(f'http://{HOST}:{PORT}', experiment_id, run_id)}"
