"""A model that was counted is what it was, and does what it did."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from perfexp.cost.count import count
from perfexp.cost.trial import Inconclusive


class Busy(nn.Module):
    """Leaves tensors behind in attributes and in a list, counts its calls, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout()
        )
        self.recurrent = nn.LSTM(4, 4)
        self.calls, self.last, self.seen, self.named = 0, None, [], {}
        self.constant = torch.arange(4.0)

    def forward(self, inputs):
        self.calls += 1
        maps = self.features(inputs) * random.random() + torch.rand(1) * np.random.rand()
        self.last = maps
        self.seen.append(maps)
        self.named["maps"] = maps
        return self.recurrent(maps.mean(dim=3).permute(0, 2, 1))[0] + self.constant


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_left_as_it_was(training, fails):
    model = Busy().train(training)
    model.features[1].eval()
    before = copy.deepcopy(model)
    objects = {
        name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    flat = [id(tensor) for tensor in model.recurrent._flat_weights]
    versions = [
        tensor._version for tensor in (*model.parameters(), *model.buffers(), model.constant)
    ]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    original_call = nn.Module.__call__
    if fails:
        with pytest.raises(RuntimeError):
            count(model, torch.Size((2, 5, 8, 8)), backward=True)
    else:
        count(model, torch.rand(2, 3, 8, 8, generator=torch.Generator()), backward=True)
    assert nn.Module.__call__ is original_call
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2][1])
    assert {
        name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    } == objects
    assert [id(tensor) for tensor in model.recurrent._flat_weights] == flat
    assert [
        tensor._version for tensor in (*model.parameters(), *model.buffers(), model.constant)
    ] == versions
    for (name, now), then in zip(
        model.state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(now, then), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.calls, model.last, model.seen, model.named) == (0, None, [], {})
    for now, then in zip(model.modules(), before.modules(), strict=True):
        assert now.training == then.training
        assert now.__dict__.keys() == then.__dict__.keys()
        assert not now._forward_hooks and not now._forward_pre_hooks
    for module in (model, before):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        module.outputs = module(torch.ones(2, 3, 8, 8))
    torch.testing.assert_close(model.outputs, before.outputs, rtol=0, atol=0)


def test_hooks_of_the_model_run_and_stay():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = model[0].register_forward_hook(
        lambda module, given, returned: seen.append(1) or returned * 2
    )
    work = count(model, torch.Size((2, 4)))
    assert not seen  # it ran in another process
    assert list(model[0]._forward_hooks) == [handle.id]
    # what a hook computes belongs to the call that it is hooked to
    assert [(row.path, row.flops) for row in work.rows] == [("0", 2 * 32 + 8), ("1", 64)]


def test_a_compiled_model_is_counted_as_what_was_compiled():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    truth = count(plain, torch.Size((2, 4)), backward=True)
    inside = nn.Sequential(plain[0], torch.compile(plain[1], backend="eager"))
    itself = copy.deepcopy(plain)
    itself[1].compile(backend="eager")
    for compiled in (torch.compile(plain, backend="eager"), inside, itself):
        assert count(compiled, torch.Size((2, 4)), backward=True) == truth


def test_models_and_inputs_of_inference_mode_can_be_counted():
    with torch.inference_mode():
        model, inputs = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.ones(2, 4)
        work = count(model, inputs, backward=True)
    assert (work.macs, work.rows[0].weight_gradient_flops) == (32, 64)
    assert sum(row.parameters for row in work.rows) == work.parameters


def test_a_part_in_inference_mode_is_counted():
    class Frozen(nn.Linear):
        @torch.inference_mode()
        def forward(self, inputs):
            return super().forward(inputs)

    assert count(Frozen(4, 5), torch.Size((2, 3, 4))).macs == 2 * 3 * 4 * 5


def test_meta_model_that_catches_a_failure_can_be_counted():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrong, self.right = nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, inputs):
            try:
                return self.wrong(inputs)
            except RuntimeError:
                return self.right(inputs)

    with torch.device("meta"):
        model = Careful()
    work = count(model, torch.Size((2, 4)))
    assert work.macs == 32
    assert work.rows[-1].path == "right"


def test_scripted_models_are_refused():
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(Inconclusive, match="scripted"):
        count(scripted, torch.Size((2, 4)))


class _Cache:
    def __init__(self) -> None:
        self.state = torch.ones(2, 3)
        self.layers = [SimpleNamespace(keys=torch.ones(2, 3), caches=[self])]


class _ReadsCache(nn.Module):
    def forward(self, inputs: torch.Tensor, cache: _Cache) -> torch.Tensor:
        for tensor in (cache.state, cache.layers[0].keys):
            assert isinstance(tensor, FakeTensor), "memory of the device was reached"
        return inputs @ cache.state + inputs @ cache.layers[0].keys


def test_tensors_inside_an_object_are_counted_on_stand_ins():
    cache = _Cache()

    work = count(_ReadsCache(), torch.ones(4, 2), cache)

    assert work.macs == 2 * 4 * 2 * 3
    assert not isinstance(cache.state, FakeTensor)
    assert not isinstance(cache.layers[0].keys, FakeTensor)
