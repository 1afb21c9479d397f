"""Faults of half the kinds; `validation/faults.py` runs many."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfexp.devices import lock
from perfexp.host import interrupts, locks
from perfexp.host.files import write_atomically
from perfexp.main import main
from perfexp.records.paths import RunPaths, append_line
from perfexp.records.record import Key, Point, Record, Status, point_to_line, read_points
from tests.support import processes
from tests.support.faults import KINDS, TORCH_KINDS, Trial, draw_pictures
from tests.support.selection import first_always

#: Seed and kind of each trial, and whether it runs torch.
TRIALS = [(7 * place % 60, kind, False) for place, kind in enumerate(KINDS)]
TRIALS += [(0, kind, True) for kind in TORCH_KINDS]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="finds processes in /proc and limits those of others"
)
@pytest.mark.parametrize(("number", "kind", "torch"), first_always("README: crashes", TRIALS))
def test_fault_loses_no_point_and_the_run_completes(tmp_path, number, kind, torch):
    (tmp_path / "trial").mkdir()
    pictures = draw_pictures(tmp_path / "pictures") if torch else None
    trial = Trial(number, tmp_path / "trial", short=True, pictures=pictures, kind=kind)
    trial.go()
    assert not trial.outcome.problems, trial.report()


def point(batch_size):
    key = Key(phase="inference", input_size=(32, 32), batch_size=batch_size, precision="fp32")
    return Point(key=key, status=Status.OK)


def test_line_that_lacks_only_its_newline_survives_an_append(tmp_path):
    file = tmp_path / "points.jsonl"
    append_line(file, point_to_line(point(1)))
    append_line(file, point_to_line(point(2)))
    os.truncate(file, file.stat().st_size - 1)
    append_line(file, point_to_line(point(3)))
    assert [each.key.batch_size for each in read_points(file)] == [1, 2, 3]


def test_finished_points_stay_byte_for_byte_on_rerun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "output_dir=run"]
    command.append("batch_size=[1,2]")
    assert main(command) == 0
    file = tmp_path / "run" / "details" / "points.jsonl"
    first, second = map(json.loads, file.read_bytes().splitlines())
    first["metrics"].append({"name": "whole/bytes", "value": 330, "unit": "bytes"})  # and not 330.0
    written = json.dumps(first).encode() + b"\n"
    file.write_bytes(written + json.dumps(second | {"status": "failed"}).encode() + b"\n")
    assert main(command) == 0
    assert file.read_bytes().startswith(written)
    assert [each.status for each in read_points(file)] == [Status.OK, Status.OK]


def test_partial_files_of_a_crash_are_removed_and_others_kept(tmp_path):
    paths = RunPaths(tmp_path)
    paths.create()
    (tmp_path / ".record.json.abc_1234").write_text("{")
    (tmp_path / ".mine.abc_1234").write_text("")
    (tmp_path / ".record.json.backup-of-mine").write_text("")
    paths.remove_leftovers()
    (paths.details / ".plan.yaml.abc_1234").write_text("{")
    paths.remove_leftovers()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "manifest.json",
        ".mine.abc_1234",
        ".record.json.backup-of-mine",
    }


def test_a_forked_process_does_not_keep_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    ready, end = os.pipe(), os.pipe()
    with lock.held("device", wait=False, purpose="a test", waiting=lambda owner: None):
        child = os.fork()
        if not child:
            os.close(end[1])
            os.write(ready[1], b"!")
            os.read(end[0], 1)  # as a loader that outlives its worker
            os._exit(0)
        os.read(ready[0], 1)
        assert lock.holder("device") is not None
    assert lock.holder("device") is None
    os.close(end[1])
    os.waitpid(child, 0)
    for descriptor in (*ready, end[0]):
        os.close(descriptor)


def test_interrupt_waits_until_a_held_step_is_done(tmp_path):
    with interrupts.handled():
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                write_atomically(tmp_path / "file", b"whole")
        interrupts.check()  # two at once are one
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_held_interrupt_is_raised_at_an_explicit_check():
    with interrupts.handled(), interrupts.held():
        interrupts.check()
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_an_interrupt_that_nothing_holds_comes_at_once():
    with interrupts.handled(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_worker_ends_if_its_parent_has_already_ended(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [
        sys.executable,
        "-m",
        "perfexp.worker.entry",
        str(tmp_path),
        "--plan-sha256=0",
        f"--parent={gone.pid}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout + done.stderr) == (1, "")


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022])
def test_what_is_written_is_readable_as_the_umask_says(tmp_path, umask):
    paths = RunPaths(tmp_path / "x")
    before = os.umask(umask)
    try:
        paths.create()
        write_atomically(paths.record, b"{}")
        write_atomically(paths.plan, lambda file: file.write(b"{}"))
        append_line(paths.points, b"{}\n")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in paths.root.rglob("*") if path.is_file()} == {
        0o666 & ~umask
    }


@pytest.mark.slow
@pytest.mark.always("fault: kill -9 while results are replaced")
def test_kill_during_overwrite_keeps_old_or_new_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        "model=fake",
        "gpu=fake",
        "ttfp=false",
        "tracking=none",
        "stopping=fixed",
        "quiet=true",
        "output_dir=x",
    ]
    assert main([*command, "input_size=16"]) == 0
    names = ("record.json", "details/points.jsonl", "details/plan.yaml", "time.png")
    before = {name: Path("x", name).read_bytes() for name in names}
    again = [
        "--overwrite",
        *command,
        "input_size=[32,64,96]",
        "model.faults.hang=5000",
        "timeout_seconds=10",
    ]
    finished = Path("x/.replacement/details/points.jsonl")
    with processes.start(*again) as process:
        while (
            not any(one.status is Status.OK for one in read_points(finished))
            and process.poll() is None
        ):
            time.sleep(0.02)
        process.kill()
    assert {name: Path("x", name).read_bytes() for name in names} == before
    kept = {one.key: one.started for one in read_points(finished) if one.status is Status.OK}
    assert main(again) == 1
    points = Record.load(Path("x")).points
    assert kept.items() <= {one.key: one.started for one in points}.items()
    assert [one.status for one in points] == [Status.OK, Status.OK, Status.TIMEOUT]
    assert not Path("x/.replacement").exists()
