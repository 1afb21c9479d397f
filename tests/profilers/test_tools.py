"""Tools that are asked: what becomes of them when nobody waits for the answer any more."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from perfexp.host import interrupts
from perfexp.profilers import tools

#: Starts another process, says who both are, and does not end; where it is stubborn, not even when it is asked to.
STUB = """
import os, signal, subprocess, sys, time
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({told!r} + ".part", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({told!r} + ".part", {told!r})
time.sleep(600)
"""


def sleeper(told, *, stubborn=False):
    return [sys.executable, "-c", STUB.format(told=str(told), stubborn=stubborn)]


def interrupt_when(told, number):
    """Send this process a signal once the tool has begun."""

    def send():
        while not told.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def are_gone(told: Path) -> bool:
    alive = [
        psutil.Process(number)
        for number in map(int, told.read_text().split())
        if psutil.pid_exists(number)
    ]
    return not [
        process
        for process in psutil.wait_procs(alive, timeout=20)[1]
        if process.status() != "zombie"
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_held_interrupt_ends_the_tool_and_is_raised(tmp_path, number):
    told = tmp_path / "told"
    with interrupts.handled():
        thread = interrupt_when(told, number)
        with interrupts.held(), pytest.raises(KeyboardInterrupt):
            tools.ask(sleeper(told), 600.0)
        thread.join()
    assert are_gone(told)


def test_an_interrupt_that_is_not_held_ends_the_tool_too(tmp_path):
    told = tmp_path / "told"
    with interrupts.handled():
        thread = interrupt_when(told, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            tools.ask(sleeper(told), 600.0)
        thread.join()
    assert are_gone(told)


@pytest.mark.slow
def test_stubborn_tool_is_terminated_after_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "_GRACE_SECONDS", 0.1)
    told = tmp_path / "told"
    answer = tools.ask(sleeper(told, stubborn=True), 3.0)
    assert answer.code is None
    assert "took longer than 3 s and was terminated" in answer.err
    assert are_gone(told)


def test_a_long_answer_is_heard_whole(tmp_path):
    script = "import sys, time; print('x' * 10**6); sys.stdout.flush(); time.sleep(0.5); print('end', file=sys.stderr)"
    answer = tools.ask([sys.executable, "-c", script])
    assert (answer.code, answer.out, answer.err) == (0, "x" * 10**6 + "\n", "end\n")


def test_a_tool_is_named_from_the_root_wherever_it_runs_later(nsys, tmp_path, monkeypatch):
    tool = nsys()
    monkeypatch.chdir(tmp_path)
    assert tools.find("nsys", "tools/nsys").path == str(tool.path)
    monkeypatch.setenv("PATH", "tools", prepend=":")
    assert tools.find("nsys").path == str(tool.path)
