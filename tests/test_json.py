"""`--json`: results on stdout, everything else on stderr."""

import json

import pytest

from perfexp.__main__ import dispatch

FAKE = ("model=fake", "gpu=fake", "tracking=none", "ttfp=false", "stopping=fixed", "replicate=1")


@pytest.fixture(autouse=True)
def signals(monkeypatch):
    """The process of a command ignores signals at its end; this one goes on."""
    monkeypatch.setattr("perfexp.host.interrupts.ignore", lambda: None)


def printed(capsys, *arguments):
    capsys.readouterr()
    code = dispatch(list(arguments))
    return code, json.loads(capsys.readouterr().out)


def test_a_sweep_and_the_commands_print_one_document(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, sweep = printed(capsys, "-m", *FAKE, "seed=0,1", "output_dir=sweep", "--json")
    assert (code, sweep["sweep"]) == (0, str(tmp_path / "sweep"))
    assert [run["name"] for run in sweep["runs"]] == [f"seed={n}-fake-default-inference" for n in (0, 1)]
    assert all(run["points"][0]["median_ms"] > 0 for run in sweep["runs"])
    code, shown = printed(capsys, "show", "sweep", "--json")
    assert [run["uid"] for run in shown["runs"]] == [run["uid"] for run in sweep["runs"]]
    code, alone = printed(capsys, "show", sweep["runs"][0]["folder"], "--json")
    assert alone["runs"] == [sweep["runs"][0]]
    code, progress = printed(capsys, "status", "sweep", "--json")
    assert (code, progress["is_complete"], [run["points"] for run in progress["runs"]]) == (0, True, [{"ok": 1}] * 2)
    code, checked = printed(capsys, "check", "sweep/1_1", "--against", "sweep/0_0", "--json")
    assert checked["outcome"] in ("passed", "failed", "not decided")


def test_a_refused_command_prints_no_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, content = printed(capsys, *FAKE, "batch_size=0", "--json")
    assert (code, content["runs"]) == (2, [])


def test_options_are_listed_with_their_descriptions(capsys):
    code, models = printed(capsys, "list", "models", "--json")
    assert (code, models["swin_t"]) == (0, "of torchvision")
    assert "Alias" in models["ocrnet_hrnetw48"]
