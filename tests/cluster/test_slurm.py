"""Campaigns on a private SLURM: one short one wherever its packages are, the others by hand (`-m "slurm and slow"`)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from perfexp.cluster import job_states
from perfexp.commands import run as command
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep
from tests.cluster.conftest import write_site
from tests.ranks.test_several_ranks import NET

RUN = ("model=fake", "gpu=fake", "cluster=test", "stopping=coarse", "tracking=none")
SLURM = ("hydra/launcher=slurm", "-m", "--config-dir=mine")
pytestmark = pytest.mark.slurm


@pytest.fixture
def sweep(run, tmp_path):
    """A function that runs a sweep into the folder `s`: exit code and printed text."""
    write_site(tmp_path / "mine")

    def sweep(*arguments, launcher=SLURM, base=RUN):
        code, printed, _ = run(*base, *launcher, f"output_dir={tmp_path / 's'}", *arguments)
        return code, printed

    sweep.folder = tmp_path / "s"
    return sweep


def states(folder):
    return {state.run: state for state in job_states.states(Sweep.load(folder), folder)}


def until(is_so, seconds=90):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def state_of(cluster, job):
    """State of a job by SLURM's own tools."""
    if cluster.accounting:
        shown = cluster.call("sacct", "-nXP", f"--jobs={job}", "--format=State").split()
        return shown[0] if shown else ""
    shown = cluster.call("scontrol", "show", "job", "-o", job)
    return shown.partition("JobState=")[2].split()[0]


def resume(node):
    """Return a node to service, which SLURM refuses if the node has returned by itself."""
    subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True)


def is_done(folder):
    """Whether the first run is done; it fails as soon as nothing more would happen."""
    state = states(folder)[0]
    assert state.state in ("pending", "running", "done"), state
    return state.state == "done"


def keys_of(folder):
    """Keys of the points in a record, each of which has one line in points.jsonl."""
    record = Record.load(folder)
    keys = [point.key for point in record.points if point.status is Status.OK]
    assert len(keys) == len(set(keys))
    return set(keys)


def test_sweep_runs_as_an_array_and_a_failed_run_fails_in_slurm(cluster, sweep, capsys):
    code, printed = sweep("batch_size=1,64", "model.faults.fail=1000000")
    assert code == 1
    assert "2 runs on gpu=fake" in printed
    assert "1 done, 1 failed" in printed
    found = states(sweep.folder)
    assert [found[run].state for run in (0, 1)] == ["done", "failed"]
    assert "pixels are more than 1000000" in found[1].why
    assert [state_of(cluster, found[run].job) for run in (0, 1)] == ["COMPLETED", "FAILED"]
    record = Record.load(sweep.folder / "0-b1")
    assert record.environment["job"]["id"] == found[0].job
    assert record.environment["job"]["constraint"] == "gpul40s"
    assert record.sweep.uid == Sweep.load(sweep.folder).uid
    assert command(["cluster", "logs", str(sweep.folder / "1-b64")]) == 0
    assert "not measured" in capsys.readouterr().out


@pytest.mark.slow
def test_sweep_of_8_runs_is_submitted_followed_and_then_skipped(each_cluster, sweep, capsys):
    axes = "batch_size=1,2,3,4,5,6,7,8"
    code, printed = sweep(axes, "hydra.launcher.wait=false")
    assert code == 0, printed
    script = [sys.executable, "-m", "perfexp", "status", str(sweep.folder)]
    shown = subprocess.run(script, capture_output=True, text=True, env={**os.environ})
    assert "jobs" in shown.stdout, shown
    until(lambda: all(state.state == "done" for state in states(sweep.folder).values()))
    assert command(["status", str(sweep.folder)]) == 0
    assert "8 of 8 runs have ended" in capsys.readouterr().out
    code, printed = sweep(axes)
    assert code == 0
    assert "8 runs finished already" in printed
    assert (sweep.folder / "sweep.csv").is_file()


@pytest.mark.slow
def test_a_run_that_is_missing_is_submitted_again_alone(each_cluster, sweep):
    assert sweep("batch_size=1,2,3,64", "model.faults.fail=1000000")[0] == 1
    before = [
        (sweep.folder / name / "details" / "points.jsonl").read_bytes()
        for name in ("0-b1", "1-b2", "2-b3")
    ]
    code, printed = sweep("batch_size=1,2,3,64", "model.faults.fail=1000000")
    assert code == 1
    assert "3 runs finished already" in printed
    assert ": 1 run on gpu=fake" in printed
    assert before == [
        (sweep.folder / name / "details" / "points.jsonl").read_bytes()
        for name in ("0-b1", "1-b2", "2-b3")
    ]


@pytest.mark.slow
def test_killed_process_and_cancelled_element_are_reported(each_cluster, sweep):
    """A run hangs at 64 samples until its job is cancelled; another one's own process is killed."""
    hang = ("model.faults.hang=1000000", "batch_size=1,64,128")
    assert sweep(*hang, "hydra.launcher.wait=false")[0] == 0
    until(
        lambda: (
            [states(sweep.folder)[run].state for run in (0, 1, 2)] == ["done", "running", "running"]
        )
    )
    job = states(sweep.folder)[1].job
    each_cluster.call("scancel", job)
    until(lambda: states(sweep.folder)[1].state == "cancelled")
    assert state_of(each_cluster, job).startswith("CANCELLED")
    job = states(sweep.folder)[2].job
    each_cluster.call("scancel", "--batch", "--signal=KILL", job)
    until(lambda: states(sweep.folder)[2].state == "failed")
    assert state_of(each_cluster, job) == "FAILED"


@pytest.mark.slow
def test_run_warned_of_its_limit_is_requeued_without_loss(each_cluster, sweep):
    sizes = ("sweep=sizes", "sweep.num_sizes=60", "batch_size=1,2", "processes=1")
    assert sweep(*sizes, "hydra.launcher.wait=false")[0] == 0
    points = sweep.folder / "0-b1" / "details" / "points.jsonl"
    until(lambda: points.is_file() and points.read_bytes().count(b"\n") >= 3)
    job = states(sweep.folder)[0].job
    each_cluster.call("scancel", "--batch", "--signal=USR2", job)
    until(lambda: states(sweep.folder)[0].state == "pending")
    early = points.read_bytes()
    assert 3 <= early.count(b"\n") < 60
    until(lambda: is_done(sweep.folder), 240)
    assert points.read_bytes().startswith(early)
    assert len(keys_of(sweep.folder / "0-b1")) == 60
    assert Record.load(sweep.folder / "0-b1").environment["job"]["restarts"] >= 1


@pytest.mark.slow
def test_jobs_wait_for_the_success_of_an_earlier_sweep(each_cluster, sweep, run, tmp_path, capsys):
    sanity = (
        *RUN,
        *SLURM,
        "model.faults.hang=1000000",
        "batch_size=1,64",
        "hydra.launcher.wait=false",
        "output_dir=a",
    )
    assert run(*sanity)[0] == 0
    code, printed = sweep("batch_size=1,2", "hydra.launcher.after=a", "hydra.launcher.wait=false")
    assert code == 0, printed
    assert "afterok" in printed
    until(lambda: states(tmp_path / "a")[0].state == "done")
    assert all(state.state == "pending" for state in states(sweep.folder).values())
    assert command(["cluster", "cancel", "a"]) == 0
    assert "1 job cancelled" in capsys.readouterr().out
    until(lambda: all("has failed" in state.why for state in states(sweep.folder).values()))
    assert run(*RUN, *SLURM, "batch_size=1,2", "output_dir=c", "hydra.launcher.after=a")[:1] == (2,)


@pytest.mark.slow
def test_a_kind_of_gpu_that_nobody_has_is_refused(each_cluster, sweep):
    code, printed = sweep("batch_size=1", "gpu=h100")
    assert code == 2
    assert "sbatch failed" in printed
    assert not list(sweep.folder.glob("*/details/points.jsonl"))
    code, printed = sweep("batch_size=1", "gpu=a100", f"output_dir={sweep.folder}2")
    assert code == 2
    assert "cluster=test has no entry gpus.a100" in printed


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_when_its_node_goes_down(each_cluster, sweep):
    sizes = ("sweep=sizes", "sweep.num_sizes=20", "batch_size=1,2", "processes=1")
    assert sweep(*sizes, "hydra.launcher.wait=false")[0] == 0
    points = sweep.folder / "0-b1" / "details" / "points.jsonl"
    until(lambda: points.is_file() and points.read_bytes().count(b"\n") >= 3)
    node = states(sweep.folder)[0].node
    each_cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    until(lambda: states(sweep.folder)[0].state == "pending")
    early = points.read_bytes()
    until(lambda: not RunPaths(sweep.folder / "0-b1").in_use())
    resume(node)
    until(lambda: is_done(sweep.folder), 240)
    assert points.read_bytes().startswith(early)
    assert len(keys_of(sweep.folder / "0-b1")) == 20


@pytest.mark.slow
def test_a_waiting_campaign_is_left_to_itself_by_an_interrupt(cluster, sweep, tmp_path):
    arguments = (
        *RUN,
        *SLURM,
        "batch_size=64",
        "model.faults.hang=1000000",
        f"output_dir={sweep.folder}",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "perfexp", *arguments], stdout=subprocess.PIPE, text=True
    )
    until(
        lambda: (
            (sweep.folder / "details" / "jobs.jsonl").is_file()
            and states(sweep.folder)[0].state == "running"
        )
    )
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert "stay in the queue" in out
    assert states(sweep.folder)[0].state == "running"
    assert command(["cluster", "cancel", str(sweep.folder)]) == 0


@pytest.fixture
def training(sweep, tmp_path, monkeypatch):
    """A function that submits a training of a small network by one rank on each of two nodes into the folder `s`."""
    (tmp_path / "mine" / "model").mkdir()
    (tmp_path / "mine" / "model" / "net.yaml").write_text("_target_: few_numbers.Net\n")
    (tmp_path / "few_numbers.py").write_text(NET)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}")
    base = (
        "model=net",
        "mode=train",
        "gpu=cpu",
        "gpu.nodes=2",
        "batch_size=2",
        "execution.threads=1",
    )
    base += (
        "tracking=none",
        "cluster=test",
        "stopping=fixed",
        "stopping.warmup=1",
        "percentiles=[50]",
    )

    def training(*arguments):
        return sweep(*arguments, base=base)

    return training


def ranks_of(folder):
    """Processes of the ranks of a run, by number."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if str(folder) in words and any(word.startswith("--ranks=") for word in words):
                found[int(process.environ()["RANK"])] = process
        except psutil.Error:  # it has just ended
            continue
    return found


@pytest.mark.slow
def test_two_nodes_train_together(each_cluster, training, sweep):
    code, printed = training("gpu.count=2", "input_size=32", "stopping.measure=6")
    assert code == 0, printed
    record = Record.load(sweep.folder / "0")
    [point] = record.points
    ranks = record.environment["ranks"]
    assert point.facts["world_size"] == len(ranks["devices"]) == 4
    assert [host["node"] for host in ranks["hosts"]] == [each_cluster.name(1), each_cluster.name(2)]
    assert "(4 ranks on 2 nodes)" in printed
    rates = {metric.name for metric in point.metrics if metric.value is not None}
    assert {
        "ranks/samples_per_second",
        "ranks/3/samples_per_second",
        "ranks/communication_share",
    } <= rates
    assert state_of(each_cluster, states(sweep.folder)[0].job) == "COMPLETED"


@pytest.mark.slow
def test_rank_killed_on_another_node_is_named_and_nothing_hangs(cluster, training, sweep):
    assert (
        training("input_size=[32,48]", "stopping.measure=100", "hydra.launcher.wait=false")[0] == 0
    )
    folder = sweep.folder / "0"
    until(lambda: (folder / "details" / "points.jsonl").is_file())
    killed = ranks_of(folder)[1]
    killed.kill()
    until(lambda: states(sweep.folder)[0].state == "failed")
    text = f"rank 1 of 2 (process {killed.pid} on {cluster.name(2)}) was terminated by SIGKILL"
    assert text in states(sweep.folder)[0].why
    assert [point.status for point in Record.load(folder).points] == [Status.OK, Status.KILLED]
    assert ranks_of(folder) == {}


@pytest.mark.slow
def test_a_training_starts_again_when_one_of_its_nodes_goes_down(cluster, training, sweep):
    assert (
        training("input_size=[32,48]", "stopping.measure=40", "hydra.launcher.wait=false")[0] == 0
    )
    points = sweep.folder / "0" / "details" / "points.jsonl"
    until(lambda: points.is_file())
    early, node = points.read_bytes(), cluster.name(2)
    cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    until(lambda: states(sweep.folder)[0].state == "pending")
    until(lambda: ranks_of(sweep.folder / "0") == {})
    resume(node)
    until(lambda: is_done(sweep.folder), 240)
    assert points.read_bytes().startswith(early)
    assert len(keys_of(sweep.folder / "0")) == 2
