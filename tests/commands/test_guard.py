"""The guard of `perfexp ui`: what web pages of other addresses send to a real server, and what they get."""

import http.client
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import warnings
from types import SimpleNamespace

import psutil
import pytest

from perfexp.commands import guard
from perfexp.records.analysis import Analysis
from perfexp.records.record import SweepMembership
from perfexp.report.tracking.mlflow_sink import MlflowSink

pytestmark = pytest.mark.slow

READS = (
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/graphql"),
    ("GET", "/ajax-api/2.0/mlflow/experiments/get?experiment_id=0"),
    ("GET", "/api/2.0/mlflow/experiments/get?experiment_id=0"),
    ("GET", "/get-artifact?path=x&run_uuid=x"),
    ("GET", "/ajax-api/2.0/mlflow-artifacts/artifacts"),
    ("POST", "/graphql"),
    ("POST", "/api/2.0/mlflow/experiments/search"),
    ("POST", "/ajax-api/2.0/mlflow/runs/search"),
)
CREATE = "/api/2.0/mlflow/experiments/create"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`perfexp ui` on a store of its own, in an environment that would open MLflow's server to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    folder = tmp_path_factory.mktemp("guarded")
    for name in ("flask", "uvicorn"):
        (folder / f"{name}.py").write_text("raise SystemExit('code of the current folder')\n")
    here, folder = folder, folder / "outputs"
    folder.mkdir()
    uri = f"sqlite:///{folder}/mlflow.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        MlflowClient(tracking_uri=uri).create_experiment("there")
    script = "import sys; from perfexp import commands; sys.exit(commands.run(sys.argv[1:]))"
    options = ["--port", str(port), "--allowed-hosts", "tunnel.example:8080,*.lab.example"]
    ui = subprocess.Popen(
        [sys.executable, "-P", "-c", script, "ui", "--uri", uri, *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=here,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
            "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "true",
            "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": "*",
            "MLFLOW_SERVER_ALLOWED_HOSTS": "*",
        },
    )
    try:
        assert any(line.startswith("Ctrl-C") for line in ui.stdout)
        yield SimpleNamespace(port=port, process=psutil.Process(ui.pid), store=uri, folder=folder)
    finally:
        ui.send_signal(signal.SIGINT)
        ui.wait(30)
        ui.stdout.close()


@pytest.fixture
def ask(server):
    """A function that sends a request with the headers given, and no others."""

    def send(method, path, headers, body=b"{}"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        if method == "POST":
            connection.putheader("Content-Length", str(len(body)))
            if not any(name == "Content-Type" for name, _ in headers):
                connection.putheader("Content-Type", "application/json")
        connection.endheaders(body if method == "POST" else None)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, dict(answer.headers), content

    return send


def names(ask, server):
    """Names of the experiments in the store."""
    host = ("Host", f"127.0.0.1:{server.port}")
    _, _, content = ask(
        "POST", "/api/2.0/mlflow/experiments/search", [host], b'{"max_results": 1000}'
    )
    return {experiment["name"] for experiment in json.loads(content)["experiments"]}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
@pytest.mark.parametrize("with_port", [True, False])
def test_the_own_address_is_answered(host, with_port, ask, server):
    value = f"{host}:{server.port}" if with_port else host
    assert ask("GET", "/health", [("Host", value)])[0] == 200
    assert ask("GET", "/", [("Host", value), ("Origin", f"http://{value}")])[0] == 200


@pytest.mark.parametrize(
    "host", ["tunnel.example:8080", "gpu7.lab.example", "gpu7.lab.example:{port}"]
)
def test_names_that_the_user_allows_are_answered(host, ask, server):
    headers = [("Host", host.format(port=server.port))]
    assert ask("GET", "/api/2.0/mlflow/experiments/get?experiment_id=0", headers)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "10.evil.example",
        "192.168.evil.example",
        "172.16.evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "0.0.0.0",
        "localhost:1",
        "tunnel.example",
        "",
        None,
    ],
)
def test_rebound_host_name_reads_and_writes_nothing(host, ask, server):
    headers = [] if host is None else [("Host", host)]
    for method, path in READS:
        status, _, content = ask(method, path, headers)
        assert (status, b"experiment" in content) in ((403, False), (400, False)), path
    assert ask("POST", CREATE, headers, b'{"name": "rebound"}')[0] in (400, 403)
    assert "rebound" not in names(ask, server)


def test_of_two_hosts_none_is_believed(ask, server):
    own = f"127.0.0.1:{server.port}"
    for pair in ((own, "evil.example"), ("evil.example", own)):
        assert ask("GET", "/health", [("Host", host) for host in pair])[0] in (400, 403)


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:{other}",
        "http://127.0.0.1:{other}",
        "http://[::1]:{other}",
        "http://localhost",
        "null",
        "https://evil.example",
        "http://localhost:{port}",
        "http://127.0.0.1:{port}.evil.example",
    ],
)
def test_a_page_of_another_origin_reads_and_writes_nothing(origin, ask, server):
    origin = origin.format(port=server.port, other=server.port + 1)
    headers = [("Host", f"127.0.0.1:{server.port}"), ("Origin", origin)]
    for method, path in READS:
        status, answer, _ = ask(method, path, headers)
        assert status == 403, path
        assert not [name for name in answer if name.lower().startswith("access-control")]
    preflight = [
        *headers,
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "content-type"),
    ]
    assert ask("OPTIONS", CREATE, preflight)[0] == 403
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        assert (
            ask("POST", CREATE, [*headers, ("Content-Type", kind)], b'{"name": "forged"}')[0] == 403
        )
    assert "forged" not in names(ask, server)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_embed_nothing_but_link_here(site, ask, server):
    headers = [("Host", f"127.0.0.1:{server.port}"), ("Sec-Fetch-Site", site)]
    for destination in ("image", "script", "iframe", "empty"):
        assert ask("GET", "/health", [*headers, ("Sec-Fetch-Dest", destination)])[0] == 403
    document = [*headers, ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]
    assert ask("GET", "/", document)[0] == 200
    assert ask("POST", CREATE, document, b'{"name": "by a form"}')[0] == 403


def test_files_outside_of_the_store_are_not_sent(ask, server, tmp_path):
    """Who writes the store, or asks for an experiment, says where a run's artifacts are."""
    host = ("Host", f"127.0.0.1:{server.port}")

    def post(what, **content):
        path = f"/api/2.0/mlflow/{what}"
        return json.loads(ask("POST", path, [host], json.dumps(content).encode())[2])

    answers = []
    for number, folder in enumerate((tmp_path, server.folder / "mlartifacts")):
        experiment = post(
            "experiments/create", name=f"x{number}", artifact_location=folder.as_uri()
        )
        run = post("runs/create", start_time=1, **experiment)["run"]["info"]["run_id"]
        (folder / run / "artifacts").mkdir(parents=True)
        (folder / run / "artifacts" / "secret").write_text("hunter2")
        for path in (
            f"/get-artifact?path=secret&run_uuid={run}",
            f"/api/2.0/mlflow/artifacts/list?run_id={run}",
        ):
            answers.append(ask("GET", path, [host])[2])
    assert not [answer for answer in answers[:2] if b"hunter2" in answer or b"secret" in answer]
    assert answers[2] == b"hunter2"
    assert b"secret" in answers[3]


def test_a_socket_of_another_page_is_refused(ask, server):
    upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")]
    upgrade += [
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("Host", f"127.0.0.1:{server.port}"),
    ]
    assert ask("GET", "/", [*upgrade, ("Origin", "http://localhost:1")])[0] == 403


def test_the_store_is_on_no_command_line(server):
    """A database's URI holds its password, and every user of a machine can read command lines."""
    processes = server.process.children(recursive=True)
    assert processes
    assert not [
        argument
        for process in processes
        for argument in process.cmdline()
        if server.store in argument
    ]


def test_wildcard_address_accepts_every_address_of_this_machine():
    hosts = guard.accepted_hosts("0.0.0.0", 5000, None)
    assert {"localhost:5000", "127.0.0.1", f"{socket.gethostname().lower()}:5000"} <= set(hosts)
    assert not [host for host in hosts if "*" in host or "%" in host]
    assert "0.0.0.0" not in hosts
    assert guard.accepted_hosts("node7", 80, "fe80::1,x:1")[-6:-2] == [
        "node7",
        "node7:80",
        "[fe80::1]",
        "[fe80::1]:80",
    ]


def _publish(uri, record, folder):
    warnings.simplefilter("ignore")
    MlflowSink(uri=uri, experiment="race").publish(Analysis.of(record), folder)


def test_concurrent_senders_of_one_record_make_one_run(server, make_record, leave_run, tmp_path):
    from mlflow import MlflowClient

    record = make_record(sweep=SweepMembership(uid="s4", job=0, jobs=1))
    folder, context = leave_run(record, tmp_path), multiprocessing.get_context("spawn")
    uri = f"http://127.0.0.1:{server.port}"
    processes = [context.Process(target=_publish, args=(uri, record, folder)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    client = MlflowClient(tracking_uri=server.store)
    found = client.search_runs([client.get_experiment_by_name("race").experiment_id])
    runs = {run.data.tags["perfexp.kind"]: run for run in found}
    assert len(found) == len(runs) == 2
    assert runs["run"].data.tags["mlflow.parentRunId"] == runs["sweep"].info.run_id
