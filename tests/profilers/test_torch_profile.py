"""torch's own profiler on the processor, from the command to the record."""

import csv
import gzip
import json
from pathlib import Path

import pytest

import perfexp
from perfexp.profilers.kineto import is_own
from perfexp.records.record import Status

TORCH = (
    "model=torchvision",
    "model.name=squeezenet1_1",
    "gpu=cpu",
    "execution.threads=1",
    "input_size=32",
    "batch_size=2",
    "stopping=fixed",
    "stopping.warmup=1",
    "stopping.measure=3",
    "cold_start=false",
    "tracking=none",
    "probes.work=false",
    "output_dir=x",
)


@pytest.mark.slow
def test_a_trace_the_operators_and_the_memory_of_a_training_step(run):
    code, printed, [record] = run(
        *TORCH,
        "mode=train",
        "profiler=torch",
        "profiler.warmup=1",
        "profiler.steps=2",
        "profiler.memory=true",
        "profiler.modules=true",
    )
    assert code == 0
    timed, point = record.points
    assert (point.key.phase, point.status, point.error) == ("train_profile", Status.OK, None)
    assert point.series == []
    assert timed.series
    names = {artifact.path for artifact in record.artifacts if artifact.kind == "profiles"}
    assert names == {"train.pt.trace.json.gz", "train_operators.csv", "train_memory.csv"}
    with gzip.open("x/train.pt.trace.json.gz", "rt") as file:
        events = [event.get("name") for event in json.load(file)["traceEvents"]]
    for name in ("train_step", "forward", "loss", "backward", "optimizer_step", "classifier"):
        assert events.count(name) == 2, name
    operators = {
        row["operator"]: row
        for row in csv.DictReader(Path("x/train_operators.csv").read_text().splitlines())
    }
    assert not operators.keys() & {"train_step", "forward", "classifier"}
    assert int(operators["aten::conv2d"]["calls"]) == 2 * 26
    assert int(operators["aten::convolution_backward"]["calls"]) == 2 * 26
    assert int(operators["aten::conv2d"]["flops"]) > 0
    facts = point.facts["profile"]
    assert facts["operators"][0]["seconds"] >= facts["operators"][1]["seconds"]
    assert sum(row["share"] for row in facts["operators"]) <= 1 + 1e-9
    memory = list(csv.DictReader(Path("x/train_memory.csv").read_text().splitlines()))
    assert {row["device"] for row in memory} == {"cpu"}
    assert any(int(row["bytes"]) < 0 for row in memory)
    assert "torch profiled 2 calls after 1 warm-up calls in" in printed
    assert "operators by torch" in printed
    assert "self per call" in printed
    assert "self: on the CPU, without the operators that it calls" in printed
    assert "\n## Profile\n" in Path("x/report.md").read_text()
    listed = set(json.loads(Path("x/details/manifest.json").read_text())["files"])
    files = (path for path in Path("x").rglob("*") if path.is_file())
    assert {path.relative_to("x").as_posix() for path in files} <= listed


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("aten::conv2d", False),
        ("torch/nn/modules/conv.py(564): forward", False),
        ("torchvision/models/resnet.py(89): forward", False),
        ("my_model.py(3): forward", False),
        ("perfexp/my_model.py(3): forward", False),  # a folder of the user's that is called so
        ("<built-in method conv2d of type object at 0x7f>", False),
        ("<built-in function isinstance>", False),
        ("nn.Module: Conv2d_0", False),
        ("autograd::engine::evaluate_function: ConvolutionBackward0", False),
        ("void gemm<float>(int)", False),
        ("perfexp/worker/entry.py(207): profile", True),
        ("perfexp/models/session.py(144): forward", True),
        (f"{Path(perfexp.__file__).parent}/modes/train.py(30): forward", True),
        ("/home/me/perfexp/modes/mine.py(30): forward", False),
        ("torch/profiler/profiler.py(538): add_metadata_json", True),
        ("torch/autograd/profiler.py(932): __exit__", True),
        (
            "<built-in method _record_function_enter_new of pybind11_builtins.x object at 0x7f>",
            True,
        ),
        ("<built-in method _disable_profiler of pybind11_builtins.x object at 0x7f>", True),
        ("<built-in method  of pybind11_builtins.x object at 0x7f>", True),
    ],
)
def test_calls_of_perfexps_and_of_the_profilers_are_known(name, own):
    assert is_own(name) == own


@pytest.mark.slow
def test_stacks_show_the_models_lines_and_not_those_of_perfexp(run):
    run(
        *TORCH,
        "mode=train",
        "profiler=torch",
        "profiler.warmup=0",
        "profiler.steps=1",
        "profiler.stacks=true",
    )
    names = [
        row["operator"]
        for row in csv.DictReader(Path("x/train_operators.csv").read_text().splitlines())
    ]
    assert any(name.startswith("torchvision/models/squeezenet.py") for name in names)
    assert not [
        name
        for name in names
        if name.startswith(("perfexp/", "torch/profiler/", "torch/autograd/profiler"))
    ]


@pytest.mark.slow
def test_inference_profile_has_only_the_requested_files(run):
    _, _, [record] = run(*TORCH, "profiler=torch", "profiler.warmup=0", "profiler.steps=1")
    names = {artifact.path for artifact in record.artifacts if artifact.kind == "profiles"}
    assert names == {"inference.pt.trace.json.gz", "inference_operators.csv"}
    assert record.points[-1].facts["profile"]["marked"] == ["inference", "forward"]


@pytest.mark.slow
def test_modules_option_without_modules_costs_only_the_profile(run):
    fake = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "output_dir=y")
    code, _, [record] = run(*fake, "profiler=torch", "profiler.modules=true")
    assert (code, record.points[-1].status) == (1, Status.FAILED)
    assert "needs a torch model" in record.points[-1].error
