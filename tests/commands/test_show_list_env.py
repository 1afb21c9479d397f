"""Commands that only read: show, list, env."""

import json
import re
from pathlib import Path

import pytest

from perfexp import __version__, commands
from perfexp.__main__ import dispatch
from perfexp.cli.usage import COMMANDS, OLD_COMMANDS
from perfexp.main import main
from perfexp.records.diagnostics import make
from perfexp.records.paths import RunPaths
from perfexp.records.record import Metric

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")


def test_show_gives_the_report_of_a_run_again(make_record, leave_run, tmp_path, capsys):
    folder = leave_run(make_record(sizes=(224,)), tmp_path)
    assert commands.run(["show", str(folder)]) == 0
    from_folder = capsys.readouterr().out
    assert commands.run(["show", str(folder / "record.json")]) == 0
    assert capsys.readouterr().out == from_folder
    assert "latency" in from_folder
    assert "224" in from_folder


def test_show_with_v_adds_all_metrics_and_the_text_of_notes(
    make_record, leave_run, tmp_path, capsys
):
    details = [
        Metric(name=f"memory/{name}_bytes", value=2.0**30, unit="bytes")
        for name in ("reserved_peak", "device")
    ]
    record = make_record(metrics=details, doubts=[make("tf32_ceiling", ratio=7.4)])
    folder = leave_run(record, tmp_path)
    assert commands.run(["show", str(folder)]) == 0
    brief = capsys.readouterr().out
    assert "memory/device" not in brief
    assert "tf32_ceiling" not in brief
    assert brief.endswith(f"/  perfexp show -v {folder}\n")
    assert commands.run(["show", "-v", str(folder)]) == 0
    verbose = capsys.readouterr().out
    assert "memory/device" in verbose
    assert "note: by the device's data sheet, TF32 computes" in verbose


def test_show_gives_the_sum_of_a_sweep_again(tmp_path, capsys):
    assert main([*FAKE, "-m", "batch_size=1,2", f"output_dir={tmp_path / 's'}"]) == 0
    capsys.readouterr()
    assert commands.run(["show", str(tmp_path / "s")]) == 0
    assert "2 of 2 runs" in capsys.readouterr().out


def test_show_html_needs_no_network(make_record, leave_run, tmp_path, capsys):
    name = "<script>alert(1)</script>"
    record = make_record(sizes=(224, 256), plan={"model": {"name": name}})
    folder, file = leave_run(record, tmp_path / "run"), tmp_path / "page.html"
    assert commands.run(["show", str(folder), "--html", str(file), "--quiet"]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {file}\n")
    page = file.read_text()
    assert "<h1>&lt;script&gt;alert(1)&lt;/script&gt; · " in page
    assert name not in page
    assert page.count("<svg") == 1
    assert page.count("<td>256</td>") == 1
    assert not re.search(r"""(?:src|href)=["']?https?:""", page)
    assert commands.run(["show", str(folder), "--html", str(file)]) == 2
    assert "--force" in capsys.readouterr().err


def test_the_path_of_a_page_does_not_disturb_json(make_record, leave_run, tmp_path, capsys):
    folder, file = leave_run(make_record(sizes=(224,)), tmp_path / "run"), tmp_path / "page.html"
    assert commands.run(["show", str(folder), "--html", str(file), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["runs"]
    assert printed.err == f"wrote {file}\n"


def test_show_alone_shows_what_ended_last(make_record, leave_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, hour in (("b", 12), ("c", 11), ("a", 10)):
        leave_run(
            make_record(name=name, uid=name, ended=f"2026-11-28T{hour}:00:00+00:00"),
            tmp_path / "outputs" / name,
        )
    (tmp_path / "outputs" / "broken").mkdir()
    (tmp_path / "outputs" / "broken" / "record.json").write_text('{"ended": 3}')
    assert commands.run(["show"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("outputs/b/ ")
    assert "unreadable  outputs/broken/record.json" in printed.err


def test_show_alone_shows_the_sweep_that_ended_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*FAKE, "output_dir=outputs/alone"]) == 0
    assert main([*FAKE, "-m", "batch_size=1,2", "processes=1", "output_dir=outputs/s"]) == 0
    capsys.readouterr()
    assert commands.run(["show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sweep"] == str(tmp_path / "outputs" / "s")


def test_show_alone_without_a_record_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.run(["show"]) == 2
    assert capsys.readouterr().err.startswith("error: There is no folder outputs.")
    (tmp_path / "outputs").mkdir()
    assert commands.run(["show"]) == 2
    assert "There is no record in outputs" in capsys.readouterr().err


def test_show_of_something_else_is_an_error(tmp_path, capsys):
    assert commands.run(["show", str(tmp_path)]) == 2
    assert "No record can be read" in capsys.readouterr().err


def without_record(folder, *overrides):
    """A run that was killed before its record."""
    assert main([*FAKE, *overrides, f"output_dir={folder}"]) == 0
    (folder / "record.json").unlink()


def test_show_of_an_interrupted_run_says_what_makes_its_record(tmp_path, capsys):
    without_record(tmp_path / "run")
    assert commands.run(["show", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "was interrupted and has no record yet, 1 point finished" in told
    assert f"perfexp resume={tmp_path / 'run'} measures the rest" in told


def test_show_of_a_run_that_is_being_measured_says_so(tmp_path, capsys):
    without_record(tmp_path / "run")
    with RunPaths(tmp_path / "run").locked():
        assert commands.run(["show", str(tmp_path / "run")]) == 2
    assert "is being measured into, 1 point so far" in capsys.readouterr().err


def test_show_of_a_refused_run_says_why(tmp_path, capsys):
    without_record(tmp_path / "run")
    (tmp_path / "run" / "details" / "refused.txt").write_text("there is no such model\n")
    assert commands.run(["show", str(tmp_path / "run")]) == 2
    assert "was refused and has no record: there is no such model" in capsys.readouterr().err


@pytest.mark.slow
def test_show_of_a_parent_folder_names_its_runs_and_their_sweep(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*FAKE, "-m", "experiment=sanity", "model.name=a,b,c,d"]) == 0
    capsys.readouterr()
    assert commands.run(["show", "outputs/1_sanity"]) == 2
    told = capsys.readouterr().err
    assert "outputs/1_sanity/a_default_fake, " in told
    assert "outputs/1_sanity/c_default_fake and 1 more." in told
    [sweep] = Path("outputs").glob("*/*-sweep-*")
    assert f"The sweep that measured a_default_fake lies in {sweep}." in told


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


def test_list_probes_names_the_keys_of_the_section(capsys):
    assert commands.run(["list", "probes"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["probes.call_times", "true"]
    assert last == "options of the group probe: none"
    assert commands.run(["list", "probes", "--json"]) == 0
    assert "probes.energy" in json.loads(capsys.readouterr().out)


def test_list_of_an_unknown_group_names_the_nearest(capsys):
    assert commands.run(["list", "modles"]) == 2
    assert "model" in capsys.readouterr().err


def test_list_shows_groups_of_ones_own(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text("# My own.\n_target_: mine.Tiny\n")
    assert commands.run(["list", "models", "--config-dir", str(tmp_path)]) == 0
    assert any(
        line.startswith("tiny") and "My own." in line
        for line in capsys.readouterr().out.splitlines()
    )


def test_env_is_json(capsys):
    assert commands.run(["env"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"]["torch"]


def test_help_names_every_command_and_version_is_printed(capsys):
    assert dispatch(["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"perfexp {name}" not in text] == []
    assert dispatch(["--version"]) == 0
    assert capsys.readouterr().out == f"perfexp {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name, capsys):
    assert dispatch([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: perfexp {name}" in text
    if name == "cluster":
        return
    assert re.search(rf"\n  Example:.*\bperfexp {name}\b", text)
    assert dispatch(["help", name]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", ["check", "use", "logs", "cancel"])
def test_the_commands_of_a_cluster_have_examples(name, capsys):
    assert dispatch(["cluster", name, "--help"]) == 0
    assert f"\n  Example: perfexp cluster {name} " in capsys.readouterr().out


@pytest.mark.parametrize("name", OLD_COMMANDS)
def test_earlier_names_go_on_working_and_are_not_listed(name, capsys):
    assert dispatch([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: perfexp {' '.join(OLD_COMMANDS[name])} ")
    assert dispatch(["--help"]) == 0
    assert f"perfexp {name} " not in capsys.readouterr().out


def test_v_prints_the_version(capsys):
    assert dispatch(["-V"]) == 0
    assert capsys.readouterr().out == f"perfexp {__version__}\n"


@pytest.mark.parametrize(
    ("command", "told"), [(["show", "--html"], "--html FILE"), (["ui", "--port"], "--port VALUE")]
)
def test_an_option_without_its_value_says_what_to_type(command, told, capsys):
    assert commands.run(command) == 2
    assert capsys.readouterr().err == (
        f"error: {command[1]} needs a value: {told}; perfexp {command[0]} --help explains it.\n"
    )


def test_the_comments_of_experiments_are_whole_sentences(capsys):
    assert commands.run(["list", "experiments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.endswith((".", "FOLDER")) for line in lines), lines
