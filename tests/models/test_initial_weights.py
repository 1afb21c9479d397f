"""Random weights that a worker reads are those that it would have drawn."""

import os
from functools import partial

import pytest
import torch

from perfexp.host import fork_server
from perfexp.models.initial_weights import initialized
from perfexp.models.torchvision import Torchvision

#: One model of each way to initialize: all of torchvision's have been compared once.
_USUAL = (
    "resnet18",
    "vit_b_16",
    "mobilenet_v3_small",
    "inception_v3",
    "swin_t",
    "fcn_resnet50",
    "r3d_18",
    "alexnet",
)


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.fixture
def file(monkeypatch):
    file = os.memfd_create("weights")
    monkeypatch.setattr(fork_server, "weights_file", file)
    yield file
    os.close(file)


def opened(name, seed):
    model = Torchvision(name=name)
    module = initialized(partial(model._build, None, 10), name, seed=seed)
    return tensors(module), torch.rand(3)


@pytest.mark.parametrize("name", _USUAL)
def test_weights_and_random_numbers_are_those_of_a_worker_alone(name, file, monkeypatch):
    with monkeypatch.context() as alone:
        alone.setattr(fork_server, "weights_file", None)
        expected, following = opened(name, 3)
    for _ in range(2):  # written, then read
        found, random = opened(name, 3)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert torch.equal(random, following)


def test_weights_are_read_instead_of_drawn(file):
    first, _ = opened("resnet18", 1)
    size = os.fstat(file).st_size
    assert size > sum(tensor.nbytes for tensor in first.values())
    os.pwrite(file, bytes(size - 32 - 5056), 32)
    assert not any(tensor.any() for tensor in opened("resnet18", 1)[0].values())


def test_values_that_are_read_are_not_worked_on_before(file):
    class Truncated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2, 3), 2.0))
            with torch.no_grad():
                self.before = self.weight.uniform_().erfinv_().mul_(2).add_(1).clamp_(-1, 1).clone()

    drawn, read = (initialized(Truncated, "truncated", seed=1) for _ in range(2))
    assert torch.equal(read.weight, drawn.weight)
    assert torch.equal(drawn.before, drawn.weight)
    assert torch.equal(read.before, torch.full((2, 3), 2.0))


@pytest.mark.parametrize(
    ("draw", "zeros"), [("trunc_normal_", True), ("kaiming_normal_", False), ("normal_", False)]
)
def test_zeros_replace_only_values_that_are_looked_at(draw, zeros, file):
    class Drawn(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2, 3), 9.0))
            getattr(torch.nn.init, draw)(self.weight)
            self.before, self.state = self.weight.detach().clone(), torch.get_rng_state()

    drawn, read = (initialized(Drawn, draw, seed=1) for _ in range(2))
    assert torch.equal(read.weight, drawn.weight)
    assert torch.equal(read.before, torch.full((2, 3), 0.0 if zeros else 9.0))
    torch.manual_seed(1)
    assert torch.equal(read.state, torch.get_rng_state()), "nothing was drawn"


@pytest.mark.parametrize(("name", "seed"), [("resnet18", 2), ("resnet34", 1)])
def test_another_model_or_seed_has_weights_of_its_own(name, seed, file, monkeypatch):
    opened("resnet18", 1)
    found, _ = opened(name, seed)
    monkeypatch.setattr(fork_server, "weights_file", None)
    expected, _ = opened(name, seed)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_weights_that_take_much_memory_are_drawn_each_time(file, monkeypatch):
    monkeypatch.setattr("perfexp.models.initial_weights._MOST_OF_MEMORY", 0.0)
    opened("resnet18", 1)
    assert os.fstat(file).st_size == 0


def test_a_module_that_is_not_on_the_host_is_left_alone(file):
    module = initialized(lambda: torch.nn.Linear(3, 4, device="meta"), seed=1)
    assert module.weight.device.type == "meta"
    assert os.fstat(file).st_size == 0
