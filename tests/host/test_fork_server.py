"""Workers that are forked from a server are as new interpreters, and none outlives its client or its server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from perfexp.host import fork_server
from perfexp.host.process import WorkerProcess
from perfexp.worker import server as serving
from tests.host.test_process import is_running

#: Events and facts of a process whose module is this text.
TELL = """
import json, os, signal, sys, time, argparse
parser = argparse.ArgumentParser()
parser.add_argument("words", nargs="*")
for name in ("events-fd", "parent", "spawned-ns"):
    parser.add_argument(f"--{name}", type=int)
given = parser.parse_args()
def tell(**fields):
    os.write(given.events_fd, json.dumps({"event": "facts", **fields}).encode() + b"\\n")
"""
FACTS = """
import locale, random, resource, threading
from pathlib import Path
import numpy, torch
files = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) < 3}
count = len([name for name in os.listdir("/proc/self/fd")])
random.random(), numpy.random.random()
tell(
    argv=sys.argv[1:2], environment=dict(os.environ),
    folder=os.getcwd(), path=sys.path, leads=os.getsid(0) == os.getpid(),
    limits=[resource.getrlimit(number) for number in range(16)], umask=os.umask(0o22), locale=locale.getlocale(),
    signals=[str(signal.getsignal(number)) for number in sorted(signal.valid_signals())], flags=list(sys.flags),
    affinity=sorted(os.sched_getaffinity(0)), nice=os.nice(0), streams=files, descriptors=count, name=__name__,
    threads=[thread.name for thread in threading.enumerate()], torch=torch.get_num_threads(),
    encoding=[sys.stdout.encoding, sys.stdout.line_buffering, sys.stdin.isatty()],
)
"""


def is_forked(process):
    return isinstance(process._process, fork_server.ForkedProcess)


@pytest.fixture(autouse=True)
def _own_server(monkeypatch, tmp_path):
    """A server of the test's own, with the modules of its folder."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield
    fork_server._discard()


@pytest.fixture
def begin(tmp_path):
    started = []

    def begin(code, *words, imports=(), name="subject"):
        (tmp_path / f"{name}.py").write_text(TELL + code)
        process = WorkerProcess(
            [sys.executable, "-P", "-m", name, *words], tmp_path / "log", imports=imports
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process._process.poll() is None:
            process.end()


def test_a_forked_process_has_the_facts_of_a_new_interpreter(begin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for imports in (None, ["torch"]):
        process = begin(FACTS, "word", imports=imports)
        found += process.events(120)
        assert is_forked(process) == (imports is not None), (tmp_path / "log").read_text()
        assert process.end() == 0, (tmp_path / "log").read_text()
    fresh, forked = found
    for facts in found:
        facts["environment"] = {
            name: facts["environment"][name]
            for name in os.environ
            if name not in fork_server._IGNORED
        }
    forked["descriptors"] -= 1  # the file of random weights
    assert forked == fresh


def test_forked_processes_do_not_share_their_random_numbers(begin):
    code = "import random, numpy, torch; tell(numbers=[random.random(), numpy.random.random(), float(torch.rand(1))])"
    first, second = (next(begin(code, imports=["torch"]).events(60))["numbers"] for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("sys.exit(7)", 7),
        ("raise SystemExit", 0),
        ("sys.exit('words')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("", 0),
    ],
)
def test_its_exit_code_or_signal_comes_back(begin, code, ending):
    process = begin(code, imports=[])
    assert list(process.events(60)) == []
    assert is_forked(process)
    assert process.end() == ending


def test_what_it_prints_is_in_the_log_with_its_errors(begin, tmp_path):
    process = begin("print('words'); 1 / 0", imports=[])
    assert list(process.events(60)) == []
    process.end()
    log = (tmp_path / "log").read_text()
    assert "words" in log and "ZeroDivisionError" in log


def test_one_fork_server_serves_until_the_environment_changes(begin, monkeypatch):
    parents = [
        next(begin("tell(parent=os.getppid())", imports=[]).events(60))["parent"] for _ in range(2)
    ]
    monkeypatch.setenv("SOMETHING", "else")
    parents.append(next(begin("tell(parent=os.getppid())", imports=[]).events(60))["parent"])
    assert parents[0] == parents[1] != parents[2]
    assert not is_running(parents[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_fork_server_ends_children_and_restarts(begin, number):
    process = begin("tell(parent=os.getppid()); time.sleep(600)", imports=[])
    events = process.events(60)
    parent = next(events)["parent"]
    os.kill(parent, number)
    assert list(events) == []
    assert process.end() == -signal.SIGKILL
    again = begin("tell(parent=os.getppid())", imports=[])
    assert next(again.events(60))["parent"] != parent
    assert is_forked(again)


def test_nothing_outlives_a_client_that_is_killed(tmp_path):
    (tmp_path / "subject.py").write_text(
        TELL + "tell(own=[os.getpid(), os.getppid()]); time.sleep(600)"
    )
    client = (
        "import sys; from pathlib import Path; from perfexp.host.process import WorkerProcess\n"
        "process = WorkerProcess([sys.executable, '-P', '-m', 'subject'], Path('log'), imports=[])\n"
        "print(*next(process.events(60))['own'], type(process._process).__name__, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", client],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        *pids, kind = process.stdout.readline().split()
        process.kill()
    assert kind == "ForkedProcess"
    psutil.wait_procs(
        [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))], timeout=20
    )
    assert not any(is_running(int(pid)) for pid in pids)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "starts threads (1)",
        ),
        ("raise RuntimeError('no such library')", "cannot be imported: no such library"),
    ],
)
def test_unforkable_import_falls_back_to_a_new_interpreter(begin, tmp_path, module, why):
    (tmp_path / "spoiler.py").write_text(module)
    process = begin("tell()", imports=["spoiler"])
    assert [event["event"] for event in process.events(60)] == ["facts"]
    assert not is_forked(process)
    assert (
        "started as a new interpreter: " in (log := (tmp_path / "log").read_text()) and why in log
    )


def test_a_server_with_a_device_of_a_driver_is_spoilt(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "_DEVICES", (str(tmp_path),))
    assert serving.Server._opened_device() is None
    with (tmp_path / "nvidiactl").open("w"):
        assert "nvidiactl" in serving.Server._opened_device()


def test_a_thread_that_starts_after_the_first_fork_is_seen_too(begin, tmp_path):
    (tmp_path / "late.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    assert is_forked(begin("", imports=["numpy"]))
    assert not is_forked(begin("", imports=["late"]))


def test_an_import_that_fails_concerns_its_own_process_only(begin, tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit('no such library')")
    assert not is_forked(begin("", imports=["broken"]))
    assert is_forked(begin("", imports=[]))


def test_what_a_process_inherits_is_that_of_its_own_start(begin, monkeypatch):
    code = "tell(cores=sorted(os.sched_getaffinity(0)), umask=os.umask(0))"
    before, cores = next(begin(code, imports=[]).events(60)), os.sched_getaffinity(0)
    old = os.umask(0o077)
    try:
        os.sched_setaffinity(0, {min(cores)})
        after = next(begin(code, imports=[]).events(60))
    finally:
        os.umask(old)
        os.sched_setaffinity(0, cores)
    assert (before["cores"], before["umask"]) == (sorted(cores), old)
    assert (after["cores"], after["umask"]) == ([min(cores)], 0o077)


def test_server_without_descriptors_falls_back_to_spawning(begin, monkeypatch):
    process = begin("tell(parent=os.getppid())", imports=[])
    parent = psutil.Process(next(process.events(60))["parent"])
    process.end()
    few = max(parent.num_fds() - 4, 3)  # those of the process before may still be open
    parent.rlimit(psutil.RLIMIT_NOFILE, (few, few))
    again = begin("tell()", imports=[])
    assert len(list(again.events(60))) == 1
    assert not is_forked(again)


def test_a_process_that_hangs_in_the_fork_is_started_anew(begin, tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text(
        "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(600))"
    )
    monkeypatch.setattr(fork_server, "_FORK_SECONDS", 1.0)
    process = begin("tell()", imports=["hanging"])
    assert len(list(process.events(60))) == 1
    assert not is_forked(process)
    assert "did not begin" in (tmp_path / "log").read_text()


def test_fork_server_gains_no_threads_from_its_forks(begin):
    """Ten forks that compute leave it as it was: torch's pools exist in the forked processes only."""
    code = "import torch; torch.ones(300, 300) @ torch.ones(300, 300); tell(parent=os.getppid())"
    counts = set()
    for _ in range(11):
        process = begin(code, imports=["torch"])
        parent = next(process.events(120))["parent"]
        counts.add(len(list(Path(f"/proc/{parent}/task").iterdir())))
        assert is_forked(process)
        process.end()
    assert len(counts) == 1


def test_forked_process_memory_includes_its_servers_imports(begin):
    code = (
        "import torch; from perfexp.devices.cpu import CpuDevice\n"
        "device = CpuDevice(); device.reset_peak_memory(); tell(bytes=device.memory()[0].value)"
    )
    forked, fresh = (
        next(begin(code, imports=imports).events(120))["bytes"] for imports in (["torch"], None)
    )
    assert forked == pytest.approx(fresh, rel=0.1)


def test_descriptors_are_given_back(begin):
    begin("", imports=[]).end()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        process = begin("", imports=[])
        assert list(process.events(60)) == []
        process.end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_server_that_can_not_start_leaves_new_interpreters(begin, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    process = begin("tell()", imports=[])
    assert len(list(process.events(60))) == 1
    assert not is_forked(process)
    assert "darwin" in (tmp_path / "log").read_text()
