"""The calls that a profiler looks at: which, with which ranges, from which thread."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.modes.train import Train
from perfexp.measuring.procedure import Procedure
from perfexp.measuring.profilers import (
    About,
    NoProfiler,
    ProfileLocation,
    Profiler,
    captured,
    place_of,
)
from perfexp.measuring.profilers.ncu import Ncu
from perfexp.measuring.profilers.nsys import Nsys
from perfexp.measuring.profilers.nvtx import Nvtx, command_lines
from perfexp.measuring.profilers.passing import profile_point
from perfexp.models import Execution, Precision
from perfexp.models.module import adapt
from perfexp.records.profile_keys import is_profile, profile_key, profiled_key
from perfexp.records.record import Key
from perfexp.timing.stopping import Fixed

KEY = Key(phase="train", input_size=(8, 8), batch_size=2, precision="fp32")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 10)

    def forward(self, inputs):
        self.calls += 1
        return self.fc(torch.relu(self.conv(inputs)).mean((2, 3)))


class Recording(Profiler):
    """A profiler that writes down what it is shown."""

    def __init__(self, **settings):
        self.steps = settings.pop("steps", 1)
        super().__init__(name="recording", **settings)
        self.seen, self.inside, self.calls_before = [], [], None
        self.net = None

    @contextmanager
    def watching(self, place, device):
        self.calls_before = self.net.calls
        yield self

    @contextmanager
    def range(self, name):
        self.seen.append("/".join((*self.inside, name)))
        self.inside.append(name)
        yield
        assert self.inside.pop() == name


def procedure():
    model = adapt(Net(), "net")
    device, precision = CpuDevice(), Precision(name="fp32")
    session = model.open(
        device=device, precision=precision, execution=Execution(), num_classes=None, seed=0
    )
    modes = {"inference": Inference(), "train": Train(optimizer={"name": "sgd", "lr": 0.01})}
    stopping = Fixed(warmup=1, measure=2)
    return Procedure(
        session=session, device=device, data=Synthetic(), modes=modes, stopping=stopping
    )


def watched(phase, tmp_path, **settings):
    measuring = procedure()
    profiler = Recording(**settings)
    profiler.net = measuring.session.module
    key = profile_key(Key(phase=phase, input_size=(8, 8), batch_size=2, precision="fp32"))
    told = profile_point(measuring, key, profiler, ProfileLocation(folder=tmp_path, stem=phase))
    return profiler, told


def test_a_training_step_has_its_parts_inside_of_it(tmp_path):
    profiler, told = watched("train", tmp_path, warmup=3, steps=2)
    parts = ("data", "forward", "loss", "backward", "optimizer_step")
    assert profiler.seen == ["train_step", *(f"train_step/{part}" for part in parts)] * 2
    assert told == {"warmup": 3, "steps": 2, "marked": ["train_step", *parts]}


def test_an_inference_is_one_with_its_forward_pass(tmp_path):
    profiler, _ = watched("inference", tmp_path, warmup=0, steps=1)
    assert profiler.seen == ["inference", "inference/forward"]


def test_so_many_calls_come_before(tmp_path):
    few, many = (watched("train", tmp_path, warmup=calls, steps=1)[0] for calls in (1, 6))
    assert many.calls_before - few.calls_before == 5


def test_modules_have_ranges_too_where_that_is_wanted(tmp_path):
    profiler, _ = watched("train", tmp_path, warmup=1, steps=2, modules=True)
    inside = [name.rpartition("/")[2] for name in profiler.seen if "/forward/" in name]
    assert {name: inside.count(name) for name in ("conv", "relu", "fc")} == {
        "conv": 2,
        "relu": 2,
        "fc": 2,
    }
    before = watched("train", tmp_path, warmup=1, steps=2)[0]
    assert [name for name in profiler.seen if "/forward/" not in name] == before.seen


def test_a_processor_has_no_nvtx_and_says_what_to_use():
    with pytest.raises(Unsupported, match="profiler=torch"), captured(CpuDevice()):
        pass


def test_first_point_of_each_phase_is_profiled_unless_all_are():
    keys = [
        Key(phase=phase, input_size=(8, 8), batch_size=batch, precision="fp32", replicate=replicate)
        for replicate in (0, 1)
        for batch in (1, 2)
        for phase in ("train", "inference")
    ]
    assert [(key.phase, key.batch_size) for key in Nsys().chosen(keys)] == [
        ("train_profile", 1),
        ("inference_profile", 1),
    ]
    assert [(key.phase, key.batch_size) for key in Ncu(all_points=True).chosen(keys)] == [
        ("train_profile", 1),
        ("inference_profile", 1),
        ("train_profile", 2),
        ("inference_profile", 2),
    ]
    assert NoProfiler().chosen(keys) == []


def test_keys_of_profiles_belong_to_those_that_are_timed(tmp_path):
    key = profile_key(KEY)
    assert (key.phase, is_profile(key), is_profile(KEY), key.is_timed) == (
        "train_profile",
        True,
        False,
        False,
    )
    assert profiled_key(key) == KEY
    other = profile_key(Key(phase="train", input_size=(8, 16), batch_size=4, precision="fp32"))
    assert place_of(key, [key], tmp_path).stem == "train"
    assert [place_of(each, [key, other], tmp_path).stem for each in (key, other)] == [
        "train_8_b2",
        "train_8x16_b4",
    ]


def test_the_marked_step_is_the_one_that_is_asked_for():
    assert (Nvtx().warmup, Nvtx(warmup=5, step=3).warmup, Nvtx().steps, Nvtx().times) == (
        20,
        7,
        1,
        False,
    )


def test_command_lines_fit_the_marked_call():
    command = ["model=resnet18", "mode=train", "profiler=nvtx", "output_dir=/tmp/x y"]
    lines = command_lines("train", About(phase="train", command=command))
    end = "python -m perfexp model=resnet18 mode=train profiler=nvtx"
    assert lines["nsys"].startswith("nsys profile --trace=cuda,cudnn,nvtx,osrt ")
    assert "--capture-range=cudaProfilerApi --capture-range-end=stop --kill=none" in lines["nsys"]
    assert "--profile-from-start=off --nvtx --nvtx-include=train_step " in lines["ncu"]
    assert all(line.endswith(end) for line in lines.values())


def test_nsys_traces_graph_nodes_and_escapes_the_output_path(nsys, tmp_path):
    nsys()
    place = ProfileLocation(folder=tmp_path / "100%h", stem="inference")
    command = Nsys(options=["--gpu-metrics-devices=all"]).command(place, About(phase="inference"))
    assert "--cuda-graph-trace=node" in command
    assert command[-1] == "--gpu-metrics-devices=all"
    assert any(
        text.startswith("--output=") and text.endswith("100%%h/inference") for text in command
    )
