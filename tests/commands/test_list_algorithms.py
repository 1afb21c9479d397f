"""`perfexp list algorithms model=…`: what can compute a model's layers; against what a run of each algorithm takes."""

import importlib
import json
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from perfexp import commands
from perfexp.commands import list_options
from perfexp.commands.list_options import shape_text, support_table
from perfexp.convolution import attention
from perfexp.convolution.forced import Forced
from perfexp.convolution.layer_support import _problems_of, survey
from perfexp.cost import trial
from perfexp.devices.cpu import CpuDevice
from perfexp.host import installation
from perfexp.models import Execution, Precision
from perfexp.models.module import adapt
from perfexp.plan import config
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key
from perfexp.worker import answers
from tests.convolution.scripted_cudnn import in_place
from tests.support.selection import slow_after

pytestmark = pytest.mark.usefixtures("quick_commands")

PORTABLE = [
    "direct",
    "gemm",
    "implicit_gemm",
    "implicit_precomp_gemm",
    "fft",
    "fft_tiling",
    "winograd",
    "winograd_nonfused",
]
OF_CPU = [*PORTABLE, "onednn", "native"]

SMALL = """
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.strided = nn.Conv2d(3, 8, 5, stride=2)
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.grouped = nn.Conv2d(8, 4, 1, groups=2)

    def forward(self, inputs):
        return self.grouped(self.second(self.first(self.strided(inputs)))).mean(dim=(2, 3))
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Arguments for a model of the user's own, with few and small convolutions."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("_target_: small_network.Small\n")
    (tmp_path / "small_network.py").write_text(SMALL)
    monkeypatch.syspath_prepend(tmp_path)
    return ("model=small", "input_size=16", f"--config-dir={tmp_path}")


@pytest.fixture
def cudnn(monkeypatch):
    """A function that puts a cuDNN of that script in torch's place."""
    return partial(in_place, monkeypatch)


@pytest.fixture
def here(monkeypatch):
    """The worker's part in this process, where there may be a scripted cuDNN."""

    def query(plain, what, *, waiting):
        told = answers.algorithms(
            config.typed(plain), RunPaths(Path("nowhere")), answers.Events(None)
        )
        return json.loads(json.dumps(told))

    monkeypatch.setattr(list_options, "query", query)


def run(capsys, *arguments):
    code = commands.run(["list", "algorithms", "gpu=cpu", *arguments])
    told = capsys.readouterr()
    assert code == 0, told.err
    return told.out


def found(capsys, *overrides):
    return json.loads(run(capsys, *overrides, "--json"))


def layer(answer, name):
    return next(each for each in answer["layers"] if name in each["names"])


def opened(model, **settings):
    execution = Execution(channels_last=settings.pop("channels_last", False))
    precision = Precision(name="fp32", **settings)
    return model.open(
        device=CpuDevice(), precision=precision, execution=execution, num_classes=None, seed=0
    )


def key(phase="inference", size=16, batch=2):
    return Key(phase=phase, input_size=(size, size), batch_size=batch, precision="fp32")


def strided(name, code, first, second, how, out):
    """As cuDNN's FFTs and Winograds: no strides."""
    names = {"Forward": (4, 5, 6, 7), "BackwardData": (2, 3, 4, 5), "BackwardFilter": (2, 4, 5, 6)}
    return code in names[name] and (how["u"], how["v"]) != (1, 1)


@pytest.mark.slow
def test_cpu_algorithms_are_listed_without_torch_in_the_parent(tmp_path):
    code = (
        "import sys; from perfexp import commands; "
        "done = commands.run(['list', 'algorithms', 'model=resnet18', 'input_size=64', 'gpu=cpu']); "
        "sys.exit(99 if 'torch' in sys.modules else done)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    title, head, first, second, *rest = done.stdout.splitlines()
    assert title.startswith("resnet18 · inference · 64 · batch 1 · float32 · on ")
    assert head.split() == ["layer", "shape", *OF_CPU]
    assert first.split()[:5] == ["conv1", "3→64", "7×7", "s2", "64×64"]
    assert first.split()[5:13] == ["torch"] * 4 + ["–"] * 4
    assert second.split()[:9] == ["layer1.0.conv1", "(+3)", "64→64", "3×3", "16×16", *["torch"] * 4]
    refused = next(line for line in rest if "fft, fft_tiling" in line)
    assert "the stride is 2×2, not 1" in refused
    assert "conv1, layer2.0.conv1, layer2.0.downsample.0, 4 more" in refused
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_layers_that_compute_the_same_are_one(here, capsys):
    answer = found(capsys, "model=resnet18", "input_size=[64,96]", "batch_size=3")
    assert answer["algorithms"] == OF_CPU
    assert len(answer["layers"]) == 11
    assert sum(len(each["names"]) for each in answer["layers"]) == 20
    alike = layer(answer, "layer1.0.conv1")
    assert alike["names"] == [
        "layer1.0.conv1",
        "layer1.0.conv2",
        "layer1.1.conv1",
        "layer1.1.conv2",
    ]
    assert alike["input_shape"] == [3, 64, 16, 16]
    assert alike["convolution"]["kernel"] == [3, 3]
    assert alike["algorithms"]["winograd"]["forward"] == {
        "backend": "torch",
        "engine": "torch.winograd",
        "workspace_bytes": None,
        "reason": None,
        "passed_over": {},
    }
    assert (
        layer(answer, "conv1")["algorithms"]["winograd"]["forward"]["reason"]
        == "the kernel is 7×7, not 3×3"
    )
    assert "the first of the plan's 2 input" in run(capsys, "model=resnet18", "input_size=[64,96]")


def test_onednn_and_native_are_what_torch_takes(here, capsys):
    answer = found(capsys, "model=alexnet")
    before = torch._C._get_mkldnn_enabled()
    taken = {
        name: layer(answer, "features.0")["algorithms"][name]["forward"]
        for name in ("onednn", "native")
    }
    assert taken["native"] == {
        **taken["native"],
        "backend": "torch",
        "engine": "native",
        "reason": None,
    }
    assert taken["onednn"]["engine"] == "onednn" or taken["onednn"]["reason"].startswith(
        "torch takes "
    )
    assert torch._C._get_mkldnn_enabled() == before


@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_it_says_what_a_run_of_each_algorithm_takes(cudnn, small, phase, channels_last):
    cudnn(refuses=strided, workspace=lambda which, code: 100 * code)
    module = importlib.import_module("small_network").Small()
    session = opened(adapt(module, "small"), channels_last=channels_last)
    answer = survey(session, key(phase), workspace_bytes=600)
    assert layer(answer, "first")["names"] == ["first", "second"]
    assert {"guess", "benchmark"} <= set(answer["algorithms"])
    inputs = session.random_batch((16, 16), 2, 0)
    for name in ("gemm", "winograd", "winograd_nonfused", "fft_tiling", "guess"):
        forced = Forced(name=name, workspace_bytes=600)
        active = session.training() if phase == "train" else session.inferring()
        with forced.applied(session), active:
            session.forward(inputs.inputs)
            reports = forced.report().layers
        assert len(reports) == 4
        for report in reports:
            mine = layer(answer, report.name)
            assert mine["input_shape"] == report.input_shape
            passes = mine["algorithms"][name]
            assert list(passes) == [each.which.value for each in report.passes]
            for each in report.passes:
                told = passes[each.which.value]
                assert told["reason"] == each.reason
                assert (told["engine"] or "default") == each.selected
                assert told["workspace_bytes"] == each.workspace_bytes


def test_first_training_layer_needs_no_input_gradient(here, cudnn, small, capsys):
    cudnn(refuses=strided, workspace=lambda which, code: 100 * code)
    answer = found(capsys, *small, "mode=train", "algorithm.backend=cudnn")
    assert list(layer(answer, "strided")["algorithms"]["gemm"]) == ["forward", "backward_filter"]
    second = layer(answer, "first")["algorithms"]["winograd"]
    assert [
        second[which]["engine"] for which in ("forward", "backward_data", "backward_filter")
    ] == [
        "cudnn.winograd",
        "cudnn.winograd",
        "cudnn.winograd_nonfused",
    ]


def test_settings_of_the_algorithm_are_those_of_a_run(here, cudnn, small, capsys):
    cudnn(workspace=lambda which, code: 2**20 * code)
    overrides = (*small, "mode=train", "algorithm.backend=cudnn")
    limits = ("algorithm.workspace_bytes=3000000", "algorithm.backward_data=algo_0")
    passes = layer(found(capsys, *overrides, *limits), "first")["algorithms"]
    assert passes["gemm"]["forward"]["workspace_bytes"] == 2**21
    assert passes["gemm"]["backward_data"]["engine"] == "cudnn.algo_0"
    assert "it needs 4.00 MiB of workspace" in passes["fft"]["forward"]["reason"]


@pytest.mark.slow
def test_what_was_passed_over_is_told_on_request(here, cudnn, small, capsys):
    cudnn(refuses=lambda which, code, *_: which == "Forward" and code == 3)
    assert "NOT_SUPPORTED" not in run(capsys, *small)
    told = run(capsys, *small, "--reasons")
    assert "supported, but not by the first backend" in told
    assert (
        next(line for line in told.splitlines() if "cuDNN: NOT_SUPPORTED" in line).split()[0]
        == "direct"
    )


@pytest.mark.parametrize("width", slow_after(2, [80, 100, 160]))
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_no_line_is_wider_than_the_terminal(here, cudnn, capsys, monkeypatch, mode, width):
    cudnn(refuses=strided, workspace=lambda which, code: 1234567 * code)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run(capsys, "model=resnet18", "input_size=64", f"mode={mode}").splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert {"implicit_gemm", "implicit_precomp_gemm", "winograd_nonfused", "guess"} <= set(
        text.split()
    )
    heads = [line for line in lines if line.split()[:2] == ["layer", "shape"]]
    tables = [line for line in lines if "layer1.0.conv1 (+3)" in line]
    assert heads
    for size in (
        "3.53 MiB",
        "2.35 MiB",
        "1.18 MiB",
        "4.71 MiB",
        "5.89 MiB",
        "7.06 MiB",
        "8.24 MiB",
    ):
        assert sum(f"cudnn {size}" in line for line in tables) == 1


def test_custom_model_beyond_fake_tensors_is_surveyed():
    class Other(torch.nn.Conv2d):
        def forward(self, inputs):
            return torch.nn.functional.conv2d(inputs, self.weight, self.bias, stride=2)

    class Curious(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect")
            self.second, self.unused = Other(4, 8, 3), torch.nn.Conv2d(1, 1, 1)

        def forward(self, inputs):
            outputs = self.first(inputs)
            return self.second(outputs if outputs.sum() > 1e9 else outputs[:1]).mean(dim=(2, 3))

    answer = survey(opened(adapt(Curious(), "curious")), key(size=10))
    assert answer["unused"] == ["unused"]
    first, second = (layer(answer, name) for name in ("first", "second"))
    assert (first["input_shape"], first["convolution"]["padding"]) == ((2, 3, 12, 12), (0, 0, 0, 0))
    assert (second["input_shape"], second["convolution"]["stride"]) == ((1, 4, 10, 10), (2, 2))


def test_a_model_that_is_a_convolution_itself():
    model = adapt(torch.nn.Conv2d(3, 4, 3), "alone")
    found = {**survey(opened(model), key()), "phase": "inference", "inputs": 1, "doubts": []}
    [line] = support_table(found).lines
    assert line[:2] == ("the model", "3→4 3×3 16×16")


class Attending(torch.nn.Module):
    """Attention of two shapes: within a module with a fast path, and with a mask."""

    def __init__(self):
        super().__init__()
        self.block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, images):
        tokens = self.block(images.flatten(2)[:, :, :8])
        mask = torch.ones(3, 3, device=images.device)
        return torch.nn.functional.scaled_dot_product_attention(
            tokens, tokens, value=tokens, attn_mask=mask, scale=1.0
        ).mean(dim=1)


ON_A_CPU = {"flash": None, "efficient": "it needs a GPU", "cudnn": "it needs a GPU", "math": None}


@pytest.mark.parametrize("phase", ["inference", "train"])
def test_attention_is_listed_by_shape_with_its_backends(phase):
    answer = survey(opened(adapt(Attending(), "attending")), key(phase))
    assert answer["layers"] == []
    assert answer["attention"] == [
        {"shape": "2×2×3×4", "dtype": "float32", "auto": "flash", "backends": ON_A_CPU},
        {"shape": "2×3×8 mask", "dtype": "float32", "auto": "math", "backends": ANY},
    ]
    masked = answer["attention"][1]["backends"]
    assert masked["math"] is None
    assert masked["flash"]


def test_attention_is_listed_in_the_types_of_autocast():
    execution, precision = Execution(), Precision(name="amp_bf16", autocast="bfloat16")
    session = adapt(Attending(), "attending").open(
        device=CpuDevice(), precision=precision, execution=execution, num_classes=None, seed=0
    )
    problems, attended = _problems_of(session, session.module, key())
    assert problems == {}
    for problem in attended:
        assert {operand.dtype for operand in problem[:3]} == {torch.bfloat16}
    assert attended[1].mask.dtype is torch.bfloat16


def test_attention_is_recorded_in_a_fork_that_does_without_a_gpu():
    def replaced():
        trial.leave_device_unselected(0)
        with attention.recorded() as problems:
            Attending().eval()(torch.zeros(2, 3, 4, 4))
        return [problem.label for problem in problems]

    assert trial.isolated(replaced)() == ["2×2×3×4", "2×3×8 mask"]


def test_recording_attention_leaves_torch_as_it_was():
    before = torch.nn.functional.scaled_dot_product_attention
    with attention.recorded():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert torch.backends.mha.get_fastpath_enabled()


def test_attention_is_a_table_of_its_own_with_reasons(here, capsys):
    words = ("model=vit_b_16", "precision=amp_bf16")
    first, rest = run(capsys, *words).split("\nattention\n")
    second, third = rest.split("not supported")
    assert "conv_proj" in first
    assert "1×12×197×64 bfloat16  auto   –          –      yes" in second
    assert "efficient, cudnn" in third
    assert "it needs a GPU" in third


def test_a_model_of_attention_alone_has_one_table(here, capsys):
    pytest.importorskip("transformers")
    words = ("model=hf:bert", "input_size=64", "model.config.num_hidden_layers=1")
    text = run(capsys, *words, "precision=tf32")
    title, head, line, *rest = text.splitlines()
    assert title.startswith("hf:bert · inference · 64 · batch 1 · fp32 · on ")
    assert head.split() == ["attention", "flash", "efficient", "cudnn", "math"]
    assert line.split() == ["1×12×64×64", "float32", "auto", "–", "–", "yes"]
    assert "tf32 was requested, but fp32 was measured" in " ".join(rest)


def test_autocast_decides_the_data_type(here, capsys):
    answer = found(capsys, "model=alexnet", "precision=amp_bf16", "execution.channels_last=true")
    assert {each["dtype"] for each in answer["layers"]} == {"bfloat16"}
    assert all(each["channels_last"] for each in answer["layers"])
    assert "FFT" in layer(answer, "features.3")["algorithms"]["fft"]["forward"]["reason"]


def test_groups_strides_and_dilations_are_told():
    convolution = {"in_channels": 64, "out_channels": 32, "kernel": [1, 3], "groups": 1}
    shape = {"input_shape": [1, 64, 7, 9]}
    plain = shape | {"convolution": convolution | {"stride": [1, 1], "dilation": [1, 1]}}
    assert shape_text(plain) == "64→32 1×3 7×9"
    other = shape | {
        "convolution": convolution | {"stride": [2, 1], "dilation": [4, 4], "groups": 8}
    }
    assert shape_text(other) == "64→32 1×3 s2×1 d4 g8 7×9"


def test_a_precision_that_the_device_lacks_is_told(here, capsys):
    text = run(capsys, "model=alexnet", "precision=tf32")
    assert "fp32" in text.splitlines()[0]
    assert "tf32 was requested, but fp32 was measured" in text


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model=resnet81"], "Did you mean resnet18"),
        (["model=resnet18", "gpu=h2000"], "Did you mean h200"),
        (["model=resnet18", "input_sise=3"], "Did you mean input_size?"),
        (["model=torchvision"], "model.name is required"),
        (["model=resnet18", "algorithm=default", "algorithm.workspace=1"], "no key 'workspace'"),
        (["model=resnet18", "model._target_=os.system"], "_target_"),
        (["model=resnet18", "batch_size=0"], "batch_size"),
        (["resnet18"], "set KEY=VALUE"),
    ],
)
def test_what_a_run_would_refuse_is_refused(capsys, overrides, told):
    assert commands.run(["list", "algorithms", *overrides]) == 2
    answer = capsys.readouterr()
    assert told in answer.err
    assert answer.err.count("\n") == 1
    assert not answer.out


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model=fake", "gpu=fake"], "choose a torch model"),
        (["model=fake"], "choose a torch model"),
        (["model=resnet18", "gpu=h200"], "asks for NVIDIA H200"),
        (
            ["model=torchvision", "model.name=r3d_18", "input_size=32"],
            "no 2-D convolution and calls no scaled",
        ),
        (["model=alexnet", "input_size=16"], "can't take 1 × 3 × 16 × 16"),
        (["model=alexnet", "algorithm.workspace_bytes=-1"], "give 0 or more"),
        (["model=alexnet", "algorithm.backward_data=gemm"], "no backward_data algorithm"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_what_the_worker_finds_wrong_is_told(here, capsys, overrides, told):
    assert commands.run(["list", "algorithms", *overrides]) == 2
    answer = capsys.readouterr()
    assert told.lower() in answer.err.lower()
    assert not answer.out


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("tell('refused', message='no such thing', exit_code=2)", 2, "error: no such thing"),
        ("tell('failed', message='RuntimeError: odd')", 1, "error: RuntimeError: odd"),
        ("print('the driver is gone'); sys.exit(7)", 1, "ended with code 7 (the driver is gone)"),
        ("os.kill(os.getpid(), 9)", 1, "was ended by SIGKILL"),
    ],
)
def test_a_worker_that_does_not_answer(monkeypatch, tmp_path, capsys, body, code, told):
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent(
            f"""
            #!{sys.executable}
            import os, sys
            from perfexp.worker.entry import Events
            descriptor = next(text for text in sys.argv if text.startswith("--events-fd="))
            tell = Events(int(descriptor.partition("=")[2]))
            {body}
            """
        ).lstrip()
    )
    script.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OF_ANOTHER_SERVER", body)  # one that is running has the usual interpreter
    monkeypatch.setattr("perfexp.host.installation.sys.executable", str(script))
    assert commands.run(["list", "algorithms", "model=resnet18"]) == code
    assert told in capsys.readouterr().err


def test_only_algorithms_are_listed_for_a_model(capsys):
    assert commands.run(["list", "models", "model=resnet18"]) == 2
    assert "Overrides are for algorithms only" in capsys.readouterr().err
    assert commands.run(["list", "model=resnet18"]) == 2
    assert "perfexp list algorithms model=resnet18" in capsys.readouterr().err
    assert commands.run(["list", "algorithms", "--json"]) == 0
    assert "fastest" in json.dumps(json.loads(capsys.readouterr().out))


def test_the_group_alone_lists_its_options_and_attention(capsys):
    assert commands.run(["list", "algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = len(list((installation.conf_dir() / "algorithm").glob("*.yaml")))
    attention = " ".join(lines[options:])
    assert attention.startswith(
        "execution.attention: backend of scaled_dot_product_attention: auto"
    )
    assert any(line.startswith("winograd_nonfused ") for line in lines)
