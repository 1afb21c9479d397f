"""Commands that only read: show, list, env."""

import json

from perfexp import __version__, commands
from perfexp.main import main


def test_show_gives_the_report_of_a_run_again(make_record, leave_run, tmp_path, capsys):
    folder = leave_run(make_record(sizes=(224,)), tmp_path)
    assert commands.run(["show", str(folder)]) == 0
    from_folder = capsys.readouterr().out
    assert commands.run(["show", str(folder / "record.json")]) == 0
    assert capsys.readouterr().out == from_folder
    assert "latency" in from_folder
    assert "224" in from_folder


def test_show_gives_the_sum_of_a_sweep_again(tmp_path, capsys):
    fake = ("model=fake", "gpu=fake", "tracking=none", "ttfp=false", "stopping=fixed")
    assert main([*fake, "-m", "batch_size=1,2", f"output_dir={tmp_path / 's'}"]) == 0
    capsys.readouterr()
    assert commands.run(["show", str(tmp_path / "s")]) == 0
    assert "2 of 2 runs" in capsys.readouterr().out


def test_show_of_something_else_is_an_error(tmp_path, capsys):
    assert commands.run(["show", str(tmp_path)]) == 2
    assert "No record can be read" in capsys.readouterr().err


def test_list_names_the_options_of_a_group(capsys):
    assert commands.run(["list", "gpus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    h200 = next(line for line in lines if line.startswith("h200 "))
    assert "4.80 TB/s, 700 W" in h200
    assert commands.run(["list", "models"]) == 0
    assert "resnet50" in capsys.readouterr().out


def test_list_alone_names_all_groups(capsys):
    assert commands.run(["list"]) == 0
    groups = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"model", "gpu", "mode", "experiment", "stopping"} <= set(groups)


def test_list_of_an_unknown_group_names_the_nearest(capsys):
    assert commands.run(["list", "modles"]) == 2
    assert "model" in capsys.readouterr().err


def test_list_shows_groups_of_ones_own(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text("# My own.\n_target_: mine.Tiny\n")
    assert commands.run(["list", "models", "--config-dir", str(tmp_path)]) == 0
    assert any(line.startswith("tiny") and "My own." in line for line in capsys.readouterr().out.splitlines())


def test_env_is_json(capsys):
    assert commands.run(["env"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"]["torch"]


def test_the_help_names_every_command_and_the_version_is_perfexps_own(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in commands.NAMES if f"perfexp {name}" not in text and name != "env"] == []
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"perfexp {__version__}\n"
