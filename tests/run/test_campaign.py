"""Sweeps over several runs: what is entered of runs that never came to be, and what the summary calls them."""

import os
import shutil

import pandas as pd
import pytest

from perfexp import commands
from perfexp.errors import UserError
from perfexp.host import credentials
from perfexp.main import main
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Status
from perfexp.records.sweep_record import Sweep
from perfexp.report.tracking import mlflow_sink
from perfexp.report.tracking.mlflow_sink import MlflowSink

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")


@pytest.mark.parametrize(
    ("axis", "reason"),
    [
        ("batch_size=0,1", "batch_size=0 is not a batch size"),
        ("batch_size=1,0", "batch_size=0 is not a batch size"),
        ("data=cityscapes,synthetic", "data.root is required"),
    ],
)
def test_a_run_that_its_configuration_refuses_is_told_everywhere(
    axis, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*FAKE, "-m", axis, "output_dir=s"]) == 2
    assert "2 of 2 runs ended, 1 failed" in capsys.readouterr().out
    [refused] = [
        child for child in Sweep.load(tmp_path / "s").children if child.status is Status.FAILED
    ]
    assert reason in refused.error
    assert commands.run(["show", "s"]) == 0
    assert f"run {refused.job} {refused.name}: failed: {reason}" in capsys.readouterr().out
    assert commands.run(["export", "s"]) == 0
    frame = pd.read_parquet("export.parquet").set_index("sweep_job")
    assert reason in frame.loc[refused.job, "error"]
    assert commands.run(["status", "s"]) == 1
    told = capsys.readouterr().out
    assert "1/1 done, 1 run refused" in told
    assert reason in told


def test_a_sweep_whose_runs_are_all_refused_has_a_summary(tmp_path, capsys):
    assert main([*FAKE, "-m", "batch_size=0,-1", f"output_dir={tmp_path / 's'}"]) == 2
    assert "sweep over batch_size: 2 of 2 runs ended, 2 failed" in capsys.readouterr().out
    assert not (tmp_path / "s").exists()


def test_sweep_without_variation_is_reported_as_one_run(tmp_path, capsys):
    assert main([*FAKE, "-m", f"output_dir={tmp_path / 's'}"]) == 0
    assert "sweep over one run: 1 of 1 runs ended\n" in capsys.readouterr().out


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder: what it says on stderr, and the stores and experiments that it sends to."""
    sent = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        MlflowSink, "_send", lambda sink, *_: sent.append((sink.uri, sink.experiment)) or ""
    )
    monkeypatch.setattr(mlflow_sink, "start_sender", lambda: None)

    def run(folder, *arguments, code=0):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        sent.clear()
        assert main(arguments) == code
        return capsys.readouterr().err, set(sent)

    return run


BEGIN = ("model=fake", "gpu=fake", "stopping=fixed", "-m", "batch_size=1,2", "output_dir=s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "typed", "store"),
    [
        ({}, (), ("sqlite:///{}/here/outputs/mlflow.db", None)),
        (
            {},
            ("tracking.uri=sqlite:///own.db", "tracking.experiment=mine"),
            ("sqlite:///{}/here/own.db", "mine"),
        ),
        (
            {"MLFLOW_TRACKING_URI": "http://host:5000", "MLFLOW_EXPERIMENT_NAME": "all"},
            (),
            ("http://host:5000", "all"),
        ),
    ],
)
def test_a_resumed_sweep_keeps_its_store_wherever_it_is_resumed(
    variables, typed, store, sweep, tmp_path, monkeypatch
):
    uri, experiment = store[0].format(tmp_path), store[1]
    with monkeypatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        assert sweep("here", *BEGIN, *typed) == ("", {(uri, experiment)})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another:5000")
    assert sweep("there", "resume=../here/s") == ("", {(uri, experiment)})
    assert sweep("there", "resume=../here/s/0-b1") == ("", {(uri, experiment)})
    other = f"sqlite:///{tmp_path}/there/other.db"
    assert sweep("there", "resume=../here/s", "tracking.uri=sqlite:///other.db") == (
        "",
        {(other, experiment)},
    )
    assert sweep("here", "resume=s") == ("", {(other, experiment)}), (
        "what was typed last is the sweep's store"
    )
    assert sweep("here", "resume=s", "tracking=none") == ("", set())
    assert sweep("here", "resume=s", "tracking.experiment=other") == ("", {(other, "other")})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["of somebody else", "masked"])
def test_store_that_resume_does_not_reuse_is_named_with_a_remedy(how, sweep, tmp_path):
    url = "http://joe:s3cr3t@host:5000" if how == "masked" else "http://host:5000"
    shown = url.replace("joe:s3cr3t", "***")
    assert sweep("here", *BEGIN, f"tracking.uri={url}") == ("", {(url, None)})
    if how == "of somebody else":
        shutil.rmtree(tmp_path / "cache")
    else:
        credentials._hidden.clear()  # as in another process
    told, sent = sweep("there", "resume=../here/s")
    default = f"sqlite:///{tmp_path}/there/outputs/mlflow.db"
    assert sent == {(default, None)}
    assert told.startswith(
        f"warning: the sweep's earlier runs are in {shown}; the others are sent to {default}. "
    )
    assert f"perfexp resume={tmp_path}/there/../here/s tracking.uri=URI" in told
    assert told.count("\n") == 1
    assert "s3cr3t" not in told
    assert sweep("there", "resume=../here/s", f"tracking.uri={url}") == ("", {(url, None)})


@pytest.mark.slow
def test_a_folder_of_somebody_else_is_not_resumed(sweep, tmp_path):
    sweep("here", *BEGIN)
    summary = Sweep.load(tmp_path / "here" / "s")
    summary.uid, summary.store = "another", "http://evil:1\x1b[31m"
    summary.command += ["tracking.uri=http://evil:1"]
    (tmp_path / "here" / "s" / "sweep.json").write_bytes(summary.to_json())
    shutil.rmtree(tmp_path / "here" / "s" / "0-b1")
    shutil.rmtree(tmp_path / "here" / "s" / "1-b2")
    told, sent = sweep("there", "resume=../here/s", code=2)
    assert not sent
    assert "you did not begin it" in told
    assert "evil" not in told


@pytest.mark.slow
def test_sweep_with_my_uid_elsewhere_is_not_sent_to_my_store(sweep, tmp_path):
    sweep("here", *BEGIN, "tracking.uri=http://mine:1")
    shutil.move(tmp_path / "here" / "s", tmp_path / "theirs")
    told, sent = sweep("there", "resume=../theirs")
    assert sent == {(f"sqlite:///{tmp_path}/there/outputs/mlflow.db", None)}
    assert "are in http://mine:1; the others are sent to sqlite:" in told


@pytest.mark.slow
def test_sweep_begun_without_a_store_resumes_without_one(sweep, tmp_path):
    assert sweep("here", *BEGIN, "tracking=none") == ("", set())
    assert sweep("here", "resume=s", "tracking=mlflow")[1] == {
        (f"sqlite:///{tmp_path}/here/outputs/mlflow.db", None)
    }
    assert sweep("there", "resume=../here/s") == ("", set())


def test_a_run_that_is_unsupported_is_called_so_and_nothing_else(tmp_path, capsys):
    folder = str(tmp_path / "s")
    assert main([*FAKE, "-m", "input_size=16,64", "model.smallest=32", f"output_dir={folder}"]) == 1
    measured = capsys.readouterr().out
    commands.run(["show", folder])
    commands.run(["status", folder])
    told = measured + capsys.readouterr().out
    assert told.count("1 unsupported") == 3
    assert "not measured" in told
    assert "failed" not in told


def test_forked_process_does_not_keep_the_sweep_lock(tmp_path):
    paths, (receive, send) = SweepPaths(tmp_path), os.pipe()
    paths.create()
    with paths.locked():
        if not (child := os.fork()):
            os.read(receive, 1)
            os._exit(0)
        assert paths.in_use()
    assert not paths.in_use()
    os.write(send, b"0")
    os.waitpid(child, 0)


def test_a_lock_that_cannot_be_written_is_named(tmp_path):
    paths = RunPaths(tmp_path)
    paths.create()
    paths.lock.symlink_to("/dev/null")
    with pytest.raises(UserError, match=f"{paths.lock} can't be written"), paths.locked():
        pass


@pytest.mark.slow
def test_a_sweep_that_another_process_measures_is_left_alone(tmp_path, capsys):
    assert main([*FAKE, "-m", "batch_size=1,2", f"output_dir={tmp_path / 's'}"]) == 0
    before = {file: file.read_bytes() for file in (tmp_path / "s").iterdir() if file.is_file()}
    with SweepPaths(tmp_path / "s").locked():
        assert main([*FAKE, "-m", "batch_size=1,2", f"output_dir={tmp_path / 's'}"]) == 2
    assert "Another perfexp is measuring the sweep" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in before} == before
