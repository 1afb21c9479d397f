"""Campaigns without SLURM: requests, states from scripted answers of its commands, turns on a host, local processes."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as replaced

from perfexp import main
from perfexp.cluster import campaign as campaigns
from perfexp.cluster import element, job_states, local_queue, site, slurm
from perfexp.cluster.campaign import SlurmCampaign, SlurmSettings
from perfexp.cluster.job_states import SubmittedRun
from perfexp.cluster.slurm import QueuedJob
from perfexp.commands import cluster
from perfexp.commands import run as command
from perfexp.errors import PerfexpError, UserError
from perfexp.host import host_turns, interrupts, locks, scheduler
from perfexp.orchestration.preparation import is_finished
from perfexp.plan.schema import Cluster, ClusterGpu
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Record, Status, point_to_line
from perfexp.records.sweep_record import Sweep, SweepChild

EARLIER, LATER = "2026-01-01T10:00:00+00:00", "2026-01-01T11:00:00+00:00"


def test_a_kind_of_gpu_becomes_what_the_site_calls_it():
    default = Cluster(name="default")
    assert site.requests(default, "l40s") == ["--gres=gpu:l40s:1"]
    assert site.requests(default, "cpu") == []
    gpus = {
        "l40s": ClusterGpu(constraint="gpul40s"),
        "h100": ClusterGpu(gres="gpu:hopper", partition="big"),
    }
    own = Cluster(
        name="own", partition="gpu", time_limit="60", cpus_per_gpu=8, options=["--nice"], gpus=gpus
    )
    assert site.requests(own, "l40s", count=2) == [
        *(
            "--partition=gpu",
            "--time=60",
            "--constraint=gpul40s",
            "--gres=gpu:2",
            "--cpus-per-task=16",
            "--nice",
        ),
    ]
    assert "--partition=big" in site.requests(own, "h100")
    of_two_nodes = site.requests(default, "l40s", count=4, nodes=2)
    assert of_two_nodes == ["--gres=gpu:l40s:4", "--nodes=2", "--ntasks-per-node=1"]
    with pytest.raises(UserError, match=r"no entry gpus.l40\. Did you mean l40s"):
        site.requests(own, "l40")
    with pytest.raises(UserError, match="name the kind"):
        site.requests(default, "auto")


@pytest.mark.parametrize(
    ("node", "wrong"),
    [
        ({"warn_seconds": 5}, "warn_seconds=5"),
        ({"warn_seconds": True}, "warn_seconds=True"),
        ({"max_running": 0}, "max_running=0"),
        ({"wait": "no"}, "wait=no"),
    ],
)
def test_settings_out_of_range_are_refused(node, wrong):
    with pytest.raises(UserError, match=wrong):
        SlurmSettings(**node)


def test_long_sweep_is_split_by_array_size_and_by_request(tmp_path, monkeypatch):
    paths, options = SweepPaths(tmp_path), []
    paths.create()
    monkeypatch.setattr(slurm, "max_array_size", lambda: 3)
    monkeypatch.setattr(
        slurm, "submit", lambda script, given: options.append(given) or str(len(options))
    )
    runs = [
        element.Run(
            assignment=SimpleNamespace(
                number=number + 1, folder=tmp_path / str(number), plan=SimpleNamespace(gpu_name="x")
            ),
            overrides=(),
            cluster=Cluster(name="x"),
            requests=["--gres=gpu:x:1"] if number % 2 else [],
        )
        for number in range(8)
    ]
    found = [
        [run.number for run in array]
        for _, array in campaigns.submit(runs, paths, "s", SlurmSettings(), [])
    ]
    assert found == [[0, 2, 4], [6], [1, 3, 5], [7]]
    assert [word for words in options for word in words if "array" in word] == [
        "--array=0-2",
        "--array=0-0",
    ] * 2
    assert job_states.load(paths)[4].job == "1_2"


@pytest.fixture
def campaign(tmp_path, make_record, monkeypatch):
    """A sweep of eight runs in all states, and the answers of SLURM's commands."""
    children = [
        SweepChild(
            job=number, name=f"run{number}", directory=f"{number}", status=Status.INTERRUPTED
        )
        for number in range(9)
    ]
    sweep = Sweep(uid="s", name="batch_size", started=EARLIER, children=children, jobs=9)
    (tmp_path / "sweep.json").write_bytes(sweep.to_json())
    (tmp_path / "details").mkdir()
    for number, failing in ((0, None), (1, {224: Status.FAILED})):
        record = make_record(failing=failing)
        (tmp_path / str(number)).mkdir()
        membership = {"uid": "s", "job": number, "directory": ".."}
        content = record.to_json().replace(
            b'"sweep": null', f'"sweep": {membership}'.replace("'", '"').encode()
        )
        (tmp_path / str(number) / "record.json").write_bytes(content)
        assert Record.load(tmp_path / str(number)).sweep.job == number
    entries = [
        SubmittedRun(run=number, job=f"7_{number}", gpu="l40s", submitted=EARLIER)
        for number in range(7)
    ]
    entries.append(SubmittedRun(run=7, job="8_0", gpu="l40s", submitted=LATER))
    job_states.append(SweepPaths(tmp_path), entries)
    jobs = [
        QueuedJob("7_2", "RUNNING", "None", "node1", "59:00", name="perfexp-s"),
        QueuedJob("7_3", "PENDING", "Resources", name="perfexp-s"),
        QueuedJob("7_4", "TIMEOUT", "TimeLimit", "node1", name="perfexp-s"),
        QueuedJob("8_0", "PENDING", "Priority", name="perfexp-s"),
    ]
    monkeypatch.setattr(slurm, "queue", lambda: {job.job: job for job in jobs})
    accounted = {
        "7_5": QueuedJob("7_5", "CANCELLED", "", "node2"),
        "7_2": QueuedJob("7_2", "PREEMPTED"),
    }
    monkeypatch.setattr(slurm, "accounted", lambda name: accounted if name == "perfexp-s" else {})
    return sweep, tmp_path


def test_states_join_records_queue_and_accounting(campaign):
    sweep, folder = campaign
    states = job_states.states(sweep, folder)
    assert [str(state.state) for state in states] == [
        *(
            "done",
            "failed",
            "running",
            "pending",
            "failed",
            "cancelled",
            "lost",
            "pending",
            "not submitted",
        ),
    ]
    assert states[1].why.startswith("CUDA out of memory")
    assert (states[2].node, states[2].left) == ("node1", "59:00")
    assert (states[3].why, states[4].why) == ("Resources", "reached its time limit")
    assert states[7].why == "Priority"
    assert job_states.counted(states) == (
        "1 done, 1 running, 2 pending, 2 failed, 1 cancelled, 1 lost, 1 not submitted"
    )
    lines = list(job_states.lines(states))
    assert "run 2 run2: running as job 7_2 on node1, 59:00 left" in lines
    assert "1 run of job 7 pending: Resources" in lines


def test_dependency_waits_for_running_and_refuses_failed_runs(campaign):
    sweep, folder = campaign
    with pytest.raises(
        UserError, match=r"5 runs of .* did not succeed \(run1: failed: CUDA out of memory"
    ):
        campaigns.dependency(folder)
    sweep.children = [child for child in sweep.children if child.job in (0, 2, 3)]
    (folder / "sweep.json").write_bytes(sweep.to_json())
    assert campaigns.dependency(folder) == ["--dependency=afterok:7_2:7_3"]
    sweep.children = sweep.children[:1]
    (folder / "sweep.json").write_bytes(sweep.to_json())
    assert campaigns.dependency(folder) == []
    assert campaigns.dependency("12,13_4") == ["--dependency=afterok:12:13_4"]
    with pytest.raises(UserError, match="no sweep of a stage"):
        campaigns.dependency("nowhere")


def test_foreign_jobs_file_cancels_only_jobs_with_the_sweep_name(campaign, monkeypatch, capsys):
    _, folder = campaign
    calls = []
    monkeypatch.setattr(slurm, "call", lambda *words, **_: calls.append(words) or "")
    with (folder / "details" / "jobs.jsonl").open("ab") as file:
        file.write(b'{"run":8,"job":"1 --me","gpu":"x","submitted":"","log":"../../x"}\n')
    assert command(["cluster", "cancel", str(folder), "--run", "2"]) == 0
    assert calls[0][:2] == ("scancel", "--name=perfexp-s")
    assert calls[0][3:] == ("7_2",)
    assert "1 job cancelled" in capsys.readouterr().out
    assert command(["cluster", "cancel", str(folder), "--run", "12"]) == 2


def test_output_is_read_from_the_sweeps_own_folder(campaign, capsys):
    _, folder = campaign
    SweepPaths(folder).job_logs.mkdir(parents=True, exist_ok=True)
    foreign = SubmittedRun(run=2, job="../../7_2", gpu="x", submitted=EARLIER)
    job_states.append(SweepPaths(folder), [foreign])
    (folder / "details" / "jobs" / "7_2.out").write_text("hello\x1b[2J")
    assert command(["cluster", "logs", str(folder / "2")]) == 0
    assert "hello?[2J" in capsys.readouterr().out
    assert command(["cluster", "logs", str(folder)]) == 2
    (folder / "details" / "jobs").rename(folder / "elsewhere")
    (folder / "details" / "jobs").symlink_to(folder / "elsewhere")
    capsys.readouterr()
    assert command(["cluster", "logs", str(folder / "2")]) == 2
    assert "jobs is a link" in capsys.readouterr().err


def test_the_queue_and_the_accounting_are_read_field_by_field(monkeypatch):
    calls = []
    answers = {
        "squeue": "7_1|RUNNING|None|n1|1:00|N/A|name|x\nslurm_load_jobs warning\n",
        "sacct": "7_1|CANCELLED by 1000|0:0|n1|2026-01-01T10:00:00|name\n7_2|FAILED|1:0|n2|Unknown|name\n",
    }
    monkeypatch.setattr(slurm, "call", lambda *words, **_: calls.append(words) or answers[words[0]])
    assert slurm.queue() == {
        "7_1": QueuedJob("7_1", "RUNNING", "None", "n1", "1:00", "N/A", "name|x")
    }
    found = slurm.accounted("name")
    assert "--name=name" in calls[1]
    assert [(job.state, job.reason, job.node) for job in found.values()] == [
        ("CANCELLED", "", "n1"),
        ("FAILED", "exit code 1:0", "n2"),
    ]


def test_nodes_are_counted_by_what_a_kind_requests(monkeypatch):
    listed = "a|gpu*|idle|gpul40s|gpu:l40s:4(S:0-1)\nb|gpu*|mix-|gpul40s,x|gpu:l40s:4\nc|cpu|drain*|(null)|(null)\n"
    monkeypatch.setattr(slurm, "call", lambda *words, **_: listed)
    gpus = {
        "l40s": ClusterGpu(constraint="gpul40s"),
        "h100": ClusterGpu(constraint="gpuh100|x"),
        "cpu": ClusterGpu(gres=""),
    }
    found = site.offers(Cluster(name="own", gpus=gpus), [])
    assert [(offer.kind, *offer.nodes.values()) for offer in found] == [
        *(("l40s", 2, 1, 1, 0), ("h100", 1, 0, 1, 0), ("cpu", 3, 1, 1, 1)),
    ]
    assert [
        offer.kind for offer in site.offers(Cluster(name="default"), ["l40", "l40s", "h100"])
    ] == ["l40s"]


@pytest.mark.parametrize(
    ("constraint", "nodes"),
    [
        ("v100&ib", 0),
        ("(v100|a100)&ib", 1),
        ("ib&(v100|a100)", 1),
        ("v100|a100&ib", 1),  # from left to right
        ("[v100|a100]", 2),
        ("((ib&x)|v100)", 2),
        ("a100*2&ib*2", 1),
    ],
)
def test_a_constraint_is_read_as_slurm_reads_it(constraint, nodes, monkeypatch):
    listed = "a|gpu|idle|v100|gpu:2\nb|gpu|idle|a100,ib|gpu:2\nc|gpu|idle|x,ib|gpu:2\n"
    monkeypatch.setattr(slurm, "call", lambda *words, **_: listed)
    [offer] = site.offers(
        Cluster(name="own", gpus={"x": ClusterGpu(constraint=constraint, gres="gpu")}), []
    )
    assert offer.nodes["nodes"] == nodes


def test_types_of_gpus_are_counted_exactly_as_slurm_gives_them(monkeypatch, capsys):
    listed = (
        "a|gpu|idle|(null)|gpu:a100-sxm4-80gb:8(S:0-1)\nb|gpu|idle|(null)|gpu:a100.mig-1g.5gb:14(S:0,2),shard:8\n"
        "c|gpu|idle|(null)|tmpdisk:100,gpu:a100:4(S:0,2)\nd|gpu|idle|(null)|gpu:2\ne|gpu|idle|(null)|xgpu:a100:2\n"
    )
    monkeypatch.setattr(slurm, "call", lambda *words, **_: listed)

    def nodes_of(gres):
        return site.offers(Cluster(name="own", gpus={"a100": ClusterGpu(gres=gres)}), [])[0].nodes[
            "nodes"
        ]

    kinds = (
        "gpu:a100",
        "gpu:a100-sxm4-80gb",
        "gpu:a100.mig-1g.5gb",
        "gpu:a100.mig",
        "gpu",
        "gpu:a100-sxm4",
    )
    assert [nodes_of(gres) for gres in kinds] == [1, 1, 1, 0, 4, 0]
    [found] = site.offers(Cluster(name="default"), ["a100", "a100-sxm4", "2"])
    assert (found.kind, found.nodes["nodes"]) == ("a100", 1)
    listed = "a|gpu|idle|(null)|gpu:a100-sxm4-80gb:8(S:0-1)\nd|gpu|idle|(null)|gpu:2\n"
    assert command(["cluster", "check"]) == 2
    assert "(types: a100-sxm4-80gb). Write a site file" in capsys.readouterr().err


def test_a_job_knows_itself_and_who_else_is_on_its_node(monkeypatch):
    shown = {
        "job": "JobId=7 Features=gpul40s TresPerNode=gres:gpu:1 TimeLimit=00:10:00",
        "node": "NodeName=n1 CPUAlloc=12 AllocTRES=cpu=12,gres/gpu=3 GresUsed=gpu:l40s:3(IDX:0-2)",
    }
    monkeypatch.setattr(
        scheduler, "_shown", lambda kind, name: dict(w.split("=", 1) for w in shown[kind].split())
    )
    variables = {
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURMD_NODENAME": "n1",
    }
    variables |= {"SLURM_CPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "1"}
    monkeypatch.setattr(scheduler, "environ", variables)
    facts = scheduler.job_facts()
    assert facts["id"] == "7_2"
    assert facts["constraint"] == "gpul40s"
    assert facts["others"] == {"cpus": 8, "gpus": 2}
    variables.clear()
    assert scheduler.job_facts() is None


def test_turn_begins_when_all_others_pause_without_deadlock(monkeypatch, tmp_path):
    """Each of four threads records who is at work; in a turn it is alone."""
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    at_work, alone, lock = set(), [], threading.Lock()

    def work(name):
        with host_turns.joined(waiting=lambda text: None) as turn:
            for _ in range(5):
                with lock:
                    at_work.add(name)
                time.sleep(0.001)
                with lock:
                    at_work.discard(name)
                with turn(), lock:
                    alone.append(not at_work)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert alone == [True] * 20


def test_gpus_of_a_machine_are_all_some_or_refused(monkeypatch):
    boards = [("GPU-a", "0000:1b:00.0"), ("GPU-b", "0000:1c:00.0")]
    monkeypatch.setattr(local_queue.nvml, "places", lambda: boards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [slot.visible for slot in local_queue.slots("all")] == ["GPU-a", "GPU-b"]
    assert [slot.visible for slot in local_queue.slots([1])] == ["GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [slot.visible for slot in local_queue.slots("all")] == ["GPU-b"]
    for wrong in (0, "some", True, [], 2, [0, 7], [True]):
        with pytest.raises(UserError, match=r"hydra\.launcher\.gpus="):
            local_queue.slots(wrong)
    monkeypatch.setattr(local_queue.nvml, "places", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match="the NVIDIA driver lists no GPU"):
        local_queue.slots("all")


def test_a_process_gets_the_cores_near_its_gpu(tmp_path, monkeypatch):
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("0-3,8\n")
    monkeypatch.setattr(local_queue.os, "sched_getaffinity", lambda process: {1, 2, 3, 8, 9})
    assert local_queue._cores("0000:1b:00.0", tmp_path) == {1, 2, 3, 8}
    assert local_queue._cores("0000:1c:00.0", tmp_path) == frozenset()


@pytest.mark.slow
@pytest.mark.always("runs of a sweep on several GPUs")
def test_local_sweep_runs_side_by_side_and_notes_it(run, monkeypatch):
    fake = (
        "model=fake",
        "gpu=fake",
        "stopping=coarse",
        "tracking=none",
        "-m",
        "hydra/launcher=local",
    )
    sweep = (
        *fake,
        "hydra.launcher.gpus=2",
        "output_dir=s",
        "batch_size=1,64",
        "model.faults.fail=1000000",
    )
    code, printed, records = run(*sweep, "hydra.launcher.exclusive=false")
    assert code == 1, printed
    assert [record.status for record in records] == ["ok", "failed"]
    assert all("shared_host" in [doubt.code for doubt in record.doubts] for record in records)
    code, printed, again = run(*sweep)
    assert "1 run finished already" in printed
    assert "shared_host" in [doubt.code for doubt in again[0].doubts]


@pytest.mark.slow
def test_launchers_are_for_sweeps_and_for_machines_that_can(run, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    fake = ("model=fake", "gpu=fake", "tracking=none", "output_dir=s")
    assert "add -m" in run(*fake, "hydra/launcher=slurm")[1]
    code, printed, _ = run(*fake, "-m", "batch_size=1,2", "hydra/launcher=slurm")
    assert code == 2
    assert "is not on the PATH" in printed
    assert not (run.folder / "s").exists()
    code, printed, _ = run(
        *fake, "-m", "batch_size=1,2", "hydra/launcher=slurm", "hydra.launcher.warn_seconds=1"
    )
    assert printed.count("warn_seconds=1") == 1
    assert (
        "set cluster=NAME"
        in run(*fake, "-m", "batch_size=1,2", "hydra/launcher=slurm", "~cluster")[1]
    )
    assert (
        "gpu=auto"
        in run("model=fake", "output_dir=t", "-m", "batch_size=1,2", "hydra/launcher=slurm")[1]
    )


@pytest.mark.parametrize("is_new", [True, False])
def test_failed_sbatch_removes_a_new_sweep_but_no_earlier_one(run, monkeypatch, is_new):
    calls = []

    def call(*command, **_):
        calls.append(command[0])
        raise PerfexpError("sbatch failed: Invalid partition")

    monkeypatch.setattr(slurm, "max_array_size", lambda: 1000)
    monkeypatch.setattr(slurm, "submit", call)
    sweep = (
        "model=fake",
        "gpu=fake",
        "tracking=none",
        "stopping=fixed",
        "-m",
        "batch_size=1,2",
        "output_dir=s",
    )
    if not is_new:
        assert run(*sweep)[0] == 0
        for folder in (run.folder / "s").glob("1-*"):
            shutil.rmtree(folder)
    code, printed, _ = run(*sweep, "hydra/launcher=slurm")
    assert (code, bool(calls)) == (1, True), printed
    assert "Invalid partition" in printed
    assert (run.folder / "s").exists() is not is_new


@pytest.mark.slow
@pytest.mark.always("SECURITY.md: jobs have another key than their user")
def test_a_job_with_another_home_goes_on_when_requeued(run, tmp_path, monkeypatch):
    """A requeue ends the first attempt after a point; both have a home of their own."""
    scripts = []
    monkeypatch.setattr(slurm, "max_array_size", lambda: 1000)
    monkeypatch.setattr(slurm, "submit", lambda script, given: scripts.append(script) or "7")
    monkeypatch.setattr(slurm, "queue", dict)
    monkeypatch.setattr(slurm, "accounted", lambda name: {})
    words = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "batch_size=[1,2]")
    sweep = ("-m", *words, "seed=1,2", "output_dir=s", "hydra/launcher=slurm")
    assert run(*sweep, "hydra.launcher.wait=false")[0] == 0
    [script], folder = scripts, tmp_path / "s" / "0-seed-1"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    for attempt in (1, 2):
        for name in ("HOME", "XDG_STATE_HOME"):
            monkeypatch.setenv(name, str(tmp_path / f"home{attempt}"))
        subprocess.run(["bash"], input=script, text=True, check=True, timeout=300)
        points = RunPaths(folder).points.read_bytes().splitlines(keepends=True)
        assert len(points) == 2
        if attempt == 1:
            first = points[0]
            RunPaths(folder).points.write_bytes(first)
            RunPaths(folder).record.unlink()
    assert points[0] == first
    assert Record.load(folder).status is Status.OK


def test_sparse_sweep_needs_the_points_its_results_ask_for(tmp_path, make_record):
    record = make_record()
    (tmp_path / "record.json").write_bytes(record.to_json())
    (tmp_path / "details").mkdir()
    (tmp_path / "details" / "points.jsonl").write_bytes(b"".join(map(point_to_line, record.points)))
    keys, asked = [point.key for point in record.points], []
    plan = SimpleNamespace(
        keys=lambda results=(): asked.append(len(results)) or [*keys, *([()] if results else [])]
    )
    assert not is_finished(RunPaths(tmp_path), plan)
    assert asked == [len(keys)]


def test_a_record_that_cannot_be_read_stops_no_other_run(tmp_path, monkeypatch, make_record):
    monkeypatch.setattr(element, "is_finished", lambda paths, plan: paths.root.name != "new")
    runs = [
        SimpleNamespace(assignment=SimpleNamespace(folder=tmp_path / name, plan=None))
        for name in ("garbage", "whole", "new")
    ]
    for run, content in zip(runs, (b"garbage", make_record().to_json()), strict=False):
        run.assignment.folder.mkdir()
        (run.assignment.folder / "record.json").write_bytes(content)
    outcomes, notes = [], []
    left = element.unfinished(
        runs, SimpleNamespace(note=notes.append), lambda *ended: outcomes.append(ended)
    )
    assert left == runs[2:]
    assert [(assignment.folder.name, type(outcome)) for assignment, outcome in outcomes] == [
        ("garbage", UserError),
        ("whole", Record),
    ]
    assert notes == ["1 run finished already"]


@pytest.mark.slow
def test_interrupt_ends_processes_and_summarizes_their_results(run, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        local_queue, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupted)
    )
    fake = (
        "model=fake",
        "gpu=fake",
        "stopping=coarse",
        "tracking=none",
        "-m",
        "hydra/launcher=local",
    )
    code, printed, _ = run(*fake, "hydra.launcher.gpus=1", "output_dir=s", "batch_size=1,2")
    assert code == 130
    assert "sweep over batch_size" in printed
    assert "to continue: perfexp resume=" in printed
    assert Sweep.load(run.folder / "s").ended is not None


def test_logs_of_processes_follow_no_link(tmp_path):
    paths = SweepPaths(tmp_path)
    paths.make_job_logs()
    (paths.job_logs / "0.out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="a link"):
        local_queue._log(paths, 0, "out")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("code", "is_new", "outcome", "is_sent"),
    [
        (0, True, Record, True),
        (3, True, Record, False),
        (2, False, UserError, True),
        (1, True, PerfexpError, True),
    ],
)
def test_local_run_outcome_follows_exit_code_and_new_record(
    tmp_path, make_record, code, is_new, outcome, is_sent
):
    (tmp_path / "record.json").write_bytes(make_record().to_json())
    assignment = SimpleNamespace(folder=tmp_path, name="run", number=1, is_sent=True, sweep=None)
    run = element.Run(assignment=assignment, overrides=(), cluster=Cluster(name="x"))
    run.earlier = None if is_new else run.version
    outcomes, console = [], SimpleNamespace(show=lambda *_, **__: None)
    local_queue._collect(
        run, code, SweepPaths(tmp_path), console, lambda run, outcome: outcomes.append(outcome)
    )
    assert (type(outcomes[0]), assignment.is_sent) == (outcome, is_sent)


def test_only_a_slurm_job_succeeds_with_an_unsent_record(campaign, monkeypatch):
    _, folder = campaign
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(element.lifeline, "die_with", lambda parent: None)
    assert element.of_arguments([f"--of-sweep={folder}:2"])[1].end(3) == 0
    assert element.of_arguments([f"--of-sweep={folder}:2", f"{element.PARENT}=1"])[1].end(3) == 3
    monkeypatch.delenv("SLURM_JOB_ID")
    assert element.of_arguments([f"--of-sweep={folder}:2"])[1].end(3) == 3


@pytest.mark.parametrize(
    ("status", "is_new", "text"),
    [
        (Status.FAILED, False, "failed: left"),
        (Status.INTERRUPTED, True, "reached its time limit"),
        (Status.OK, True, None),
    ],
)
def test_job_without_a_complete_new_record_reports_its_state(
    tmp_path, make_record, status, is_new, text
):
    record = make_record()
    (tmp_path / "record.json").write_bytes(
        record.to_json().replace(b'"status": "ok"', f'"status": "{status.value}"'.encode(), 1)
    )
    if status is Status.INTERRUPTED:
        assert Record.load(tmp_path).status is status
    plan = SimpleNamespace(tracking={"_target_": "perfexp.tracking.NoTracking"})
    assignment = SimpleNamespace(folder=tmp_path, name="run", number=1, plan=plan, is_sent=True)
    run = element.Run(assignment=assignment, overrides=(), cluster=Cluster(name="x"))
    run.earlier = None if is_new else run.version
    why = "left" if status is Status.FAILED else "reached its time limit"
    state = job_states.RunState(
        run=0, name="run", folder=tmp_path, state=job_states.State.failed, job="7_0", why=why
    )
    if status is Status.OK:
        state = replace(state, state=job_states.State.done, why="")
    outcomes = []
    campaigns._collect(run, state, None, lambda run, outcome: outcomes.append(outcome))
    assert text in str(outcomes[0]) if text else isinstance(outcomes[0], Record)


def test_interrupt_during_submission_waits_for_the_jobs_file(tmp_path, monkeypatch):
    def taken(*words, **_):
        signal.raise_signal(signal.SIGINT)
        return "MaxArraySize = 10" if words[0] == "scontrol" else "5\n"

    paths = SweepPaths(tmp_path)
    assignment = SimpleNamespace(
        number=1, folder=tmp_path / "0", plan=SimpleNamespace(gpu_name="x")
    )
    run = element.Run(assignment=assignment, overrides=(), cluster=Cluster(name="x"))
    monkeypatch.setattr(slurm, "max_array_size", lambda: 10)
    monkeypatch.setattr(slurm, "call", taken)
    paths.create()
    with interrupts.handled(), pytest.raises(KeyboardInterrupt):
        list(campaigns.submit([run], paths, "s", SlurmSettings(), []))
    assert job_states.load(paths)[0].job == "5_0"


def test_cancelling_a_sweep_includes_jobs_missing_from_its_file(campaign, monkeypatch):
    _, folder = campaign
    calls = []
    monkeypatch.setattr(slurm, "call", lambda *words, **_: calls.append(words) or "")
    (folder / "details" / "jobs.jsonl").unlink()
    assert command(["cluster", "cancel", str(folder)]) == 0
    assert [words[:2] for words in calls] == [("scancel", "--name=perfexp-s")]


@pytest.mark.parametrize(("seconds", "state"), [(5, "running"), (500, "lost")])
def test_a_run_without_a_visible_record_is_lost_after_a_while(
    campaign, monkeypatch, seconds, state
):
    sweep, folder = campaign
    at = (datetime.now() - timedelta(seconds=seconds)).isoformat(timespec="seconds")
    job = QueuedJob("7_2", "COMPLETED", "None", "node1", ended=at, name="perfexp-s")
    monkeypatch.setattr(slurm, "queue", lambda: {"7_2": job})
    found = job_states.states(sweep, folder)[2]
    assert (found.state, found.is_queued) == (state, False)


def test_a_container_has_its_own_perfexp_and_no_scontrol(tmp_path):
    assignment = SimpleNamespace(
        number=1,
        folder=tmp_path / "0",
        overwrites=False,
        plan=SimpleNamespace(
            gpu_name="cpu", devices=1, nodes=1, tracking={"_target_": "perfexp.tracking.NoTracking"}
        ),
    )
    boxed = Cluster(name="boxed", container="image.sif")
    with pytest.raises(UserError, match=r"hydra\.launcher\.requeue=false"):
        SlurmCampaign({}).add(assignment, boxed, [])
    own = SlurmCampaign({"requeue": False})
    own.add(assignment, boxed, [])
    [run], settings = own.runs, SlurmSettings(requeue=False)
    script = campaigns._script([run], SweepPaths(tmp_path), settings)
    assert 'exec apptainer exec --nv image.sif python3 -P -m perfexp "$@"\n' in script
    assert sys.executable not in script
    assert site.python(Cluster(name="bare"))[0] == sys.executable
    assignment.plan.nodes = 2
    with pytest.raises(UserError, match="A container has no srun"):
        own.add(assignment, boxed, [])


@pytest.mark.slow
def test_requeueing_container_is_refused_before_submission(run, tmp_path, monkeypatch):
    """No command of SLURM is on the PATH: the refusal comes before the first of them."""
    (tmp_path / "mine" / "cluster").mkdir(parents=True)
    site_file = "defaults: [/schema/cluster@_here_, _self_]\nname: boxed\ncontainer: image.sif\n"
    (tmp_path / "mine" / "cluster" / "boxed.yaml").write_text(site_file)
    monkeypatch.setenv("PATH", "/nowhere")
    sweep = (
        "model=fake",
        "gpu=fake",
        "tracking=none",
        "output_dir=s",
        "-m",
        "batch_size=1,2",
        "--config-dir=mine",
    )
    boxed = (*sweep, "hydra/launcher=slurm", "cluster=boxed")
    code, printed, _ = run(*boxed)
    assert code == 2
    errors = [line for line in printed.splitlines() if line.startswith("error:")]
    assert set(errors) == {
        "error: A job in cluster.container can't queue itself again: set hydra.launcher.requeue=false."
    }
    assert not (tmp_path / "s").exists()
    assert "is not on the PATH" in run(*boxed, "hydra.launcher.requeue=false")[1]


def test_jobs_that_are_left_in_the_queue_print_their_json(capsys, tmp_path):
    application = main._Application()
    application.print_json(is_set=True)
    application._is_left = True
    application.close()
    assert json.loads(capsys.readouterr().out)
    application.is_dry = True
    application.close()
    assert not capsys.readouterr().out


def test_unresponsive_nodes_are_not_idle_in_any_partition(monkeypatch):
    listed = "a|one*|idle*|(null)|(null)\nb|two|idle|(null)|(null)\nc|three|alloc|(null)|(null)\n"
    monkeypatch.setattr(slurm, "call", lambda *words, **_: listed)
    gpus = {"cpu": ClusterGpu(gres="", partition="one,two")}
    [found] = site.offers(Cluster(name="own", gpus=gpus), [])
    assert found.nodes == {"nodes": 2, "idle": 1, "busy": 0, "others": 1}


def test_output_is_found_beside_a_broken_sweep(campaign, monkeypatch, capsys):
    _, folder = campaign
    (folder / "broken" / "details").mkdir(parents=True)
    (folder / "broken" / "sweep.json").write_text("{")
    (folder / "broken" / "details" / "jobs.jsonl").touch()
    files = [folder / "broken" / "sweep.json", folder / "sweep.json"]
    monkeypatch.setattr(cluster, "below", lambda *_, **__: files)
    SweepPaths(folder).job_logs.mkdir(parents=True, exist_ok=True)
    (folder / "details" / "jobs" / "7_2.out").write_text("hello")
    assert command(["cluster", "logs", str(folder / "2")]) == 0
    assert "hello" in capsys.readouterr().out


def test_queue_that_cannot_be_listed_is_queried_only_once(campaign, monkeypatch, capsys):
    sweep, folder = campaign
    (folder / "other" / "details").mkdir(parents=True)
    other = replaced(sweep, uid="t", command=["batch_size=7,8"], children=[])
    (folder / "other" / "sweep.json").write_bytes(other.to_json())
    (folder / "other" / "details" / "jobs.jsonl").touch()
    calls = []

    def away():
        calls.append(1)
        raise UserError("the controller is away")

    monkeypatch.setattr(slurm, "queue", away)
    assert command(["status", str(folder)]) == 1
    assert "the controller is away" in capsys.readouterr().out
    assert len(calls) == 1
