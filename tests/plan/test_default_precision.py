"""precision=torch, the default: flags stay, stored plans keep theirs, and comparisons tell three precisions apart."""

import json

import msgspec
import numpy as np
import pytest
import torch
import yaml

from perfexp import api, commands
from perfexp.comparison.comparability import differences
from perfexp.main import main
from perfexp.models import Execution, Precision, tf32, torch_settings
from perfexp.records.number_formats import Formats, tf32_flags
from perfexp.records.record import Record
from tests.support import typed
from tests.support.verdicts import record

pytestmark = pytest.mark.usefixtures("quick_commands")

COMMAND = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "batch_size=[1,2]")
FP32 = Precision(name="fp32")
TORCH = Precision(name="torch", tf32=None)


@pytest.fixture(autouse=True)
def restored():
    with torch_settings.unchanged_settings():
        yield


def test_a_plan_without_a_precision_has_that_of_torch():
    assert api.compose("model=fake").precision == TORCH


@pytest.mark.parametrize("flags", [(False, True), (True, True), (False, False)])
def test_torchs_flags_stay_as_the_program_set_them(flags):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags
    torch_settings.apply_settings(Execution(), TORCH)
    assert tf32.allowed() == flags
    assert Formats.of("float32", None, flags) == tuple("tf32" if flag else "fp32" for flag in flags)
    torch_settings.apply_settings(Execution(), FP32)
    assert tf32.allowed() == (False, False)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="torch has the older flags only",
)
def test_the_newer_flags_are_read_and_restored():
    before = tf32.allowed()
    with tf32.unchanged():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert tf32.allowed() == (True, False)
        with tf32.off():
            assert tf32.allowed() == (False, False)
        assert tf32.allowed() == (True, False)
    assert tf32.allowed() == before


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        ({"kind": "cuda", "compute_capability": "9.0"}, (False, True)),
        ({"kind": "cuda", "compute_capability": "7.5"}, None),
        ({"kind": "cuda", "rocm": "6.4"}, None),
        ({"kind": "cpu"}, None),
    ],
)
def test_only_some_devices_have_tf32(device, flags):
    session = {"matmul_allow_tf32": False, "cudnn_allow_tf32": True}
    assert tf32_flags({"device": device, "session": session}) == flags


def test_a_run_of_the_former_default_is_continued_with_it(tmp_path, monkeypatch, finished, capsys):
    monkeypatch.chdir(tmp_path)
    assert finished(*COMMAND, "precision=fp32", "output_dir=x").copied(tmp_path).code == 0
    plan = yaml.safe_load((tmp_path / "x" / "details" / "plan.yaml").read_text())
    plan["format"] = 2
    del plan["sources"]
    del plan["mode"]["inference"]["trained"]  # as before that key existed
    plan["command"].remove("precision=fp32")
    (tmp_path / "x" / "details" / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    assert main(["resume=x"]) == 2  # nobody has signed it
    assert main(typed.shown(capsys.readouterr().err)) == 0
    assert "Nothing is left to measure" in capsys.readouterr().out
    assert main([*COMMAND, "output_dir=x"]) == 2
    assert "precision.name: fp32 → torch" in capsys.readouterr().err
    assert main([*COMMAND, "precision=fp32", "mode.inference.trained=true", "output_dir=x"]) == 2, (
        "typed, so measured"
    )


def test_a_sweep_of_the_former_default_is_continued_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["-m", *COMMAND[:-1], "batch_size=1,2", "output_dir=s"]
    assert main([*words, "precision=fp32"]) == 0
    for file in [tmp_path / "s" / "sweep.json", *(tmp_path / "s").glob("*/record.json")]:
        content = json.loads(file.read_text())
        content["command"].remove("precision=fp32")
        file.write_text(json.dumps(content))
    assert main(["resume=s"]) == 2  # nobody has signed it
    assert main(typed.shown(capsys.readouterr().err)) == 0
    assert {
        Record.load(file.parent).plan["precision"]["name"]
        for file in tmp_path.glob("s/*/record.json")
    } == {"fp32"}


def made(precision, *, kind="cuda", matmul=False, cudnn=True):
    found = record("run", [[1.0, 1.001, 0.999]], np.random.default_rng(0))
    found.plan["precision"] = {
        "name": precision,
        "tf32": None if precision == "torch" else precision == "tf32",
    }
    found.environment = {
        "device": {"name": kind, "kind": kind},
        "session": {"matmul_allow_tf32": matmul, "cudnn_allow_tf32": cudnn},
    }
    for point in found.points:
        point.key = msgspec.structs.replace(point.key, precision=precision)
    return found


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            made("torch"),
            made("fp32", cudnn=False),
            "float32, TF32 convolutions (PyTorch's default) → fp32 (no TF32)",
        ),
        (made("fp32", cudnn=False), made("fp16"), "fp32 (no TF32) → fp16"),
        (
            made("torch"),
            made("torch", matmul=True),
            "(PyTorch's default) → float32, TF32 convolutions and products",
        ),
        (
            made("torch"),
            made("torch", kind="cpu"),
            "float32, TF32 convolutions (PyTorch's default) → float32",
        ),
        (
            made("torch"),
            made("tf32", matmul=True),
            "float32, TF32 convolutions (PyTorch's default) → tf32",
        ),
    ],
)
def test_a_comparison_says_which_formats_differ(one, other, words):
    [precision] = [each for each in differences(one, other) if each.key in ("precision", "tf32")]
    assert precision.text.endswith(words)
    assert not [each for each in differences(one, one) if each.key == "precision"]


def test_a_gate_says_which_precision_its_baseline_has(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, one in (("baseline", made("fp32", cudnn=False)), ("new", made("torch"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_bytes(one.to_json())
    assert commands.run(["check", "new", "--against", "./baseline"]) == 2
    assert "measure it again with precision=fp32" in capsys.readouterr().err
