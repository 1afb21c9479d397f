"""`perfexp ui`: a real server, its links, its end, and what it says where it can't start."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from perfexp import commands
from perfexp.commands import ui
from perfexp.errors import PerfexpError
from perfexp.records.analysis import Analysis
from perfexp.report.tracking.mlflow_sink import MlflowSink
from tests.support.selection import first_always


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_a_missing_store_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.run(["ui"]) == 2
    assert str(tmp_path / "outputs" / "mlflow.db") in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(tmp_path, capsys):
    (tmp_path / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert (
            commands.run(["ui", "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--port", str(port)])
            == 2
        )
    assert "--port" in capsys.readouterr().err


def test_a_server_is_its_own_ui(capsys):
    assert commands.run(["ui", "--uri", "http://me:secret@example.org:5000"]) == 0
    out = capsys.readouterr().out
    assert "http://***@example.org:5000" in out


def test_the_start_is_told_before_the_server_answers(tmp_path, monkeypatch, free_port, capsys):
    told = []
    (tmp_path / "mlflow.db").touch()

    def wait_for(*_):
        told.append(capsys.readouterr().err)
        raise PerfexpError("no server")

    monkeypatch.setattr(ui, "_server", lambda uri: [sys.executable, "-c", "input()"])
    monkeypatch.setattr(ui, "_wait_for", wait_for)
    assert (
        commands.run(["ui", "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--port", str(free_port)])
        == 1
    )
    assert told == [f"Starting MLflow on http://127.0.0.1:{free_port} …\n"]


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(tmp_path, free_port, capsys):
    (tmp_path / "mlflow.db").write_text(
        "no database, a text that is long enough to be told from an empty one"
    )
    assert (
        commands.run(["ui", "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--port", str(free_port)])
        == 1
    )
    assert "not a database" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", first_always("README: perfexp ui", [signal.SIGINT, signal.SIGTERM])
)
def test_ui_serves_store_takes_records_ends_all_processes(
    store, make_record, leave_run, tmp_path, monkeypatch, free_port, ending
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    record = make_record()
    folder = leave_run(record, tmp_path)
    MlflowSink(uri=store, experiment="shown").publish(Analysis.of(record), folder)
    script = "import sys; from perfexp import commands; sys.exit(commands.run(sys.argv[1:]))"
    ui = subprocess.Popen(
        [sys.executable, "-c", script, "ui", "--uri", store, "--port", str(free_port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert ui.stdout is not None
    try:
        lines = []
        for line in ui.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                break
        base = f"http://127.0.0.1:{free_port}"
        assert any(line.startswith(f"shown  {base}/#/experiments/") for line in lines)
        assert all("?workflowType=machine_learning" in line for line in lines[:-1])
        assert lines[0].endswith("&viewStateShareKey=perfexp-inference\n")
        assert urllib.request.urlopen(base, timeout=10).status == 200
        for _ in range(2):
            link = MlflowSink(uri=base, experiment=f"through {ending.name}").publish(
                Analysis.of(record), folder
            )
        assert link.startswith(f"{base}/#/experiments/")
        processes = psutil.Process(ui.pid).children(recursive=True)
        ui.send_signal(ending)
        assert ui.wait(30) == 0
        assert not psutil.wait_procs(processes, timeout=10)[1]
        assert _names_of_files(store, f"through {ending.name}") == [
            "config",
            "data",
            "logs",
            "tables",
        ]
    finally:
        ui.kill()
        ui.stdout.close()
        ui.wait()


def _names_of_files(store, experiment):
    """Folders of the artifacts of an experiment's only run; a server keeps them where it was told to."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    folder = Path(store.removeprefix("sqlite:///")).parent / "mlartifacts"
    return sorted(
        file.name
        for file in (folder / run.info.artifact_uri.removeprefix("mlflow-artifacts:/")).iterdir()
    )
