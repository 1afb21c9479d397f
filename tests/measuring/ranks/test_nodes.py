"""Nodes: ranks on two nodes by a stand-in for srun, which starts the tasks of both here."""

import json
import os
import sys

import msgspec
import pytest

from perfexp.errors import UserError
from perfexp.host import scheduler
from perfexp.measuring.ranks import start
from perfexp.records.messages import Events, cut
from perfexp.worker import rank_process

#: Starts each task with its node's variables and the first line of its input, and ends all when one fails.
SRUN = """#!{python}
import os, subprocess, sys, time
words = sys.argv[1:]
command = words[[word.startswith("--") for word in words].index(False):]
line, tasks = sys.stdin.buffer.readline(), []
for node in range(2):
    own = dict(SLURM_NODEID=str(node), SLURMD_NODENAME=f"node{{node}}", SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
    tasks.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | own))
    tasks[-1].stdin.write(line)
    tasks[-1].stdin.flush()
print("a line of the site's prolog", flush=True)
while None in (codes := [task.poll() for task in tasks]):
    if any(codes):
        for task in tasks: task.terminate()
    time.sleep(0.05)
sys.exit(max(map(abs, codes)))
"""
#: The first rank sends a message to the others, one of which is killed by it.
RANK = """
import json, os, pathlib, signal, sys, time
from perfexp.measuring.ranks import Place
from perfexp.measuring.ranks.control_messages import from_leader, to_followers
folder = pathlib.Path(next(word for word in sys.argv if word.startswith("--ranks=")).partition("=")[2])
number, size, per_host = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
place = Place(number=number, size=size, folder=folder, per_host=per_host)
if number == 0:
    connections = to_followers(place)
    event = {"event": "block", "text": f"{size} {per_host}"}
    with open(folder / "events", "w") as pipe: print(json.dumps(event), file=pipe)
    os.write(connections[0], b"die\\n")
elif from_leader(place).readline() == b"die\\n":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "node0"}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """This process is on the first node of a job of two; gives the path of its srun."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "srun"


def run(script):
    """The exit code, and the events that arrive at the worker's parent."""
    receive, send = os.pipe()
    with os.fdopen(receive) as events:
        try:
            code = start.run_on_nodes(
                [sys.executable, "-c", script], nodes=2, per_host=1, port=None, emit=Events(send)
            )
        finally:
            os.close(send)
        return code, list(map(json.loads, events))


@pytest.mark.slow
@pytest.mark.always("fault: a rank of two nodes is killed")
def test_ranks_of_two_nodes_meet_and_a_killed_one_is_named(job):
    job.write_text(SRUN.format(python=sys.executable))
    job.chmod(0o755)
    code, [block, failed] = run(RANK)
    assert (code, block) == (1, {"event": "block", "text": "2 1"})
    assert (failed["event"], failed["status"]) == ("failed", "killed")
    assert failed["message"].startswith("rank 1 of 2 (process ")
    assert " on node1) was terminated by SIGKILL" in failed["message"]


@pytest.mark.parametrize("rank", [None, {"rank": 0, "end": [1, start.RANK_LOST, None, "a"]}])
def test_an_srun_that_starts_nothing_or_loses_a_node_is_reported(job, rank):
    job.write_text(f"#!/bin/sh\necho '{json.dumps(rank)}'\nexit 5\n")
    job.chmod(0o755)
    assert run("") == (
        1,
        [
            {
                "event": "failed",
                "message": "srun ended with code 5; see details/run.log",
                "status": "killed",
            }
        ],
    )


@pytest.mark.parametrize("letter", ['"', "é", "\U0001f600", "\x01", "\udc80", "x"])
def test_the_line_of_an_error_stays_whole_in_slurm(letter, capfdbinary, monkeypatch):
    message = cut(letter * 2000, rank_process._MOST_BYTES)
    error = {"message": message, "status": "unsupported", "timestamp": 1764345678.1234567}
    monkeypatch.setattr(start, "_launch", lambda *_: {99999: start.FailedRank(4194304, 1, error)})
    monkeypatch.setattr(start, "_REPORT_SECONDS", 0)
    monkeypatch.setattr(start, "_end_with_input", lambda: None)
    for name, value in {
        "SLURM_NODEID": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "::",
        "SLURMD_NODENAME": "n" * 64,
    }.items():
        monkeypatch.setenv(name, value)
    instructions = start.Instructions(
        command=[], folder="", nodes=2, per_host=1, run_id="", port=1, messages_port=2, secret=""
    )
    receive, send = os.pipe()
    os.write(send, json.dumps(msgspec.to_builtins(instructions)).encode() + b"\n")
    with os.fdopen(receive) as given, os.fdopen(send, "wb"):
        monkeypatch.setattr("sys.stdin", given)
        assert start.main() == 1
    line = capfdbinary.readouterr().out
    assert 700 < len(line) <= 1024
    assert json.loads(line)["end"][2]["message"] == message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_JOB_ID": ""}, "this is not in a job"),
        ({"SLURM_JOB_NUM_NODES": "1"}, "job 7 has 1"),
        ({"SLURMD_NODENAME": ""}, "job 7 has 2"),
    ],
)
def test_several_nodes_need_a_job_of_as_many(changes, text, monkeypatch):
    environ = {name: value for name, value in (JOB | changes).items() if value}
    monkeypatch.setattr(scheduler, "environ", environ)
    with pytest.raises(UserError, match=f"gpu.nodes=2 needs a job of SLURM with 2 nodes; {text}"):
        scheduler.require_nodes(2)
