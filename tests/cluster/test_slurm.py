"""Campaigns on a private SLURM: one short one wherever its packages are, the others by hand (`-m "slurm and slow"`)."""

import os
import signal
import subprocess
import sys
import time

import pytest

from perfexp.cluster import job_states
from perfexp.commands import run as command
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep
from tests.cluster.conftest import write_site

RUN = ("model=fake", "gpu=fake", "cluster=test", "stopping=coarse", "ttfp=false", "tracking=none")
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


def is_done(cluster, folder, *nodes):
    """Whether the first run is done; SLURM holds a job that starts again before its node is clean: it is released."""
    for number in cluster.call("squeue", "-h", "--array", "-t", "PD", "-o", "%A").split():
        for words in (("release", number), ("update", f"JobId={number}", "StartTime=now")):
            subprocess.run(["scontrol", *words], capture_output=True)
    for node in nodes:
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True)
    time.sleep(2)
    return states(folder)[0].state == "done"


def keys_of(folder):
    """Keys of the points in a record, each of which has one line in points.jsonl."""
    record = Record.load(folder)
    keys = [point.key for point in record.points if point.status is Status.OK]
    assert len(keys) == len(set(keys))
    return set(keys)


def test_a_sweep_runs_as_an_array_and_a_failed_run_fails_in_slurm(cluster, sweep, capsys):
    code, printed = sweep("batch_size=1,64", "model.faults.fail=1000000")
    assert code == 1
    assert "2 runs on gpu=fake" in printed
    assert "1 done, 1 failed" in printed
    found = states(sweep.folder)
    assert [found[run].state for run in (0, 1)] == ["done", "failed"]
    assert "pixels are more than 1000000" in found[1].why
    assert [state_of(cluster, found[run].job) for run in (0, 1)] == ["COMPLETED", "FAILED"]
    record = Record.load(sweep.folder / "0_1")
    assert record.environment["job"]["id"] == found[0].job
    assert record.environment["job"]["constraint"] == "gpul40s"
    assert record.sweep.uid == Sweep.load(sweep.folder).uid
    assert command(["job-output", str(sweep.folder / "1_64")]) == 0
    assert "not measured" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_of_eight_runs_is_submitted_followed_resumed_and_skipped(each_cluster, sweep, capsys):
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
    before = [(sweep.folder / name / "points.jsonl").read_bytes() for name in ("0_1", "1_2", "2_3")]
    code, printed = sweep("batch_size=1,2,3,64", "model.faults.fail=1000000")
    assert code == 1
    assert "3 runs finished already" in printed
    assert ": 1 run on gpu=fake" in printed
    assert before == [(sweep.folder / name / "points.jsonl").read_bytes() for name in ("0_1", "1_2", "2_3")]


@pytest.mark.slow
def test_a_process_that_ends_hard_or_a_cancelled_element_is_reported(each_cluster, sweep):
    """A run hangs at 64 samples until its job is cancelled; another one's own process is killed."""
    hang = ("model.faults.hang=1000000", "batch_size=1,64,128")
    assert sweep(*hang, "hydra.launcher.wait=false")[0] == 0
    until(lambda: [states(sweep.folder)[run].state for run in (0, 1, 2)] == ["done", "running", "running"])
    job = states(sweep.folder)[1].job
    each_cluster.call("scancel", job)
    until(lambda: states(sweep.folder)[1].state == "cancelled")
    assert state_of(each_cluster, job).startswith("CANCELLED")
    job = states(sweep.folder)[2].job
    each_cluster.call("scancel", "--batch", "--signal=KILL", job)
    until(lambda: states(sweep.folder)[2].state == "failed")
    assert state_of(each_cluster, job) == "FAILED"


@pytest.mark.slow
def test_a_run_that_is_warned_of_its_limit_is_queued_again_and_loses_no_point(each_cluster, sweep):
    sizes = ("sweep=sizes", "sweep.num_sizes=60", "batch_size=1,2")
    assert sweep(*sizes, "hydra.launcher.wait=false")[0] == 0
    points = sweep.folder / "0_1" / "points.jsonl"
    until(lambda: points.is_file() and points.read_bytes().count(b"\n") >= 3)
    job = states(sweep.folder)[0].job
    each_cluster.call("scancel", "--batch", "--signal=USR2", job)
    until(lambda: states(sweep.folder)[0].state == "pending")
    early = points.read_bytes()
    assert 3 <= early.count(b"\n") < 60
    until(lambda: is_done(each_cluster, sweep.folder, *map(each_cluster.name, (1, 2))), 240)
    assert points.read_bytes().startswith(early)
    assert len(keys_of(sweep.folder / "0_1")) == 60
    assert Record.load(sweep.folder / "0_1").environment["job"]["restarts"] >= 1


@pytest.mark.slow
def test_jobs_wait_for_the_success_of_an_earlier_sweep(each_cluster, sweep, run, tmp_path, capsys):
    sanity = (*RUN, *SLURM, "model.faults.hang=1000000", "batch_size=1,64", "hydra.launcher.wait=false", "output_dir=a")
    assert run(*sanity)[0] == 0
    code, printed = sweep("batch_size=1,2", "hydra.launcher.after=a", "hydra.launcher.wait=false")
    assert code == 0, printed
    assert "afterok" in printed
    until(lambda: states(tmp_path / "a")[0].state == "done")
    assert all(state.state == "pending" for state in states(sweep.folder).values())
    assert command(["cancel", "a"]) == 0
    assert "1 job cancelled" in capsys.readouterr().out
    until(lambda: all("has failed" in state.why for state in states(sweep.folder).values()))
    assert run(*RUN, *SLURM, "batch_size=1,2", "output_dir=c", "hydra.launcher.after=a")[:1] == (2,)


@pytest.mark.slow
def test_a_kind_of_gpu_that_nobody_has_is_refused(each_cluster, sweep):
    code, printed = sweep("batch_size=1", "gpu=h100")
    assert code == 2
    assert "sbatch failed" in printed
    assert not list(sweep.folder.glob("*/points.jsonl"))
    code, printed = sweep("batch_size=1", "gpu=a100", f"output_dir={sweep.folder}2")
    assert code == 2
    assert "cluster=test has no entry gpus.a100" in printed


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_when_its_node_goes_down(each_cluster, sweep):
    sizes = ("sweep=sizes", "sweep.num_sizes=20", "batch_size=1,2")
    assert sweep(*sizes, "hydra.launcher.wait=false")[0] == 0
    points = sweep.folder / "0_1" / "points.jsonl"
    until(lambda: points.is_file() and points.read_bytes().count(b"\n") >= 3)
    node = states(sweep.folder)[0].node
    each_cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    until(lambda: states(sweep.folder)[0].state == "pending")
    early = points.read_bytes()
    until(lambda: not RunPaths(sweep.folder / "0_1").in_use())
    until(lambda: is_done(each_cluster, sweep.folder, node), 240)
    assert points.read_bytes().startswith(early)
    assert len(keys_of(sweep.folder / "0_1")) == 20


@pytest.mark.slow
def test_a_waiting_campaign_is_left_to_itself_by_an_interrupt(cluster, sweep, tmp_path):
    arguments = (*RUN, *SLURM, "batch_size=64", "model.faults.hang=1000000", f"output_dir={sweep.folder}")
    process = subprocess.Popen([sys.executable, "-m", "perfexp", *arguments], stdout=subprocess.PIPE, text=True)
    until(lambda: (sweep.folder / "jobs.jsonl").is_file() and states(sweep.folder)[0].state == "running")
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert "stay in the queue" in out
    assert states(sweep.folder)[0].state == "running"
    assert command(["cancel", str(sweep.folder)]) == 0
