"""Modules have moved; plans, users' files, folders and records with their earlier places stay valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from perfexp import commands
from perfexp.cli import composition
from perfexp.main import main
from perfexp.plan import config, plan_file
from perfexp.records.old_names import MOVED, plan_as_first_named, plan_of_today
from perfexp.records.record import Record
from perfexp.run.segmentation_table import SegmentationTable
from perfexp.timing.stopping import Fixed

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "processes=1", "quiet=true")
#: Every target that conf/ had before modules moved.
EARLIER = (
    "perfexp.algorithms.default.open_default",
    "perfexp.algorithms.forced.Forced",
    "perfexp.modes.inference.Inference",
    "perfexp.modes.train.Train",
    "perfexp.prediction.sparse.Sparse",
    "perfexp.profilers.NoProfiler",
    "perfexp.profilers.kineto.Torch",
    "perfexp.profilers.ncu.Ncu",
    "perfexp.profilers.nsys.Nsys",
    "perfexp.profilers.nvtx.Nvtx",
    "perfexp.stopping.Fixed",
    "perfexp.stopping.Precision",
    "perfexp.sweep.BatchSizes",
    "perfexp.sweep.Point",
    "perfexp.sweep.Sizes",
    "perfexp.tracking.NoTracking",
    "perfexp.tracking.mlflow_sink.MlflowSink",
)


def targets(plan) -> set[str]:
    return {target for _, target in config.targets(plan)}


@pytest.mark.parametrize("target", EARLIER)
def test_every_earlier_target_names_the_same_code(target):
    [today] = targets(plan_of_today({"node": {"_target_": target}}))
    assert today != target
    assert config.locate({"_target_": today}).__name__ == target.rpartition(".")[2]
    assert targets(plan_as_first_named({"node": {"_target_": today}})) == {target}


@pytest.mark.parametrize(
    "target", ["mine.Rule", "perfexp.models.fake.FakeModel", "perfexp.sweeping.Rule"]
)
def test_other_targets_stay(target):
    assert targets(plan_of_today({"probes": {"own": [{"_target_": target}]}})) == {target}


def test_a_users_file_may_name_an_earlier_place(tmp_path):
    file = tmp_path / "own" / "stopping" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: perfexp.stopping.Fixed\nwarmup: 1\nmeasure: 7\n")
    plain = composition.compose([*FAKE, f"--config-dir={tmp_path / 'own'}", "stopping=mine"])
    assert plain["stopping"]["_target_"] == "perfexp.timing.stopping.Fixed"
    assert isinstance(config.build(plain["stopping"]), Fixed)


def test_a_users_experiment_may_name_the_earlier_callback():
    target = "perfexp.orchestration.segmentation_table.SegmentationTable"
    assert config.locate({"_target_": target}) is SegmentationTable


def as_written_before(folder: Path) -> str:
    """Give the plan and the record of a run their earlier targets; return the plan's hash."""
    file = folder / "details" / "plan.yaml"
    plain = _with_earlier_targets(file.read_text(), yaml.safe_load)
    file.write_bytes(plan_file.signed(plan_file.to_yaml(plain)))
    file = folder / "record.json"
    record = _with_earlier_targets(file.read_text(), json.loads)
    file.write_text(json.dumps(record))
    assert "perfexp.modes.inference.Inference" in targets(record["plan"])
    return record["plan_hash"]


def _with_earlier_targets(text: str, read):
    for before, now in MOVED.items():
        text = text.replace(f"{now}.", f"{before}.")
    return read(text)


def test_a_run_from_before_the_move_continues_in_its_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main([*FAKE, f"output_dir={folder}"]) == 0
    plan_hash = as_written_before(folder)
    record = Record.load(folder)
    stored = plan_file.read(folder / "details" / "plan.yaml")
    assert plan_file.plan_hash(record.plan) == plan_file.plan_hash(stored) == plan_hash
    measured = record.points
    assert main([f"resume={folder}", "processes=2"]) == 0, capsys.readouterr().err
    again = Record.load(folder)
    assert again.points[0] == measured[0]
    assert {point.key.replicate for point in again.points} == {0, 1}


def test_records_from_before_and_after_the_move_agree(tmp_path, capsys):
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        assert main([*FAKE, f"output_dir={folder}"]) == 0
    as_written_before(folders[0])
    capsys.readouterr()
    assert commands.run(["compare", *map(str, folders), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [side["differences"] for side in document["sides"]] == [[], []]
