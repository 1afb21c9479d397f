"""perfexp ui: run MLflow's server on the tracking store until it is interrupted."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from perfexp.commands.app import Uri, app, echo
from perfexp.commands.guard import (
    APPLICATION,
    EVERYWHERE,
    LOOPBACK,
    STORE_VARIABLE,
    accepted_hosts,
    write_plugin,
)
from perfexp.errors import PerfexpError, UserError
from perfexp.host import interrupts
from perfexp.host.credentials import hide, mask
from perfexp.host.foreign import printable
from perfexp.host.installation import is_here_on_path, python_command
from perfexp.report.tracking import store
from perfexp.report.tracking.views import VIEWS

#: Time limits for the server's start and end, and the pause between two questions.
_START_SECONDS, _END_SECONDS, _POLL_SECONDS = 120.0, 10.0, 0.2
#: Environment variables with `mlflow server` options, which perfexp's server ignores.
_OPTIONS = {
    *(
        "MLFLOW_ARTIFACTS_ONLY",
        "MLFLOW_DEFAULT_ARTIFACT_ROOT",
        "MLFLOW_GUNICORN_OPTS",
        "MLFLOW_UVICORN_OPTS",
    ),
    *("MLFLOW_READ_REPLICA_BACKEND_STORE_URI", "MLFLOW_REGISTRY_STORE_URI", "MLFLOW_STATIC_PREFIX"),
}
#: Requests to this machine bypass proxies.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


AllowedHosts = Annotated[
    str | None,
    typer.Option(
        help="Further allowed names in browsers, NAME[:PORT],…, with the port of a tunnel."
    ),
]


@app.command()
def ui(
    uri: Uri = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = store.PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; anyone who reaches it can read and delete.")
    ] = store.HOST,
    allowed_hosts: AllowedHosts = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the first link in a browser.")
    ] = False,
) -> None:
    """Open MLflow on the tracking store until Ctrl-C.

    Example: perfexp ui --port 5001 --open
    """
    location = store.store_uri(uri)
    # a tracking server needs no second server
    if store.is_server(location):
        echo(f"The tracking server has its own pages: {hide(location)}/#/experiments")
        return
    _check(location, host, port)
    if host not in LOOPBACK:
        echo(
            f"It has no authentication: anyone who reaches {host}:{port} "
            "can read and delete everything.",
            err=True,
        )
    hosts = accepted_hosts(host, port, allowed_hosts)
    command = [
        *_server(location),
        "--host",
        host,
        "--port",
        str(port),
        "--allowed-hosts",
        ",".join(hosts),
    ]
    address = EVERYWHERE.get(host, host)
    base = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    echo(f"Starting MLflow on {base} …", err=True)
    with (
        tempfile.TemporaryFile("w+") as output,
        _environment(location) as environment,
        interrupts.handled(),
        _running(command, environment, output) as server,
        suppress(KeyboardInterrupt),
    ):
        _wait_for(server, base, output)
        links = _links(base)
        for name, link in links:
            typer.echo(printable(f"{mask(name)}  {link}"))  # a masked link would not open
        if open_page and links:
            webbrowser.open(links[0][1])
        echo("Ctrl-C ends it.")
        server.wait()
        raise _failure(f"ended with exit code {server.returncode}", output)


def _check(uri: str, host: str, port: int) -> None:
    """Raise `UserError` if the server cannot start: no store, no MLflow, or a port in use."""
    file = store.database(uri)
    if file is not None and not file.is_file():
        raise UserError(
            f"There is no tracking store {file} yet. "
            "Measure something, go to its folder, or give --uri."
        )
    store.refuse_foreign_database(uri)
    try:
        importlib.metadata.version("mlflow")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "MLflow's pages need the full package: pip install mlflow (mlflow-skinny only sends)."
        ) from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be opened ({error.strerror}); choose another with --port."
        ) from error


def _server(uri: str) -> list[str]:
    """Return MLflow's command without address and hosts."""
    command = python_command("mlflow", "server", "--workers", "1", "--app-name", APPLICATION)
    folder = store.artifact_folder(uri)
    if folder:
        return [*command, "--artifacts-destination", folder.as_uri()]
    return command


@contextmanager
def _environment(uri: str) -> Iterator[dict[str, str]]:
    """Yield the server's environment, with the store and the guard.

    The store may contain a password, which `ps` must not show.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _OPTIONS and not name.startswith(("MLFLOW_SERVER_", "_MLFLOW_"))
    }
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        write_plugin(Path(folder))
        yield variables | {
            STORE_VARIABLE: uri,
            # without language-model jobs: 2 processes and 0.5 GB instead of 15 and 2.7 GB
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **store.mlflow_environment(),
            # uvicorn searches the current folder first, where a flask.py may be
            "UVICORN_APP_DIR": folder,
            **({} if is_here_on_path() else {"PYTHONSAFEPATH": "1"}),
            "PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }


@contextmanager
def _running(
    command: list[str], environment: dict[str, str], output: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Run the server in its own process group; terminate the group on leaving."""
    server = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield server
    finally:
        # the server has child processes, so the whole group is signaled
        for ending in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, ending)
            with suppress(subprocess.TimeoutExpired):
                server.wait(_END_SECONDS)


def _wait_for(server: subprocess.Popen[str], base: str, output: IO[str]) -> None:
    """Wait until the server answers.

    Raises:
        PerfexpError: it has ended, or does not answer within 120 s.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise _failure(f"ended with exit code {server.returncode}", output)
        with suppress(OSError), _direct.open(f"{base}/health", timeout=5):
            return
        time.sleep(_POLL_SECONDS)
    raise _failure(f"did not answer at {base} within {_START_SECONDS:.0f} s", output)


def _links(base: str) -> list[tuple[str, str]]:
    """Return names and links: views of the last used experiment, then all experiments.

    Experiments are sorted by last use.
    """
    experiments = _experiments(base)
    links = []
    for last in experiments[:1]:
        tags = {tag["key"] for tag in last.get("tags", [])}
        for view in VIEWS:
            if view.tag in tags:
                links.append((view.name, store.view_page(base, last["experiment_id"], view.key)))
    return links + [
        (experiment["name"], store.page(base, experiment["experiment_id"]))
        for experiment in experiments
    ]


def _experiments(base: str) -> list[dict[str, Any]]:
    """Return the experiments, last used first.

    MLflow's empty default is left out unless it is alone.
    """
    query: dict[str, Any] = {"max_results": 20, "order_by": ["last_update_time DESC"]}
    request = urllib.request.Request(
        f"{base}/api/2.0/mlflow/experiments/search",
        json.dumps(query).encode(),
        {"Content-Type": "application/json"},
    )
    with _direct.open(request, timeout=30) as answer:
        experiments = json.load(answer).get("experiments", [])
    used = [experiment for experiment in experiments if experiment["experiment_id"] != "0"]
    return used or list(experiments)


def _failure(message: str, output: IO[str]) -> PerfexpError:
    """Return the error for a server that failed, with the last lines of its output."""
    output.seek(0)
    return PerfexpError(f"MLflow's server {message}.\n{''.join(output.readlines()[-10:]).rstrip()}")
