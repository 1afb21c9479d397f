"""`perfexp sync`: what it sends, what it says, and its exit codes."""

import socket
import subprocess
import sys

import pytest

from perfexp import commands
from perfexp.cli.usage import COMMANDS
from perfexp.records.record import SweepMembership
from perfexp.records.sweep_record import Sweep, SweepChild


@pytest.fixture
def read(store):
    """A function that reads back the runs of an experiment."""

    def read(experiment):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=store)
        return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))

    return read


def test_a_runs_folder_is_sent_to_the_store_that_is_named(
    store, read, make_record, leave_run, tmp_path, capsys
):
    record = make_record(
        plan={"tracking": {"uri": "sqlite:///elsewhere.db", "experiment": "of_the_plan"}}
    )
    assert commands.run(["sync", "--uri", store, str(leave_run(record, tmp_path))]) == 0
    assert [run.data.tags["perfexp.uid"] for run in read("of_the_plan")] == [record.uid]
    out = capsys.readouterr().out
    assert record.name in out
    assert f"perfexp ui --uri {store}" in out
    assert "workflowType" not in out  # no server runs here


@pytest.mark.slow
def test_a_record_does_not_say_where_perfexp_writes(make_record, leave_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = make_record(
        plan={"tracking": {"uri": f"sqlite:///{tmp_path}/chosen_by_the_record.db"}}
    )
    assert commands.run(["sync", str(leave_run(record, tmp_path / "run"))]) == 0
    assert (tmp_path / "outputs" / "mlflow.db").exists()
    assert not (tmp_path / "chosen_by_the_record.db").exists()


def test_sync_sends_everything_below_a_folder_and_is_repeatable(
    store, read, make_record, leave_run, tmp_path, capsys
):
    sweep = Sweep(
        uid="s3",
        name="models",
        started="2026-03-01T10:00:00+00:00",
        ended="2026-03-01T11:00:00+00:00",
        jobs=2,
    )
    for job in range(2):
        membership = SweepMembership(uid="s3", job=job, jobs=2)
        record = make_record(uid=f"log{job}", name=f"model{job}", sweep=membership)
        leave_run(record, tmp_path / "sweep" / str(job))
        sweep.children.append(
            SweepChild(job=job, name=record.name, directory=str(job), status=record.status)
        )
    (tmp_path / "sweep" / "sweep.json").write_bytes(sweep.to_json())
    for _ in range(2):
        assert commands.run(["sync", str(tmp_path), "--uri", store, "--experiment", "below"]) == 0
        assert sorted(run.info.run_name for run in read("below")) == [
            "models",
            *["resnet50 fp32 224 b1 inf"] * 2,
        ]
    assert capsys.readouterr().out.count("sent ") == 6


def test_sync_skips_a_folder_without_record_as_user_error(
    store, read, make_record, leave_run, tmp_path, capsys
):
    (tmp_path / "empty").mkdir()
    record = make_record()
    good = leave_run(record, tmp_path / "good")
    options = ["--uri", store, "--experiment", "mixed"]
    assert (
        commands.run(["sync", str(tmp_path / "empty"), str(tmp_path / "gone"), str(good), *options])
        == 2
    )
    assert len(read("mixed")) == 1
    told = capsys.readouterr().err
    assert "empty: no record.json" in told
    assert "gone: there is no such folder; set the store with --uri" in told


@pytest.mark.slow
def test_the_copies_in_a_store_below_the_folder_are_not_sent(
    make_record, leave_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    leave_run(make_record(), tmp_path / "outputs" / "run")
    for _ in range(2):
        assert commands.run(["sync", "outputs"]) == 0
        assert capsys.readouterr().out.count("sent ") == 1
    assert list((tmp_path / "outputs" / "mlartifacts").rglob("record.json"))


def test_a_damaged_record_is_told_and_the_others_are_sent(
    store, read, make_record, leave_run, tmp_path, capsys
):
    leave_run(make_record(), tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").write_text("{")
    assert commands.run(["sync", str(tmp_path), "--uri", store, "--experiment", "damaged"]) == 2
    assert len(read("damaged")) == 1
    assert "bad" in capsys.readouterr().err


def test_an_unreachable_server_is_a_failure_of_exit_code_3(
    make_record, leave_run, tmp_path, capsys
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert commands.run(["sync", str(leave_run(make_record(), tmp_path)), "--uri", uri]) == 3
    assert "perfexp sync" in capsys.readouterr().err


def test_a_bare_command_and_a_wrong_option_show_what_is_possible(capsys):
    assert commands.run(["sync"]) == 2
    assert commands.run(["sync", "--urk"]) == 2
    assert "--help" in capsys.readouterr().err


def test_its_help_does_not_import_mlflow():
    script = (
        "import sys; from perfexp import commands; code = commands.run(['sync', '--help'])\n"
        "assert code == 0 and not {'mlflow', 'torch', 'sqlalchemy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_the_commands_are_known_by_name():
    assert {"sync", "ui"} <= set(COMMANDS)
