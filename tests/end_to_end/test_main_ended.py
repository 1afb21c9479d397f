"""The command line from end to end: runs that are interrupted, killed, kept waiting, or that lose what they need."""

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from perfexp.devices import lock
from perfexp.main import main
from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep
from tests.support import processes
from tests.support.selection import first_always

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")


def start(folder, *arguments):
    return processes.start(
        *arguments,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def worker_of(process):
    [worker] = psutil.Process(process.pid).children()
    return worker.pid


def points_in(folder):
    file = folder / "details" / "points.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def sizes(count):
    return f"input_size=[{','.join(str(32 + number) for number in range(count))}]"


LONG = (*FAKE, sizes(400), "stopping.measure=2000", "output_dir=x")
#: A device of this process's: other tests may run at the same time.
LOCK = f"perfexp-test-{os.getpid()}"
LOCKED = (*FAKE, f"+gpu.script.lock_name={LOCK}", "output_dir=x")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", first_always("README: Ctrl-C", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
)
def test_interrupted_run_keeps_finished_points_and_resumes(tmp_path, number, run):
    process = start(tmp_path, *LONG)
    wait_for(lambda: points_in(tmp_path / "x") >= 2)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    record = Record.load(tmp_path / "x")
    statuses = [point.status for point in record.points]
    assert statuses.count(Status.OK) >= 2
    assert set(statuses) == {Status.OK, Status.INTERRUPTED}
    assert record.status is Status.INTERRUPTED
    assert "Traceback" not in printed
    assert "to continue: perfexp resume=x\n" in printed


@pytest.mark.slow
def test_a_sweep_whose_terminal_goes_away_keeps_what_is_finished(tmp_path):
    process = start(tmp_path, *LONG[:-1], "-m", "batch_size=1,2", "output_dir=s")
    wait_for(lambda: points_in(tmp_path / "s" / "0-b1") >= 2)
    process.send_signal(signal.SIGHUP)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "to continue: perfexp resume=" in printed
    assert Sweep.load(tmp_path / "s").children[0].status is Status.INTERRUPTED


@pytest.mark.slow
def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path):
    ignored = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = ["-m", "perfexp", *FAKE, sizes(40), "stopping.measure=500", "output_dir=x"]
    process = subprocess.Popen(
        [sys.executable, "-c", ignored, *command],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: points_in(tmp_path / "x") >= 1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 0
    assert Record.load(tmp_path / "x").status is Status.OK


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [(), ("-m", "batch_size=1,2")])
def test_output_folder_deleted_during_a_run_is_named(tmp_path, sweep):
    process = start(tmp_path, *FAKE, sizes(30), "stopping.measure=2000", "output_dir=x", *sweep)
    folder = tmp_path / "x" / "0-b1" if sweep else tmp_path / "x"
    wait_for(lambda: points_in(folder) >= 1)
    while (tmp_path / "x").exists():  # it is still being written to
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1, printed
    told = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert f"The output folder {tmp_path / 'x'} is gone" in told[0]
    assert "Traceback" not in printed
    assert len(told) == 1 or sweep


def test_output_folder_deleted_before_the_worker_starts_is_named(run, tmp_path, monkeypatch):
    from perfexp.orchestration import supervisor

    begin = supervisor.WorkerProcess

    def gone(command, log, **options):
        shutil.rmtree(log.parent.parent)
        return begin(command, log, **options)

    monkeypatch.setattr(supervisor, "WorkerProcess", gone)
    code, printed, _ = run(*FAKE, "output_dir=x", "quiet=true")
    assert code == 1
    [line] = printed.splitlines()
    assert f"The output folder {tmp_path / 'x'} is gone" in line


@pytest.mark.slow
@pytest.mark.always("fault: a worker is killed")
def test_killed_worker_costs_at_most_one_point(tmp_path):
    process = start(tmp_path, *FAKE, sizes(30), "stopping.measure=4000", "output_dir=x")
    wait_for(lambda: points_in(tmp_path / "x") >= 2)
    os.kill(worker_of(process), signal.SIGKILL)
    printed, _ = process.communicate(timeout=120)
    statuses = [point.status for point in Record.load(tmp_path / "x").points]
    killed = statuses.count(
        Status.KILLED
    )  # none, where the signal came while the second one was being kept
    assert killed <= 1
    assert process.returncode == killed, printed
    assert statuses.count(Status.OK) == len(statuses) - killed
    assert (tmp_path / "x" / "details" / "run.log").read_text().count("perfexp.worker.entry") == 2


def test_a_worker_does_not_outlive_its_parent(tmp_path):
    process = start(tmp_path, *LONG)
    wait_for(lambda: points_in(tmp_path / "x") >= 1)
    worker = worker_of(process)
    process.kill()
    process.wait()
    wait_for(
        lambda: (
            not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
        )
    )
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.always("fault: the disk is full")
def test_a_full_disk_is_told_and_loses_no_finished_point(tmp_path):
    """A limit on the size of files stands for the full disk: writing fails in the same way, in the worker too."""
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from perfexp.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = [*FAKE, sizes(20), "output_dir=x"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "repeat the command" in done.stderr
    assert "Traceback" not in done.stderr
    finished = points_in(tmp_path / "x")
    assert finished >= 1
    assert main([*arguments[:-1], f"output_dir={tmp_path / 'x'}"]) == 0
    record = Record.load(tmp_path / "x")
    assert [point.status for point in record.points] == [Status.OK] * 20


@pytest.mark.slow
def test_two_perfexps_do_not_measure_into_one_folder(tmp_path, run):
    process = start(tmp_path, *LONG)
    wait_for(lambda: points_in(tmp_path / "x") >= 1)
    code, printed, _ = run(*LONG)
    assert code == 2
    assert "Another perfexp is measuring" in printed
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.slow
def test_a_hanging_worker_is_ended_and_another_takes_the_rest(run):
    code, _, [record] = run(
        *FAKE,
        "batch_size=[1,100,2]",
        "model.faults.hang=1000000",
        "timeout_seconds=5",
        "output_dir=x",
    )
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.TIMEOUT, Status.OK]
    assert "timeout_seconds" in record.points[1].error


def test_lost_device_costs_one_point_and_a_new_worker_continues(run, tmp_path):
    # in this order with this seed
    code, _, [record] = run(
        *FAKE, "batch_size=[1,100,2]", "seed=3", "model.faults.lost=1000000", "output_dir=x"
    )
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.FAILED, Status.OK]
    assert (tmp_path / "x" / "details" / "run.log").read_text().count(
        "-m perfexp.worker.entry"
    ) == 2


@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [
        ("kill", Status.KILLED, "SIGKILL"),
        ("crash", Status.KILLED, "SIGSEGV"),
        ("fail", Status.FAILED, "RuntimeError"),
    ],
)
def test_failure_of_one_point_is_its_status_others_are_measured(run, fault, status, told):
    code, _, [record] = run(
        *FAKE, "batch_size=[1,100,2]", f"model.faults.{fault}=1000000", "output_dir=x"
    )
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, status, Status.OK]
    assert told in record.points[1].error


def test_a_device_in_use_is_refused_where_that_is_wanted(run):
    with lock.held(LOCK, wait=False, purpose="something else", waiting=print):
        code, printed, records = run(*LOCKED, "device_lock=fail")
    assert code == 2
    assert f"process {os.getpid()} measures something else" in printed
    assert not records


@pytest.mark.slow
def test_a_device_in_use_is_waited_for(tmp_path):
    with lock.held(LOCK, wait=False, purpose="something else", waiting=print):
        process = start(tmp_path, *LOCKED, "timeout_seconds=2")
        wait_for(lambda: psutil.Process(process.pid).children())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)  # longer than a worker may be silent: waiting is no hanging
        assert points_in(tmp_path / "x") == 0
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert points_in(tmp_path / "x") == 1
