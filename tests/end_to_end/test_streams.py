"""Output that nobody takes: a measurement goes on without it, with the same exit code and a complete record."""

import itertools
import os
import shlex
import signal
import subprocess
import sys

import pytest

from perfexp.records.record import Record, Status
from tests.support.faults import ROOT
from tests.support.selection import first_always

FAKE = "model=fake gpu=fake tracking=none cold_start=false stopping=fixed batch_size=[1,2,3] output_dir=x"
PERFEXP = f"{shlex.quote(sys.executable)} -m perfexp"
UNDRAWN = f"{shlex.quote(sys.executable)} -m tests.support.undrawn"

#: What stdout of a run may be.
STDOUTS = ["| true", "| head -1", ">&-", "> /dev/full"]
#: Commands that measure nothing, and where their output goes.
ENDING = list(
    itertools.product(
        ("--help", "--version", "list models", "env", "--cfg job model=fake"),
        ("| true", ">&-", "> /dev/full"),
    )
)


def shell(command, folder):
    """Exit code of the first command of a pipe, and what came on stderr."""
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


def is_complete(folder):
    record = Record.load(folder / "x")
    return (
        record.status is Status.OK
        and len(record.points) == 3
        and (folder / "x" / "report.md").is_file()
    )


@pytest.mark.parametrize("where", first_always("fault: stdout is closed", STDOUTS))
@pytest.mark.slow
def test_run_continues_without_stdout_and_reports_it_once(tmp_path, where):
    code, told = shell(f"{UNDRAWN} {FAKE} {where}", tmp_path)
    assert code == 0, told
    assert is_complete(tmp_path)
    lines = told.splitlines()
    assert len(lines) == (0 if "|" in where else 1)
    assert all(line.startswith("warning: stdout is closed") for line in lines)


@pytest.mark.parametrize("command", ["help keys", "list gpus", "--help", "completion bash"])
def test_the_end_of_a_pipe_is_quiet(tmp_path, command):
    assert shell(f"{PERFEXP} {command} | true", tmp_path) == (0, "")


@pytest.mark.parametrize("where", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2> /dev/full"])
@pytest.mark.slow
def test_a_run_goes_on_without_its_stderr(tmp_path, where):
    code, told = shell(f"{UNDRAWN} {FAKE} {where}", tmp_path)
    assert (code, told) == (0, "")
    assert is_complete(tmp_path)


@pytest.mark.slow
def test_failure_keeps_its_exit_code_with_closed_output(tmp_path):
    assert shell(f"{UNDRAWN} {FAKE} model.faults.fail=1 >&- 2>&-", tmp_path) == (1, "")
    assert shell(f"{PERFEXP} nonsense=1 >&- 2>&-", tmp_path) == (2, "")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "where"), ENDING)
def test_a_command_ends_as_ever_without_its_stdout(tmp_path, command, where):
    code, told = shell(f"{PERFEXP} {command} {where}", tmp_path)
    assert code == 0, told
    assert "Traceback" not in told
    assert len(told.splitlines()) <= 1


@pytest.mark.slow
def test_results_never_go_where_a_closed_stdout_was(tmp_path):
    """The lowest free descriptor is the next one that is opened: nothing that is printed may end in a file."""
    code, _ = shell(f"{UNDRAWN} {FAKE} >&-", tmp_path)
    assert code == 0
    for file in ("details/points.jsonl", "record.json", "details/run.log"):
        assert "1 point" not in (tmp_path / "x" / file).read_text()


def test_output_arrives_unchanged_through_a_nonblocking_pipe(tmp_path):
    receive, send = os.pipe()
    os.set_blocking(send, False)
    text = "ü" * 200_000
    code = (
        f"from perfexp.__main__ import install_streams; install_streams(); print({'ü'!r} * 200_000)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=send, env={**os.environ, "PYTHONUTF8": "1"}
    )
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        assert pipe.read().decode() == f"{text}\n"
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_terminal_that_goes_away_interrupts_as_usual(tmp_path):
    """Its signal and its closed streams come together."""
    settings = "model=fake gpu=fake tracking=none cold_start=false stopping=fixed stopping.measure=2000 output_dir=x"
    sizes = f"input_size=[{','.join(str(32 + number) for number in range(400))}]"
    process = subprocess.Popen(
        [sys.executable, "-m", "perfexp", *settings.split(), sizes],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdout.readline()
    while b"1/400" not in process.stdout.readline():
        pass
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 130
    assert Record.load(tmp_path / "x").status is Status.INTERRUPTED
