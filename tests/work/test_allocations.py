"""The peak of memory on tensors without memory, against sums by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.work.allocations import BLOCK_BYTES, INPUTS, Allocations, peak_of_calls


def traced(module, shape, *, trains):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=True)
    state = {}

    def forward():
        state["outputs"] = module(state["inputs"])

    def backward():
        state["outputs"].sum().backward()

    def update():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def prepare(allocations):
        state["inputs"] = torch.empty(shape)
        allocations.add([state["inputs"]], INPUTS)
        return {"forward": forward, **({"backward": backward, "optimizer": update} if trains else {})}

    with torch.set_grad_enabled(trains):
        return peak_of_calls(module, prepare)


@pytest.mark.slow
def test_an_inference_holds_two_layers_and_its_last_outputs():
    with FakeTensorMode():
        module = torch.nn.Sequential(torch.nn.Linear(256, 1024, bias=False), torch.nn.Linear(1024, 256, bias=False))
        peak = traced(module, (64, 256), trains=False)
    weights, wide, narrow = 2 * 256 * 1024 * 4, 64 * 1024 * 4, 64 * 256 * 4
    assert peak.categories == {"parameters": weights, "inputs": narrow, "activations": wide + 2 * narrow}
    assert peak.total_bytes == weights + wide + 3 * narrow


def test_a_training_step_holds_gradients_and_the_state_of_the_optimizer():
    with FakeTensorMode():
        module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)))
        peak = traced(module, (1, 2048), trains=True)
    weights = 3 * 2048 * 2048 * 4
    assert peak.categories["parameters"] == weights
    assert peak.categories["optimizer"] == weights
    gradients = peak.categories["gradients"] + peak.categories["temporaries of backward"]  # the last one is both
    assert gradients == pytest.approx(weights, rel=0.01)
    assert peak.total_bytes == pytest.approx(3 * weights, rel=0.01)


def test_sizes_are_those_of_the_blocks_of_the_allocator_and_end_with_their_tensors():
    with FakeTensorMode():
        allocations = Allocations()
        with allocations:
            one = torch.empty(1)
            view = one[:0]
            del one
            assert allocations.peak.total_bytes == BLOCK_BYTES
            del view
            allocations.restart()
            assert allocations.peak.total_bytes == 0
            both = torch.empty(129), torch.empty(128)
        assert allocations.peak.total_bytes == 3 * BLOCK_BYTES
        assert len(both) == 2
