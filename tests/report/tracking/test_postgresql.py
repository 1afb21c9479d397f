"""MLflow's server as docker/compose.yaml starts it, on a PostgreSQL of this test's own, with authentication."""

import multiprocessing
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from perfexp import commands
from perfexp.records.analysis import Analysis
from perfexp.report.tracking import mlflow_sink, send
from perfexp.report.tracking.mlflow_sink import MlflowSink

ROOT = Path(__file__).parents[3]
PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAMS is None, reason="postgresql is not installed: apt-get install postgresql"
    ),
]
WRITERS = 16
#: Limit on each step, for machines that do other things too.
START_SECONDS = 300
SECRETS = ("postgres_password", "mlflow_admin_password", "mlflow_secret_key")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def place():
    """A folder that the user of the database can enter, with the files of secrets beside what is written."""
    folder = Path(tempfile.mkdtemp(prefix="perfexp-postgresql-"))
    folder.chmod(0o755)
    (folder / "secrets").mkdir()
    for name in SECRETS:
        (folder / "secrets" / name).write_text(f"{secrets.token_hex(24)}\n")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def words(place):
    return {name: (place / "secrets" / name).read_text().strip() for name in SECRETS}


@pytest.fixture(scope="module")
def postgres(place):
    """A private cluster on a loopback port: the port."""
    data, port = place / "data", free_port()
    data.mkdir(mode=0o700)
    as_user = []
    if os.getuid() == 0:  # the server refuses to run as root
        shutil.chown(data, "postgres", "postgres")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    password = place / "secrets" / "postgres_password"
    options = [
        "--username=mlflow",
        "--auth=scram-sha-256",
        f"--pwfile={password}",
        "--no-sync",
        "-D",
        str(data),
    ]
    subprocess.run([*as_user, str(PROGRAMS), *options], check=True, capture_output=True, cwd="/")
    settings = ["-h", "127.0.0.1", "-p", str(port), "-k", "", "-c", "fsync=off"]
    with (place / "postgres.log").open("wb") as log:
        server = subprocess.Popen(
            [*as_user, str(PROGRAMS.with_name("postgres")), "-D", str(data), *settings],
            stdout=log,
            stderr=log,
            cwd="/",
        )
    try:
        _wait_for(
            lambda: socket.create_connection(("127.0.0.1", port), 1).close(),
            server,
            place / "postgres.log",
        )
        environment = os.environ | {"PGPASSWORD": password.read_text().strip()}
        create = [
            "psql",
            "-h",
            "127.0.0.1",
            "-p",
            str(port),
            "-U",
            "mlflow",
            "-d",
            "postgres",
            "-c",
        ]
        subprocess.run(
            [*create, "create database mlflow"], env=environment, check=True, capture_output=True
        )
        yield port
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def server(place, postgres):
    """The address of MLflow's server, started by the script of its image."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    pytest.importorskip(
        "flask_wtf", reason="Flask-WTF is not installed: pip install 'mlflow[auth]'"
    )
    port = free_port()
    environment = os.environ | {
        "SECRETS": str(place / "secrets"),
        "ARTIFACTS": str(place / "artifacts"),
        "MLFLOW_AUTH_CONFIG_PATH": str(ROOT / "docker" / "mlflow-auth.ini"),
        "PGHOST": "127.0.0.1",
        "PGPORT": str(postgres),
        "HOME": str(place),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    arguments = ["--host=127.0.0.1", f"--port={port}", f"--allowed-hosts=127.0.0.1:{port}"]
    with (place / "server.log").open("wb") as log:
        started = subprocess.Popen(
            [str(ROOT / "docker" / "mlflow-server.sh"), *arguments],
            stdout=log,
            stderr=log,
            cwd=place,
            env=environment,
            start_new_session=True,
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        _wait_for(
            lambda: urllib.request.urlopen(f"{uri}/health", timeout=2).close(),
            started,
            place / "server.log",
        )
        yield uri
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, 15)
        started.wait(30)


def _wait_for(attempt, process, log):
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return attempt()
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)


def publish(uri, record, folder):
    """Send a record from a process of its own, which has imported MLflow before it was forked."""
    mlflow_sink.deliver = send.send
    MlflowSink(uri=uri, experiment="parallel", deadline_seconds=START_SECONDS).publish(
        Analysis.of(record), folder
    )


@pytest.fixture(autouse=True)
def new_sender():
    """Each command has a sending process of its own, with its environment."""
    mlflow_sink.end_sender()
    yield
    mlflow_sink.end_sender()


@pytest.fixture
def user(monkeypatch, words):
    """The server's user, as the environment of a run has it."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", words["mlflow_admin_password"])


def test_of_sixteen_writers_at_once_nothing_is_lost(server, user, make_record, leave_run, tmp_path):
    from mlflow import MlflowClient

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["mlflow", "perfexp.report.tracking.mlflow_sink", "perfexp.report.tracking.send"]
    )
    records = [make_record(uid=f"{number:032x}", sizes=(224, 256)) for number in range(WRITERS)]
    processes = [
        context.Process(
            target=publish, args=(server, record, leave_run(record, tmp_path / record.uid))
        )
        for record in records
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * WRITERS
    client = MlflowClient(tracking_uri=server)
    runs = client.search_runs([client.get_experiment_by_name("parallel").experiment_id])
    assert {run.data.tags["perfexp.uid"] for run in runs} == {record.uid for record in records}
    whole = [run for run in runs if run.data.tags["perfexp.kind"] == "run"]
    assert (len(whole), len(runs)) == (WRITERS, 3 * WRITERS)
    for run in whole:
        assert run.info.status == "FINISHED"
        assert len(client.get_metric_history(run.info.run_id, "latency/p50_ms")) == 2
        assert "data/record.json" in [
            file.path for file in client.list_artifacts(run.info.run_id, "data")
        ]


def test_a_wrong_password_is_one_line_and_the_record_stays(
    server, monkeypatch, make_record, leave_run, tmp_path, capfd
):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-and-never-written")
    folder = leave_run(make_record(), tmp_path)
    before = (folder / "record.json").read_bytes()
    assert commands.run(["sync", str(folder), "--uri", server]) == 3
    printed = capfd.readouterr()
    [line] = printed.err.splitlines()
    assert "401" in line or "authent" in line.lower() or "credential" in line.lower(), line
    assert "wrong-and-never-written" not in printed.out + printed.err
    assert (folder / "record.json").read_bytes() == before


def test_credentials_are_in_no_file(
    server, user, words, place, make_record, leave_run, tmp_path, capfd
):
    """Neither of the run nor of both servers, whose database has hashes."""
    folder = leave_run(make_record(uid="f" * 32), tmp_path)
    assert commands.run(["sync", str(folder), "--uri", server]) == 0
    files = [file for top in (place, tmp_path) for file in top.rglob("*") if file.is_file()]
    leaks = [
        (name, str(file))
        for file in files
        if file.parent != place / "secrets"
        for name, word in words.items()
        if word.encode() in file.read_bytes()
    ]
    assert not leaks
    assert not [name for name, word in words.items() if word in "".join(capfd.readouterr())]
