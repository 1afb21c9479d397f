"""The peak of memory on tensors without memory, against sums by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.cost.allocations import (
    BLOCK_BYTES,
    INPUTS,
    WORKSPACES,
    Allocations,
    by_operators,
    peak_of_calls,
    without_memory,
)
from perfexp.cost.trial import isolated


def traced(module, shape, *, trains, **settings):
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
        return {
            "forward": forward,
            **({"backward": backward, "optimizer": update} if trains else {}),
        }

    with torch.set_grad_enabled(trains):
        return peak_of_calls(module, prepare, **settings)


@pytest.mark.slow
def test_an_inference_holds_two_layers_and_its_last_outputs():
    with FakeTensorMode():
        module = torch.nn.Sequential(
            torch.nn.Linear(256, 1024, bias=False), torch.nn.Linear(1024, 256, bias=False)
        )
        peak = traced(module, (64, 256), trains=False)
    weights, wide, narrow = 2 * 256 * 1024 * 4, 64 * 1024 * 4, 64 * 256 * 4
    assert peak.categories == {
        "parameters": weights,
        "inputs": narrow,
        "activations": wide + 2 * narrow,
    }
    assert peak.total_bytes == weights + wide + 3 * narrow


def test_training_step_holds_gradients_and_optimizer_state():
    with FakeTensorMode():
        module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)))
        peak = traced(module, (1, 2048), trains=True)
    weights = 3 * 2048 * 2048 * 4
    assert peak.categories["parameters"] == weights
    assert peak.categories["optimizer"] == weights
    gradients = (
        peak.categories["gradients"] + peak.categories["temporaries of backward"]
    )  # the last one is both
    assert gradients == pytest.approx(weights, rel=0.01)
    assert peak.total_bytes == pytest.approx(3 * weights, rel=0.01)


def test_allocation_sizes_are_allocator_blocks_freed_with_tensor():
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


@pytest.mark.parametrize("trains", [False, True])
def test_workspaces_count_with_what_is_live_at_their_convolution(trains):
    with FakeTensorMode():
        module = torch.nn.Sequential(
            torch.nn.Conv2d(4, 8, 1, bias=False),
            torch.nn.Conv2d(8, 32, 1, bias=False),
            torch.nn.Flatten(),
        )

    def peak_with(workspaces):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return traced(module, (2, 4, 32, 32), trains=trains, workspaces=workspaces)

    peak = peak_with({})
    first, second, *backward = peak.convolutions
    assert [first.operator, second.operator] == ["convolution"] * 2
    assert [one.operator for one in backward] == ["convolution_backward"] * 2 * trains
    assert [one.arguments[0].shape for one in (first, second)] == [(2, 4, 32, 32), (2, 8, 32, 32)]
    weights, pixels = BLOCK_BYTES + 8 * 32 * 4, 2 * 32 * 32 * 4
    live = (
        weights * (1 + trains) + (4 + 8 + 32) * pixels
    )  # with the momentum, and the outputs of the call before
    assert peak_with({first: 512}) == peak
    larger = peak_with({first: 2**24, second: 512})
    assert larger.total_bytes == live + 2**24
    assert larger.categories[WORKSPACES] == 2**24
    assert sum(larger.categories.values()) == larger.total_bytes


def test_each_convolution_takes_its_workspace():
    with FakeTensorMode():
        layer, inputs = torch.nn.Conv2d(1, 1, 1, bias=False), torch.empty(1, 1, 16, 16)
        with (plain := Allocations()), torch.no_grad():
            layer(inputs)
        [call] = plain.peak.convolutions
        allocations = Allocations(workspaces={call: 4096})
        allocations.add([inputs], INPUTS)
        with allocations, torch.no_grad():
            held = [layer(inputs), layer(inputs)]
            assert len(held) == 2
            held.clear()
            layer(inputs)
    assert allocations.peak.categories == {"inputs": 1024, "activations": 2048, WORKSPACES: 4096}


def peak_without_gradients(module, inputs):
    with (allocations := Allocations()), torch.inference_mode(), by_operators():
        allocations.add([inputs], INPUTS)
        module(inputs)
    assert torch.is_autocast_cache_enabled()
    return allocations.peak


def test_an_inference_is_traced_by_the_operators_that_torch_runs():
    """In inference mode stand-ins copy the input of a dropout; decompositions for compilers enlarge by elements."""
    with FakeTensorMode():
        inputs = torch.empty(1, 1, 16, 16)
        assert (
            "activations"
            not in peak_without_gradients(torch.nn.Dropout().eval(), inputs).categories
        )
        enlarged = peak_without_gradients(torch.nn.UpsamplingBilinear2d(scale_factor=2), inputs)
    assert enlarged.categories["activations"] == 4 * 1024


@pytest.mark.parametrize(
    ("module", "inference", "training"), [("Linear", 1, 2), ("BatchNorm1d", 0, 0)]
)
def test_threads_that_multiply_matrices_are_counted(module, inference, training):
    settings = {"Linear": (8, 8), "BatchNorm1d": (8,)}[module]
    with FakeTensorMode():
        layer = getattr(torch.nn, module)(*settings)
        assert traced(layer, (4, 8), trains=True).multiplying_threads == training
        assert (
            peak_without_gradients(layer.eval(), torch.empty(4, 8)).multiplying_threads == inference
        )


def test_gradients_of_two_paths_are_added_up_in_place():
    class TwoPaths(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(1))

        def forward(self, inputs):
            scaled = inputs * self.scale
            return (scaled * 2.0).sum() + (scaled * 3.0).sum()

    with FakeTensorMode():
        peak = traced(TwoPaths(), (256, 1024), trains=True)
    assert peak.total_bytes == pytest.approx(
        3 * 256 * 1024 * 4, rel=0.01
    )  # inputs, and a gradient for each path


def test_what_devices_have_a_kernel_for_takes_no_parts():
    """The gradient of a SiLU has a definition by other operators, too, which take five times its memory."""
    with FakeTensorMode():
        inputs = torch.empty(1024, requires_grad=True)
        outputs = torch.nn.functional.silu(inputs).sum()
        with (allocations := Allocations()):
            outputs.backward()
    assert allocations.peak.total_bytes <= 2 * 4096


def trained(module, shape):
    def peak():
        with without_memory(module):
            return traced(module, shape, trains=True)

    return isolated(peak)()


def test_attention_takes_no_memory_for_dropout():
    peaks = [
        trained(
            torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=share, batch_first=True),
            (2, 256, 64),
        )
        for share in (0.0, 0.1)
    ]
    scores = 2 * 4 * 256 * 256 * 4
    assert (
        peaks[1].total_bytes - peaks[0].total_bytes < scores
    )  # masks of the dropouts between layers


def test_a_normalization_by_the_root_mean_square_is_fused():
    shape = (8, 1024, 64)
    peaks = [trained(layer(64), shape) for layer in (torch.nn.LayerNorm, torch.nn.RMSNorm)]
    assert peaks[1].total_bytes == pytest.approx(peaks[0].total_bytes, rel=0.01)


def test_a_bias_is_added_in_place():
    class Mixing(torch.nn.Module):
        def __init__(self, bias):
            super().__init__()
            self.mix = torch.nn.Linear(196, 768, bias=bias)

        def forward(self, inputs):
            return self.mix(inputs.transpose(1, 2))

    def peak(module):
        with without_memory(module):
            return peak_without_gradients(module, torch.empty(8, 196, 128)).total_bytes

    peaks = [isolated(peak)(Mixing(bias)) for bias in (False, True)]
    assert peaks[1] - peaks[0] <= BLOCK_BYTES
