"""Two commands that go on with one sweep at once."""

import json
import subprocess

import pytest

from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep
from tests.support import processes

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")


def start(folder, *arguments):
    return processes.start(
        *arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_one_of_two_concurrent_resumes_of_a_sweep_is_refused(
    tmp_path,
):
    first = start(tmp_path, "-m", *FAKE, "batch_size=1,2,4", "output_dir=s")
    assert first.wait(120) == 0
    first.communicate()
    for record in (tmp_path / "s").rglob("record.json"):
        record.unlink()
        (record.parent / "details" / "points.jsonl").unlink()
    both = [start(tmp_path, "resume=s") for _ in range(2)]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in both]
    assert sorted(code for _, _, code in ended) == [0, 2]
    [refused] = [err for _, err, code in ended if code == 2]
    assert len(refused.splitlines()) == 1
    assert "Another perfexp is measuring the sweep" in refused
    sweep = Sweep.load(tmp_path / "s")
    assert [child.status for child in sweep.children] == [Status.OK] * 3


@pytest.mark.slow
def test_a_summary_that_says_failed_is_mended_by_the_records(tmp_path):
    process = start(tmp_path, "-m", *FAKE, "batch_size=1,2", "output_dir=s")
    process.communicate(timeout=120)
    summary = tmp_path / "s" / "sweep.json"
    content = json.loads(summary.read_bytes())
    content["children"][0] |= {"status": "failed", "error": "Another perfexp is measuring"}
    summary.write_text(json.dumps(content))
    process = start(tmp_path, "resume=s")
    process.communicate(timeout=120)
    assert [(child.status, child.error) for child in Sweep.load(tmp_path / "s").children] == [
        (Status.OK, None)
    ] * 2
    assert Record.load(tmp_path / "s" / "0-b1").status is Status.OK
