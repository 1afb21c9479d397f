"""Workers as processes: what they tell, and that nothing of them is left."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from perfexp.errors import UserError
from perfexp.host.process import MessageError, SilenceError, WorkerProcess

HEAD = """
import json, os, signal, subprocess, sys, time
fd = next(int(text.partition("=")[2]) for text in sys.argv if text.startswith("--events-fd="))
def tell(**event):
    os.write(fd, json.dumps(event).encode() + b"\\n")
"""
#: A child in a session of its own, and one that does not end when it is asked to.
CHILDREN = """
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
children = [
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True),
    subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, pass_fds=[fd]),
]
children[1].stdout.readline()
tell(event="block", text=" ".join(str(child.pid) for child in children))
"""


def worker(tmp_path, code):
    return WorkerProcess([sys.executable, "-c", HEAD + code], tmp_path / "log")


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_events_arrive_and_the_exit_code_is_told(tmp_path):
    process = worker(tmp_path, "tell(event='a'); tell(event='finished'); sys.exit(3)")
    assert [event["event"] for event in process.events(60)] == ["a", "finished"]
    assert process.end() == 3


def test_what_was_told_right_before_a_death_arrives(tmp_path):
    process = worker(
        tmp_path, "[tell(event=str(n)) for n in range(100)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert [event["event"] for event in process.events(60)] == [str(n) for n in range(100)]
    assert process.end() == -signal.SIGKILL


def test_silence_is_told_and_patience_is_kept(tmp_path):
    process = worker(
        tmp_path, "tell(event='a', patient=True); time.sleep(1.5); tell(event='b'); time.sleep(600)"
    )
    seen = []
    with pytest.raises(SilenceError):
        for event in process.events(0.5):
            seen.append(event["event"])
    assert seen == ["a", "b"] or seen == []  # on a busy machine it is silent before its first word
    assert process.end() < 0


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_nothing_that_a_worker_started_outlives_it(tmp_path, ending):
    process = worker(tmp_path, CHILDREN + ending)
    pids = [int(pid) for pid in next(process.events(60))["text"].split()]
    process.end()
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_worker_end_is_seen_though_children_hold_its_pipe(tmp_path):
    process = worker(tmp_path, CHILDREN + "children[0].kill()")
    [event] = process.events(60)
    assert process.end() == 0
    assert not any(is_running(int(pid)) for pid in event["text"].split())


def test_a_worker_that_can_not_be_started_is_told(tmp_path):
    with pytest.raises(UserError, match="can't be started"):
        WorkerProcess(["/no/such/program"], tmp_path / "log")


def test_the_descriptors_of_a_worker_are_given_back(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        process = worker(tmp_path, "")
        assert list(process.events(60)) == []
        process.end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    "text",
    [
        "junk",
        "5",
        "[]",
        "{}",
        '{"event": 3}',
        '{"event": "a", "patient": 1}',
        '{"event": "a',
        "[" * 99999,
        '"\\ud800"',
    ],
)
def test_what_is_not_an_event_is_an_error(tmp_path, text):
    process = worker(
        tmp_path, f"tell(event='a'); os.write(fd, {text!r}.encode() + b'\\n'); time.sleep(600)"
    )
    events = process.events(60)
    assert next(events)["event"] == "a"
    with pytest.raises(MessageError):
        next(events)
    process.end()
