"""Files that would take hours or all memory, or name what cannot exist, are refused in one line with exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from perfexp import commands, main
from perfexp.cluster import job_states, slurm
from perfexp.cluster.job_states import SubmittedRun
from perfexp.errors import UserError
from perfexp.models.weights import read_content
from perfexp.records import quantities
from perfexp.records import record as records
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import Metric, Record, Status, read_points
from perfexp.records.sweep_record import Sweep, SweepChild

RECORD = Path(__file__).parent / "record.json"


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The line with which a command refuses, with exit code 2; status lists it as unreadable."""
    code = (
        main.main(list(command))
        if command[0].startswith("resume=")
        else commands.run(list(command))
    )
    [line] = capsys.readouterr().err.splitlines()
    assert code == (1 if command[0] == "status" else 2), line
    assert "unexpected" not in line
    return line


FOLDERS = {
    "long": (["a" * 300], "no folder can be aaa"),
    "deep": (["x/" * 3000], "no folder can be x/x/"),
    "nul": (["a\0b"], r"no folder can be a\?b"),
    "twice": (["a", "./a/"], "2 runs have the folder a"),
}


@pytest.mark.parametrize("command", ["show", "status", "compare", "resume"])
@pytest.mark.parametrize(("folders", "why"), FOLDERS.values(), ids=FOLDERS)
def test_folders_of_a_sweep_can_exist_and_differ(
    tmp_path, monkeypatch, capsys, folders, why, command
):
    monkeypatch.chdir(tmp_path)
    children = [
        SweepChild(job=n, name="run", directory=folder, status="ok")
        for n, folder in enumerate(folders)
    ]
    sweep = Sweep(
        uid="s",
        name="s",
        started="",
        command=["-m", "model=fake"],
        children=children,
        jobs=len(children),
    )
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_bytes(sweep.to_json())
    with pytest.raises(UserError, match=f"is not a perfexp sweep: {why}"):
        Sweep.load(tmp_path / "s")
    words = {"compare": ["compare", "s", str(RECORD)], "resume": ["resume=s"]}.get(
        command, [command, "s"]
    )
    assert "is not a perfexp sweep" in refused(capsys, *words)


def doubled(content: dict[str, Any]) -> None:
    content["points"].append(content["points"][0])


def with_metric(name: str, unit: str) -> Callable[[dict[str, Any]], None]:
    metric = {"name": name, "value": 1.0, "unit": unit}
    return lambda content: content["points"][0].update(metrics=[metric])


def repeated(name: str, number: int) -> Callable[[dict[str, Any]], None]:
    def repeat(content: dict[str, Any]) -> None:
        doubt = {"code": "x", "severity": "note", "detail": "", "remedy": ""}
        item = {
            "metrics": {"name": "x", "value": 1.0, "unit": "1"},
            "epochs": {"number": 1, "seconds": 1.0, "samples_per_second": 1.0},
            "doubts": doubt,
        }[name]
        content["points"][0][name] = [item] * number

    return repeat


CHANGES = {
    "a point twice": (doubled, "it has train .* twice"),
    "a unit": (
        with_metric("memory/peak_bytes", "MiB"),
        "memory/peak_bytes is in 'MiB', not in 'bytes'",
    ),
    "another unit": (with_metric("energy/per_image_joules", "1"), "is in '1', not in 'joules'"),
    "percent": (with_metric("accuracy", "percent"), "accuracy is in 'percent', not in '1'"),
    "metrics": (repeated("metrics", 2001), "length <= 2000"),
    "doubts": (repeated("doubts", 2001), "length <= 2000"),
    "epochs": (repeated("epochs", 100_001), "length <= 100000"),
}


@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=CHANGES)
def test_points_of_a_record_are_few_and_in_their_units(change, why):
    content = json.loads(RECORD.read_bytes())
    change(content)
    with pytest.raises(UserError, match=rf"^record\.json is not a perfexp record: .*{why}"):
        Record.from_json(json.dumps(content).encode())


def test_a_custom_metric_has_any_unit():
    metric = Metric(name="custom/queue_seconds", value=1.0, unit="1")
    assert quantities.of(metric).unit == "1"


def test_samples_of_a_record_and_of_its_points_are_limited(monkeypatch, tmp_path):
    content = json.loads(RECORD.read_bytes())
    (tmp_path / "points.jsonl").write_bytes(
        b"".join(json.dumps(point).encode() + b"\n" for point in content["points"])
    )
    monkeypatch.setattr(records, "_MOST_SAMPLES", 10)
    with pytest.raises(UserError, match="it has more than 10 samples"):
        Record.load(RECORD)
    with pytest.raises(UserError, match="it has more than 10 samples"):
        read_points(tmp_path / "points.jsonl")


def test_a_wall_time_beyond_any_measurement_is_refused(tmp_path, capsys):
    content = json.loads(RECORD.read_bytes())
    (tmp_path / "plan.yaml").write_text("format: 1\n")
    (tmp_path / "points.jsonl").write_text(
        json.dumps({**content["points"][0], "wall_seconds": 1e308}) + "\n"
    )
    commands.run(["status", str(tmp_path)])
    printed = capsys.readouterr()
    assert "Expected `float` <= 1000000000.0" in printed.out + printed.err


def test_weights_that_unpack_beyond_their_file_size_are_not_read(tmp_path):
    whole, packed = tmp_path / "whole.pt", tmp_path / "packed.pt"
    torch.save({"weight": torch.zeros(1 << 20)}, whole)
    assert set(read_content(whole, "weights", "")) == {"weight"}
    with (
        zipfile.ZipFile(whole) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    assert set(torch.load(packed, weights_only=True)) == {"weight"}  # torch itself would
    with pytest.raises(UserError, match="it is an archive of another program"):
        read_content(packed, "weights", "")
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(UserError, match="it is cut off or damaged"):
        read_content(whole, "weights", "")


def test_a_replacement_with_endless_folders_is_left_alone(tmp_path):
    folder = tmp_path / "x"
    paths = RunPaths(folder)
    paths.create()
    paths.replacement().create()
    paths.replacement().record.write_text("{}")
    deep = paths.replacement().root
    with contextlib.chdir(deep):
        for _ in range(1500):  # the whole path is longer than a path may be
            Path("d").mkdir()
            os.chdir("d")
    paths.put_in_place()
    assert paths.record.read_text() == "{}"
    assert deep.is_dir()
    subprocess.run(["rm", "-r", deep], check=True)


def test_the_accounting_is_asked_once_for_a_file_of_many_jobs(tmp_path, monkeypatch):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(slurm, "queue", dict)
    monkeypatch.setattr(
        slurm, "call", lambda *words: asked.append(words) or "7_1|FAILED|1:0|node|end|perfexp-s\n"
    )
    entries = [
        SubmittedRun(run=number, job=f"{number}_1", gpu="x", submitted="")
        for number in range(30_000)
    ]
    SweepPaths(tmp_path).create()
    job_states.append(SweepPaths(tmp_path), entries)
    children = [SweepChild(job=7, name="x", directory="7", status=Status.INTERRUPTED)]
    [state] = job_states.states(
        Sweep(uid="s", name="x", started="", children=children, jobs=1), tmp_path
    )
    assert (state.state, state.why) == ("failed", "exit code 1:0")
    assert len(asked) == 1
    assert sum(map(len, asked[0])) < 1000
