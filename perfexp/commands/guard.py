"""A guard in front of MLflow's server: against foreign web pages, and for foreign stores.

MLflow's own checks are not enough. Its default host list has patterns that also match names: `10.*`
matches 10.evil.example. Besides, any page served from this machine, on any port, may read and
write. The server also sends files from wherever the store says that a run's artifacts are.
"""

from __future__ import annotations

import fnmatch
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from perfexp.report.tracking import store

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
#: Name of the MLflow plugin, and the variable in which MLflow's command line passes the hosts.
APPLICATION, HOSTS_VARIABLE = "perfexp-guard", "MLFLOW_SERVER_ALLOWED_HOSTS"
#: Variable with the store that the server shows.
STORE_VARIABLE = "MLFLOW_BACKEND_STORE_URI"
#: Artifact places that name another place in the same store, which is checked in its turn.
_NAMES = ("runs:", "models:")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def create_app() -> Application:
    """Return MLflow's application behind the guard; uvicorn calls this."""
    from mlflow.server.fastapi_app import app

    _refuse_foreign_places(os.environ[STORE_VARIABLE])
    return Guard(app, os.environ[HOSTS_VARIABLE].split(","))


def _refuse_foreign_places(uri: str) -> None:
    """Make MLflow refuse artifacts outside of the store in this process.

    Somebody else may have written the store, or may send a request that creates an experiment.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry

    repository = _artifact_repository_registry.get_artifact_repository

    def checked(artifact_uri: str, *others: Any, **options: Any) -> Any:
        """Return the repository for an address; raise an error if it is outside of the store."""
        if not artifact_uri.startswith(_NAMES) and store.is_foreign_place(artifact_uri, uri):
            raise MlflowException("These artifacts are outside of the store.", PERMISSION_DENIED)
        return repository(artifact_uri, *others, **options)

    _artifact_repository_registry.get_artifact_repository = checked


def write_plugin(folder: Path) -> None:
    """Register `create_app` for MLflow's option --app-name.

    `perfexp ui` calls it before it starts the server.

    Args:
        folder: empty folder; processes with it in PYTHONPATH find the plugin.
    """
    metadata = folder / "perfexp_guard-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: perfexp-guard\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[mlflow.app]\n{APPLICATION} = {__name__}:create_app\n"
    )


def accepted_hosts(host: str, port: int, others: str | None) -> list[str]:
    """Return the accepted values of the Host header, with and without the port.

    `perfexp ui` passes them to the server.

    Args:
        others: further names, separated by commas; a name may contain `*`.
    """
    names = [*LOOPBACK, *(_own_names() if host in EVERYWHERE else [host])]
    names += [name.strip().strip("[]") for name in (others or "").split(",") if name.strip()]
    quoted = (f"[{name}]" if name.count(":") > 1 else name for name in names)
    return list(
        dict.fromkeys(value.lower() for name in quoted for value in (name, f"{name}:{port}"))
    )


def _own_names() -> list[str]:
    """Return the names and addresses of this machine.

    A server that listens on all addresses accepts all of them.
    """
    addresses = [
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [socket.gethostname(), socket.getfqdn(), *addresses]


class Guard:
    """An ASGI application that passes on only requests to its own address from its own pages.

    Args:
        application: the guarded application.
        hosts: accepted values of the Host header, from `accepted_hosts`.
    """

    def __init__(self, application: Application, hosts: Sequence[str]) -> None:
        self._application, self._hosts = application, tuple(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as the ASGI specification describes."""
        fault = None if scope["type"] == "lifespan" else self._fault(scope)
        if fault is None:
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": f"perfexp ui: {fault}\n".encode()})

    def _fault(self, scope: Scope) -> str | None:
        """Return why a request is refused; None if it is accepted."""
        hosts, origins = (_values(scope, name) for name in (b"host", b"origin"))
        if len(hosts) != 1 or not any(_matches(hosts[0], pattern) for pattern in self._hosts):
            return "this name is not allowed; allow it with --allowed-hosts NAME[:PORT]"
        # browsers send Origin with requests that can change data …
        if origins and any(urlsplit(origin).netloc != hosts[0] for origin in origins):
            return "a page of another address sent this request"
        # … and Sec-Fetch-Site with all requests
        sites = _values(scope, b"sec-fetch-site")
        is_foreign = "cross-site" in sites or "same-site" in sites
        if is_foreign and not _is_link(scope):
            return "a page of another address sent this request"
        return None


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return the values of a request's header, in lower case."""
    return [
        value.decode("latin-1").strip().lower()
        for key, value in scope["headers"]
        if key.lower() == name
    ]


def _matches(host: str, pattern: str) -> bool:
    """Return whether a Host header matches a pattern, which may contain `*`."""
    if "*" in pattern:
        return fnmatch.fnmatchcase(host, pattern)
    return host == pattern


def _is_link(scope: Scope) -> bool:
    """Return whether the user follows a link to a page.

    Following a link reveals nothing to the page that contains it.
    """
    destination = _values(scope, b"sec-fetch-dest")
    return scope.get("method") in ("GET", "HEAD") and destination == ["document"]
