"""`perfexp apply PLAN --check FILE.py:NAME`: what a plan gains in the user's own script."""

import json
import sys
from pathlib import Path

import pytest

from perfexp import commands
from perfexp.convolution.race import software_of
from perfexp.devices.cpu import CpuDevice
from perfexp.measuring import script_gain
from perfexp.statistics.estimators import Interval

SCRIPT = """
import torch
print("printed by the script")
calls = []

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 4, 3)
    def forward(self, images, *, scale=1):
        calls.append((torch.is_grad_enabled(), scale))
        return self.first(images) * scale

def of_tensor():
    return Small(), torch.randn(1, 3, 8, 8)
def of_tuple():
    return Small(), (torch.randn(1, 3, 8, 8),)
def of_names():
    return Small(), {"images": torch.randn(1, 3, 8, 8), "scale": 2}
def of_step():
    module, images = Small(), torch.randn(1, 3, 8, 8)
    return module, lambda: module(images).sum().backward()
def no_pair():
    return Small()
def no_module():
    return 3, torch.zeros(1)
def wrong_shape():
    return Small(), torch.randn(1, 4, 8, 8)
def other_layers():
    return torch.nn.Linear(1, 1), torch.randn(1, 1)
def with_seed(seed):
    return of_tensor()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The name of a file with functions, in the current folder; no module of an earlier test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    name = f"script_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SCRIPT)
    return f"{name}.py"


@pytest.fixture
def plan(tmp_path):
    """A function that writes a plan for this machine."""

    def write(**changed):
        place = {name: software_of(CpuDevice())[name] for name in ("device", "torch", "cudnn")}
        layer = {"name": "first", "input_shape": [1, 3, 8, 8], "dtype": "float32"}
        content = {
            "model": "small",
            **place,
            "layers": [{**layer, "passes": {"forward": "torch.gemm"}}],
            "gains": {"inference 8×8 batch 1 over default": [1.5, 1.4, None]},
        }
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(content | changed))
        return str(path)

    return write


def run(capsys, *words):
    code = commands.run(["apply", *words])
    return code, capsys.readouterr()


@pytest.mark.parametrize("name", ["of_tensor", "of_tuple", "of_names"])
def test_inputs_are_timed_in_forward_passes_without_gradients(script, plan, capsys, name):
    code, printed = run(capsys, plan(), "--check", f"{script}:{name}", "--json")
    document = json.loads(printed.out)
    gain = document["gain"]
    assert gain["low"] <= gain["value"] <= gain["high"]
    assert code == int(gain["high"] < 1)
    assert document["device"] == CpuDevice().name
    assert document["run_gains"] == {"inference 8×8 batch 1 over default": [1.5, 1.4, None]}
    assert "printed by the script" in printed.err
    calls = sys.modules[script.removesuffix(".py")].calls
    assert set(calls) == {(False, 2 if name == "of_names" else 1)}


def test_a_function_is_timed_as_it_is(script, plan, capsys):
    run(capsys, plan(), "--check", f"{script}:of_step")
    assert set(sys.modules[script.removesuffix(".py")].calls) == {(True, 1)}


def test_the_plan_computes_the_timed_module(script, plan, monkeypatch):
    patched = []

    def gain(applied, call):
        call()
        patched.append(applied.name)
        return Interval(value=1.0, low=0.9, high=1.1)

    monkeypatch.setattr(script_gain, "gain", gain)
    assert script_gain.gain_in_script(Path(plan()), f"{script}:of_tensor")[1].value == 1
    assert patched == ["plan"]


@pytest.mark.parametrize(
    "layer", [{"input_shape": [1, 3, 9, 9]}, {"dtype": "float16"}, {"passes": {"forward": "no"}}]
)
def test_a_plan_of_other_shapes_is_refused(script, plan, capsys, layer):
    passes = {"forward": "torch.gemm"}
    own = {"name": "first", "input_shape": [1, 3, 8, 8], "dtype": "float32", "passes": passes}
    code, printed = run(capsys, plan(layers=[own | layer]), "--check", f"{script}:of_tensor")
    assert (code, printed.out) == (2, "")
    assert "computes no layer by the plan" in printed.err
    code, _ = run(capsys, plan(layers=[own | layer, own]), "--check", f"{script}:of_tensor")
    assert code in (0, 1)


@pytest.mark.parametrize(
    ("interval", "code", "word"),
    [
        ((1.2, 1.1, 1.3), 0, "FASTER"),
        ((0.9, 0.7, 1.1), 0, "UNDECIDED"),
        ((0.8, 0.7, 0.9), 1, "SLOWER"),
    ],
)
def test_a_slower_program_has_exit_code_1(script, plan, capsys, monkeypatch, interval, code, word):
    value, low, high = interval
    gain = Interval(value=value, low=low, high=high)
    monkeypatch.setattr(script_gain, "gain", lambda _, call: call() is None or gain)
    found, printed = run(capsys, plan(), "--check", f"{script}:of_tensor")
    here, in_run = printed.out.splitlines()
    assert found == code
    text = f"{word} {value:.3f}, {low:.3f} to {high:.3f}: speedup over torch's choices"
    assert here.startswith(text)
    assert in_run == "1.500, 1.400 to ?: in its run, inference 8×8 batch 1 over default"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no function 'missing'."),
        ("no_pair", "TypeError: it does not return (module, inputs) or (module, function)"),
        ("no_module", "it does not return (module, inputs)"),
        ("wrong_shape", "fails: RuntimeError: Given groups=1"),
        ("with_seed", "fails: TypeError: with_seed() missing 1 required positional argument"),
        ("other_layers", "this module has no 2-D convolution 'first'"),
    ],
)
def test_a_wrong_function_is_an_error_in_one_line(script, plan, capsys, name, message):
    code, printed = run(capsys, plan(), "--check", f"{script}:{name}")
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.removeprefix("printed by the script\n").count("\n") == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "NVIDIA H200"}, "The plan is for device NVIDIA H200, not "),
        ({"torch": "1.0"}, "(--remeasure)"),
        ({"layers": 3}, "is not an algorithm plan"),
    ],
)
def test_a_plan_of_another_place_is_an_error(script, plan, capsys, changed, message):
    code, printed = run(capsys, plan(**changed), "--check", f"{script}:of_tensor")
    assert (code, printed.out) == (2, "")
    assert message in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.json", "--check", "{script}:of_tensor"], "missing.json can't be read"),
        (["{plan}"], "Missing option '--check'"),
        (["{plan}", "--check", "{script}"], "does not name a function; write FILE.py:NAME"),
        (["{plan}", "--check", "other_{script}:of_tensor"], "not found. Did you mean {script}?"),
    ],
)
def test_a_wrong_command_is_an_error_in_one_line(script, plan, capsys, words, message):
    texts = [text.format(script=script, plan=plan()) for text in words]
    code, printed = run(capsys, *texts)
    assert (code, printed.out) == (2, "")
    assert message.format(script=script) in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_a_plan_of_another_torch_is_raced_again_on_request(
    script, plan, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = (plan(torch="1.0"), "--check", f"{script}:of_tensor", "--remeasure", "--json")
    code, printed = run(capsys, *words)
    gain = json.loads(printed.out)["gain"]
    assert code == int(gain["high"] < 1)
    assert gain["low"] <= gain["value"] <= gain["high"]
    assert list((tmp_path / "cache").rglob("*.json"))
