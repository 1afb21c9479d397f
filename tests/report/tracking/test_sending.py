"""Sending ends: whatever a server does, the command goes on at the deadline, and holds nothing."""

import fcntl
import gc
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from perfexp.errors import UserError
from perfexp.host import locks
from perfexp.host.cache import JsonCache
from perfexp.records.analysis import Analysis
from perfexp.report.tracking import mlflow_sink, payload, send, store
from perfexp.report.tracking.delivery import Delivery, Fetch
from perfexp.report.tracking.mlflow_sink import DeadlineMissed, MlflowSink, deliver
from perfexp.report.tracking.send import Claim
from perfexp.report.tracking.store import LockTimeout, TrackingFailed, lock_name, store_uri
from tests.support.selection import first_always

#: Far above what any of these sends takes, far below what the servers ask for.
BOUND_SECONDS = 30


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Stores that missed a deadline in another test had other servers behind the same ports."""
    monkeypatch.setattr(mlflow_sink, "_late", set())


@contextmanager
def lock_of(uri):
    """The lock of a database, held by this process as by any other that sends to it."""
    with locks.opened(lock_name(uri)) as descriptor:
        assert locks.try_lock(descriptor)
        locks.sign(descriptor, "sends a record")
        yield


def answers_429(request, over):
    request.send_response(429)
    request.send_header("Retry-After", "3600")
    request.send_header("Content-Length", "0")
    request.end_headers()


def drips(request, over):
    request.send_response(200)
    request.send_header("Content-Length", "1000000")
    request.end_headers()
    while not over.wait(0.5):
        request.wfile.write(b" ")


def answers_3_gb(request, over):
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    for _ in range(3 * 2**10):
        if over.is_set():
            break
        request.wfile.write(chunk)
    request.wfile.write(b"0\r\n\r\n")


def never_answers(request, over):
    over.wait()


def answers_500(request, over):
    request.send_error(500)


def answers_garbage(request, over):
    request.wfile.write(b"\x00\xff garbage, not HTTP\r\n\r\n")


def answers_garbage_as_json(request, over):
    request.send_response(200)
    request.send_header("Content-Type", "application/json")
    request.end_headers()
    request.wfile.write(b'[{"no": "MLflow"')


def answers_401(request, over):
    request.send_error(401)


@pytest.fixture
def serve():
    """A function that starts a server on loopback; it returns its address and the paths that were asked for."""
    over, servers = threading.Event(), []

    def start(behavior):
        paths = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self):
                self.close_connection = True
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    return
                paths.append(self.path)
                try:
                    behavior(self, over)
                    self.wfile.flush()
                except OSError:
                    pass

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", paths

    yield start
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


BEHAVIORS = [
    answers_429,
    drips,
    answers_3_gb,
    never_answers,
    answers_500,
    answers_garbage,
    answers_garbage_as_json,
    answers_401,
]


@pytest.mark.slow
@pytest.mark.parametrize("behavior", first_always("fault: the MLflow server", BEHAVIORS))
def test_sending_ends_whatever_a_server_does(behavior, serve, make_record, leave_run, tmp_path):
    uri, paths = serve(behavior)
    record, begin = make_record(), time.monotonic()
    sink = MlflowSink(uri=uri, request_timeout_seconds=1, deadline_seconds=2)
    with pytest.raises(
        TrackingFailed, match=rf"Nothing is lost.*perfexp sync {tmp_path} --uri {uri}"
    ):
        sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    assert time.monotonic() - begin < BOUND_SECONDS
    assert paths, "the server was asked"
    assert lock_name(uri) is None


@pytest.mark.slow
def test_huge_response_ends_in_an_error_within_a_memory_limit(
    serve, make_record, leave_run, tmp_path
):
    uri, _ = serve(answers_3_gb)
    record, peak, over = make_record(), [0], threading.Event()

    def watch():
        while not over.wait(0.02):
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    peak[0] = max(peak[0], child.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(TrackingFailed, match="memory"):
            MlflowSink(uri=uri, request_timeout_seconds=60, deadline_seconds=60).publish(
                Analysis.of(record), leave_run(record, tmp_path)
            )
    finally:
        over.set()
        watcher.join()
    assert 2**26 < peak[0] < 1.5 * 2**30


@pytest.mark.slow
def test_the_sending_process_stays_for_the_next_run(serve, make_record, leave_run, tmp_path):
    uri, paths = serve(answers_401)
    record, processes = make_record(), []
    folder = leave_run(record, tmp_path)
    for _ in range(2):
        with pytest.raises(TrackingFailed, match="401"):
            MlflowSink(uri=uri).publish(Analysis.of(record), folder)
        processes.append(psutil.Process().children())
    assert len(paths) == 2
    assert processes[0] == processes[1] != []


@pytest.mark.slow
def test_store_that_missed_its_deadline_is_not_tried_again(serve, make_record, leave_run, tmp_path):
    uri, paths = serve(never_answers)
    record = make_record()
    folder = leave_run(record, tmp_path)
    with pytest.raises(TrackingFailed, match=r"tracking\.deadline_seconds=2"):
        MlflowSink(uri=uri, deadline_seconds=2).publish(Analysis.of(record), folder)
    asked = len(paths)
    with pytest.raises(TrackingFailed, match=r"earlier send.*perfexp sync"):
        MlflowSink(uri=uri, deadline_seconds=10**6).publish(Analysis.of(record), folder)
    assert len(paths) == asked == 1


def test_wait_for_a_database_lock_ends_and_names_its_holder(
    make_record, leave_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(mlflow_sink, "deliver", send.send)
    uri, record = store_uri(f"sqlite:///{tmp_path}/mlflow.db"), make_record()
    with lock_of(uri):
        with pytest.raises(
            TrackingFailed, match=f"process {os.getpid()} sends a record.*perfexp sync"
        ):
            MlflowSink(uri=uri, deadline_seconds=0.3).publish(
                Analysis.of(record), leave_run(record, tmp_path)
            )
        with pytest.raises(TrackingFailed, match="earlier send"):
            MlflowSink(uri=uri, deadline_seconds=10**6).publish(Analysis.of(record), tmp_path)
    assert not list(tmp_path.glob("mlflow.db*"))


def test_database_lock_depends_on_the_database_not_the_folder(monkeypatch, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").symlink_to("one")
    monkeypatch.chdir(tmp_path / "one")
    absolute = lock_name(store_uri(f"sqlite:///{tmp_path}/one/mlflow.db"))
    assert lock_name(store_uri("sqlite:///mlflow.db")) == absolute
    assert lock_name(store_uri(f"sqlite:///{tmp_path}/two/mlflow.db")) == absolute
    assert lock_name(store_uri("sqlite:///mlflow.db?timeout=30")) == absolute
    assert store_uri("sqlite:///mlflow.db?timeout=30").endswith("/one/mlflow.db?timeout=30")
    assert lock_name(store_uri("sqlite:///other.db")) != absolute


def test_no_lock_file_is_left_beside_the_database(store, make_record, leave_run, tmp_path):
    record = make_record()
    MlflowSink(uri=store, experiment="no lock file").publish(
        Analysis.of(record), leave_run(record, tmp_path)
    )
    database = Path(store.removeprefix("sqlite:///"))
    assert not list(database.parent.glob("*.lock"))
    with locks.opened(lock_name(store)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_killed_sender_releases_the_database_lock(store, make_record, leave_run, tmp_path):
    """The process that sends holds the lock, and nobody else does."""
    uri, record = store_uri(store), make_record()
    content = payload.of_run(Analysis.of(record), leave_run(record, tmp_path / "run"))

    def delivery(seconds):
        return Delivery(
            uri=uri,
            experiment="by another process",
            artifacts=(tmp_path / "mlartifacts").as_uri(),
            request_timeout_seconds=10,
            deadline_seconds=seconds,
            payload=content,
        )

    assert "perfexp ui" in deliver(delivery(60))
    with lock_of(uri), pytest.raises(LockTimeout, match=f"process {os.getpid()} sends a record"):
        deliver(delivery(2))
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        database.execute("BEGIN EXCLUSIVE")  # a database that does not answer
        with pytest.raises(DeadlineMissed):
            deliver(delivery(2))
    with lock_of(uri):
        pass
    assert "perfexp ui" in deliver(delivery(60))


@pytest.mark.parametrize("seconds", [-60, 60])
def test_of_two_runs_that_were_made_at_once_all_take_the_earlier(
    seconds, store, make_record, leave_run, tmp_path
):
    from mlflow import MlflowClient

    record = make_record(uid=f"at once {seconds}")
    content = payload.of_run(Analysis.of(record), leave_run(record, tmp_path))
    client = MlflowClient(tracking_uri=store)
    experiment = client.create_experiment(f"at once {seconds}")
    claim = Claim(client, experiment, content)
    start = claim.run.info.start_time + 1000 * seconds
    other = client.create_run(experiment, start_time=start, tags=content.identity)
    earlier = claim.run_id if seconds > 0 else other.info.run_id
    assert claim.settle() == (seconds < 0)
    assert claim.run_id == earlier
    assert Claim(client, experiment, content).run_id == earlier
    assert (earlier == other.info.run_id) == (len(client.search_runs([experiment])) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_the_sending_process_ends_with_its_command(ending, serve, make_record, leave_run, tmp_path):
    uri, paths = serve(never_answers)
    record = make_record()
    script = "import signal, sys; from perfexp import commands; "
    script += "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell in the background ignores it
    script += "sys.exit(commands.run(sys.argv[1:]))"
    command = subprocess.Popen(
        [sys.executable, "-c", script, "sync", str(leave_run(record, tmp_path)), "--uri", uri],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while not paths and time.monotonic() < until:
            time.sleep(0.05)
        processes = psutil.Process(command.pid).children(recursive=True)
        assert processes
        assert not any(uri in argument for process in processes for argument in process.cmdline())
        command.send_signal(ending)
        assert command.wait(BOUND_SECONDS) == (130 if ending is signal.SIGINT else -signal.SIGKILL)
        assert not psutil.wait_procs(processes, timeout=10)[1]
    finally:
        command.kill()
        command.wait()


def test_mlflow_has_a_home_where_the_user_has_none(monkeypatch, tmp_path):
    """As in a container that is run by a number which its /etc/passwd does not know."""
    monkeypatch.delenv("HOME", raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    assert store.mlflow_environment()["HOME"].endswith(f"perfexp-{os.getuid()}")
    monkeypatch.setenv("HOME", "/somewhere")
    assert store.mlflow_environment()["HOME"] == "/somewhere"


@pytest.mark.parametrize("prepared", ["open to all", "a link"])
def test_a_home_that_somebody_else_prepared_is_refused(prepared, monkeypatch, tmp_path):
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    folder = tmp_path / f"perfexp-{os.getuid()}"
    if prepared == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(UserError, match="not a folder of yours alone"):
        locks.private_folder()


def test_linked_lock_file_in_the_cache_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    cache = JsonCache(tmp_path / "cache", {"sweep": "x"})
    cache.path.parent.mkdir()
    cache.path.with_suffix(".lock").symlink_to(tmp_path / "precious")
    cache.add("store", {"uri": "http://host"})
    assert (tmp_path / "precious").read_text() == "mine"


def endless_record():
    """A handler of requests for a run whose record has no end, and that claims to be a folder of many."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            run = {
                "info": {
                    "run_id": "a" * 32,
                    "experiment_id": "0",
                    "artifact_uri": "mlflow-artifacts:/0/a",
                }
            }
            listing = {
                "files": [
                    {"path": f"{number}.json", "is_dir": False, "file_size": 1}
                    for number in range(9)
                ]
            }
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                if "runs/get" in self.path:
                    self.wfile.write(json.dumps({"run": {**run, "data": {}}}).encode())
                elif "?path=" in self.path:
                    self.wfile.write(json.dumps(listing).encode())
                else:
                    for _ in range(64):
                        self.wfile.write(b" " * 2**20)

        def log_message(self, *arguments):
            pass

    return Handler


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # MLflow leaves its connection open
def test_a_record_without_an_end_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(send, "MAX_BYTES", 2**20)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with ThreadingHTTPServer(("127.0.0.1", 0), endless_record()) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        uri = f"http://127.0.0.1:{listening.server_port}"
        try:
            with pytest.raises(Exception, match="File too large"):
                send.fetch(
                    Fetch(
                        uri=uri,
                        request_timeout_seconds=5,
                        deadline_seconds=60,
                        run_id="a" * 32,
                        folder=str(tmp_path),
                    )
                )
        finally:
            listening.shutdown()
            thread.join()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 2**20
    gc.collect()
    with (tmp_path / "large").open("wb") as file:  # the limit has gone
        file.truncate(2**22)


def test_a_page_is_linked_if_its_server_runs(monkeypatch, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(store, "PORT", server.getsockname()[1])
        command, page = store.how_to_look(uri, "1", "abc").splitlines()
    assert command == f"perfexp ui --uri {uri}"
    assert page.startswith(f"http://127.0.0.1:{store.PORT}/#/experiments/1/runs/abc")
    assert store.how_to_look(uri, "1", "abc") == command
