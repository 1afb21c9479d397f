"""Folders of older versions: nothing goes on in them, and everything in them can still be read."""

import json

import pytest
import yaml

from perfexp import commands
from perfexp.main import main
from perfexp.plan import naming
from perfexp.records.record import Record, Status

pytestmark = pytest.mark.usefixtures("quick_commands")

COMMAND = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "batch_size=[1,2]")


@pytest.fixture
def older(tmp_path, monkeypatch, finished):
    """A run in the folder `x` as a version without a plan format left it: all at the top, no expected.json."""
    monkeypatch.chdir(tmp_path)
    assert finished(*COMMAND, "output_dir=x").copied(tmp_path).code == 0
    folder = tmp_path / "x"
    for file in (folder / "details").iterdir():
        file.rename(folder / file.name)
    (folder / "details").rmdir()
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace("details/", ""))
    (folder / "expected.json").unlink()
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    del plan["format"]
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    record = json.loads((folder / "record.json").read_text())
    del record["plan"]["format"]
    (folder / "record.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    "command", [("resume=x",), (*COMMAND, "output_dir=x"), (*COMMAND, "output_dir=x", "--dry-run")]
)
def test_a_run_of_another_format_is_not_gone_on_with(older, capsys, command):
    before = {file.name: file.read_bytes() for file in older.iterdir()}
    assert main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "x/plan.yaml has format 1; this version resumes formats 2 to 6. "
        "Measure again with --overwrite, or use another output_dir."
    )
    assert {file.name: file.read_bytes() for file in older.iterdir()} == before


def test_it_is_measured_again_with_overwrite(older):
    assert main([*COMMAND, "output_dir=x", "--overwrite"]) == 0
    assert yaml.safe_load((older / "plan.yaml").read_text())["format"] == 6
    assert Record.load(older).status is Status.OK
    assert not (older / "details").exists()


def test_an_older_sweep_goes_on_in_the_folders_where_it_began(tmp_path):
    axes = {"batch_size": "1", "gpu": "fake"}
    assert naming.child_folder(None, tmp_path, 0, axes) == tmp_path / "0-b1-fake"
    (tmp_path / "0_1_fake").mkdir()
    assert naming.child_folder(None, tmp_path, 0, axes) == tmp_path / "0_1_fake"


def test_its_results_are_still_read(older, tmp_path, capsys):
    assert commands.run(["show", "x"]) == 0
    assert "fake" in capsys.readouterr().out
    assert commands.run(["status", "x"]) == 0
    assert "2/2 done" in capsys.readouterr().out
    assert commands.run(["export", "x"]) == 0
    assert (tmp_path / "export.parquet").exists()
    assert commands.run(["sync", "x"]) == 0
    (older / "record.json").unlink()
    capsys.readouterr()
    assert commands.run(["status", "x"]) == 1
    assert "2 done, total unknown" in capsys.readouterr().out
